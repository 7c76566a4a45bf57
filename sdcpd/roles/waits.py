"""Waiting in roles: for a change, up to a moment of the role's own clock."""

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from sdcpd.roles.ports import Clock, Unreachable

T = TypeVar("T")


class Changes:
    """A thing that changes and can be waited for. Waiters re-ask the machine after each wake (design 5.7, 7)."""

    def __init__(self) -> None:
        self._next: trio.Event | None = None  # made for whoever waits first

    def notify(self) -> None:
        if self._next is not None:
            self._next.set()
            self._next = None

    async def wait(self) -> None:
        await self._event().wait()

    async def wait_until(self, clock: Clock, at: float | None) -> None:
        """Return at the next change, or at `at` on `clock`, whichever is first."""
        event = self._event()
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

    def _event(self) -> trio.Event:
        if self._next is None:
            self._next = trio.Event()
        return self._next


class Alarm:
    """Rings at a moment that moves with each round, mostly away: setting it costs nothing unless it comes nearer."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._at = math.inf
        self._sleeps_until = math.inf
        self._sleep = trio.CancelScope()

    def set(self, at: float | None) -> None:
        """From now on `at` is the moment; None for never."""
        self._at = math.inf if at is None else at
        if self._at < self._sleeps_until:
            self._sleep.cancel()

    async def run(self) -> None:
        """Until cancelled. A moment that has come is forgotten with its ring."""
        while True:
            if self._at <= self._clock.now():
                self._at = math.inf
                self._ring()
            self._sleeps_until = self._at
            with trio.CancelScope() as self._sleep:
                await self._clock.sleep_until(self._at)


async def within(limit_s: float, call: Callable[[], Awaitable[T]]) -> T | Unreachable:
    """A peer call with its deadline: after `limit_s` it counts as unreachable, which includes "maybe delivered"."""
    with trio.move_on_after(limit_s):
        return await call()
    return Unreachable(reason=f"no answer within {limit_s:g} s")
