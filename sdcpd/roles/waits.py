"""Waiting in roles: for a change, up to a moment of the role's own clock."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from sdcpd.roles.ports import Clock, Unreachable

T = TypeVar("T")


class Changes:
    """A thing that changes and can be waited for. Waiters re-ask the machine after each wake (design 5.7, 7)."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = trio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    async def wait_until(self, clock: Clock, at: float | None) -> None:
        """Return at the next change, or at `at` on `clock`, whichever is first."""
        event = self._event
        if at is None:
            await event.wait()
            return
        async with trio.open_nursery() as nursery:

            async def sleep() -> None:
                await clock.sleep_until(at)
                nursery.cancel_scope.cancel()

            nursery.start_soon(sleep)
            await event.wait()
            nursery.cancel_scope.cancel()


async def within(limit_s: float, call: Callable[[], Awaitable[T]]) -> T | Unreachable:
    """A peer call with its deadline: after `limit_s` it counts as unreachable, which includes "maybe delivered"."""
    with trio.move_on_after(limit_s):
        return await call()
    return Unreachable(reason=f"no answer within {limit_s:g} s")
