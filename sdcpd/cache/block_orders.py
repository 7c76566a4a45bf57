"""Finished orders for worker threads: which octets are to go from where to where (design 1.1).

An order is made by the index (block_store.py), in the event loop's thread. It holds all it needs, and what it reads and
writes is set aside for it until it is settled: pages by a reference, buffers and files by a mark on their block. `run`
belongs to a worker, touches no bookkeeping, and returns how it went; the index hears of it by `settle`. Every order
that was given out is settled, once, whether or not it was run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

from sdcpd.cache.block_file import Damaged, read_block, read_head, write_block
from sdcpd.cache.blocks import KvLayout
from sdcpd.cache.disk_tier import DiskTier, Scanned, Written


class Tier(StrEnum):
    """Where a block is, the fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class KvMemory(Protocol):
    """The octets of pages and of host buffers. Every method blocks and belongs to worker threads."""

    @property
    def buffers(self) -> int: ...
    def page_to_buffer(self, page: int, buffer: int) -> None: ...
    def buffer_to_page(self, buffer: int, page: int) -> None: ...
    def read_page(self, page: int) -> bytes: ...
    def write_page(self, page: int, payload: memoryview) -> None: ...
    def read_buffer(self, buffer: int) -> bytes: ...
    def write_buffer(self, buffer: int, payload: memoryview) -> None: ...


class FillEnd(Enum):
    """How the fill of one page went."""

    DONE = "done"
    MISSING = "missing"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class Source:
    """Where a block's octets lie: in a page or a buffer, else in its file."""

    page: int | None = None
    buffer: int | None = None


@dataclass(frozen=True, eq=False)
class Fill:
    """Bring consecutive blocks of one text into pages, which nobody reads before this is settled."""

    memory: KvMemory
    disk: DiskTier | None
    layout: KvLayout
    names: tuple[bytes, ...]
    sources: tuple[Source, ...]
    pages: tuple[int, ...]

    def run(self) -> tuple[FillEnd, ...]:
        """One end a block; none for those after the first that was not there."""
        ends: list[FillEnd] = []
        for name, source, page in zip(self.names, self.sources, self.pages, strict=True):
            ends.append(self._fill(name, source, page))
            if ends[-1] is not FillEnd.DONE:
                break
        return tuple(ends)

    def _fill(self, name: bytes, source: Source, page: int) -> FillEnd:
        if source.buffer is not None:
            self.memory.buffer_to_page(source.buffer, page)
            return FillEnd.DONE
        assert self.disk is not None
        octets = self.disk.read(name)
        if octets is None:
            return FillEnd.MISSING
        if isinstance(octets, Damaged):
            return FillEnd.DAMAGED
        head = read_head(self.layout, octets)
        assert not isinstance(head, Damaged), "it was verified"
        self.memory.write_page(page, memoryview(octets)[head.payload_at :])
        return FillEnd.DONE


@dataclass(frozen=True, eq=False)
class Spill:
    """Copy a block one tier down: into `buffer`, else into a file."""

    memory: KvMemory
    disk: DiskTier | None
    layout: KvLayout
    name: bytes
    scope: bytes | None
    source: Source
    buffer: int | None

    @property
    def tier(self) -> Tier:
        """Where to."""
        return Tier.DISK if self.buffer is None else Tier.HOST

    def run(self) -> Written:
        if self.buffer is not None:
            assert self.source.page is not None
            self.memory.page_to_buffer(self.source.page, self.buffer)
            return Written.DONE
        assert self.disk is not None
        payload = _payload(self.memory, self.source)
        return self.disk.write(self.name, write_block(self.layout, self.name, self.scope, payload))


@dataclass(frozen=True, eq=False)
class ReadBlock:
    """Read a block as the octets of its file."""

    memory: KvMemory
    disk: DiskTier | None
    layout: KvLayout
    name: bytes
    scope: bytes | None
    tier: Tier
    source: Source

    def run(self) -> bytes | Damaged | None:
        if self.tier is Tier.DISK:
            assert self.disk is not None
            return self.disk.read(self.name)
        return write_block(self.layout, self.name, self.scope, _payload(self.memory, self.source))


@dataclass(frozen=True, eq=False)
class AcceptBlock:
    """Verify a block that somebody sent, and store it: in `buffer`, else in a file."""

    memory: KvMemory
    disk: DiskTier | None
    layout: KvLayout
    name: bytes
    scope: bytes | None
    octets: bytes
    buffer: int | None

    def run(self) -> Written | Damaged:
        payload = read_block(self.layout, self.name, self.octets)
        if isinstance(payload, Damaged):
            return payload
        head = read_head(self.layout, self.octets)
        if isinstance(head, Damaged) or head.scope != self.scope:
            return Damaged("it is of another scope")
        if self.buffer is not None:
            self.memory.write_buffer(self.buffer, payload)
            return Written.DONE
        assert self.disk is not None
        return self.disk.write(self.name, self.octets)


@dataclass(frozen=True, eq=False)
class Discard:
    """Remove files of blocks that the index has given up."""

    disk: DiskTier
    names: tuple[bytes, ...]

    def run(self) -> None:
        self.disk.remove(self.names)


@dataclass(frozen=True, eq=False)
class Scan:
    """Find what an earlier run left on disk."""

    disk: DiskTier
    limit: int

    def run(self) -> Scanned:
        return self.disk.scan(self.limit)


Order = Fill | Spill | ReadBlock | AcceptBlock | Discard | Scan
Outcome = Sequence[FillEnd] | Written | bytes | Damaged | Scanned | None
"""What `run` returned; None also for an order that was not run."""


def _payload(memory: KvMemory, source: Source) -> bytes:
    if source.page is not None:
        return memory.read_page(source.page)
    assert source.buffer is not None
    return memory.read_buffer(source.buffer)
