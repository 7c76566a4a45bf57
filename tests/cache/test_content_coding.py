"""gzip bodies: what pays, and what a small body may become (decision 54)."""

import gzip
import random
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.cache.content_coding import PACK_FROM_BYTES, pack, unpack
from sdcpd.protocol.problems import IllFormed, TooLarge


def test_dense_rows_are_nearly_all_zeros() -> None:
    rows = bytearray(8 * 49152 * 4)
    rows[::40_000] = b"\x3f" * len(rows[::40_000])
    packed = pack(bytes(rows))
    assert packed is not None
    assert len(packed) < len(rows) // 50
    assert unpack(packed, len(rows)) == rows


def test_packing_must_pay() -> None:
    assert pack(bytes(PACK_FROM_BYTES - 1)) is None
    assert pack(bytes(PACK_FROM_BYTES)) is not None
    assert pack(random.Random(1).randbytes(100_000)) is None


@given(st.binary(max_size=64), st.integers(0, 100_000))
def test_unpack_is_the_inverse(end: bytes, zeros: int) -> None:
    octets = bytes(zeros) + end
    assert unpack(gzip.compress(octets), len(octets)) == octets
    if octets:
        with pytest.raises(TooLarge):
            unpack(gzip.compress(octets), len(octets) - 1)


def test_a_bomb_does_not_go_off() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    with pytest.raises(TooLarge):
        unpack(bomb, 1 << 20)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize(
    "octets",
    [b"", b"x", gzip.compress(b"abc")[:-1], gzip.compress(b"abc") + b"x", gzip.compress(b"a") * 2, zlib.compress(b"a")],
)
def test_what_is_not_one_whole_member(octets: bytes) -> None:
    with pytest.raises(IllFormed):
        unpack(octets, 1000)


@given(st.binary(max_size=200))
def test_any_octets_end_in_a_problem_at_worst(octets: bytes) -> None:
    for tried in (octets, b"\x1f\x8b\x08\x00" + octets):
        try:
            assert len(unpack(tried, 100)) <= 100
        except (IllFormed, TooLarge):
            continue
