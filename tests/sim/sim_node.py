"""One simulated sdcpd: a real role over its own ports, which can crash, restart, pause and resume.

A node outlives its *incarnations*, each of which is one process. Crash is not cancel: cancelling a task runs its
`finally` blocks, which in a crash never run. So the ports are detached first (whoever still calls one waits for ever),
and only then are the tasks cancelled. A paused incarnation stands at its ports: nothing goes out or comes back until
it resumes, while everybody else's time goes on, which makes a verifier that still believes.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from tests.sim.trace import Trace


class Role(Protocol):
    """What a node runs."""

    async def run(self, *, task_status: trio.TaskStatus[None] = ...) -> None: ...


class Incarnation:
    """One process. `nursery` holds all its tasks while it lives."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.alive = True
        self.paused = False
        self.nursery: trio.Nursery | None = None
        self.left_behind_at: float | None = None  # since when another process is in its place
        self.over = trio.Event()
        self._resumed = trio.Event()

    async def gate(self) -> None:
        """Pass while the process runs; wait while it is paused, and for ever when it is gone."""
        while self.alive and self.paused:
            await self._resumed.wait()
        if not self.alive:
            await trio.sleep_forever()

    def spawn(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task within this process; dropped when it is gone."""
        if self.alive and self.nursery is not None:
            self.nursery.start_soon(task, *args)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._resumed.set()
        self._resumed = trio.Event()


class SimNode:
    """`build` makes a fresh role for an incarnation; `serve` and `withdraw` open and close its port.

    `prepared` runs between the start of the role and the opening of the port. `failed` hears of an exception that a
    role let out, which a real node would have ended by.
    """

    def __init__(
        self,
        name: str,
        uri: str,
        *,
        build: Callable[[Incarnation], Role],
        serve: Callable[[Incarnation, Role], None],
        withdraw: Callable[[], None],
        prepared: Callable[[Role], Awaitable[None]],
        failed: Callable[[str, BaseException], None],
        trace: Trace,
    ) -> None:
        self.name = name
        self.uri = uri
        self.incarnation: Incarnation | None = None
        self.role: Role | None = None
        self.starts = 0
        self._build = build
        self._serve = serve
        self._withdraw = withdraw
        self._prepared = prepared
        self._failed = failed
        self._trace = trace

    @property
    def up(self) -> bool:
        """The process runs (or is paused) and its role has started."""
        return self.incarnation is not None and self.incarnation.alive and self.role is not None

    async def run(self) -> None:
        """One process, from its start to its end."""
        assert self.incarnation is None, f"{self.name} runs already"
        self.starts += 1
        own = self.incarnation = Incarnation(self.name, self.starts)
        self._trace.say(self.name, f"starts ({self.starts})")
        try:
            async with trio.open_nursery() as nursery:
                own.nursery = nursery
                role = self._build(own)
                await nursery.start(role.run)
                await self._prepared(role)
                self._serve(own, role)
                self.role = role
                self._trace.say(self.name, "serves")
        except Exception as error:
            if own.alive:
                self._failed(self.name, error)
        finally:
            own.alive = False
            own.over.set()
            if self.incarnation is own:
                self._let_go()

    def leave_behind(self) -> Incarnation:
        """The process runs on, but is no longer what the node is: nobody reaches it, and another may be started."""
        own = self.incarnation
        assert own is not None
        own.left_behind_at = trio.current_time()
        self._let_go()
        return own

    def _let_go(self) -> None:
        self.role = None
        self.incarnation = None
        self._withdraw()

    async def crash(self, left_behind: Incarnation | None = None) -> None:
        """End the process, or one left behind, without its doing. Returns when nothing of it is left."""
        own = left_behind or self.incarnation
        if own is None:
            return
        self._trace.say(self.name, "crashes")
        own.alive = False
        if left_behind is None:
            self._withdraw()
        own.resume()
        if own.nursery is not None:
            own.nursery.cancel_scope.cancel()
        await own.over.wait()
