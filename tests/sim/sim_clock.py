"""A node's own clock. All tasks share trio's virtual clock; skew lives here, and roles ask only this.

Monotonic, as roles are promised: it runs at its own rate and may jump forward (a machine that was suspended), never
back. A paused node's clock goes on; whoever sleeps by it wakes when the node does.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

LEAST_SLEEP_S: Final = 1e-6
"""Rounding must not let a sleeper wake just before its time: it would find nothing due, and no time would pass."""


class SimClock:
    """Implements roles.ports.Clock: now = offset + rate * virtual time + jumps."""

    def __init__(self, gate: Callable[[], Awaitable[None]], *, offset_s: float, rate: float) -> None:
        self._gate = gate
        self._offset_s = offset_s
        self._rate = rate
        self._jumped = trio.Event()

    def now(self) -> float:
        return self._offset_s + self._rate * trio.current_time()

    async def sleep_until(self, at: float) -> None:
        while self.now() < at:
            left_s = max((at - self.now()) / self._rate, LEAST_SLEEP_S)
            with trio.move_on_after(left_s):
                await self._jumped.wait()
        await trio.lowlevel.checkpoint()
        await self._gate()

    def jump(self, by_s: float) -> None:
        assert by_s >= 0
        self._offset_s += by_s
        self._jumped.set()
        self._jumped = trio.Event()
