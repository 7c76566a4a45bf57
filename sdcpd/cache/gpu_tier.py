"""The page pool: the memory in which the engine's keys and values live (the highest tier of the cache).

One tensor holds all pages, made once. A page is `page_tokens` consecutive slots; a slot is the place of one token's
keys and values in all layers. The pool knows which pages are free and how often a used one is referred to; what is in
them is the engine's business.

Two threads meet here. The bookkeeping (all methods) belongs to the event loop's thread and is plain Python. The tensor
belongs to the worker that runs passes. They never contradict each other, because a page that is freed while a pass
still writes it can only be used by a pass that is planned later, and passes run in the order they are planned.

A sequence whose pages lie one after another can be read in place; one whose pages are scattered must be gathered
first. So a sequence is given the page after its last whenever that is free, and a new sequence starts in the middle of
the largest free run, which leaves it and its neighbour room to grow.

Invariant: free + used = all pages (`check_integrity`). The engine keeps the whole pool free of NaN and infinities, so
that reading a masked slot of someone else is harmless.
"""

import re
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_FREE_RUN: Final = re.compile(rb"\x00+")


class PagePool:
    """All pages of one model on one device.

    `slots` has the shape [2, layers, kv_heads, pages * page_tokens, head_dim]: keys at 0, values at 1. The keys of one
    layer and head over consecutive slots are one block of memory, which is what attention reads fastest.
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
        self.slots: Tensor = torch.zeros(
            (2, layers, kv_heads, pages * page_tokens, head_dim), dtype=dtype, device=device
        )
        self._used = bytearray(pages)
        """1 for each page that is referred to, else 0. The same truth as `_references`, in a form to search fast."""
        self._references = [0] * pages
        self._free = pages

    @staticmethod
    def page_bytes(*, page_tokens: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Octets that one page takes."""
        return 2 * layers * kv_heads * page_tokens * head_dim * dtype.itemsize

    @property
    def pages(self) -> int:
        return len(self._used)

    @property
    def free_pages(self) -> int:
        return self._free

    def can_allocate(self, count: int) -> bool:
        return count <= self._free

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` free pages, each with one reference; `after` is the page that they should follow.

        The caller has asked `can_allocate`.
        """
        assert self.can_allocate(count)
        pages: list[int] = []
        while len(pages) < count:
            first = self._next_place(count - len(pages), pages[-1] if pages else after)
            page = first
            while page < self.pages and not self._used[page] and len(pages) < count:
                self._used[page] = 1
                self._references[page] = 1
                pages.append(page)
                page += 1
        self._free -= count
        return pages

    def _next_place(self, count: int, after: int | None) -> int:
        """Where to go on: right behind `after` if that is free, else in the middle of the largest free run."""
        if after is not None and self.are_free(after + 1, 1):
            return after + 1
        start, length = 0, 0
        for run in _FREE_RUN.finditer(self._used):
            if run.end() - run.start() > length:
                start, length = run.start(), run.end() - run.start()
        assert length > 0, "can_allocate said there is room"
        # An untouched pool is taken from its start; the room before a run's middle is the neighbour's to grow into.
        return start if length == self.pages else start + max(0, length - count) // 2

    def are_free(self, first: int, count: int) -> bool:
        """Whether the `count` pages from `first` exist and are free."""
        return first + count <= self.pages and not any(self._used[first : first + count])

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
                self._used[page] = 0
                self._free += 1

    def check_integrity(self) -> None:
        """Assert that free + used = all, by counting anew."""
        used = sum(1 for references in self._references if references > 0)
        assert all(
            (references > 0) == bool(flag) for references, flag in zip(self._references, self._used, strict=True)
        )
        assert used + self._free == self.pages
