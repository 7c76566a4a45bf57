"""The toy target over real pages: tokens lie in a page pool as numbers, and sessions share blocks of them.

A row is computed from what lies in the pages of its sequence, so a page that was shared in error, filled too early or
written by another gives a wrong token, as with a real model.
"""

from collections.abc import Sequence
from typing import Any

import torch
import trio

from sdcpd.cache.block_store import BlockStore
from sdcpd.cache.blocks import KvLayout
from sdcpd.cache.disk_tier import DiskTier
from sdcpd.cache.files import Files
from sdcpd.cache.gpu_tier import PagePool
from sdcpd.cache.host_tier import HostTier
from sdcpd.cache.settings import CacheSettings
from sdcpd.engine.block_tables import BlockTable
from sdcpd.engine.kv_blocks import KvBlocks
from sdcpd.engine.spans import Row, Span
from sdcpd.roles.ports import Clock
from tests.support.toy_engine import ToyEngine

NOTHING = -1.0
"""What lies in a slot that nobody wrote. (No token, so that whoever reads it gives itself away.)"""


class PagedToyEngine(ToyEngine):
    """Implements roles.ports.Engine. `host_blocks` and `disk_blocks` are how many the lower tiers hold."""

    def __init__(
        self,
        clock: Clock,
        *,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        files: Files | None = None,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(clock, **options)
        info = self._info
        shape = {"layers": 1, "kv_heads": 1, "head_dim": 1}
        device = torch.device("cpu")
        self.pool = PagePool(
            pages=info.pages, page_tokens=info.page_tokens, dtype=torch.float32, device=device, **shape
        )
        self.pool.slots.fill_(NOTHING)
        layout = KvLayout(
            model=info.model,
            tokenizer=info.tokenizer,
            block_tokens=info.page_tokens,
            dtype="fp32",
            quantization="none",
            numerics="fast",
            config=config or {},
            **shape,
        )
        block = 8 * info.page_tokens
        settings = CacheSettings(cpu_bytes_to_use=host_blocks * block, disk_bytes_to_use=disk_blocks * block)
        memory = HostTier(self.pool, layout, settings.cpu_bytes_to_use)
        disk = None if files is None else DiskTier(files, layout)
        self.store = BlockStore(settings, layout, self.pool, memory, disk)
        self._tables: dict[int, BlockTable] = {}
        self._blocks = KvBlocks(self.store, self._tables)
        self._passing = 0
        self._ended = trio.Event()

    @property
    def free_pages(self) -> int:
        return self.pool.free_pages

    @property
    def blocks(self) -> KvBlocks | None:
        return self._blocks

    def open_sequence(self) -> int:
        self._handles += 1
        self._tables[self._handles] = BlockTable(self.pool)
        return self._handles

    def close_sequence(self, sequence: int) -> None:
        self._tables.pop(sequence).close()

    def reserve(self, sequence: int, length: int) -> bool:
        return self._tables[sequence].reserve(length)

    async def passes_ended(self) -> None:
        while self._passing:
            await self._ended.wait()
        await trio.lowlevel.checkpoint()

    async def run_pass(self, spans: Sequence[Span]) -> list[tuple[Row, ...]]:
        """What is to be written is planned before the pass, and written at its end, whatever became of the sequence."""
        assert spans
        self.passes.append(list(spans))
        planned = [self._plan(span) for span in spans]
        self._passing += 1
        try:
            await self._clock.sleep_until(self._clock.now() + self._pass_s)
            return [self._rows(span, slots) for span, slots in zip(spans, planned, strict=True)]
        finally:
            self._passing -= 1
            self._ended.set()
            self._ended = trio.Event()

    def _plan(self, span: Span) -> list[int]:
        table, end = self._tables[span.sequence], span.start + len(span.tokens)
        assert span.start <= table.length, "a hole before the span"
        assert end <= table.capacity_tokens, "no page there"
        assert table.may_write(span.start, end), "a block would be written"
        table.length = end
        return table.slots(0, end)

    def _rows(self, span: Span, slots: list[int]) -> tuple[Row, ...]:
        places = self.pool.slots[0, 0, :, 0]
        places[slots[span.start :]] = torch.tensor(span.tokens, dtype=torch.float32)
        self._kv[span.sequence] = [int(token) for token in places[slots].tolist()][: span.start]
        self._held[span.sequence] = len(slots)
        rows = self._run(span)
        del self._kv[span.sequence], self._held[span.sequence]
        return rows
