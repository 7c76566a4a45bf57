"""The octets of the commit-log journal: segments of frames, and how a damaged segment is read.

A segment is a header and then frames. A frame is one step of one log:

    head with the log's name | the same again | payload

Each frame states the log *after* it: floor (highest fence epoch), length in octets, SHA-256 over all its octets. So a
reader needs no CBOR, sees at once when a frame is missing before this one, and proves the content octet for octet.

Head and name are there twice, so that damage to one copy costs nothing, and damage to a payload costs one log, which
is known by its name: no log can vanish as if it had never been. The check sum of a head also covers the segment's
number and the frame's place, so a head is only valid where it was written. Where both copies are gone, reading resumes
at the next valid head, and the octets between are a gap.

`settled` in a head is the offset up to which this segment had been acknowledged when the frame was written. A bad spot
below the highest `settled` that can still be read in a segment is damage. One at or after it cannot be told from an
unfinished write, whose sender was told nothing. A MARK frame holds nothing but its own `settled`: it is put behind each
batch after the batch was synced, so that damage to the last batch is known as such for as long as the MARK is there;
the next batch overwrites it. It is not synced itself, and where it goes together with octets before it, so does the
proof that these had been acknowledged.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from hashlib import sha256
from typing import Final
from zlib import crc32

from msgspec import Struct

SEGMENT_MAGIC: Final = b"SDCPLOG1"
FRAME_MAGIC: Final = b"\xabSL1"

_SEGMENT: Final = struct.Struct(">8sQ")
_CHECK: Final = struct.Struct(">I")
_PLACE: Final = struct.Struct(">QQ")
_HEAD: Final = struct.Struct(">4sBBHIQQI32sI")
_HEAD_BYTES: Final = _HEAD.size + _CHECK.size

SEGMENT_HEADER_BYTES: Final = _SEGMENT.size + _CHECK.size
MARK_BYTES: Final = 2 * _HEAD_BYTES
NAME_LIMIT_BYTES: Final = 255
EMPTY_TAG: Final = sha256().digest()
"""SHA-256 over no records."""

_FINAL: Final = 1
_NAME_LENGTH_AT: Final = 6
"""Where in a head the name's length stands."""


class FrameKind(IntEnum):
    """What a frame does to its log."""

    CREATE = 1  # the log begins; the payload is its first records, or all of a directory record, whatever was before
    APPEND = 2  # one or more records follow
    BASE = 3  # the whole log again, moved to the journal's end: frames before it no longer matter
    REMOVE = 4  # the log is gone
    LOST = 5  # the log's content was found damaged; it stays known as such. The payload says why
    MARK = 6  # no log: see the module's text


class FrameOrder(Struct, frozen=True):
    """A frame to write. `floor`, `final`, `length` and `tag` describe the log after it."""

    kind: FrameKind
    name: str
    payload: bytes
    floor: int
    final: bool
    length: int
    tag: bytes

    @property
    def frame_bytes(self) -> int:
        return frame_bytes(len(self.name), len(self.payload))


class Head(Struct, frozen=True):
    """A frame's head as read."""

    kind: FrameKind
    final: bool
    name: str
    payload_bytes: int
    floor: int
    length: int
    settled: int
    tag: bytes
    payload_check: int

    @property
    def frame_bytes(self) -> int:
        return frame_bytes(len(self.name), self.payload_bytes)


class Frame(Struct, frozen=True):
    """A good frame. `repaired` says that one copy of its head was bad."""

    offset: int
    order: FrameOrder
    settled: int
    repaired: bool

    @property
    def payload_offset(self) -> int:
        return payload_offset(self.offset, self.order)

    @property
    def end(self) -> int:
        return self.offset + self.order.frame_bytes


class SpoiledFrame(Struct, frozen=True):
    """A good head with a bad or missing payload."""

    offset: int
    head: Head


class Gap(Struct, frozen=True):
    """Octets in which no frame could be recognised."""

    offset: int
    end: int


Found = Frame | SpoiledFrame | Gap


def frame_bytes(name_bytes: int, payload_bytes: int) -> int:
    """Size of a frame."""
    return 2 * (_HEAD_BYTES + name_bytes) + payload_bytes


def payload_offset(offset: int, order: FrameOrder) -> int:
    """Where the payload of a frame at `offset` begins."""
    return offset + frame_bytes(len(order.name), 0)


def encode_segment_header(segment: int) -> bytes:
    """What a segment begins with."""
    fields = _SEGMENT.pack(SEGMENT_MAGIC, segment)
    return fields + _CHECK.pack(crc32(fields))


def segment_header_is_good(segment: int, octets: bytes) -> bool:
    """Does a segment's content begin as it must?"""
    return octets[:SEGMENT_HEADER_BYTES] == encode_segment_header(segment)


