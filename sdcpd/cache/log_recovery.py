"""Reading the journal back after a restart, before anything is answered.

Segments are replayed from the oldest on. These things can be wrong; each that is seen is told in a StoreFact:

- *A torn end*: in the last segment, a bad spot behind all that is still known to have been acknowledged. A write that a
  crash left unfinished looks like this, and it must cost no log: the octets from there on are cut off. Yet it is not
  known that nobody was told of them. Damage that takes the end of the journal, its last frames together with the MARK
  behind them, looks the same; and a journal that lost its end between two frames looks whole.
- *Damage*: a bad spot in what had been acknowledged. A frame whose head still says whose it is costs that log alone.
  Behind a gap, every log that began before it might have lost its last records there; it is in doubt until a later
  frame of it proves that none is missing. Logs still in doubt at the end are damaged as well: a log that lost its end
  must never be read as if it were whole, since a session resumed from it would contradict what it had released.
- *A missing segment*: as a gap. So is a segment of which nothing is recognised: no header, no frame, or the header of
  another format. Nothing is written to it, even if it is the last one; the journal goes on in a new segment behind it,
  and it is set aside under another name, as all damaged segments are, once no log needs to be doubted for it. Only a
  last segment that holds a part of its own header and nothing else, as a crash leaves one that was being begun, is
  begun anew.

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
    segment_header_is_foreign,
    segment_header_is_good,
    segment_header_is_unfinished,
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
    """Read everything, cut a torn end, sync. Blocks. Raises OSError when the disk does not let us."""
    replay = _Replay(now)
    numbers = sorted(number for number in map(segment_number, files.names()) if number is not None)
    segments: dict[int, int] = {}
    for number, follower in pairwise(numbers):
        octets = files.read(segment_file(number))
        segments[number] = len(octets)
        replay.segment(number, octets)
        if follower != number + 1:
            replay.missing(number + 1, follower - 1)
    active = numbers[-1] if numbers else 1
    octets = files.read(segment_file(active)) if numbers else b""
    last = _Last(active, octets)
    if last.unrecognised:
        segments[active] = len(octets)
        replay.segment(active, octets)
        active += 1
        last = _Last(active, b"")
    file = files.open(segment_file(active))
    segments[active] = _recover_last(files, last, file, replay)
    replay.finish()
    return Recovered(
        index=replay.index,
        segments=segments,
        damaged_segments=replay.damaged_segments,
        active=active,
        file=file,
        facts=replay.facts,
    )


class _Last:
    """The last segment as read: what of it is kept, and where that ends."""

    def __init__(self, number: int, octets: bytes) -> None:
        self.number = number
        self.octets = octets
        self.kept = list(scan(number, octets))
        self.end = max(len(octets), SEGMENT_HEADER_BYTES)
        self.cut_bytes = 0
        self.marked = False
        """A MARK stands at the end of what is kept."""
        settled = max((_settled(one) for one in self.kept), default=0)
        for position, one in enumerate(self.kept):
            whole = isinstance(one, Frame) and not one.repaired
            mark = isinstance(one, Frame) and one.order.kind is FrameKind.MARK
            if one.offset >= settled and (mark or not whole):
                self.end, self.marked = one.offset, mark
                self.cut_bytes = len(octets[self.end + (MARK_BYTES if mark else 0) :])
                self.kept = self.kept[:position]
                break

    @property
    def unrecognised(self) -> bool:
        """Is this neither a segment of ours nor one that was being begun? Then there is nothing to go on from.

        Frames are only written behind a header that is durable, so a bad header is never an unfinished write.
        """
        if segment_header_is_good(self.number, self.octets) or self.begun:
            return False
        if segment_header_is_foreign(self.number, self.octets):
            return True
        return not self.kept and (self.cut_bytes > 0 or not self.marked)

    @property
    def begun(self) -> bool:
        return segment_header_is_unfinished(self.number, self.octets)


def _recover_last(files: Files, last: _Last, file: OpenFile, replay: "_Replay") -> int:
    """Replay the last segment and make it ready to be written on. Returns its length."""
    number, end = last.number, last.end
    if last.cut_bytes:
        detail = (
            f"{last.cut_bytes} octets from offset {end} on, not all of them whole, were cut off; "
            "this cannot be told from an unfinished write, which nobody was told of"
        )
        replay.facts.append(StoreFact(kind="torn_end_cut", detail=detail, segment=number))
    if not last.begun:
        replay.header(number, last.octets)
    for one in last.kept:
        replay.take(number, one)
    file.truncate(end)
    if not segment_header_is_good(number, last.octets):
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

    def segment(self, segment: int, octets: bytes) -> None:
        """A whole segment that is not written on any more. It had frames, or the next one would not have been begun."""
        found = [] if segment_header_is_foreign(segment, octets) else list(scan(segment, octets))
        if all(isinstance(one, Gap) for one in found):
            detail = f"nothing in its {len(octets)} octets is recognised: it is damaged, or of another format"
            self._damage(segment, f"{detail}. It is left as it is, to be set aside")
            self._doubt(f"records may be missing: nothing in segment {segment} is recognised")
            return
        self.header(segment, octets)
        for one in found:
            self.take(segment, one)

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
