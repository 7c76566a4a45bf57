"""Packed bodies: what pays, and what a small body may become (decision 54). zstd where this Python has it."""

import gzip
import random
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.cache.content_coding import CODINGS, PACK_FROM_BYTES, SAMPLE_BYTES, Coding, pack, unpack
from sdcpd.protocol.problems import IllFormed, TooLarge


@pytest.mark.parametrize("coding", CODINGS)
def test_dense_rows_are_nearly_all_zeros(coding: Coding) -> None:
    rows = bytearray(8 * 49152 * 4)
    rows[::40_000] = b"\x3f" * len(rows[::40_000])
    packed = pack(bytes(rows), coding)
    assert packed is not None
    assert len(packed) < len(rows) // 50
    assert unpack(packed, len(rows), coding) == rows


def test_packing_must_pay() -> None:
    assert pack(bytes(PACK_FROM_BYTES - 1)) is None
    assert pack(bytes(PACK_FROM_BYTES)) is not None
    assert pack(random.Random(1).randbytes(100_000)) is None


def test_a_large_body_whose_beginning_does_not_shrink_is_not_tried() -> None:
    assert pack(random.Random(1).randbytes(SAMPLE_BYTES) + bytes(4 * SAMPLE_BYTES)) is None


@given(st.binary(max_size=64), st.integers(0, 100_000))
def test_unpack_is_the_inverse(end: bytes, zeros: int) -> None:
    octets = bytes(zeros) + end
    assert unpack(gzip.compress(octets), len(octets)) == octets
    if octets:
        with pytest.raises(TooLarge):
            unpack(gzip.compress(octets), len(octets) - 1)


@pytest.mark.parametrize("coding", CODINGS)
def test_a_bomb_does_not_go_off(coding: Coding) -> None:
    bomb = pack(bytes(64 << 20), coding)
    assert bomb is not None
    tracemalloc.start()
    with pytest.raises(TooLarge):
        unpack(bomb, 1 << 20, coding)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize(
    "octets",
    [b"", b"x", gzip.compress(b"abc")[:-1], gzip.compress(b"abc") + b"x", gzip.compress(b"a") * 2, zlib.compress(b"a")],
    ids=["nothing", "junk", "cut off", "more behind it", "two members", "zlib"],  # gzip's octets hold the time
)
def test_what_is_not_one_whole_member(octets: bytes) -> None:
    with pytest.raises(IllFormed):
        unpack(octets, 1000)


@pytest.mark.skipif("zstd" not in CODINGS, reason="this Python has no zstd: install backports.zstd")
def test_a_zstd_body_may_not_ask_for_much_memory() -> None:
    """A frame of a few octets may name a window of gigabytes, and be whole: RFC 9659 has 8 MiB."""
    window_of_1_gib = b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([(30 - 10) << 3]) + b"\x01\x00\x00"
    with pytest.raises(IllFormed):
        unpack(window_of_1_gib, 1000, "zstd")
    window_of_1_mib = window_of_1_gib.replace(bytes([(30 - 10) << 3]), bytes([(20 - 10) << 3]))
    assert unpack(window_of_1_mib, 1000, "zstd") == b""


@given(st.binary(max_size=200))
def test_any_octets_end_in_a_problem_at_worst(octets: bytes) -> None:
    for coding in CODINGS:
        for tried in (octets, b"\x1f\x8b\x08\x00" + octets, b"\x28\xb5\x2f\xfd" + octets):
            try:
                assert len(unpack(tried, 100, coding)) <= 100
            except (IllFormed, TooLarge):
                continue
