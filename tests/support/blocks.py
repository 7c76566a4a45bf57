"""A block store over plain octets: the bookkeeping of the tiers without a model."""

from typing import Any

import torch

from sdcpd.cache.block_orders import Order, Outcome
from sdcpd.cache.block_store import BlockStore
from sdcpd.cache.disk_tier import DiskTier
from sdcpd.cache.files import Files
from sdcpd.cache.gpu_tier import PagePool
from sdcpd.cache.settings import CacheSettings
from tests.support.block_names import BLOCK_BYTES, LAYOUT, content


class OctetMemory:
    """KvMemory over lists of octets."""

    def __init__(self, pages: int, buffers: int) -> None:
        self.pages = [bytes(BLOCK_BYTES)] * pages
        self.held = [bytes(BLOCK_BYTES)] * buffers

    @property
    def buffers(self) -> int:
        return len(self.held)

    def page_to_buffer(self, page: int, buffer: int) -> None:
        self.held[buffer] = self.pages[page]

    def buffer_to_page(self, buffer: int, page: int) -> None:
        self.pages[page] = self.held[buffer]

    def read_page(self, page: int) -> bytes:
        return self.pages[page]

    def write_page(self, page: int, payload: memoryview) -> None:
        self.pages[page] = bytes(payload)

    def read_buffer(self, buffer: int) -> bytes:
        return self.held[buffer]

    def write_buffer(self, buffer: int, payload: memoryview) -> None:
        self.held[buffer] = bytes(payload)


class Stand:
    """A store with its pool, its memory and perhaps a disk; orders are carried out when a test says so."""

    def __init__(self, pages: int = 4, buffers: int = 0, files: Files | None = None, **settings: Any) -> None:
        self.pool = PagePool(
            pages=pages,
            page_tokens=2,
            layers=1,
            kv_heads=1,
            head_dim=2,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.memory = OctetMemory(pages, buffers)
        self.disk = None if files is None else DiskTier(files, LAYOUT)
        self.store = BlockStore(CacheSettings(**settings), LAYOUT, self.pool, self.memory, self.disk)
        self.now = 0.0

    def compute(self, name: bytes, scope: bytes | None = None, times: int = 1) -> None:
        """A session computes a block and ends; with `times`, others take it afterwards."""
        (page,) = self.pool.allocate(1)
        self.memory.pages[page] = content(name)
        self.store.publish(name, scope, page, self.now)
        self.pool.release([page])
        for _ in range(times - 1):
            self.store.taken(name, self.now)

    def carry_out(self, order: Order) -> Outcome:
        outcome = order.run()
        self.store.settle(order, outcome, self.now)
        return outcome

    def spill_all(self) -> list[Order]:
        """Carry out all that presses."""
        done: list[Order] = []
        while (order := self.store.next_spill(self.now)) is not None:
            self.carry_out(order)
            done.append(order)
        return done

    def fill(self, name: bytes) -> bytes | None:
        """Bring a block back into a page; its content there."""
        pages = self.pool.allocate(1)
        order = self.store.fill([name], pages)
        if order is None:
            self.pool.release(pages)
            return None
        assert self.store.next_fill() is order
        self.carry_out(order)
        self.pool.release(pages)
        page = self.store.page_of(name)
        return None if page is None else self.memory.pages[page]

    def check(self) -> None:
        self.pool.check_integrity()
        self.store.check_integrity()
