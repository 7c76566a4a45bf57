"""The page pool: the memory in which the engine's keys and values live (the highest tier of the cache).

One tensor holds all pages, made once. A page is `page_tokens` consecutive slots; a slot is the place of one token's
keys and values in all layers. The pool knows which pages are free and how often a used one is referred to; what is in
them is the engine's business.

Two threads meet here. The bookkeeping (all methods) belongs to the event loop's thread and is plain Python. The tensor
belongs to the worker that runs passes. They never contradict each other, because a page that is freed while a pass
still writes it can only be used by a pass that is planned later, and passes run in the order they are planned.

Invariant: free + used = all pages (`check_integrity`). A freed page keeps its octets: a sequence reads only slots that
it wrote or was given with their content.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class PagePool:
    """All pages of one model on one device.

    `slots` has the shape [layers, 2 * kv_heads, pages * page_tokens, head_dim]: keys of all heads, then values. Keys of
    one layer and head over consecutive slots are one block of memory, so a page is gathered in long pieces.
    """

    def __init__(
        self,
        *,
        pages: int,
        page_tokens: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert pages >= 1
        self.page_tokens = page_tokens
        self.pages = pages
        # Zeros, since the kernel hands those out at first use: a large pool costs nothing until it is used.
        self.slots: Tensor = torch.zeros(
            (layers, 2 * kv_heads, pages * page_tokens, head_dim), dtype=dtype, device=device
        )
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        """Free pages; the last is handed out next, and the last one freed comes back first, still warm."""

    @staticmethod
    def page_bytes(*, page_tokens: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Octets that one page takes."""
        return 2 * layers * kv_heads * page_tokens * head_dim * dtype.itemsize

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each with one reference. The caller has asked `can_allocate`."""
        assert self.can_allocate(count)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            assert self._references[page] == 0
            self._references[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """One more reference to each of `pages`, which are in use."""
        for page in pages:
            assert self._references[page] > 0, "a free page has nothing to share"
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each of `pages`; those without one are free."""
        for page in pages:
            assert self._references[page] > 0, "released more often than referred to"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Assert that free + used = all and that no page is both."""
        used = sum(references > 0 for references in self._references)
        assert len(set(self._free)) == len(self._free)
        assert all(self._references[page] == 0 for page in self._free)
        assert used + len(self._free) == self.pages
