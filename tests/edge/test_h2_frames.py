"""Frames: field blocks that were seen before read and write the same as if they had not been."""

from collections.abc import Sequence
from typing import Any

import hpack
import pytest
from h2.events import RequestReceived
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hyperframe.frame import HeadersFrame
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.edge.h2_frames import KNOWN_BLOCKS, Frames

NAMES = (b":status", b"date", b"etag", b"x-own")
FIELDS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from((b"200", b"a", b"b", b"c" * 60))), max_size=4)
SIZES = st.sampled_from((0, 40, 150, 4096))

Fields = Sequence[tuple[bytes, bytes]]


def read(decoder: hpack.Decoder, block: bytes) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in decoder.decode(block, raw=True)]


def kept(decoder: hpack.Decoder) -> dict[Any, Any]:
    blocks: dict[Any, Any] = vars(decoder.header_table)["blocks"]
    return blocks


@given(st.lists(FIELDS | SIZES, max_size=40))
def test_blocks_read_the_same_by_any_reader(steps: list[Fields | int]) -> None:
    """Also across changes of the table's size. `plain` is the library's own reader, which keeps no block."""
    encoder, ours, plain = Frames(client=False).encoder, Frames(client=True).decoder, hpack.Decoder()
    for step in steps:
        if isinstance(step, int):
            if step != encoder.header_table_size:  # said twice before the next block, the library forgets to tell
                encoder.header_table_size = step
        else:
            for _ in range(3):
                block = encoder.encode(step)
                assert read(ours, block) == read(plain, block) == list(step)


@given(st.lists(st.tuples(FIELDS, st.booleans(), SIZES), max_size=40))
def test_what_a_foreign_writer_says_reads_the_same(steps: list[tuple[Fields, bool, int]]) -> None:
    """It may empty the table within a block, and say nothing for the table."""
    writer, ours, plain = hpack.Encoder(), Frames(client=False).decoder, hpack.Decoder()
    for fields, empties, size in steps:
        if empties:
            writer.header_table_size = size
            writer.header_table_size = 4096
        for sensitive in (False, True, False):
            block = writer.encode([(name, value, sensitive) for name, value in fields])
            assert read(ours, block) == read(plain, block) == list(fields)


def test_a_block_that_brings_nothing_new_is_not_put_together_again() -> None:
    frames = Frames(client=False)
    fields = [(b":status", b"200"), (b"etag", b"a")]
    assert frames.encoder.encode(fields) != frames.encoder.encode(fields)  # now the table has it
    assert frames.encoder.encode(fields) is frames.encoder.encode(fields)
    before = frames.encoder.encode(fields)
    frames.encoder.encode([(b"etag", b"b")])
    assert frames.encoder.encode(fields) != before  # its place in the table is another


def test_few_blocks_are_kept() -> None:
    decoder = Frames(client=False).decoder
    for number in range(3 * KNOWN_BLOCKS):
        decoder.decode(b"\x00\x01a\x03%03d" % number, raw=True)  # a field that is not for the table
        assert len(kept(decoder)) <= KNOWN_BLOCKS
    long = b"\x00\x01a\x7f\xf1\x01" + bytes(368)
    assert read(decoder, long) == [(b"a", bytes(368))]
    assert long not in kept(decoder)


def framed(number: int, block: bytes, *, ends: bool) -> bytes:
    frame = HeadersFrame(number, block)
    frame.flags.add("END_HEADERS")
    if ends:
        frame.flags.add("END_STREAM")
    return frame.serialize()


def server() -> tuple[Frames, hpack.Encoder]:
    """One that has met its client, and what the client writes fields with."""
    client, frames = Frames(client=True), Frames(client=False)
    for one in (client, frames):
        one.greet({SettingCodes.MAX_HEADER_LIST_SIZE: 16 << 10}, 1 << 20)
    frames.receive_data(client.data_to_send())
    return frames, hpack.Encoder()


REQUEST = ((":method", "POST"), (":scheme", "https"), (":authority", "a"), (":path", "/"), ("content-type", "x"))


def test_a_sound_request_is_sound_again() -> None:
    frames, writer = server()
    for number in range(1, 11, 2):
        (event, *_) = frames.receive_data(framed(number, writer.encode(REQUEST), ends=True))
        assert isinstance(event, RequestReceived)
        assert [field[0] for field in event.headers or ()] == [name.encode() for name, _ in REQUEST]


@pytest.mark.parametrize("wrong", [("te", "gzip"), ("connection", "close"), (":path", "/"), ("x", "a\nb"), ("X", "a")])
def test_what_is_not_sound_is_refused_whatever_came_before(wrong: tuple[str, str]) -> None:
    for before in range(4):
        frames, writer = server()
        for turn in range(before):
            frames.receive_data(framed(2 * turn + 1, writer.encode(REQUEST), ends=True))
        with pytest.raises(ProtocolError):
            frames.receive_data(framed(2 * before + 1, writer.encode((*REQUEST, wrong)), ends=True))


def test_a_sound_request_is_no_trailers() -> None:
    frames, writer = server()
    for number in (1, 3, 5):
        frames.receive_data(framed(number, writer.encode(REQUEST), ends=False))
    with pytest.raises(ProtocolError):
        frames.receive_data(framed(5, writer.encode(REQUEST), ends=True))
