"""The cache of a model's KV blocks: device pages, host buffers, files, behind one facade (decisions, cache part 5).

Bookkeeping only, in plain Python and the event loop's thread; octets move in worker threads, by finished orders
(block_orders.py). The rules:

    used      a session takes blocks that are in pages as they are (roles/session_kv.py); those further down are brought
              into its pages first (`fill`), and stay where they were as well
    pressure  when few empty pages are left, idle blocks that were used more than once are copied to host buffers, and
              from these, when few are left, to disk (`next_spill`); watermarks 90 % down to 85 %: block_moves.py
    held      leases and pins: block_index.py

A miss is never an error. Damage, a full disk, a failing one: each is a miss, counted.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from sdcpd.cache import blocks
from sdcpd.cache.block_file import payload_bytes
from sdcpd.cache.block_index import ALL, BlockFacts, BlockIndex, Entry, Pages, Pin, ScopeFilter
from sdcpd.cache.block_moves import HIGH, BlockHeld, BlockMoves, BlockRefused
from sdcpd.cache.block_orders import AcceptBlock, Fill, KvMemory, Order, Outcome, ReadBlock, Scan, Tier
from sdcpd.cache.blocks import KvLayout
from sdcpd.cache.disk_tier import DiskTier
from sdcpd.cache.leases import Lease, LeaseForeign, LeaseLapsed, Leases, LeasesFull
from sdcpd.cache.settings import CacheSettings

GUARDED_SHARE: Final = 4
"""Leases alone keep at most this part (1 / 4) of the pages from sessions."""


class BlocksLeased(Struct, frozen=True):
    """What of the wanted blocks was there and is held by `lease`; None when nothing was. `missed` are the others."""

    lease: Lease | None
    missed: tuple[bytes, ...]


class TierStats(Struct, frozen=True):
    """Counts since the start. Hits and misses are blocks that a session wanted."""

    tier: Tier
    blocks: int
    bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    promotions: int
    demotions: int
    damaged: int
    failed_writes: int


class BlockStore:
    """The blocks of one model. Every method belongs to the event loop's thread and never blocks."""

    def __init__(
        self,
        settings: CacheSettings,
        layout: KvLayout,
        pages: Pages,
        memory: KvMemory,
        disk: DiskTier | None = None,
    ) -> None:
        """`memory` holds the octets of `pages` and of as many host buffers as it says."""
        self.layout: Final = layout
        self.block_bytes: Final = payload_bytes(layout)
        self._settings = settings
        self._disk = disk
        self._pages = pages
        self._memory = memory
        self._disk_blocks = settings.disk_bytes_to_use // self.block_bytes if disk is not None else 0
        self._index = BlockIndex(pages, memory.buffers, Leases(settings))
        self._counts: Counter[tuple[str, Tier]] = Counter()
        self._moves = BlockMoves(self._index, layout, pages, memory, disk, self._disk_blocks, self._counts)
        self._leases_taken = 0
        pages.attend(favours=self._favoured, reclaimed=self._page_reclaimed)

    def on_orders(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when there may be an order to be carried out."""
        self._moves.wake = wake

    def close(self) -> None:
        """Let others have the directory of the disk tier; nothing is moved from now on."""
        if self._disk is not None:
            self._disk.close()

    # For sessions

    def root(self, scope: bytes | None) -> bytes:
        """Where the chain of names of a scope begins."""
        return blocks.root(self.layout, scope)

    def page_of(self, name: bytes) -> int | None:
        """The page that holds this block, to be shared before anything else is asked here."""
        return self._pages.page_of(name)

    def publish(self, name: bytes, scope: bytes | None, page: int, now: float) -> None:
        """The page holds valid keys and values of this block, all of them of committed tokens."""
        known = self._index.find(name)
        if known is not None:
            self._index.touch(known, now)
        if self._pages.give_name(page, name):
            self._index.look_again(known or self._index.need(name, scope, now))
        if self._pages.pages - self._pages.empty_pages > HIGH * self._pages.pages:
            self._moves.wake()

    def taken(self, name: bytes, now: float, tier: Tier = Tier.DEVICE) -> None:
        """A session goes on from this block, which came to it from `tier`."""
        entry = self._index.find(name)
        if entry is not None:
            self._index.touch(entry, now)
        self._counts["hits", tier] += 1
        for above in Tier:
            if above is tier:
                break
            self._counts["misses", above] += 1

    def missed(self, count: int) -> None:
        """So many blocks had to be computed."""
        for tier in Tier:
            self._counts["misses", tier] += count

    def is_filling(self, name: bytes) -> bool:
        """Whether the block is on its way into a page."""
        return self._moves.is_filling(name)

    def fill(self, names: Sequence[bytes], pages: Sequence[int]) -> Fill | None:
        """Bring blocks from lower tiers into `pages`, from the first on as far as they are there; None if none is.

        Each page counts as referred to until the order is settled. What came off then has its name.
        """
        return self._moves.fill(names, pages)

    def distrust(self, names: Sequence[bytes]) -> None:
        """Forget blocks whose content may be wrong, in all tiers, whoever holds them."""
        for name in names:
            entry = self._index.find(name)
            if entry is not None:
                self._moves.lose(entry)

    # Orders. What is given out is carried out by a worker (`run`) and settled, or settled with None.

    def next_fill(self) -> Fill | None:
        """The fill that waits longest. It may only run when the passes planned before this call have ended."""
        return self._moves.next_fill()

    def next_spill(self, now: float) -> Order | None:
        """What is to be written or removed next, one at a time; None when nothing presses."""
        return self._moves.next_spill(now)

    def scan_order(self) -> Scan | None:
        """To be carried out once, before the first spill: what an earlier run left on disk."""
        return self._moves.scan_order()

    def settle(self, order: Order, outcome: Outcome, now: float) -> BlockRefused | None:
        """An order was carried out, or given up (`outcome` None). What of it did not come off, if a caller may mind."""
        return self._moves.settle(order, outcome, now)

    # For peers and operators

    def lookup(self, names: Sequence[bytes]) -> tuple[Tier, ...]:
        """The longest run of `names`, from the first on, that is here; the fastest tier of each."""
        found: list[Tier] = []
        for name in names:
            tiers = self._index.tiers(name)
            if not tiers:
                break
            found.append(tiers[0])
        return tuple(found)

    def entries(self, scope: ScopeFilter = ALL, *, now: float) -> list[BlockFacts]:
        """All blocks of a scope, or of all, in no particular order."""
        return [self._facts(entry, now) for entry in self._of_scope(scope)]

    def facts(self, name: bytes, *, now: float) -> BlockFacts | None:
        """One block, if it is here."""
        entry = self._index.find(name)
        return None if entry is None else self._facts(entry, now)

    def read_order(self, name: bytes) -> ReadBlock | None:
        """An order whose `run` returns the block's file; None when it is not here."""
        return self._moves.read_order(name)

    def accept_order(self, name: bytes, scope: bytes | None, octets: bytes) -> AcceptBlock | BlockHeld | BlockRefused:
        """An order that verifies and stores a block that somebody sent. Nobody sees it before it is settled."""
        return self._moves.accept_order(name, scope, octets)

    def lease(self, names: Sequence[bytes], owner: str, ttl_s: float, now: float) -> BlocksLeased | LeasesFull:
        """Hold those of `names` that are here, for `ttl_s` (cut to the limit)."""
        self.expire(now)
        found: list[bytes] = []
        pages_left = self._pages.pages // GUARDED_SHARE - self._index.guarded_pages
        for name in dict.fromkeys(names):
            tiers = self._index.tiers(name)
            if tiers == (Tier.DEVICE,) and not self._index.entries[name].guarded:
                pages_left -= 1
                if pages_left < 0:
                    continue
            if tiers:
                found.append(name)
        missed = tuple(name for name in names if name not in found)
        if not found:
            return BlocksLeased(lease=None, missed=missed)
        self._leases_taken += 1
        until = now + min(ttl_s, self._settings.max_lease_ttl_s)
        wanted = Lease(id=str(self._leases_taken), owner=owner, names=tuple(name.hex() for name in found), until=until)
        taken = self._index.leases.take(wanted, now)
        if isinstance(taken, LeasesFull):
            return taken
        self._look_again(taken.names)
        return BlocksLeased(lease=taken, missed=missed)

    def renew(self, lease_id: str, owner: str, ttl_s: float, now: float) -> Lease | LeaseLapsed | LeaseForeign:
        """Hold on for `ttl_s` from now (cut to the limit), or as long as before if that is longer."""
        self.expire(now)
        return self._index.leases.renew(lease_id, owner, now + min(ttl_s, self._settings.max_lease_ttl_s), now)

    def release(self, lease_id: str, owner: str) -> LeaseForeign | None:
        """End a lease; done already when there is none."""
        names = self._index.leases.release(lease_id, owner)
        if isinstance(names, LeaseForeign):
            return names
        self._look_again(names)
        return None

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        self._look_again(self._index.leases.expire(now))

    def next_end(self) -> float | None:
        """When `expire` has something to do next."""
        return self._index.leases.next_end()

    def pin(self, name: bytes, level: Pin) -> BlockRefused | None:
        """Set how much a block is wanted. A hard pin that cannot be kept is refused."""
        entry = self._index.find(name)
        if entry is None:
            return BlockRefused("there is no such block here")
        if level is Pin.HARD and entry.pin is not Pin.HARD:
            room = max(self._memory.buffers, self._disk_blocks) // 2
            if len(self._index.pinned) >= room:
                return BlockRefused(f"{room} blocks can be pinned hard here (half of the host tier, or of the disk)")
        self._index.set_pin(entry, level)
        self._pages.look_again(name)
        self._index.look_again(entry)
        self._moves.wake()
        return None

    def evict(self, name: bytes) -> BlockRefused | None:
        """Remove a block from all tiers, unless somebody holds it; done already when it is not here."""
        entry = self._index.find(name)
        if entry is None:
            return None
        if self._index.held(entry):
            return BlockRefused("a lease or a hard pin holds the block")
        self._moves.lose(entry)
        return None

    def purge(self, scope: ScopeFilter) -> int:
        """Remove all blocks of a scope, whoever holds them; how many. Their files go with the next order."""
        gone = self._of_scope(scope)
        for entry in gone:
            self._moves.lose(entry)
        return len(gone)

    def stats(self) -> tuple[TierStats, ...]:
        """One for each tier that there is."""
        sizes = {
            Tier.DEVICE: (self._pages.named_pages, self._pages.pages),
            Tier.HOST: (len(self._index.in_buffers), self._memory.buffers),
            Tier.DISK: (len(self._index.on_disk), self._disk_blocks),
        }
        return tuple(self._stats(tier, *size) for tier, size in sizes.items() if size[1])

    def check_integrity(self) -> None:
        """Assert that what orders, entries and tiers say of each other agrees."""
        self._index.check_integrity()
        for name, entry in self._index.entries.items():
            assert not entry.guarded or self._pages.page_of(name) is not None
        self._moves.check_integrity()

    # Inside

    def _of_scope(self, scope: ScopeFilter) -> list[Entry]:
        return [entry for entry in self._index.entries.values() if scope is ALL or entry.scope == scope]

    def _facts(self, entry: Entry, now: float) -> BlockFacts:
        tiers = self._index.tiers(entry.name)
        return BlockFacts(
            name=entry.name,
            scope=entry.scope,
            tier=tiers[0],
            tiers=tiers,
            bytes=self.block_bytes,
            tokens=self.layout.block_tokens,
            uses=entry.uses,
            age_s=max(0.0, now - entry.touched_at),
            leases=self._index.leases.count(entry.name.hex()),
            pin=entry.pin,
        )

    def _stats(self, tier: Tier, held: int, capacity: int) -> TierStats:
        counts = self._counts
        return TierStats(
            tier=tier,
            blocks=held,
            bytes=held * self.block_bytes,
            capacity_bytes=capacity * self.block_bytes,
            hits=counts["hits", tier],
            misses=counts["misses", tier],
            evictions=counts["evictions", tier],
            promotions=counts["promotions", tier],
            demotions=counts["demotions", tier],
            damaged=counts["damaged", tier],
            failed_writes=counts["failed_writes", tier],
        )

    def _look_again(self, names: Sequence[str]) -> None:
        """Leases on these blocks came or went."""
        for name in names:
            entry = self._index.find(bytes.fromhex(name))
            if entry is not None:
                self._index.look_again(entry)
        if names:
            self._moves.wake()

    def _page_reclaimed(self, name: bytes) -> None:
        """The pool needed the page of an idle block."""
        self._counts["evictions", Tier.DEVICE] += 1
        entry = self._index.find(name)
        if entry is not None:
            self._index.look_again(entry)

    def _favoured(self, name: bytes) -> bool:
        """Whether an idle block's page goes last."""
        entry = self._index.find(name)
        return entry is not None and entry.pin is not Pin.NONE
