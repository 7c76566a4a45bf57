"""What a restart makes of a journal of which nothing, or not the end, is left (log_recovery.py)."""

import random
from zlib import crc32

import pytest

from sdcpd.cache.journal import segment_file
from sdcpd.cache.journal_frames import SEGMENT_HEADER_BYTES
from sdcpd.cache.log_requests import LogDamaged
from sdcpd.cache.settings import KIB, CacheSettings
from tests.cache.log_tools import LOGS, Driver, commit, filled
from tests.cache.sim_disk import SimDisk

NEW = "v1/s/-/l/NNNNNNNNNNNNNNNNNNNNNN"
FIRST = segment_file(1)
SMALL = CacheSettings(segment_bytes=4 * KIB, journal_bytes=64 * KIB, max_log_bytes=16 * KIB, max_record_bytes=1 * KIB)


def put(disk: SimDisk, name: str, octets: bytes) -> None:
    """A file as it is found on disk."""
    file = disk.open(name)
    file.truncate(0)
    file.write_at(0, octets)
    file.sync()
    disk.sync_directory()


def header(magic: bytes, segment: int) -> bytes:
    """A segment's header, intact, of whatever format."""
    fields = magic + segment.to_bytes(8, "big")
    return fields + crc32(fields).to_bytes(4, "big")


def good_journal() -> bytes:
    disk = SimDisk()
    filled(disk)[0].store.close()
    return disk.read(FIRST)


UNRECOGNISED = {
    "random": random.Random(5).randbytes(5000),
    "short": b"not a header",
    "zeros": bytes(5000),
    "every octet changed": bytes(octet ^ 0x5A for octet in good_journal()),
    "later format": header(b"SDCPLOG2", 1) + random.Random(6).randbytes(3000),
    "later format with nothing in it": header(b"SDCPLOG2", 1),
    "later format with the same frames": header(b"SDCPLOG2", 1) + good_journal()[SEGMENT_HEADER_BYTES:],
    "of another segment": header(b"SDCPLOG1", 7) + random.Random(7).randbytes(3000),
}


@pytest.mark.parametrize("octets", UNRECOGNISED.values(), ids=UNRECOGNISED)
def test_a_journal_that_is_not_recognised_is_set_aside_and_never_erased(disk: SimDisk, octets: bytes) -> None:
    put(disk, FIRST, octets)
    store = Driver(disk)
    for _ in range(2):  # it is told at each start until it is set aside
        facts = store.store.take_facts()
        assert [(fact.kind, fact.segment) for fact in facts] == [("segment_damaged", 1)]
        assert f"{len(octets)} octets" in facts[0].detail
        assert disk.read(FIRST) == octets
        disk.crash()
        assert disk.read(FIRST) == octets
        store = store.reopen()
    assert store.store.maintenance_is_due()
    store.maintain()
    assert disk.read(f"damaged-{FIRST}") == octets
    store.must_append(LOGS[0], commit(1, 1))
    disk.crash()
    assert FIRST not in disk.names()
    store = store.reopen()
    assert store.octets(LOGS[0]) == commit(1, 1)
    assert store.store.take_facts() == []
    assert disk.read(f"damaged-{FIRST}") == octets


@pytest.mark.parametrize("octets", UNRECOGNISED.values(), ids=UNRECOGNISED)
def test_logs_before_a_segment_that_is_not_recognised_are_damaged_for_good(disk: SimDisk, octets: bytes) -> None:
    """They may have gone on in there: none of them is read as if it were whole, at no later start either."""
    store, _ = filled(disk)
    store.store.close()
    put(disk, segment_file(2), octets)
    for round_ in range(1, 4):
        store = store.reopen()
        assert [fact.kind for fact in store.store.take_facts()] == ["segment_damaged", *["log_damaged"] * len(LOGS)]
        store.must_append(NEW, commit(1, round_))
        store.maintain()
        for name in LOGS:
            assert isinstance(store.read(name), LogDamaged), name
        assert octets in (disk.read(name) for name in disk.names())
        disk.crash()
    assert store.reopen().octets(NEW) == commit(1, 1) + commit(1, 2) + commit(1, 3)


def test_a_bad_header_behind_which_nothing_was_written_costs_nothing_but_is_told(disk: SimDisk) -> None:
    """The MARK that recovery puts there proves that no frame is missing."""
    store = Driver(disk)
    store.store.close()
    disk.flip(FIRST, 3)
    again = store.reopen()
    assert [fact.kind for fact in again.store.take_facts()] == ["segment_damaged"]
    assert again.store.snapshot().segments == 1


def test_a_segment_that_lost_all_its_frames_costs_the_logs_before_it(disk: SimDisk) -> None:
    """The next one would not have been begun before there were any."""
    store = Driver(disk, SMALL)
    store.must_append(LOGS[0], commit(1, 1))
    while store.store.snapshot().segments < 3:
        store.must_append(LOGS[1], commit(1, 1, *range(40)))
    store.store.close()
    put(disk, segment_file(2), disk.read(segment_file(2))[: SEGMENT_HEADER_BYTES - 5])
    again = store.reopen()
    assert isinstance(again.read(LOGS[0]), LogDamaged)
    assert isinstance(again.read(LOGS[1]), LogDamaged)
    assert [fact.kind for fact in again.store.take_facts()] == ["segment_damaged", "log_damaged", "log_damaged"]


@pytest.mark.parametrize("how", ["zeroed", "cut"])
def test_an_end_that_is_gone_is_not_said_to_be_unacknowledged(disk: SimDisk, how: str) -> None:
    """All of it had been acknowledged; nothing on disk tells so any more, nor the contrary."""
    store = Driver(disk)
    for round_ in range(1, 60):
        store.must_append(LOGS[0], commit(1, round_))
    store.store.close()
    whole = disk.read(FIRST)
    assert len(whole) > 2 * 4096
    put(disk, FIRST, whole[:-4096] + (bytes(4096) if how == "zeroed" else b""))
    again = store.reopen()
    (fact,) = again.store.take_facts()
    assert fact.kind == "torn_end_cut"
    assert "cannot be told from an unfinished write" in fact.detail
    assert "never acknowledged" not in fact.detail
    assert b"".join(commit(1, round_) for round_ in range(1, 60)).startswith(again.octets(LOGS[0]))
