"""Reading the journal back after a restart, before anything is answered.

Segments are replayed from the oldest on. Three things can be wrong, and each is told in a StoreFact:

- *A torn end*: octets behind the last acknowledged ones of the last segment that make no frame. Nobody was told of
  them. They are cut off.
- *Damage*: a bad spot in what had been acknowledged. A frame whose head still says whose it is costs that log alone.
  Behind a gap, every log that began before it might have lost its last records there; it is in doubt until a later
  frame of it proves that none is missing. Logs still in doubt at the end are damaged as well: a log that lost its end
  must never be read as if it were whole, since a session resumed from it would contradict what it had released.
- *A missing segment*: as a gap.

What is kept is then synced: a process that died between its write and its sync leaves records in the page cache, which
could otherwise be read now and be gone after a loss of power.
"""

import contextlib
from itertools import pairwise

from msgspec import Struct

from sdcpd.cache.files import Files, OpenFile
from sdcpd.cache.journal import segment_file, segment_number
from sdcpd.cache.journal_frames import (
    MARK_BYTES,
    SEGMENT_HEADER_BYTES,
    Found,
    Frame,
    FrameKind,
    Gap,
    SpoiledFrame,
    encode_mark,
    encode_segment_header,
    scan,
    segment_header_is_good,
)
from sdcpd.cache.log_index import LogIndex
from sdcpd.cache.log_requests import StoreFact


class Recovered(Struct):
    """The journal as found: `segments` is the length of each, `active` the last one, open and clean to its end."""

    index: LogIndex
    segments: dict[int, int]
    damaged_segments: set[int]
    active: int
    file: OpenFile
    facts: list[StoreFact]


def recover(files: Files, now: float) -> Recovered:
    """Read everything, cut the torn end, sync. Blocks. Raises OSError when the disk does not let us."""
    replay = _Replay(now)
    numbers = sorted(number for number in map(segment_number, files.names()) if number is not None)
    segments: dict[int, int] = {}
    for number, follower in pairwise(numbers):
        octets = files.read(segment_file(number))
        segments[number] = len(octets)
        replay.header(number, octets)
        for found in scan(number, octets):
            replay.take(number, found)
        if follower != number + 1:
            replay.missing(number + 1, follower - 1)
    active = numbers[-1] if numbers else 1
    file = files.open(segment_file(active))
    segments[active] = _recover_last(files, active, file, replay)
    replay.finish()
    return Recovered(
        index=replay.index,
        segments=segments,
        damaged_segments=replay.damaged_segments,
        active=active,
        file=file,
        facts=replay.facts,
    )


def _recover_last(files: Files, number: int, file: OpenFile, replay: "_Replay") -> int:
    """Replay the last segment and make it ready to be written on. Returns its length."""
    octets = files.read(segment_file(number))
    found = list(scan(number, octets))
    settled = max((_settled(one) for one in found), default=0)
    end = max(len(octets), SEGMENT_HEADER_BYTES)
    for position, one in enumerate(found):
        whole = isinstance(one, Frame) and not one.repaired
        mark = isinstance(one, Frame) and one.order.kind is FrameKind.MARK
        if one.offset >= settled and (mark or not whole):
            end = one.offset
            rest = octets[end + (MARK_BYTES if mark else 0) :]
            if rest:
                replay.facts.append(
                    StoreFact(
                        kind="torn_end_cut",
                        detail=f"{len(rest)} octets of a write that was never acknowledged, at offset {end}",
                        segment=number,
                    )
                )
            found = found[:position]
            break
    if found:
        replay.header(number, octets)
    for one in found:
        replay.take(number, one)
    file.truncate(end)
    if not segment_header_is_good(number, octets):
        file.write_at(0, encode_segment_header(number))
    file.sync()
    files.sync_directory()
    with contextlib.suppress(OSError):  # as behind a batch: only an aid to the next recovery
        file.write_at(end, encode_mark(number, end))
    return end


def _settled(found: Found) -> int:
    match found:
        case Frame(settled=settled):
            return settled
        case SpoiledFrame(head=head):
            return head.settled
        case Gap():
            return 0


class _Replay:
    """The index as it grows, and what was found wrong on the way."""

    def __init__(self, now: float) -> None:
        self.index = LogIndex()
        self.damaged_segments: set[int] = set()
        self.facts: list[StoreFact] = []
        self._now = now

    def header(self, segment: int, octets: bytes) -> None:
        if not segment_header_is_good(segment, octets):
            self._damage(segment, "its header is not what was written")

    def take(self, segment: int, found: Found) -> None:
        match found:
            case Frame():
                if found.repaired:
                    self.facts.append(
                        StoreFact(
                            kind="frame_head_copy_bad",
                            detail=f"one of its two copies is bad, at offset {found.offset}",
                            segment=segment,
                            log=found.order.name or None,
                        )
                    )
                self.index.apply(found.order, segment, found.payload_offset, self._now)
            case SpoiledFrame():
                self._spoiled(segment, found)
            case Gap():
                self._damage(segment, f"octets {found.offset} to {found.end} are unreadable")
                self._doubt(f"records may be missing: octets {found.offset} to {found.end} of segment {segment}")

    def missing(self, first: int, last: int) -> None:
        self.facts.append(StoreFact(kind="segment_missing", detail=f"segments {first} to {last}", segment=first))
        self._doubt(f"records may be missing: segments {first} to {last} are gone")

    def finish(self) -> None:
        for log in self.index:
            if log.doubt is not None and log.damage is None:
                log.spoil(log.doubt)
            if log.damage is not None:
                self.facts.append(
                    StoreFact(kind="log_damaged", detail=log.damage, segment=log.first_segment, log=log.name)
                )

    def _spoiled(self, segment: int, found: SpoiledFrame) -> None:
        self._damage(segment, f"the frame at offset {found.offset} is not what was written")
        if found.head.kind is not FrameKind.MARK:
            reason = f"the frame at offset {found.offset} of segment {segment} is not what was written"
            self.index.damaged(found.head.name, segment, self._now, reason)

    def _damage(self, segment: int, detail: str) -> None:
        self.damaged_segments.add(segment)
        self.facts.append(StoreFact(kind="segment_damaged", detail=detail, segment=segment))

    def _doubt(self, reason: str) -> None:
        for log in self.index:
            log.doubt = reason
