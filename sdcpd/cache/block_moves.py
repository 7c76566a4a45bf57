"""Which octets move next, and what came of it (design 1.1: the index decides, the tiers move bytes).

Orders are given out here and settled here; a worker carries them out in between (block_orders.py). What an order
handles is captured with it, so a block may be lost, and made anew, while an order still reads the old one: its buffer
is free when the last of such orders is settled.

A page is never waited for: what was not copied in time is lost, and computed again by whoever needs it. After a failed
write the disk is left alone for a while.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Final

from msgspec import Struct

from sdcpd.cache.block_file import Damaged
from sdcpd.cache.block_index import BlockIndex, Entry, Pages, Pin
from sdcpd.cache.block_orders import (
    AcceptBlock,
    Discard,
    Fill,
    FillEnd,
    KvMemory,
    Order,
    Outcome,
    ReadBlock,
    Scan,
    Source,
    Spill,
    Tier,
)
from sdcpd.cache.blocks import KvLayout
from sdcpd.cache.disk_tier import DiskTier, Scanned, Written

HIGH, LOW = 0.90, 0.85
"""Share of a tier in use at which blocks begin to go, and at which enough have gone."""
FILL_LIMIT_BLOCKS: Final = 32
"""Blocks of one fill, so that a long text begins to run before all of it is there."""
DISCARD_LIMIT: Final = 64
"""Files removed by one order."""
DISK_REST_S: Final = 10.0
"""How long a disk that took no block is left alone."""
FULL_DISK_SHARE: Final = 8
"""A disk that has no room, whatever the budget says, loses this part (1 / 8) of what is there before the second try."""


class BlockHeld(Struct, frozen=True):
    """It is there already: one name has one content."""


class BlockRefused(Struct, frozen=True):
    """Not done, and why. `full`: for want of room, now; else for good."""

    detail: str
    full: bool = False


class BlockMoves:
    """All orders of one store. Bookkeeping only; never blocks."""

    def __init__(
        self,
        index: BlockIndex,
        layout: KvLayout,
        pages: Pages,
        memory: KvMemory,
        disk: DiskTier | None,
        disk_blocks: int,
        counts: Counter[tuple[str, Tier]],
    ) -> None:
        """`disk_blocks` is how many blocks the disk tier may hold."""
        self.wake: Callable[[], None] = lambda: None
        self._index = index
        self._layout = layout
        self._pages = pages
        self._memory = memory
        self._disk = disk
        self._disk_blocks = disk_blocks
        self._counts = counts
        self._handled: dict[Order, tuple[Entry, ...]] = {}
        self._fills: OrderedDict[Fill, None] = OrderedDict()
        self._filling: dict[bytes, Fill] = {}
        self._discards: OrderedDict[bytes, None] = OrderedDict()
        self._again: Spill | None = None
        self._tried_twice: Spill | None = None
        self._writing = 0  # files being written
        self._disk_rests_until = float("-inf")

    @property
    def unsettled(self) -> int:
        return len(self._handled)

    # Orders

    def is_filling(self, name: bytes) -> bool:
        """Whether the block is on its way into a page."""
        return name in self._filling

    def fill(self, names: Sequence[bytes], pages: Sequence[int]) -> Fill | None:
        """See BlockStore."""
        found: list[Entry] = []
        for name in names[:FILL_LIMIT_BLOCKS]:
            entry = self._index.find(name)
            below = entry is not None and (entry.buffer is not None or entry.on_disk)
            if not below or name in self._filling or self._pages.page_of(name) is not None:
                break
            assert entry is not None
            found.append(entry)
        if not found:
            return None
        into = tuple(pages[: len(found)])
        self._pages.retain(into)
        taken = tuple(entry.name for entry in found)
        sources = tuple(Source(buffer=entry.buffer) for entry in found)
        order = Fill(self._memory, self._disk, self._layout, taken, sources, into)
        self._handle(order, *found)
        self._fills[order] = None
        self._filling |= dict.fromkeys(taken, order)
        self.wake()
        return order

    def next_fill(self) -> Fill | None:
        """See BlockStore."""
        return self._fills.popitem(last=False)[0] if self._fills else None

    def next_spill(self, now: float) -> Order | None:
        """See BlockStore."""
        if self._discards and self._disk is not None:
            names = tuple(self._discards)[:DISCARD_LIMIT]
            for name in names:
                del self._discards[name]
            order = Discard(self._disk, names)
            self._handle(order)
            return order
        if self._again is not None:
            again, self._again = self._again, None
            self._tried_twice = again
            return again
        return self._spill_page(now) or self._spill_buffer(now)

    def scan_order(self) -> Scan | None:
        """See BlockStore."""
        if self._disk is None:
            return None
        order = Scan(self._disk, self._disk_blocks)
        self._handle(order)
        return order

    def read_order(self, name: bytes) -> ReadBlock | None:
        """See BlockStore."""
        entry, tiers = self._index.find(name), self._index.tiers(name)
        if entry is None or not tiers:
            return None
        tier = Tier.HOST if Tier.HOST in tiers else tiers[0]
        source = Source(page=self._pages.page_of(name) if tier is Tier.DEVICE else None, buffer=entry.buffer)
        if source.page is not None:
            self._pages.retain((source.page,))
        order = ReadBlock(self._memory, self._disk, self._layout, name, entry.scope, tier, source)
        self._handle(order, entry)
        return order

    def accept_order(self, name: bytes, scope: bytes | None, octets: bytes) -> AcceptBlock | BlockHeld | BlockRefused:
        """See BlockStore."""
        if self._index.tiers(name):
            return BlockHeld()
        buffer = self._index.set_buffer_aside(self._counts)
        if buffer is None and not self._make_room_on_disk():
            return BlockRefused("no tier below the pages has room for a block", full=True)
        self._writing += buffer is None
        order = AcceptBlock(self._memory, self._disk, self._layout, name, scope, octets, buffer)
        self._handle(order)
        return order

    def settle(self, order: Order, outcome: Outcome, now: float) -> BlockRefused | None:
        """See BlockStore."""
        handled = self._handled.pop(order)
        refused: BlockRefused | None = None
        match order:
            case Fill():
                self._settle_fill(order, outcome if isinstance(outcome, tuple) else (), handled)
            case Spill():
                ended = outcome if isinstance(outcome, Written) else Written.FAILED
                if self._settle_spill(order, ended, handled[0], now):
                    self._handled[order] = handled
                    return None
            case AcceptBlock():
                refused = self._settle_accept(order, outcome, now)
            case ReadBlock():
                self._settle_read(order, outcome, handled[0])
            case Scan() if isinstance(outcome, Scanned):
                self._take_scanned(outcome, now)
            case Scan() | Discard():
                pass  # what was left behind is found at the next start
        for entry in handled:
            self._let_go(entry)
        return refused

    def check_integrity(self) -> None:
        """Assert that each block is as busy as there are orders that handle it."""
        busy = Counter(id(entry) for entries in self._handled.values() for entry in entries)
        assert all(entry.busy == busy[id(entry)] for entry in self._index.entries.values())
        assert all(order in self._handled for order in self._filling.values())
        assert self._handled or not self._writing

    def lose(self, entry: Entry) -> None:
        """Remove a block from everywhere, whoever holds it; sessions that read its page go on reading it."""
        index, name = self._index, entry.name
        page = self._pages.page_of(name)
        entry.pin = Pin.NONE
        index.leases.forget(name.hex())
        if entry.guarded and page is not None:
            self._pages.release((page,))
            index.guarded_pages -= 1
        entry.guarded = False
        self._pages.forget(name)
        if entry.on_disk:
            self._leave_disk(entry)
        if entry.buffer is not None and not entry.busy:
            index.leave_buffer(entry)
        index.lose(entry)

    # Inside

    def _handle(self, order: Order, *entries: Entry) -> None:
        self._handled[order] = entries
        for entry in entries:
            entry.busy += 1

    def _let_go(self, entry: Entry) -> None:
        entry.busy -= 1
        if self._index.find(entry.name) is entry:
            self._index.look_again(entry)
        elif entry.buffer is not None and not entry.busy:  # it was lost meanwhile
            self._index.give_back_buffer(entry.buffer)
            entry.buffer = None

    def _lives(self, entry: Entry) -> bool:
        return self._index.find(entry.name) is entry

    def _spill_page(self, now: float) -> Spill | None:
        index, pages = self._index, self._pages
        for name in index.pinned:
            entry = index.entries[name]
            if entry.guarded and not entry.busy:
                return self._spill(entry, Source(page=pages.page_of(name)), now)
        if not (self._memory.buffers or self._disk_blocks):
            return None
        for entry in map(index.entries.__getitem__, self._pages_taken_next()):
            if entry.uses > 1 and not entry.busy and entry.buffer is None and not entry.on_disk:
                return self._spill(entry, Source(page=pages.page_of(entry.name)), now)
        return None

    def _spill_buffer(self, now: float) -> Spill | None:
        for entry in map(self._index.entries.__getitem__, self._buffers_taken_next()):
            if entry.uses > 1 and not entry.busy and not entry.on_disk:
                return self._spill(entry, Source(buffer=entry.buffer), now)
        return None

    def _pages_taken_next(self) -> Iterable[bytes]:
        """Blocks in the idle pages that sessions take first, down to the low watermark; none below the high one."""
        pages = self._pages
        if pages.pages - pages.empty_pages <= HIGH * pages.pages:
            return ()
        return islice(pages.idle_names(), max(0, pages.pages - int(LOW * pages.pages) - pages.empty_pages))

    def _buffers_taken_next(self) -> Iterable[bytes]:
        """The same of the host tier, where there is a tier below it."""
        buffers, free = self._memory.buffers, len(self._index.free_buffers)
        if not self._disk_blocks or buffers - free <= HIGH * buffers:
            return ()
        return islice(self._index.in_buffers, max(0, buffers - int(LOW * buffers) - free))

    def _spill(self, entry: Entry, source: Source, now: float) -> Spill | None:
        """Down by one tier; past the host tier where that is not there, or is full of what may not go.

        No copy is given up for this one whose block would at once be copied again: they would take one another's
        place for ever.
        """
        keep = set(self._pages_taken_next())
        buffer = self._index.set_buffer_aside(self._counts, keep) if source.page is not None else None
        keep.update(self._buffers_taken_next())
        if buffer is None and (now < self._disk_rests_until or not self._make_room_on_disk(keep)):
            return None
        self._writing += buffer is None
        if source.page is not None:
            self._pages.retain((source.page,))
        order = Spill(self._memory, self._disk, self._layout, entry.name, entry.scope, source, buffer)
        self._handle(order, entry)
        return order

    def _make_room_on_disk(self, keep: Collection[bytes] = ()) -> bool:
        """Room in the budget for one block more. At the high watermark files are given up, down to the low one."""
        capacity = self._disk_blocks
        high, low = (int(HIGH * capacity), int(LOW * capacity)) if capacity >= 1 / (1 - HIGH) else (capacity, capacity)
        wanted = len(self._index.on_disk) + self._writing + 1
        if wanted > high:
            self._drop_from_disk(wanted - low, keep)
        return len(self._index.on_disk) + self._writing + 1 <= capacity

    def _drop_from_disk(self, count: int, keep: Collection[bytes] = ()) -> None:
        """Give up the files of up to `count` blocks, those longest unused."""
        for _ in range(count):
            entry = self._index.first_off_disk(keep)
            if entry is None:
                return
            self._counts["evictions", Tier.DISK] += 1
            self._leave_disk(entry)

    def _leave_disk(self, entry: Entry) -> None:
        self._discards[entry.name] = None
        self._index.leave_disk(entry)
        self.wake()

    def _settle_fill(self, order: Fill, ends: tuple[object, ...], handled: tuple[Entry, ...]) -> None:
        self._fills.pop(order, None)
        for place, (name, page) in enumerate(zip(order.names, order.pages, strict=True)):
            del self._filling[name]
            entry, end = handled[place], ends[place] if place < len(ends) else None
            if end is FillEnd.DONE and self._lives(entry):
                tier = Tier.HOST if order.sources[place].buffer is not None else Tier.DISK
                self._pages.give_name(page, name)
                self._counts["promotions", tier] += 1
            elif end in (FillEnd.MISSING, FillEnd.DAMAGED) and self._lives(entry):
                self._counts["damaged", Tier.DISK] += end is FillEnd.DAMAGED
                if entry.on_disk:
                    self._leave_disk(entry)
        self._pages.release(order.pages)

    def _settle_spill(self, order: Spill, ended: Written, entry: Entry, now: float) -> bool:
        """True: the order is to be tried once more, and stays unsettled."""
        name = entry.name
        if ended is Written.NO_ROOM and order is not self._tried_twice:
            self._drop_from_disk(1 + len(self._index.on_disk) // FULL_DISK_SHARE)
            self._again = order
            return True
        if order.source.page is not None:
            self._pages.release_first(order.source.page)
        if order.buffer is None:
            self._writing -= 1
        if ended is Written.DONE and self._lives(entry):
            self._counts["demotions", order.tier] += 1
            if order.buffer is None:
                self._discards.pop(name, None)
                self._index.put_on_disk(entry)
            else:
                self._index.put_in_buffer(entry, order.buffer)
            return False
        if order.buffer is not None:
            self._index.give_back_buffer(order.buffer)
        elif ended is Written.DONE:
            self._discards[name] = None  # nobody wants it any more
        else:
            self._counts["failed_writes", Tier.DISK] += 1
            self._disk_rests_until = now + DISK_REST_S
        return False

    def _settle_accept(self, order: AcceptBlock, outcome: Outcome, now: float) -> BlockRefused | None:
        self._writing -= order.buffer is None
        if outcome is Written.DONE:
            entry = self._index.need(order.name, order.scope, now)
            if order.buffer is not None:
                self._index.put_in_buffer(entry, order.buffer)
            elif not entry.on_disk:
                self._discards.pop(order.name, None)
                self._index.put_on_disk(entry)
            return None
        if order.buffer is not None:
            self._index.give_back_buffer(order.buffer)
        if isinstance(outcome, Damaged):
            return BlockRefused(outcome.detail)
        self._counts["failed_writes", Tier.DISK] += outcome is not None
        return BlockRefused("the block could not be stored now", full=True)

    def _settle_read(self, order: ReadBlock, outcome: Outcome, entry: Entry) -> None:
        if order.source.page is not None:
            self._pages.release((order.source.page,))
        if order.tier is Tier.DISK and isinstance(outcome, Damaged) and self._lives(entry) and entry.on_disk:
            self._counts["damaged", Tier.DISK] += 1
            self._leave_disk(entry)

    def _take_scanned(self, found: Scanned, now: float) -> None:
        self._counts["damaged", Tier.DISK] += found.damaged
        for name, scope in found.blocks:
            entry = self._index.need(name, scope, now)
            if not entry.on_disk:
                self._index.put_on_disk(entry)
