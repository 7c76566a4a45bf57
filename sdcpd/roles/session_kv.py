"""The keys and values of one session in the engine's page pool: which positions are valid, which have pages.

valid_tokens <= reserved_tokens always. Both are 0 for a session that waits for pages, be it new or preempted; what it
knows is run again as a prompt once it has them (roles/kv_room.py says when).

Where the engine keeps blocks (cache/block_store.py), a session begins with what others have computed of its text:

    enter      with its pages it takes the longest run of blocks that are in pages: these are shared, not copied
    catch_up   before each chunk of prompt, at a block's border: what has come into pages meanwhile is taken; what lies
               further down is brought up; what an older session is about to compute, or what is on its way up, is
               waited for. Otherwise the chunk is run
    advance    what became valid is published, block by block

Valid are the positions of the committed tokens but the last, so nothing of a rejected token is ever published, and the
last token of a text always runs: blocks that end before it are all that is taken.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from sdcpd.cache.block_orders import Fill, Tier
from sdcpd.cache.blocks import BlockChain
from sdcpd.roles.ports import Engine

Text = Callable[[], Sequence[int]]
"""All that is known of a session's text; asked only where some of it is needed."""


class SessionKv:
    """One sequence of the engine. `drop` gives its pages back and keeps the session; `close` is for good."""

    def __init__(self, engine: Engine, scope: bytes | None = None, now: Callable[[], float] = lambda: 0.0) -> None:
        self.engine = engine
        self._sequence: int | None = engine.open_sequence()
        self.valid_tokens = 0
        self.reserved_tokens = 0
        self.reused_tokens: Counter[Tier] = Counter()
        """Positions that were taken, not computed, by where their blocks were found."""
        self._blocks = engine.blocks
        self._scope = scope
        self._now = now
        self._chain: BlockChain | None = None
        if self._blocks is not None:
            self._chain = BlockChain(self._blocks.store.root(scope), self._blocks.block_tokens)
        self._published = 0  # so many blocks, from the first on, were taken or given a name
        self._wanted = 0  # so many the session would have taken
        self._fill: Fill | None = None

    @property
    def closed(self) -> bool:
        return self._sequence is None

    @property
    def sequence(self) -> int:
        """The engine's handle; another one after a `drop`."""
        assert self._sequence is not None
        return self._sequence

    def reserve(self, length: int) -> bool:
        """Have pages for `length` positions. False, and nothing changed, when too few are free."""
        if length <= self.reserved_tokens:
            return True
        if not self.engine.reserve(self.sequence, length):
            return False
        self.reserved_tokens = length
        return True

    def enter(self, length: int, end: int, text: Text) -> bool:
        """Have pages for `length` positions, shared ones where others have computed of the first `end`.

        False, and nothing changed, when too few are free.
        """
        assert not self.reserved_tokens
        if self._blocks is None or self._chain is None:
            return self.reserve(length)
        self._wanted = max(self._wanted, end // self._blocks.block_tokens)
        names = self._chain.up_to(end // self._blocks.block_tokens, text)
        found = self._placed(names)
        if not self.reserve(length):
            if found:
                self.drop()
            return False
        self._take(names, 0)
        return True

    def catch_up(self, end: int, text: Text, promised: set[bytes]) -> bool:
        """Take what is there of the first `end` positions. True: what is left of them is to be run now.

        `promised` holds what older sessions are about to compute; what this one will is added.
        """
        if self._blocks is None or self._chain is None:
            return True
        size, store = self._blocks.block_tokens, self._blocks.store
        count = end // size
        place, inside = divmod(self.valid_tokens, size)
        if place >= count:
            return True  # what is left is no full block
        names = self._chain.up_to(count, text)
        if not inside:
            place = self._take(names, place)
            if place == count:
                return True
            if store.is_filling(names[place]):
                return False
            order = store.fill(names[place:], self._blocks.pages(self.sequence)[place:count])
            if order is not None:
                self._fill = order
                return False
            if names[place] in promised:
                return False
        promised.update(names[place:])
        return True

    def advance(self, valid_tokens: int, text: Text) -> None:
        """So many positions, all of committed tokens, are valid now. Full blocks of them are everybody's."""
        self.valid_tokens = valid_tokens
        if self._blocks is None or self._chain is None:
            return
        count = valid_tokens // self._blocks.block_tokens
        if count <= self._published:
            return
        names, pages = self._chain.up_to(count, text), self._blocks.pages(self.sequence)
        store = self._blocks.store
        for place in range(self._published, count):
            store.publish(names[place], self._scope, pages[place], self._now())
        store.missed(max(0, min(count, self._wanted) - self._published))
        self._published = count

    def distrust(self) -> None:
        """What this session computed or took may be wrong: nobody is to take it any more."""
        if self._blocks is not None and self._chain is not None:
            self._blocks.store.distrust(self._chain.names)
            self._chain = None

    def drop(self) -> None:
        """Give all pages back; nothing is valid any more. Between passes only."""
        self.engine.close_sequence(self.sequence)
        self._sequence = self.engine.open_sequence()
        self.valid_tokens = self.reserved_tokens = self._published = 0
        self._fill = None

    def close(self) -> None:
        """Give all pages back for good; repeatable."""
        if self._sequence is not None:
            self.engine.close_sequence(self._sequence)
            self._sequence = None
            self.reserved_tokens = 0

    def _placed(self, names: Sequence[bytes]) -> int:
        """Place the longest run of blocks that are in pages, so that their pages are ours whatever is reserved next."""
        assert self._blocks is not None
        for place, name in enumerate(names):
            page = self._blocks.store.page_of(name)
            if page is None:
                return place
            self._blocks.place(self.sequence, place, page)
        return len(names)

    def _take(self, names: Sequence[bytes], place: int) -> int:
        """Take blocks that are in pages, from `place` on; the place of the first that is not."""
        assert self._blocks is not None
        store = self._blocks.store
        while place < len(names) and (page := store.page_of(names[place])) is not None:
            tier = self._tier(names[place], page)
            self._blocks.place(self.sequence, place, page)
            store.taken(names[place], self._now(), tier)
            self.reused_tokens[tier] += self._blocks.block_tokens
            place += 1
            self.valid_tokens = place * self._blocks.block_tokens
        self._published = max(self._published, place)
        return place

    def _tier(self, name: bytes, page: int) -> Tier:
        """Where a block that is in this page was found."""
        fill = self._fill
        if fill is None or page not in fill.pages or name not in fill.names:
            return Tier.DEVICE
        return Tier.DISK if fill.sources[fill.names.index(name)].buffer is None else Tier.HOST
