"""The journal on disk: one order at a time, in a worker thread.

An order says which octets go where in which segment, and is carried out as a whole: begin the segment if it is new,
write, sync, and put a MARK behind. Only then may anything in it be acknowledged. What else can happen:

- *not written*: the write failed (a full disk, say), and cutting the file back and syncing that worked. The journal is
  as before; the next order may come.
- *stopped*: a sync failed, or cutting back did. What is on disk is not known, and a second sync would prove nothing,
  since the system may have dropped the octets and forgotten the error. The journal takes no further order; a restart
  reads back what there is. (Cutting back is still tried: the page cache should not show what the disk may not hold.)
"""

import contextlib
import errno
from typing import Final

from msgspec import Struct

from sdcpd.cache.files import Files, OpenFile
from sdcpd.cache.journal_frames import (
    FrameOrder,
    encode_frame,
    encode_mark,
    encode_segment_header,
)

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class WriteOrder(Struct, frozen=True):
    """What to do in one go. `frames` go to `offset` of `segment` in this order, all settled before `offset`.

    `drop` are segments to be given back afterwards, oldest first, and `keep` those of them to be set aside under
    another name instead, since they are damaged.
    """

    segment: int
    begin_segment: bool
    offset: int
    frames: tuple[FrameOrder, ...]
    drop: tuple[int, ...] = ()
    keep: frozenset[int] = frozenset()


class Written(Struct, frozen=True):
    """All frames are durable. `dropped` is how many of `drop` are gone for good; the rest failed with `detail`."""

    dropped: int
    detail: str | None = None


class NotWritten(Struct, frozen=True):
    """Nothing of the order is there. `no_room` tells a full disk from a broken one."""

    detail: str
    no_room: bool


class Stopped(Struct, frozen=True):
    """Nobody knows what is there. No further order is taken."""

    detail: str


WriteResult = Written | NotWritten | Stopped


def segment_file(segment: int) -> str:
    """Name of a segment's file; names sort as numbers do."""
    return f"journal-{segment:016d}.log"


def segment_number(file: str) -> int | None:
    """Inverse of `segment_file`; None for any other file."""
    digits = file.removeprefix("journal-").removesuffix(".log")
    return int(digits) if digits.isdecimal() and segment_file(int(digits)) == file else None


class Journal:
    """Carries out orders. Used by one thread at a time; shares nothing with the bookkeeping but finished orders."""

    def __init__(self, files: Files, *, sync: bool, file: OpenFile) -> None:
        """`file` is the active segment, open and clean to its end."""
        self._files = files
        self._sync = sync
        self._file = file
        self._stopped = False
        self._torn_at: int | None = None  # half a MARK may stand behind this offset

    def carry_out(self, order: WriteOrder) -> WriteResult:
        """Write, sync, then drop. Blocks. Not to be called again after Stopped."""
        assert not self._stopped, "what is on disk is not known any more"
        if order.begin_segment:
            failed = self._begin(order.segment)
            if failed is not None:
                return failed
        if order.frames:
            failed = self._write(order)
            if failed is not None:
                return failed
        return self._drop(order)

    def close(self) -> None:
        self._file.close()

    def _begin(self, segment: int) -> NotWritten | Stopped | None:
        """Make the new segment the active one. The old one is synced first, with the MARK at its end or, in page_cache
        mode, with all of it: only a journal's last segment may ever end torn. Half a MARK, of a full disk, goes."""
        try:
            if self._torn_at is not None:
                self._file.truncate(self._torn_at)
                self._torn_at = None
            self._file.sync()
        except OSError as error:
            return self._stop(error)
        try:
            new = self._files.open(segment_file(segment))
            new.truncate(0)  # whatever an attempt that failed may have left
            new.write_at(0, encode_segment_header(segment))
        except OSError as error:
            # A segment without frames promises nothing: the next attempt begins it anew, as recovery would.
            return _not_written(error)
        try:
            new.sync()
            self._files.sync_directory()
        except OSError as error:
            return self._stop(error)
        self._file.close()
        self._file = new
        return None

    def _write(self, order: WriteOrder) -> NotWritten | Stopped | None:
        octets = bytearray()
        for frame in order.frames:
            octets += encode_frame(order.segment, order.offset + len(octets), order.offset, frame)
        end = order.offset + len(octets)
        try:
            self._file.write_at(order.offset, bytes(octets))
        except OSError as error:
            try:
                self._file.truncate(order.offset)
                self._file.sync()
            except OSError:
                return self._stop(error)
            return _not_written(error)
        if self._sync:
            try:
                self._file.sync()
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._file.truncate(order.offset)
                return self._stop(error)
        try:
            self._file.write_at(end, encode_mark(order.segment, end))
            self._torn_at = None
        except OSError:
            self._torn_at = end  # only an aid to recovery; the next write overwrites whatever is there
        return None

    def _drop(self, order: WriteOrder) -> Written:
        """One at a time, each made durable before the next, so that segments vanish from the oldest on only."""
        dropped = 0
        try:
            for segment in order.drop:
                file = segment_file(segment)
                if segment in order.keep:
                    with contextlib.suppress(FileNotFoundError):
                        self._files.rename(file, f"damaged-{file}")
                else:
                    with contextlib.suppress(FileNotFoundError):  # removed, but that sync failed
                        self._files.remove(file)
                self._files.sync_directory()
                dropped += 1
        except OSError as error:
            return Written(dropped=dropped, detail=f"segment {order.drop[dropped]} cannot be given back: {error}")
        return Written(dropped=dropped)

    def _stop(self, error: OSError) -> Stopped:
        self._stopped = True
        return Stopped(f"the journal's disk failed: {error}")


def _not_written(error: OSError) -> NotWritten:
    return NotWritten(detail=f"the journal cannot be written: {error}", no_room=error.errno in _NO_ROOM)
