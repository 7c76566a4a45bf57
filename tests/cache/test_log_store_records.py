"""Directory records: compare and set, limits, age, and what moving and damage make of them (decision 106)."""

import random
from functools import partial

import pytest

from sdcpd.cache.journal import segment_file
from sdcpd.cache.log_requests import (
    LogAppended,
    LogDamaged,
    LogExists,
    LogFull,
    LogMissing,
    LogOutcome,
    LogRemoved,
    LogTagMismatch,
    RecordEntry,
    RemoveLog,
    ReplaceRecord,
)
from sdcpd.cache.settings import KIB, CacheSettings
from sdcpd.protocol.commit_log import log_tag
from tests.cache.log_tools import LOGS, Driver, commit
from tests.cache.sim_disk import PowerLoss, SimDisk, first_octets, lose_power, pages

DIRECTORY = "v1/s/-/d"
RECORD, OTHER = (f"{DIRECTORY}/{number:022d}" for number in (1, 2))
SMALL = CacheSettings(segment_bytes=4 * KIB, journal_bytes=64 * KIB, max_log_bytes=16 * KIB, max_record_bytes=1 * KIB)


def put(store: Driver, octets: bytes, before: bytes | None, name: str = RECORD) -> LogOutcome:
    tag = None if before is None else log_tag([before])
    return store.batch([ReplaceRecord(name=name, if_match=tag, octets=octets)])[0]


def must_put(store: Driver, octets: bytes, before: bytes | None, name: str = RECORD) -> None:
    assert put(store, octets, before, name) == LogAppended(tag=log_tag([octets]))


def test_compare_and_set(disk: SimDisk) -> None:
    store = Driver(disk)
    assert put(store, b"a", b"x") == LogMissing()
    must_put(store, b"a", None)
    assert put(store, b"b", None) == LogExists()
    assert put(store, b"b", b"x") == LogTagMismatch()
    must_put(store, b"b", b"a")
    assert store.octets(RECORD) == b"b"
    assert store.batch([RemoveLog(name=RECORD)]) == (LogRemoved(),)
    assert store.batch([RemoveLog(name=RECORD)]) == (LogMissing(),)
    must_put(store, b"", None)
    assert store.octets(RECORD) == b""


def test_what_is_so_already_is_done_and_writes_nothing(disk: SimDisk) -> None:
    """A router whose answer was lost asks again."""
    store = Driver(disk)
    must_put(store, b"a", None)
    writes = disk.writes
    must_put(store, b"a", None)
    must_put(store, b"a", b"before")
    assert disk.writes == writes


def test_requests_of_one_batch_see_each_other(disk: SimDisk) -> None:
    store = Driver(disk)
    outcomes = store.batch(
        [
            ReplaceRecord(name=RECORD, if_match=None, octets=b"a"),
            ReplaceRecord(name=RECORD, if_match=None, octets=b"b"),
            ReplaceRecord(name=RECORD, if_match=log_tag([b"a"]), octets=b"c"),
            RemoveLog(name=RECORD),
            ReplaceRecord(name=RECORD, if_match=None, octets=b"d"),
        ]
    )
    assert outcomes == (
        LogAppended(tag=log_tag([b"a"])),
        LogExists(),
        LogAppended(tag=log_tag([b"c"])),
        LogRemoved(),
        LogAppended(tag=log_tag([b"d"])),
    )
    assert store.octets(RECORD) == b"d"
    disk.crash()
    assert store.reopen().octets(RECORD) == b"d"


def test_a_write_torn_at_any_octet_leaves_the_content_before_it() -> None:
    for before, after in ((None, b"new"), (b"old" * 20, b"new"), (b"old", None)):
        cut, whole = 0, False
        while not whole:
            disk = SimDisk()
            store = Driver(disk)
            if before is not None:
                must_put(store, before, None)
            disk.seen[segment_file(1)].unsynced.clear()
            disk.fail_sync = lose_power
            with pytest.raises(PowerLoss):
                if after is None:
                    store.batch([RemoveLog(name=RECORD)])
                else:
                    put(store, after, before)
            disk.fail_sync = lambda name: False
            (last,) = disk.seen[segment_file(1)].unsynced
            whole = last.octets is not None and cut == len(last.octets)
            disk.crash(partial(first_octets, count_bytes=cut))
            again = store.reopen()
            expected = after if whole else before
            if expected is None:
                assert again.read(RECORD) == LogMissing(), cut
            else:
                assert again.octets(RECORD) == expected, cut
            cut += 1


def test_a_record_that_is_replaced_for_ever_stays_within_the_journal_and_survives() -> None:
    """Its old contents are given back; another's only content moves to the journal's end."""
    disk = SimDisk()
    store = Driver(disk, SMALL)
    must_put(store, b"still", None, OTHER)
    store.must_append(LOGS[0], commit(1, 1))
    content, chance = b"first", random.Random(1)
    must_put(store, content, None)
    for _ in range(200):
        follower = chance.randbytes(chance.randrange(2 * KIB))
        must_put(store, follower, content)
        content = follower
        if chance.random() < 0.1:
            disk.crash(partial(pages, chance=chance, page_bytes=512))
            store = store.reopen()
            assert {fact.kind for fact in store.store.take_facts()} <= {"torn_end_cut"}, "a MARK, which is not synced"
        assert store.octets(RECORD) == content
        assert disk.used_bytes <= SMALL.journal_bytes
    assert (store.octets(OTHER), store.octets(LOGS[0])) == (b"still", commit(1, 1))
    assert store.store.snapshot().directory_records == 2
    assert store.store.snapshot().logs == 1


