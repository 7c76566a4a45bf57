"""Frames: field blocks that were seen before read and write the same as if they had not been."""

from collections.abc import Sequence
from typing import Any

import hpack
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
