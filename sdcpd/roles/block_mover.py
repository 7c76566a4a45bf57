"""Moves KV blocks between the tiers of a store, beside the passes of its engine.

Two lanes, so that a session that waits for its blocks never waits for a disk to be written:

    fills    blocks into pages. A page may have been freed by a session whose pass still writes it, so a fill begins
             only when the passes planned before it have ended; the passes after it run beside it
    spills   blocks out of pages and buffers, and files to be removed; first of all, what an earlier run left on disk
             is looked up, while the node already serves

Octets move in worker threads. Nothing here fails: what does not come off is a miss.
"""

from collections.abc import Callable

import structlog
import trio

from sdcpd.cache.block_moves import BlockRefused
from sdcpd.cache.block_orders import Order, Outcome
from sdcpd.cache.block_store import BlockStore
from sdcpd.cache.disk_tier import Scanned
from sdcpd.roles.ports import Engine, Ports
from sdcpd.roles.waits import Changes

log = structlog.get_logger(__name__)


async def carry_out(store: BlockStore, order: Order, ports: Ports) -> tuple[Outcome, BlockRefused | None]:
    """Have a worker carry out an order, and settle it, also when the caller is cancelled before it began."""
    outcome: Outcome = None
    try:
        outcome = await ports.workers.run(order.run)
    finally:
        refused = store.settle(order, outcome, ports.clock.now())
    return outcome, refused


class BlockMover:
    """`on_moved` is called when a fill has ended or pages have become free."""

    def __init__(self, store: BlockStore, engine: Engine, ports: Ports, on_moved: Callable[[], None]) -> None:
        self._store = store
        self._engine = engine
        self._ports = ports
        self._on_moved = on_moved
        self._orders = Changes()
        store.on_orders(self._orders.notify)

    async def run(self) -> None:
        """Until cancelled; then the disk tier's directory is free for others."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._fills)
                nursery.start_soon(self._spills)
        finally:
            self._store.close()

    async def _fills(self) -> None:
        while True:
            order = self._store.next_fill()
            if order is None:
                await self._orders.wait()
                continue
            await self._engine.passes_ended()
            await carry_out(self._store, order, self._ports)
            self._on_moved()

    async def _spills(self) -> None:
        store, clock = self._store, self._ports.clock
        scan = store.scan_order()
        if scan is not None:
            found, _ = await carry_out(store, scan, self._ports)
            if isinstance(found, Scanned):
                log.info(
                    "blocks on disk",
                    blocks=len(found.blocks),
                    damaged=found.damaged,
                    unfinished=found.unfinished,
                    foreign=found.foreign,
                    over=found.over,
                )
            self._on_moved()
        while True:
            store.expire(clock.now())
            order = store.next_spill(clock.now())
            if order is None:
                await self._orders.wait_until(clock, store.next_end())
                self._on_moved()
                continue
            await carry_out(store, order, self._ports)
            self._on_moved()