def test_an_old_content_is_not_served_when_the_new_one_is_lost(disk: SimDisk) -> None:
    store = Driver(disk)
    must_put(store, b"old content", None)
    must_put(store, b"new content", b"old content")
    must_put(store, b"x", None, OTHER)
    octets = disk.read(segment_file(1))
    disk.flip(segment_file(1), octets.index(b"new content"))
    disk.kill()
    again = store.reopen()
    assert isinstance(again.read(RECORD), LogDamaged)
    assert isinstance(put(again, b"newer", b"new content"), LogDamaged)
    assert isinstance(put(again, b"newer", None), LogDamaged)
    assert again.store.list_records(DIRECTORY, "", 9) == [
        RecordEntry(name=RECORD, tag=None),
        RecordEntry(name=OTHER, tag=log_tag([b"x"])),
    ]
    assert again.batch([RemoveLog(name=RECORD)]) == (LogRemoved(),)
    must_put(again, b"newer", None)
    disk.kill()
    assert again.reopen().octets(RECORD) == b"newer"


def test_a_listing_is_paged_in_a_fixed_order_and_of_one_directory(disk: SimDisk) -> None:
    store = Driver(disk)
    names = [f"{DIRECTORY}/{letter * 22}" for letter in "-0Aaz_"]
    for name in names:
        must_put(store, b"x", None, name)
        must_put(store, b"x", None, name.replace("/-/d", "/" + "A" * 22 + "/d"))
    store.create(LOGS[0])
    for _ in range(2):
        listed: list[str] = []
        while page := store.store.list_records(DIRECTORY, listed[-1] if listed else "", 4):
            listed += [entry.name for entry in page]
        assert listed == sorted(names)
        disk.kill()
        store = store.reopen()
    store.batch([RemoveLog(name=names[2])])
    assert names[2] not in [entry.name for entry in store.store.list_records(DIRECTORY, "", 99)]
    assert store.store.list_records(DIRECTORY, names[2], 1)[0].name == sorted(names)[sorted(names).index(names[2]) + 1]


def test_records_have_limits_of_their_own() -> None:
    settings = CacheSettings(
        segment_bytes=4 * KIB,
        journal_bytes=64 * KIB,
        max_log_bytes=16 * KIB,
        max_record_bytes=1 * KIB,
        max_directory_records=2,
        max_directory_record_bytes=12 * KIB,
        max_logs=1,
    )
    store = Driver(SimDisk(), settings)
    assert isinstance(put(store, bytes(12 * KIB + 1), None), LogFull)
    must_put(store, bytes(12 * KIB), None)
    full = put(store, bytes(4 * KIB), None, OTHER)
    assert isinstance(full, LogFull)
    assert "directory records may take" in full.detail
    must_put(store, bytes(1 * KIB), None, OTHER)
    assert isinstance(put(store, bytes(4 * KIB), bytes(1 * KIB), OTHER), LogFull)
    assert isinstance(put(store, b"", None, OTHER + "x"), LogFull)
    must_put(store, b"small", bytes(12 * KIB))
    must_put(store, bytes(4 * KIB), bytes(1 * KIB), OTHER)
    assert isinstance(store.create(LOGS[0]), LogAppended), "a record is not counted as a log"
    assert isinstance(store.create(LOGS[1]), LogFull)


def test_a_journal_that_is_full_for_commits_still_moves_sessions() -> None:
    settings = CacheSettings(
        segment_bytes=64 * KIB, journal_bytes=256 * KIB, max_log_bytes=200 * KIB, max_record_bytes=16 * KIB
    )
    store = Driver(SimDisk(), settings)
    must_put(store, b"before", None)
    for name in LOGS:
        store.create(name)
    while isinstance(store.append(LOGS[0], store.tag(LOGS[0]), commit(1, 1, *range(1000))), LogAppended):
        continue
    while isinstance(store.append(LOGS[1], store.tag(LOGS[1]), commit(1, 1)), LogAppended):
        continue
    assert isinstance(put(store, b"new", None, OTHER), LogFull)
    must_put(store, b"after", b"before")


def test_an_abandoned_record_goes_by_age(disk: SimDisk) -> None:
    store = Driver(disk, SMALL)
    must_put(store, b"a", None)
    must_put(store, b"b", None, OTHER)
    store.now = SMALL.abandoned_log_retention_s - 1
    assert store.octets(OTHER) == b"b"
    store.store.list_records(DIRECTORY, "", 9)
    store.now += 1
    store.maintain()
    assert store.read(RECORD) == LogMissing(), "being listed is not being read"
    assert store.octets(OTHER) == b"b"
    assert store.store.snapshot().directory_records == 1
