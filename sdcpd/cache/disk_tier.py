"""Blocks as files: the lowest tier, which outlives the process (decisions, cache part; bugs known of such caches).

A block is one file, `NAME.safetensors` (block_file.py). It is written under another name, synced, and then renamed; the
directory is synced last. So a file with a block's name is whole, or a disk lost what it had said was safe; that and
rot are found by the checksum when the block is read. What does not hold is removed: a block can be computed again.

All methods block and belong to worker threads; which blocks there are is the index's business (block_store.py). Blocks
of other models or layouts, left in the directory by an earlier configuration, are removed by `scan`; so are leftovers
of writes that did not end. Files with other names are somebody else's: counted, and left alone.
"""

import contextlib
import errno
import re
from enum import Enum
from typing import Final

from msgspec import Struct

from sdcpd.cache.block_file import HEADER_LIMIT_BYTES, Damaged, read_block, read_head
from sdcpd.cache.blocks import KvLayout
from sdcpd.cache.files import Files

LOCK: Final = "lock"
SUFFIX: Final = ".safetensors"
_BLOCK: Final = re.compile(r"[0-9a-f]{64}\.safetensors")
_UNFINISHED: Final = re.compile(r"[0-9a-f]{64}\.part")
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Written(Enum):
    """How a write ended. After NO_ROOM and FAILED there is no such file."""

    DONE = "done"
    NO_ROOM = "no room"
    FAILED = "failed"


class Scanned(Struct, frozen=True):
    """What a directory held: blocks to be had (name and scope), and how many files were removed or left alone."""

    blocks: tuple[tuple[bytes, bytes | None], ...]
    damaged: int
    unfinished: int
    foreign: int
    over: int  # good ones beyond what the tier may hold


class DiskTier:
    """Blocks of one layout in the directory of `files`, which nobody else uses: the constructor takes its lock.

    Raises StateInUse when another process has it, OSError when it cannot be used.
    """

    def __init__(self, files: Files, layout: KvLayout) -> None:
        self._files = files
        self._layout = layout
        self._lock = files.lock(LOCK)

    def close(self) -> None:
        """Let others have the directory."""
        self._lock.close()

    def scan(self, limit: int) -> Scanned:
        """Look what an earlier run left: reads heads only, and keeps at most `limit` blocks."""
        blocks: list[tuple[bytes, bytes | None]] = []
        damaged = unfinished = foreign = over = 0
        for file in self._files.names():
            if _UNFINISHED.fullmatch(file):
                unfinished += 1
                self._drop(file)
            elif _BLOCK.fullmatch(file):
                found = self._head(file)
                if isinstance(found, Damaged):
                    damaged += 1
                    self._drop(file)
                elif len(blocks) >= limit:
                    over += 1
                    self._drop(file)
                else:
                    blocks.append(found)
            elif file != LOCK:
                foreign += 1
        return Scanned(tuple(blocks), damaged, unfinished, foreign, over)

    def write(self, name: bytes, octets: bytes) -> Written:
        """Store a block's file, durably."""
        part = f"{name.hex()}.part"
        try:
            file = self._files.open(part)
            try:
                file.truncate(0)
                file.write_at(0, octets)
                file.sync()
            finally:
                file.close()
            self._files.rename(part, _file(name))
            self._files.sync_directory()
        except OSError as error:
            self._drop(part)
            self._drop(_file(name))  # a sync that failed tells nothing of what it left
            return Written.NO_ROOM if error.errno in _NO_ROOM else Written.FAILED
        return Written.DONE

    def read(self, name: bytes) -> bytes | Damaged | None:
        """A block's file, verified; None where there is none. What is damaged is removed."""
        try:
            octets = self._files.read(_file(name))
        except FileNotFoundError:
            return None
        except OSError as error:
            return Damaged(f"it cannot be read ({error.strerror})")
        found = read_block(self._layout, name, octets)
        if isinstance(found, Damaged):
            self._drop(_file(name))
            return found
        return octets

    def remove(self, names: tuple[bytes, ...]) -> None:
        """Remove blocks; those that are not there are gone already."""
        for name in names:
            self._drop(_file(name))

    def _head(self, file: str) -> tuple[bytes, bytes | None] | Damaged:
        try:
            octets = self._files.read(file, 0, HEADER_LIMIT_BYTES)
        except OSError as error:
            return Damaged(f"it cannot be read ({error.strerror})")
        head = read_head(self._layout, octets)
        if isinstance(head, Damaged):
            return head
        if _file(head.name) != file:
            return Damaged("it is another block than its name says")
        return head.name, head.scope

    def _drop(self, file: str) -> None:
        with contextlib.suppress(OSError):  # gone already, or a disk that does nothing any more: found again by `scan`
            self._files.remove(file)


def _file(name: bytes) -> str:
    return name.hex() + SUFFIX
