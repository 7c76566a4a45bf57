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

    def truncate(self, length: int) -> None:
        """Keep `length` valid positions; pages wholly past them go back to the pool, reserved ones too."""
        assert 0 <= length <= self.length, "only valid positions can be kept"
        self.length = length
        kept = -(-length // self._pool.page_tokens)
        self._pool.release(self.pages[kept:])
        del self.pages[kept:]

    def close(self) -> None:
        """Give all pages back."""
        self.truncate(0)

    def slots(self, start: int, end: int) -> list[int]:
        """The slots of positions start to end - 1."""
        size = self._pool.page_tokens
        return [self.pages[position // size] * size + position % size for position in range(start, end)]
