"""The parts of a node in the order of their start; they are stopped in the reverse order, one after the other.

Each part is an async function that says `task_status.started(...)` when it serves, and then runs until it is cancelled.
One that returns by itself, or raises, takes the whole node down: a node with a part missing would answer wrongly for
as long as nobody looks.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
import trio

log = structlog.get_logger(__name__)

STAGE_STOP_LIMIT_S: Final = 5.0
"""What one part may take to stop. A part that shields itself for longer hangs, and is left behind with a line."""

Part = Callable[..., Awaitable[None]]


class _Stage:
    def __init__(self, name: str) -> None:
        self.name = name
        self.scope = trio.CancelScope()
        self.ended = trio.Event()


class Stages:
    """Owns nothing but the order; the tasks live in `nursery`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._stages: list[_Stage] = []

    async def start(self, name: str, part: Part) -> Any:
        """Start one more part and wait until it serves; what it passed to `started()`. Raises what its start raised."""
        stage = _Stage(name)
        value = await self._nursery.start(self._run, stage, part)
        self._stages.append(stage)
        log.debug("started", part=name)
        return value

    async def stop(self) -> None:
        """Stop all parts, the last started first."""
        while self._stages:
            stage = self._stages.pop()
            stage.scope.cancel()
            with trio.move_on_after(STAGE_STOP_LIMIT_S, shield=True):
                await stage.ended.wait()
            if stage.ended.is_set():
                log.debug("stopped", part=stage.name)
            else:
                log.error("does not stop; left behind", part=stage.name)

    async def _run(self, stage: _Stage, part: Part, *, task_status: trio.TaskStatus[Any]) -> None:
        try:
            with stage.scope:
                await part(task_status=task_status)
            assert stage.scope.cancel_called, f"{stage.name} ended by itself"
        finally:
            stage.ended.set()