def segment_header_is_unfinished(segment: int, octets: bytes) -> bool:
    """Is this all that is left of a segment that was being begun: the first octets of its header, and then at most
    zeros, where the file had its length before its content? Frames follow only a header that is durable, so that no
    frame was ever in here."""
    written = octets.rstrip(b"\0")
    return len(octets) <= SEGMENT_HEADER_BYTES and encode_segment_header(segment).startswith(written)


def segment_header_is_foreign(segment: int, octets: bytes) -> bool:
    """Does the content begin with an intact header that is not this segment's: of another format, or another place?"""
    fields, check = octets[: _SEGMENT.size], octets[_SEGMENT.size : SEGMENT_HEADER_BYTES]
    return check == _CHECK.pack(crc32(fields)) and not segment_header_is_good(segment, octets)


def encode_frame(segment: int, offset: int, settled: int, order: FrameOrder) -> bytes:
    """The frame's octets for this place; they are valid nowhere else."""
    name = order.name.encode("ascii")
    assert len(name) <= NAME_LIMIT_BYTES
    fields = _HEAD.pack(
        FRAME_MAGIC,
        order.kind,
        _FINAL if order.final else 0,
        len(name),
        len(order.payload),
        order.floor,
        order.length,
        settled,
        order.tag,
        crc32(order.payload),
    )
    head = b"".join((fields, _head_check(segment, offset, fields, name), name))
    return b"".join((head, head, order.payload))


def encode_mark(segment: int, offset: int) -> bytes:
    """A MARK saying that all of the segment before `offset` has been acknowledged."""
    order = FrameOrder(kind=FrameKind.MARK, name="", payload=b"", floor=0, final=False, length=0, tag=EMPTY_TAG)
    return encode_frame(segment, offset, offset, order)


def scan(segment: int, octets: bytes) -> Iterator[Found]:
    """All that can be recognised behind the segment's header, in order."""
    offset = SEGMENT_HEADER_BYTES
    while offset < len(octets):
        head = _head_at(segment, offset, octets, offset)
        if head is None:
            start = offset
            offset, head = _search(segment, octets, start)
            if offset > start:
                yield Gap(offset=start, end=offset)
            if head is None:
                return
        yield _frame(offset, head, octets)
        offset += head.frame_bytes


def _frame(offset: int, head: Head, octets: bytes) -> Frame | SpoiledFrame:
    end = offset + head.frame_bytes
    head_bytes = _HEAD_BYTES + len(head.name)
    payload = octets[offset + 2 * head_bytes : end]
    if end > len(octets) or crc32(payload) != head.payload_check:
        return SpoiledFrame(offset=offset, head=head)
    order = FrameOrder(
        kind=head.kind,
        name=head.name,
        payload=payload,
        floor=head.floor,
        final=head.final,
        length=head.length,
        tag=head.tag,
    )
    copies_agree = octets[offset : offset + head_bytes] == octets[offset + head_bytes : offset + 2 * head_bytes]
    return Frame(offset=offset, order=order, settled=head.settled, repaired=not copies_agree)


def _head_check(segment: int, offset: int, fields: bytes, name: bytes) -> bytes:
    return _CHECK.pack(crc32(name, crc32(fields, crc32(_PLACE.pack(segment, offset)))))


def _name_bytes_at(octets: bytes, at: int) -> int:
    return int.from_bytes(octets[at + _NAME_LENGTH_AT : at + _NAME_LENGTH_AT + 2], "big")


def _head_at(segment: int, offset: int, octets: bytes, at: int) -> Head | None:
    """The head of the frame that begins at `offset`, from the copy at `at`."""
    fields = octets[at : at + _HEAD.size]
    name_at = at + _HEAD_BYTES
    if not fields.startswith(FRAME_MAGIC) or name_at > len(octets):
        return None
    _, kind, flags, name_bytes, payload_bytes, floor, length, settled, tag, payload_check = _HEAD.unpack(fields)
    name = octets[name_at : name_at + name_bytes]
    if octets[at + _HEAD.size : name_at] != _head_check(segment, offset, fields, name):
        return None
    return Head(
        kind=FrameKind(kind),
        final=bool(flags & _FINAL),
        name=name.decode("ascii"),
        payload_bytes=payload_bytes,
        floor=floor,
        length=length,
        settled=settled,
        tag=tag,
        payload_check=payload_check,
    )


def _search(segment: int, octets: bytes, start: int) -> tuple[int, Head | None]:
    """The first frame at or after `start` of which at least one head is good, and that head; else the octets' end."""
    at = octets.find(FRAME_MAGIC, start)
    while at >= 0:
        first = at - _HEAD_BYTES - _name_bytes_at(octets, at)  # if `at` is the second copy, here is the first
        if first >= start and (head := _head_at(segment, first, octets, at)) is not None:
            return first, head
        if (head := _head_at(segment, at, octets, at)) is not None:
            return at, head
        at = octets.find(FRAME_MAGIC, at + 1)
    return len(octets), None
