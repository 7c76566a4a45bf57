"""The page pool: the memory in which the engine's keys and values live (the highest tier of the cache).

One tensor holds all pages, made once. A page is `page_tokens` consecutive slots; a slot is the place of one token's
keys and values in all layers. The pool knows which pages are free and how often a used one is referred to; what is in
them is the engine's business.

A page that is full of valid keys and values gets a *name* (blocks.py), and from then on nobody writes it: sessions that
need the same block refer to the same page. When its last reference goes, a named page is *idle*: it counts as free, and
keeps its content until its place is needed, the longest unused first. There is no copy of it and no second memory.

Two threads meet here. The bookkeeping (all methods) belongs to the event loop's thread and is plain Python. The tensor
belongs to the worker that runs passes. They never contradict each other, because a page that is freed while a pass
still writes it can only be used by a pass that is planned later, and passes run in the order they are planned.

Invariant: free + idle + used = all pages (`check_integrity`). A freed page keeps its octets: a sequence reads only
slots that it wrote or was given with their content.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

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
        self._names: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Named pages without a reference, the longest unused first."""
        self._favoured: OrderedDict[int, None] = OrderedDict()
        """Those whose content is wanted for longer; their places are taken last."""
        self._favours: Callable[[bytes], bool] = lambda _: False
        self._reclaimed: Callable[[bytes], None] = lambda _: None

    def attend(self, *, favours: Callable[[bytes], bool], reclaimed: Callable[[bytes], None]) -> None:
        """Be told whether an idle page's content is wanted for longer, and tell when a name lost its page."""
        self._favours, self._reclaimed = favours, reclaimed

    @staticmethod
    def page_bytes(*, page_tokens: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Octets that one page takes."""
        return 2 * layers * kv_heads * page_tokens * head_dim * dtype.itemsize

    @property
    def free_pages(self) -> int:
        """Pages to be had, idle ones included."""
        return len(self._free) + len(self._idle) + len(self._favoured)

    @property
    def empty_pages(self) -> int:
        """Free pages that hold nothing of use."""
        return len(self._free)

    @property
    def named_pages(self) -> int:
        return len(self._names)

    def can_allocate(self, count: int) -> bool:
        return count <= self.free_pages

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each with one reference. The caller has asked `can_allocate`."""
        assert self.can_allocate(count)
        return [self._next_page() for _ in range(count)]

    def _next_page(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = (self._idle or self._favoured).popitem(last=False)
            name = self._names.pop(page)
            del self._pages[name]
            self._reclaimed(name)
        assert self._references[page] == 0
        self._references[page] = 1
        return page

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to each of `pages`, which are in use or idle."""
        for page in pages:
            assert self._references[page] > 0 or page in self._names, "a free page has nothing to share"
            if self._references[page] == 0:
                self._idle.pop(page, None)
                self._favoured.pop(page, None)
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each of `pages`; those without one are free, or idle: the last of them wanted last."""
        for page in pages:
            assert self._references[page] > 0, "released more often than referred to"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._put_aside(page)

    def release_first(self, page: int) -> None:
        """As `release`; an idle page's place is then the next to be taken, since its content is also elsewhere."""
        self.release([page])
        for pages in (self._idle, self._favoured):
            if page in pages:
                pages.move_to_end(page, last=False)

    def _put_aside(self, page: int) -> None:
        name = self._names.get(page)
        if name is None:
            self._free.append(page)
        elif self._favours(name):
            self._favoured[page] = None
        else:
            self._idle[page] = None

    # Names

    def page_of(self, name: bytes) -> int | None:
        """Where this block is, used or idle."""
        return self._pages.get(name)

    def named(self, page: int) -> bool:
        """Whether the page is a block, which nobody may write."""
        return page in self._names

    def give_name(self, page: int, name: bytes) -> bool:
        """The page, which is in use, holds this block. False, and nothing changed, when another does already."""
        assert self._references[page] > 0, "a free page holds nothing"
        assert page not in self._names, "a block's content does not change"
        if name in self._pages:
            return False
        self._names[page], self._pages[name] = name, page
        return True

    def forget(self, name: bytes) -> None:
        """Take the name from its page, if there is one: nobody finds it any more, and who uses it goes on using it."""
        page = self._pages.pop(name, None)
        if page is None:
            return
        del self._names[page]
        if self._references[page] == 0:
            self._idle.pop(page, None)
            self._favoured.pop(page, None)
            self._free.append(page)

    def forget_all(self) -> None:
        """Take all names from their pages."""
        for name in list(self._pages):
            self.forget(name)

    def look_again(self, name: bytes) -> None:
        """Whether this block is wanted for longer may have changed."""
        page = self._pages.get(name)
        if page is not None and self._references[page] == 0:
            self._idle.pop(page, None)
            self._favoured.pop(page, None)
            self._put_aside(page)

    def idle_names(self) -> Iterable[bytes]:
        """Names of idle pages in the order in which their places are taken."""
        for pages in (self._idle, self._favoured):
            for page in pages:
                yield self._names[page]

    def check_integrity(self) -> None:
        """Assert that free + idle + used = all and that no page is two of these."""
        used = {page for page, references in enumerate(self._references) if references > 0}
        aside = [*self._free, *self._idle, *self._favoured]
        assert len(set(aside)) == len(aside)
        assert not used & set(aside)
        assert len(used) + len(aside) == self.pages
        assert not any(page in self._names for page in self._free)
        assert all(page in self._names for page in (*self._idle, *self._favoured))
        assert self._pages == {name: page for page, name in self._names.items()}
