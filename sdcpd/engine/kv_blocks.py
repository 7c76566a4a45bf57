"""The engine's blocks as a session meets them: the store that names them, and the pages of sequences (no torch here).

A sequence takes a block by placing the block's page in its table: nothing is copied, and nobody writes the page any
more. That is how sessions of one prompt, the choices of one request and the turns of a conversation share their pages.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from sdcpd.cache.block_store import BlockStore


class Table(Protocol):
    """What is asked of a sequence's block table."""

    pages: list[int]

    def place(self, place: int, page: int) -> None: ...


class KvBlocks:
    """One engine's. Belongs to the event loop's thread."""

    def __init__(self, store: BlockStore, tables: Mapping[int, Table]) -> None:
        self.store = store
        self._tables = tables

    @property
    def block_tokens(self) -> int:
        """Block = page."""
        return self.store.layout.block_tokens

    def pages(self, sequence: int) -> Sequence[int]:
        """The sequence's pages in the order of its positions."""
        return self._tables[sequence].pages

    def place(self, sequence: int, place: int, page: int) -> None:
        """The sequence's page at `place`, which it has or is to have next, is `page` from now on, valid to its end."""
        self._tables[sequence].place(place, page)
