"""Which blocks there are, in which tiers, in what order they were used, and who holds them (no octets here).

A block is an entry as long as some tier has it or some order handles it. Its life:

    device   in a page of the pool, which knows names and uses by itself (gpu_tier.py); full pages are published here
    host     in `buffer`, one of a fixed number
    disk     in a file

Tiers may hold the same block at once: moving down is a copy whose upper one may go at any time, moving up one whose
lower one may stay. What may go is decided here. A block is *held* by leases, which end, and by a hard pin. It may then
lose all its places but one, so holding a block costs no session its pages for longer than a copy takes, or a lease.
A block that some order handles (`busy`) keeps all of them.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from enum import Enum, StrEnum
from typing import Final, Protocol

from msgspec import Struct

from sdcpd.cache.block_orders import Tier
from sdcpd.cache.leases import Leases


class Pin(StrEnum):
    """How much a block is wanted: soft, it goes after all others; hard, it does not go."""

    NONE = "none"
    SOFT = "soft"
    HARD = "hard"


class All(Enum):
    """Any scope, where None is the scope of those that name none."""

    ALL = "all"


ALL: Final = All.ALL
ScopeFilter = bytes | None | All


class Pages(Protocol):
    """What is asked of the page pool (gpu_tier.py)."""

    @property
    def pages(self) -> int: ...
    @property
    def empty_pages(self) -> int: ...
    @property
    def named_pages(self) -> int: ...
    def page_of(self, name: bytes) -> int | None: ...
    def give_name(self, page: int, name: bytes) -> bool: ...
    def forget(self, name: bytes) -> None: ...
    def retain(self, pages: Iterable[int]) -> None: ...
    def release(self, pages: Iterable[int]) -> None: ...
    def release_first(self, page: int) -> None: ...
    def look_again(self, name: bytes) -> None: ...
    def idle_names(self) -> Iterable[bytes]: ...
    def attend(self, *, favours: Callable[[bytes], bool], reclaimed: Callable[[bytes], None]) -> None: ...


class Entry(Struct, eq=False):
    """One block. `uses` counts its making and each time somebody took it; `guarded`: its page is held for its sake."""

    name: bytes
    scope: bytes | None
    touched_at: float
    uses: int = 1
    pin: Pin = Pin.NONE
    buffer: int | None = None
    on_disk: bool = False
    guarded: bool = False
    busy: int = 0


class BlockFacts(Struct, frozen=True):
    """One block for peers and operators; `tier` is the highest that has it, `age_s` the time since its last use."""

    name: bytes
    scope: bytes | None
    tier: Tier
    tiers: tuple[Tier, ...]
    bytes: int
    tokens: int
    uses: int
    age_s: float
    leases: int
    pin: Pin


class BlockIndex:
    """All entries. Every method is bookkeeping and belongs to the event loop's thread."""

    def __init__(self, pages: Pages, buffers: int, leases: Leases) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.leases = leases
        self.in_buffers: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first, as below
        self.on_disk: OrderedDict[bytes, None] = OrderedDict()
        self.free_buffers = list(range(buffers - 1, -1, -1))
        self.pinned: dict[bytes, None] = {}  # hard
        self.guarded_pages = 0
        self.set_aside = 0  # buffers that an order is filling
        self._pages = pages
        self._buffers = buffers

    def find(self, name: bytes) -> Entry | None:
        return self.entries.get(name)

    def need(self, name: bytes, scope: bytes | None, now: float) -> Entry:
        """The entry of this name, made if missing: it is about to have a place."""
        entry = self.entries.get(name)
        if entry is None:
            entry = self.entries[name] = Entry(name=name, scope=scope, touched_at=now)
        return entry

    def tiers(self, name: bytes) -> tuple[Tier, ...]:
        """Where a block is, the fastest first."""
        entry = self.entries.get(name)
        found: list[Tier] = []
        if entry is not None:
            if self._pages.page_of(name) is not None:
                found.append(Tier.DEVICE)
            if entry.buffer is not None:
                found.append(Tier.HOST)
            if entry.on_disk:
                found.append(Tier.DISK)
        return tuple(found)

    def touch(self, entry: Entry, now: float) -> None:
        """Somebody used it."""
        entry.uses += 1
        entry.touched_at = now
        for order in (self.in_buffers, self.on_disk):
            if entry.name in order:
                order.move_to_end(entry.name)

    # Places

    def put_in_buffer(self, entry: Entry, buffer: int) -> None:
        """A buffer that was set aside holds the block now."""
        self.set_aside -= 1
        if entry.buffer is not None:
            self.free_buffers.append(buffer)
        else:
            entry.buffer = buffer
            self.in_buffers[entry.name] = None
        self.look_again(entry)

    def give_back_buffer(self, buffer: int) -> None:
        """A buffer that was set aside is not needed."""
        self.set_aside -= 1
        self.free_buffers.append(buffer)

    def set_buffer_aside(self, counts: Counter[tuple[str, Tier]], keep: Collection[bytes] = ()) -> int | None:
        """A buffer for an order: a free one, or that of a block longest unused. None when all hold what may not go,
        `keep` among it."""
        if not self.free_buffers:
            goes = self._first_to_go(self.in_buffers, Tier.HOST, keep)
            if goes is None:
                return None
            counts["evictions", Tier.HOST] += 1
            self.leave_buffer(goes)
        self.set_aside += 1
        return self.free_buffers.pop()

    def leave_buffer(self, entry: Entry) -> None:
        """The block's buffer is free."""
        assert entry.buffer is not None
        del self.in_buffers[entry.name]
        self.free_buffers.append(entry.buffer)
        entry.buffer = None
        self.look_again(entry)

    def put_on_disk(self, entry: Entry) -> None:
        entry.on_disk = True
        self.on_disk[entry.name] = None
        self.look_again(entry)

    def leave_disk(self, entry: Entry) -> None:
        """The block counts as not on disk; its file is the caller's to remove."""
        del self.on_disk[entry.name]
        entry.on_disk = False
        self.look_again(entry)

    def first_off_disk(self, keep: Collection[bytes] = ()) -> Entry | None:
        """Whose file goes first; None when all are of blocks that may not go, `keep` among them."""
        return self._first_to_go(self.on_disk, Tier.DISK, keep)

    def _first_to_go(self, order: OrderedDict[bytes, None], tier: Tier, keep: Collection[bytes]) -> Entry | None:
        soft: Entry | None = None
        for name in order:
            entry = self.entries[name]
            if entry.busy or name in keep or (self.held(entry) and not self._is_elsewhere(entry, tier)):
                continue
            if entry.pin is not Pin.SOFT:
                return entry
            soft = soft or entry
        return soft

    # Holding

    def held(self, entry: Entry) -> bool:
        """By a lease that nobody has ended yet, or a hard pin."""
        return entry.pin is Pin.HARD or self.leases.known(entry.name.hex())

    def set_pin(self, entry: Entry, level: Pin) -> None:
        entry.pin = level
        if level is Pin.HARD:
            self.pinned[entry.name] = None
        else:
            self.pinned.pop(entry.name, None)

    def look_again(self, entry: Entry) -> None:
        """Its places or holders changed: guard its page if nothing else keeps it, forget it if it has no place."""
        if self.entries.get(entry.name) is not entry:
            return
        page = self._pages.page_of(entry.name)
        lower = entry.buffer is not None or entry.on_disk
        wanted = page is not None and not lower and self.held(entry)
        if wanted and not entry.guarded:
            assert page is not None
            entry.guarded = True
            self.guarded_pages += 1
            self._pages.retain((page,))
        elif entry.guarded and not wanted:
            assert page is not None, "a guarded page keeps its name"
            entry.guarded = False
            self.guarded_pages -= 1
            self._pages.release((page,))
            page = self._pages.page_of(entry.name)
        if page is None and not lower and not entry.busy:
            self.lose(entry)

    def lose(self, entry: Entry) -> None:
        """Forget an entry. A buffer that an order is still reading counts as set aside from now on."""
        name = entry.name
        if entry.buffer is not None:
            del self.in_buffers[name]
            self.set_aside += 1
        if self.entries.get(name) is entry:
            del self.entries[name]
        self.pinned.pop(name, None)
        self.leases.forget(name.hex())

    def _is_elsewhere(self, entry: Entry, tier: Tier) -> bool:
        """Whether a lower tier than the page pool, other than `tier`, has it as well. (A page may be needed.)"""
        return entry.on_disk if tier is Tier.HOST else entry.buffer is not None

    def check_integrity(self) -> None:
        """Assert that every buffer is free, set aside, or some block's, and that orders and entries agree."""
        assert len(self.free_buffers) + self.set_aside + len(self.in_buffers) == self._buffers
        taken = [entry.buffer for entry in self.entries.values() if entry.buffer is not None]
        assert len(taken) == len(set(taken)) == len(self.in_buffers)
        assert not set(taken) & set(self.free_buffers)
        assert {name for name, entry in self.entries.items() if entry.buffer is not None} == set(self.in_buffers)
        assert {name for name, entry in self.entries.items() if entry.on_disk} == set(self.on_disk)
        assert all(entry.busy or self.tiers(name) for name, entry in self.entries.items()), "an entry has a place"
