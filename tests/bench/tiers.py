"""What a block costs in each tier: orders of a real block store over real pages, buffers and files, one at a time."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from sdcpd.cache.block_file import payload_bytes, write_block
from sdcpd.cache.block_orders import AcceptBlock, Order
from sdcpd.cache.block_store import BlockStore
from sdcpd.cache.blocks import KvLayout, extend
from sdcpd.cache.disk_tier import DiskTier
from sdcpd.cache.files import RealFiles
from sdcpd.cache.gpu_tier import PagePool
from sdcpd.cache.host_tier import HostTier
from sdcpd.cache.settings import CacheSettings

LAYOUT: Final = KvLayout(
    model=bytes(32),
    tokenizer=bytes(32),
    block_tokens=256,
    dtype="bf16",
    quantization="none",
    numerics="fast",
    layers=8,
    kv_heads=8,
    head_dim=128,
    config={},
)
"""A block of 8 MiB: a quarter of one of an 8B model."""
PAGES: Final = 4


class Tiers:
    """One block, which is put in and taken out."""

    def __init__(self, folder: Path | None, *, buffers: int) -> None:
        size = payload_bytes(LAYOUT)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shape = {"layers": LAYOUT.layers, "kv_heads": LAYOUT.kv_heads, "head_dim": LAYOUT.head_dim}
        self.pool: Final = PagePool(
            pages=PAGES, page_tokens=LAYOUT.block_tokens, dtype=torch.bfloat16, device=device, **shape
        )
        self.disk: Final = None if folder is None else DiskTier(RealFiles(folder), LAYOUT)
        settings = CacheSettings(disk_bytes_to_use=PAGES * size)
        self.store: Final = BlockStore(
            settings, LAYOUT, self.pool, HostTier(self.pool, LAYOUT, buffers * size), self.disk
        )
        self.name: Final = extend(self.store.root(None), range(LAYOUT.block_tokens))
        self.octets: Final = write_block(LAYOUT, self.name, None, os.urandom(size))
        self.size: Final = size

    def carry_out(self, order: Order) -> object:
        outcome = order.run()
        refused = self.store.settle(order, outcome, 0.0)
        assert refused is None, refused
        return outcome

    def accept(self) -> None:
        order = self.store.accept_order(self.name, None, self.octets)
        assert isinstance(order, AcceptBlock), order
        self.carry_out(order)

    def read(self) -> None:
        order = self.store.read_order(self.name)
        assert order is not None
        assert isinstance(self.carry_out(order), bytes)

    def fill(self) -> None:
        """From a buffer into a page."""
        pages = self.pool.allocate(1)
        assert self.store.fill([self.name], pages) is not None
        order = self.store.next_fill()
        assert order is not None
        self.carry_out(order)
        self.pool.release(pages)

    def publish(self) -> None:
        """As a session does that has computed it: it is in a page, and nowhere else."""
        (page,) = self.pool.allocate(1)
        self.store.publish(self.name, None, page, 0.0)
        self.pool.release([page])

    def drop(self) -> None:
        self.store.evict(self.name)
        while (order := self.store.next_spill(0.0)) is not None:
            self.carry_out(order)


def tier_figures(folder: Path, times: int) -> dict[str, dict[str, float]]:
    """MB a second by tier. `get`: to the octets that a peer is sent; `put`: from these, to the device from a buffer."""
    folder.mkdir()
    host, disk = Tiers(None, buffers=PAGES), Tiers(folder, buffers=0)
    figures = {
        "device": {"get_mb_per_s": _rate(host, host.publish, host.read, host.drop, times)},
        "host": {"get_mb_per_s": _rate(host, host.accept, host.read, host.drop, times)},
        "disk": {"get_mb_per_s": _rate(disk, disk.accept, disk.read, disk.drop, times)},
    }
    figures["device"]["put_mb_per_s"] = _rate(host, host.accept, host.fill, host.drop, times)
    figures["host"]["put_mb_per_s"] = _rate(host, _nothing, host.accept, host.drop, times)
    figures["disk"]["put_mb_per_s"] = _rate(disk, _nothing, disk.accept, disk.drop, times)
    assert disk.disk is not None
    disk.disk.close()
    return figures


def _rate(
    tiers: Tiers, before: Callable[[], None], work: Callable[[], None], after: Callable[[], None], times: int
) -> float:
    """Of `work` alone; the first time, which touches memory, is not counted."""
    took_s = 0.0
    for turn in range(times + 1):
        before()
        begin = time.perf_counter()
        work()
        took_s += time.perf_counter() - begin if turn else 0.0
        after()
    return times * tiers.size / 1e6 / took_s


def _nothing() -> None:
    """There is nothing to prepare."""
