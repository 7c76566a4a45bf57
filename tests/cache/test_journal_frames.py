"""Frames of the journal: valid only where they were written, with one good head enough."""

from hashlib import sha256

import pytest

from sdcpd.cache.journal_frames import (
    FRAME_MAGIC,
    MARK_BYTES,
    SEGMENT_HEADER_BYTES,
    Frame,
    FrameKind,
    FrameOrder,
    Gap,
    SpoiledFrame,
    encode_frame,
    encode_mark,
    encode_segment_header,
    frame_bytes,
    scan,
    segment_header_is_foreign,
    segment_header_is_good,
    segment_header_is_unfinished,
)

NAME = "v1/s/-/l/AAECAwQFBgcICQoLDA0ODw"
HEAD_BYTES = frame_bytes(len(NAME), 0) // 2


def order(payload: bytes = b"abc") -> FrameOrder:
    tag = sha256(payload).digest()
    return FrameOrder(
        kind=FrameKind.APPEND, name=NAME, payload=payload, floor=2**63, final=True, length=len(payload), tag=tag
    )


def segment(*orders: FrameOrder, number: int = 7) -> bytes:
    octets = encode_segment_header(number)
    for one in orders:
        octets += encode_frame(number, len(octets), SEGMENT_HEADER_BYTES, one)
    return octets


def test_frames_are_read_as_they_were_written() -> None:
    octets = segment(order(), order(b""), order(b"x" * 1000))
    octets += encode_mark(7, len(octets))
    first, second, third, mark = scan(7, octets)
    assert [isinstance(found, Frame) and found.order for found in (first, second, third)] == [
        order(),
        order(b""),
        order(b"x" * 1000),
    ]
    assert isinstance(third, Frame)
    assert octets[third.payload_offset : third.end] == b"x" * 1000
    assert isinstance(mark, Frame)
    assert (mark.order.kind, mark.settled, mark.end) == (FrameKind.MARK, mark.offset, len(octets))
    assert mark.order.frame_bytes == MARK_BYTES


def test_a_frame_is_valid_only_in_its_place() -> None:
    octets = segment(order())
    assert [type(found) for found in scan(8, octets)] == [Gap]
    moved = octets[:SEGMENT_HEADER_BYTES] + b"\0" + octets[SEGMENT_HEADER_BYTES:]
    assert list(scan(7, moved)) == [Gap(offset=SEGMENT_HEADER_BYTES, end=len(moved))]


def test_a_payload_that_looks_like_a_frame_is_not_taken_for_one() -> None:
    """Not even behind damage: whoever wrote the payload could not know where it would lie."""
    inner = encode_frame(7, SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES, order(b"forged"))
    octets = bytearray(segment(order(FRAME_MAGIC + inner), order(b"next")))
    for copy in range(2):
        octets[SEGMENT_HEADER_BYTES + copy * HEAD_BYTES] ^= 1
    gap, found = scan(7, bytes(octets))
    assert isinstance(gap, Gap)
    assert isinstance(found, Frame)
    assert found.order == order(b"next")


@pytest.mark.parametrize("copy", [0, 1])
def test_one_good_head_is_enough_and_the_bad_one_is_told(copy: int) -> None:
    clean = segment(order(), order(b"next"))
    for offset in range(HEAD_BYTES):
        octets = bytearray(clean)
        octets[SEGMENT_HEADER_BYTES + copy * HEAD_BYTES + offset] ^= 1 << offset % 8
        first, second = scan(7, bytes(octets))
        assert isinstance(first, Frame)
        assert isinstance(second, Frame)
        assert (first.order, first.repaired) == (order(), True)
        assert (second.order, second.repaired) == (order(b"next"), False)


def test_behind_a_gap_reading_resumes_even_at_a_second_copy() -> None:
    octets = bytearray(segment(order(), order(b"next")))
    second_at = SEGMENT_HEADER_BYTES + order().frame_bytes
    for offset in (SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES + HEAD_BYTES, second_at):
        octets[offset] ^= 1
    gap, frame = scan(7, bytes(octets))
    assert gap == Gap(offset=SEGMENT_HEADER_BYTES, end=second_at)
    assert isinstance(frame, Frame)
    assert (frame.offset, frame.order, frame.repaired) == (second_at, order(b"next"), True)


def test_a_bad_or_cut_payload_still_says_whose_it_is() -> None:
    octets = bytearray(segment(order(), order(b"next")))
    octets[SEGMENT_HEADER_BYTES + 2 * HEAD_BYTES] ^= 1
    first, second = scan(7, bytes(octets))
    assert isinstance(first, SpoiledFrame)
    assert first.head.name == NAME
    assert isinstance(second, Frame)
    for cut in range(1, 4):
        assert isinstance(next(scan(7, segment(order())[:-cut])), SpoiledFrame)


def test_segment_headers() -> None:
    octets = encode_segment_header(7)
    assert len(octets) == SEGMENT_HEADER_BYTES
    assert segment_header_is_good(7, octets + b"more")
    assert not segment_header_is_good(8, octets)
    for offset in range(len(octets)):
        assert not segment_header_is_good(7, octets[:offset])
        assert not segment_header_is_foreign(7, octets[:offset])
        assert segment_header_is_unfinished(7, octets[:offset])
        assert segment_header_is_unfinished(7, octets[:offset].ljust(len(octets), b"\0"))
        assert not segment_header_is_unfinished(7, octets[:offset].ljust(len(octets) + 1, b"\0"))
        assert not segment_header_is_unfinished(7, octets[:offset] + b"\xff")
        changed = octets[:offset] + bytes([octets[offset] ^ 1]) + octets[offset + 1 :]
        assert not segment_header_is_foreign(7, changed + b"more")
    assert not segment_header_is_foreign(7, octets + b"more")
    assert segment_header_is_foreign(8, octets + b"more")
