"""The parts of a node: started one after the other, stopped one after the other, by name.

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
        self.stopping = False


class Stages:
    """Knows which parts run; the tasks live in `nursery`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._stages: dict[str, _Stage] = {}

    async def start(self, name: str, part: Part) -> Any:
        """Start one more part and wait until it serves; what it passed to `started()`. Raises what its start raised."""
        assert name not in self._stages
        stage = _Stage(name)
        value = await self._nursery.start(self._run, stage, part)
        self._stages[name] = stage
        log.debug("started", part=name)
        return value

    async def stop(self, name: str, ask: Callable[[], None] | None = None, grace_s: float = 0.0) -> None:
        """Stop a part, if it was started at all.

        `ask` asks it to end by itself, for which it has `grace_s`; what then still runs is cancelled.
        """
        stage = self._stages.pop(name, None)
        if stage is None:
            return
        stage.stopping = True
        if ask is not None:
            ask()
            with trio.move_on_after(grace_s):
                await stage.ended.wait()
        stage.scope.cancel()
        with trio.move_on_after(STAGE_STOP_LIMIT_S):
            await stage.ended.wait()
        if stage.ended.is_set():
            log.debug("stopped", part=name)
        else:
            log.error("does not stop; left behind", part=name)

    async def _run(self, stage: _Stage, part: Part, *, task_status: trio.TaskStatus[Any]) -> None:
        try:
            with stage.scope:
                await part(task_status=task_status)
            assert stage.stopping, f"{stage.name} ended by itself"
        finally:
            stage.ended.set()
