"""Which pages a sequence has, and how much of them is valid.

A table has two lengths. Its pages are the sequence's to write. `length` is the number of positions from 0 whose keys
and values are valid: planning a pass raises it, `truncate` lowers it when proposed tokens were rejected (draft 6.3).
length <= pages * page_tokens always.
"""

from sdcpd.cache.gpu_tier import PagePool


class BlockTable:
    """The pages of one sequence, in the order of its positions."""

    __slots__ = ("_pool", "length", "pages")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[int] = []
        self.length = 0

    @property
    def capacity_tokens(self) -> int:
        return len(self.pages) * self._pool.page_tokens

    def reserve(self, length: int) -> bool:
        """Have pages for `length` positions. False, and nothing changed, when the pool lacks the pages."""
        missing = -(-length // self._pool.page_tokens) - len(self.pages)
        if missing <= 0:
            return True
        if not self._pool.can_allocate(missing):
            return False
        self.pages += self._pool.allocate(missing)
        return True

    def place(self, place: int, page: int) -> None:
        """Share `page` as the sequence's page at `place`, whose positions are valid then, as all before it are."""
        end = (place + 1) * self._pool.page_tokens
        assert end - self._pool.page_tokens <= self.length, "no hole before a block"
        assert place <= len(self.pages)
        if place == len(self.pages):
            self._pool.retain([page])
            self.pages.append(page)
        elif self.pages[place] != page:
            self._pool.retain([page])
            self._pool.release([self.pages[place]])
            self.pages[place] = page
        self.length = max(self.length, end)

    def may_write(self, start: int, end: int) -> bool:
        """Whether none of the pages of positions start to end - 1 is a block, which others may be reading."""
        size = self._pool.page_tokens
        return not any(map(self._pool.named, self.pages[start // size : -(-end // size)]))

    def truncate(self, length: int) -> None:
        """Keep `length` valid positions; pages wholly past them go back to the pool, reserved ones too."""
        assert 0 <= length <= self.length, "only valid positions can be kept"
        self.length = length
        kept = -(-length // self._pool.page_tokens)
        self._pool.release(reversed(self.pages[kept:]))  # of a chain of blocks the first are of use longest
        del self.pages[kept:]

    def close(self) -> None:
        """Give all pages back."""
        self.truncate(0)

    def slots(self, start: int, end: int) -> list[int]:
        """The slots of positions start to end - 1."""
        size = self._pool.page_tokens
        return [self.pages[position // size] * size + position % size for position in range(start, end)]
