"""The disk of a cache node: tests/cache/sim_disk.py, with faults drawn from the seed, behind a Workers port.

Blocking functions run inline, between two virtual sleeps: the first is the wait for the disk, the second the way back.
A node that ends in the second has done its work and told nobody, which is how an append becomes durable unanswered.
"""

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from tests.cache.sim_disk import PowerLoss, SimDisk, Write, first_octets, pages
from tests.sim.injector import Injector

T = TypeVar("T")

SYNC_S = (0.0005, 0.006)
SLOW_SYNC_S = (0.2, 7.0)
PAGE_BYTES = (64, 512, 4096)


class SimFiles(SimDisk):
    """Implements cache.files.Files. Its content outlives the node."""

    def __init__(self, chance: random.Random, inject: Injector) -> None:
        super().__init__()
        self._chance = chance
        self._inject = inject
        self.fail_write = self._failing_write
        self.fail_sync = self._failing_sync

    def lose_power(self) -> None:
        """Of what was not synced, nothing, a beginning, or any pages have reached the disk."""
        way, size = self._chance.randrange(3), self._chance.choice(PAGE_BYTES)
        cut = self._chance.randrange(2000)

        def keep(writes: list[Write]) -> list[Write]:
            return [] if way == 0 else first_octets(writes, cut) if way == 1 else pages(writes, self._chance, size)

        self.crash(keep)

    def rot(self) -> bool:
        """One bit of what is stored flips; False when nothing is stored yet."""
        names = [name for name in self.names() if self.seen[name].octets and name != "lock"]
        if not names:
            return False
        name = self._chance.choice(names)
        self.flip(name, self._chance.randrange(len(self.seen[name].octets)), 1 << self._chance.randrange(8))
        return True

    def _failing_write(self, name: str) -> int | None:
        if self._inject.strikes("write_torn"):
            raise PowerLoss(name)
        return None

    def _failing_sync(self, name: str) -> bool:
        if self._inject.strikes("write_torn"):
            raise PowerLoss(name)
        return self._inject.strikes("sync_failed")


class SimWorkers:
    """Implements roles.ports.Workers. `done` sees each call with its result; `power_lost` ends the node in mid-call."""

    def __init__(
        self,
        chance: random.Random,
        inject: Injector,
        gate: Callable[[], Awaitable[None]],
        done: Callable[[Callable[..., object], tuple[object, ...], object], None],
        power_lost: Callable[[], None],
    ) -> None:
        self._chance = chance
        self._inject = inject
        self._gate = gate
        self._done = done
        self._power_lost = power_lost

    async def run(self, function: Callable[..., T], *args: object) -> T:
        slow = self._inject.strikes("sync_slow")
        await trio.sleep(self._chance.uniform(*(SLOW_SYNC_S if slow else SYNC_S)))
        await self._gate()
        try:
            result = function(*args)
        except PowerLoss:
            self._power_lost()
            await trio.sleep_forever()
            raise AssertionError("not reached") from None
        self._done(function, args, result)
        await trio.sleep(self._chance.uniform(*SYNC_S))
        await self._gate()
        return result

    async def run_short(self, function: Callable[..., T], *args: object) -> T:
        """Like any other: what must hold while a call is under way must hold while this one is."""
        return await self.run(function, *args)
