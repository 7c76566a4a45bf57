"""The log store: conditional appends, fences, one sync for all, limits, life (draft 6.8; decisions 85-91, 105, 109)."""

from pathlib import Path

import msgspec
import pytest

from sdcpd.cache.files import RealFiles, StateInUse
from sdcpd.cache.journal_frames import encode_mark
from sdcpd.cache.log_requests import (
    AppendToLog,
    CreateLog,
    LogAppended,
    LogBelowFence,
    LogClosed,
    LogContent,
    LogExists,
    LogFull,
    LogMissing,
    LogRemoved,
    LogTagMismatch,
    LogUnavailable,
    LogUnsettled,
    RemoveLog,
)
from sdcpd.cache.log_store import QUICK_BYTES, QUICK_FRAMES, LogStore
from sdcpd.cache.settings import KIB, CacheSettings
from sdcpd.protocol.commit_log import log_tag
from sdcpd.protocol.terms import Action
from tests.cache.log_tools import EMPTY, Driver, commit, end, fence, records
from tests.cache.sim_disk import SimDisk

LOG = "v1/s/-/l/AAAAAAAAAAAAAAAAAAAAAA"
OTHER = "v1/s/-/l/BBBBBBBBBBBBBBBBBBBBBA"
SMALL = CacheSettings(segment_bytes=4 * KIB, journal_bytes=64 * KIB, max_log_bytes=16 * KIB, max_record_bytes=1 * KIB)


# Appending


def test_a_log_is_its_records_octet_for_octet_under_the_tag_of_6_8(disk: SimDisk) -> None:
    store = Driver(disk)
    assert store.create(LOG) == LogAppended(tag=EMPTY)
    first, second = commit(1, 1, 7, 8), commit(1, 2, 9)
    assert store.append(LOG, EMPTY, first) == LogAppended(tag=log_tag([first]))
    assert store.append(LOG, log_tag([first]), second) == LogAppended(tag=log_tag([first, second]))
    assert store.read(LOG) == LogContent(octets=first + second, tag=log_tag([first, second]))


def test_create_is_refused_where_a_log_is_even_an_empty_one(disk: SimDisk) -> None:
    """Decision 86: "an existing log there is a 409"."""
    store = Driver(disk)
    store.create(LOG)
    assert store.create(LOG) == LogExists()


def test_an_append_needs_the_log_and_its_present_tag(disk: SimDisk) -> None:
    """6.8: "an append succeeds only if no other append has happened since the writer last read the log"."""
    store = Driver(disk)
    assert store.append(LOG, EMPTY, commit(1, 1)) == LogMissing()
    store.create(LOG)
    store.append(LOG, EMPTY, commit(1, 1))
    assert store.append(LOG, EMPTY, commit(1, 2)) == LogTagMismatch()
    assert store.octets(LOG) == commit(1, 1)


def test_a_repeated_append_with_the_old_tag_leaves_one_record(disk: SimDisk) -> None:
    """Bug 22: the answer was lost, the writer sends the same octets with the same tag."""
    store = Driver(disk)
    store.create(LOG)
    assert isinstance(store.append(LOG, EMPTY, commit(1, 1)), LogAppended)
    assert store.append(LOG, EMPTY, commit(1, 1)) == LogTagMismatch()
    assert store.octets(LOG) == commit(1, 1)


def test_two_appends_of_one_batch_see_each_other(disk: SimDisk) -> None:
    store = Driver(disk)
    store.create(LOG)
    first, second = commit(1, 1), commit(1, 2)
    outcomes = store.batch(
        [
            AppendToLog(name=LOG, if_match=EMPTY, records=records(first)),
            AppendToLog(name=LOG, if_match=EMPTY, records=records(commit(1, 1, 99))),
            AppendToLog(name=LOG, if_match=log_tag([first]), records=records(second)),
        ]
    )
    assert outcomes == (LogAppended(log_tag([first])), LogTagMismatch(), LogAppended(log_tag([first, second])))
    assert store.octets(LOG) == first + second


def test_all_appends_that_wait_share_one_sync(disk: SimDisk) -> None:
    """Decision 109: "so that one fsync covers all waiting appends"."""
    store = Driver(disk)
    names = [f"v1/s/-/l/{number:022d}" for number in range(64)]
    store.batch([CreateLog(name=name) for name in names])
    syncs = disk.syncs
    outcomes = store.batch([AppendToLog(name=name, if_match=EMPTY, records=records(commit(1, 1))) for name in names])
    assert all(isinstance(outcome, LogAppended) for outcome in outcomes)
    assert disk.syncs == syncs + 1


def test_page_cache_durability_does_not_sync_an_append(disk: SimDisk) -> None:
    store = Driver(disk, CacheSettings(commit_durability="page_cache"))
    syncs = disk.syncs
    store.must_append(LOG, commit(1, 1))
    assert disk.syncs == syncs
    disk.kill()
    assert store.reopen().octets(LOG) == commit(1, 1)


def test_only_small_writes_that_are_not_synced_are_quick(disk: SimDisk) -> None:
    def is_quick(store: Driver, logs: int, commits: int = 1) -> bool:
        names = [f"v1/s/-/l/{number:022d}" for number in range(logs)]
        wanted = [CreateLog(name=name, records=records(commit(1, 1) * commits)) for name in names]
        return store.store.is_quick(store.store.prepare(wanted, [], 0.0))

    unsynced = Driver(SimDisk(), CacheSettings(commit_durability="page_cache"))
    assert is_quick(unsynced, QUICK_FRAMES)
    unsynced = Driver(SimDisk(), CacheSettings(commit_durability="page_cache"))
    assert not is_quick(unsynced, QUICK_FRAMES + 1)
    unsynced = Driver(SimDisk(), CacheSettings(commit_durability="page_cache"))
    assert not is_quick(unsynced, 1, commits=QUICK_BYTES // len(commit(1, 1)))
    assert not is_quick(Driver(disk), 1)


def test_a_new_segment_is_not_begun_quickly() -> None:
    store = Driver(SimDisk(), msgspec.structs.replace(SMALL, commit_durability="page_cache"))
    quick = []
    for round_ in range(1, 30):
        batch = store.store.prepare([CreateLog(name=f"v1/s/-/l/{round_:022d}", records=records(commit(1, 1)))], [], 0.0)
        quick.append(store.store.is_quick(batch))
        assert quick[-1] is not batch.order.begin_segment
        store.store.settle(batch, store.store.write_batch(batch), 0.0)
    assert not all(quick)


def test_an_append_exists_only_when_it_is_settled(disk: SimDisk) -> None:
    """Durable before visible: between prepare and settle nobody sees the record."""
    store = Driver(disk).store
    driver = Driver.__new__(Driver)
    driver.store, driver.now = store, 0.0
    driver.create(LOG)
    batch = store.prepare([AppendToLog(name=LOG, if_match=EMPTY, records=records(commit(1, 1)))], [], 0.0)
    assert driver.octets(LOG) == b""
    result = store.write_batch(batch)
    assert driver.octets(LOG) == b""
    store.settle(batch, result, 0.0)
    assert driver.octets(LOG) == commit(1, 1)


# Fences


def test_after_a_fence_lower_epochs_fail_whatever_the_tag(disk: SimDisk) -> None:
    """6.8: "after a fence record with epoch E+1, appends carrying an epoch lower than E+1 MUST fail"."""
    store = Driver(disk)
    first = commit(1, 1)
    store.must_append(LOG, first)
    store.must_append(LOG, fence(2))
    assert store.append(LOG, log_tag([first, fence(2)]), commit(1, 2)) == LogBelowFence(floor=2)
    assert store.append(LOG, log_tag([first]), commit(1, 2)) == LogBelowFence(floor=2)
    assert store.append(LOG, log_tag([first]), end(1)) == LogBelowFence(floor=2)
    assert store.append(LOG, log_tag([first, fence(2)]), fence(1)) == LogBelowFence(floor=2)
    assert isinstance(store.append(LOG, log_tag([first, fence(2)]), commit(2, 2)), LogAppended)


def test_a_commit_does_not_raise_the_floor(disk: SimDisk) -> None:
    """Only "the epoch of a fence record raises the floor"."""
    store = Driver(disk)
    store.must_append(LOG, commit(5, 1))
    store.must_append(LOG, commit(1, 2))


def test_a_fence_alone_creates_the_log(disk: SimDisk) -> None:
    """Decision 86: "A router fencing a log that was never created creates it with the fence alone"."""
    store = Driver(disk)
    assert store.create(LOG, fence(2)) == LogAppended(tag=log_tag([fence(2)]))
    assert store.append(LOG, log_tag([fence(2)]), commit(1, 1)) == LogBelowFence(floor=2)
    disk.crash()
    assert store.reopen().append(LOG, log_tag([fence(2)]), commit(1, 1)) == LogBelowFence(floor=2)


def test_a_fence_among_the_records_of_one_append_binds_those_behind_it(disk: SimDisk) -> None:
    store = Driver(disk)
    assert store.create(LOG, fence(3), commit(2, 1)) == LogBelowFence(floor=3)
    store.create(LOG)
    assert store.append(LOG, EMPTY, fence(3), commit(2, 1)) == LogBelowFence(floor=3)
    assert store.octets(LOG) == b""


@pytest.mark.parametrize("last", [end(1), commit(1, 1, action=Action.FINISH), commit(1, 1, action=Action.FAIL)])
def test_a_closed_session_takes_no_commit_but_a_fence(disk: SimDisk, last: bytes) -> None:
    """Decision 91: such a log "is closed: it is never resumed"."""
    store = Driver(disk)
    tag = store.must_append(LOG, last)
    assert store.append(LOG, tag, commit(1, 2)) == LogClosed()
    assert isinstance(store.append(LOG, tag, fence(2)), LogAppended)
    disk.crash()
    again = store.reopen()
    assert again.append(LOG, again.tag(LOG), commit(2, 2)) == LogClosed()


# Limits


def test_one_log_has_a_limit_that_leaves_room_to_end_it(disk: SimDisk) -> None:
    store = Driver(disk, SMALL)
    store.create(LOG)
    round_ = 1
    while isinstance(outcome := store.append(LOG, store.tag(LOG), commit(1, round_, *range(40))), LogAppended):
        round_ += 1
    assert isinstance(outcome, LogFull)
    assert len(store.octets(LOG)) <= SMALL.max_log_bytes
    store.must_append(LOG, fence(2))
    store.must_append(LOG, end(2))


def test_the_journal_has_a_limit_that_leaves_room_to_end_sessions(disk: SimDisk) -> None:
    store = Driver(disk, SMALL)
    full: LogFull | None = None
    for number in range(1000):
        outcome = store.create(f"v1/s/-/l/{number:022d}", commit(1, 1, *range(40)))
        if isinstance(outcome, LogFull):
            full = outcome
            break
    assert full is not None
    assert "journal_bytes" in full.detail
    assert store.store.snapshot().journal_bytes <= SMALL.journal_bytes
    store.must_append(f"v1/s/-/l/{0:022d}", end(1))


def test_the_number_of_logs_has_a_limit(disk: SimDisk) -> None:
    store = Driver(disk, CacheSettings(max_logs=2))
    outcomes = store.batch([CreateLog(name=f"v1/s/-/l/{number:022d}") for number in range(3)])
    assert [type(outcome) for outcome in outcomes] == [LogAppended, LogAppended, LogFull]


# Failing disks


def test_a_full_disk_refuses_and_changes_nothing(disk: SimDisk) -> None:
    store = Driver(disk)
    store.must_append(LOG, commit(1, 1))
    disk.capacity_bytes = disk.used_bytes + 100
    assert isinstance(store.append(LOG, store.tag(LOG), commit(1, 2)), LogFull)
    assert store.octets(LOG) == commit(1, 1)
    assert [fact.kind for fact in store.store.take_facts()] == ["append_failed"]
    disk.capacity_bytes = None
    store.must_append(LOG, commit(1, 3))
    disk.crash(lambda writes: writes)
    assert store.reopen().octets(LOG) == commit(1, 1) + commit(1, 3)


@pytest.mark.parametrize("room_bytes", [1, 42, 80])
def test_half_a_mark_on_a_full_disk_is_no_torn_record(disk: SimDisk, room_bytes: int) -> None:
    """The MARK behind the last record of a segment finds room for a part of it only. That part must not stay there when
    the next segment begins, where only the last one may end torn."""
    store, round_, grown_bytes = Driver(disk, SMALL), 1, 0
    while disk.used_bytes + grown_bytes < SMALL.segment_bytes:
        before_bytes = disk.used_bytes
        store.must_append(LOG, commit(1, round_))
        round_, grown_bytes = round_ + 1, disk.used_bytes - before_bytes
    mark_bytes = len(encode_mark(1, 1))
    disk.capacity_bytes = disk.used_bytes + grown_bytes - mark_bytes + room_bytes
    store.must_append(LOG, commit(1, round_))
    assert disk.used_bytes == disk.capacity_bytes, "half a MARK stands there"
    disk.capacity_bytes = None
    store.must_append(OTHER, commit(1, 1))
    assert len(disk.names()) == 2, "another segment has begun"
    disk.crash(lambda writes: writes)
    store = store.reopen()
    assert store.octets(LOG) == b"".join(commit(1, number) for number in range(1, round_ + 1))
    assert store.store.take_facts() == []


def test_a_refused_record_does_not_come_back_after_a_loss_of_power(disk: SimDisk) -> None:
    """It was said that nothing was written, so cutting the file back has to be durable before that is said."""
    store = Driver(disk)
    store.must_append(LOG, commit(1, 1))
    disk.fail_write = lambda name: 1 << 20  # all octets pass, then the call fails
    assert isinstance(store.append(LOG, store.tag(LOG), commit(1, 2)), LogUnavailable)
    disk.fail_write = lambda name: None
    disk.crash(lambda writes: [write for write in writes if write.octets is not None])  # the cut is what gets lost
    assert store.reopen().octets(LOG) == commit(1, 1)


def test_a_failed_sync_stops_the_store_and_is_not_repeated(disk: SimDisk) -> None:
    """The system may drop the octets of a failed sync and report success for the next one."""
    store = Driver(disk)
    store.must_append(LOG, commit(1, 1))
    tag = store.tag(LOG)
    disk.fail_sync = lambda name: True
    assert isinstance(store.append(LOG, tag, commit(1, 2)), LogUnsettled)
    disk.fail_sync = lambda name: False
    assert isinstance(store.append(LOG, tag, commit(1, 2)), LogUnavailable)
    assert isinstance(store.create(OTHER), LogUnavailable)
    assert store.octets(LOG) == commit(1, 1), "what was durable before is still readable"
    assert store.store.snapshot().stopped is not None
    assert [fact.kind for fact in store.store.take_facts()] == ["store_stopped"]
    store.store.close()
    assert store.reopen().octets(LOG) == commit(1, 1)


def test_a_write_that_cannot_be_cut_back_stops_the_store(disk: SimDisk) -> None:
    store = Driver(disk)
    store.must_append(LOG, commit(1, 1))
    tag = store.tag(LOG)
    disk.fail_write, disk.fail_truncate = lambda name: 50, lambda name: True
    assert isinstance(store.append(LOG, tag, commit(1, 2)), LogUnsettled)
    disk.fail_write, disk.fail_truncate = lambda name: None, lambda name: False
    assert isinstance(store.append(LOG, tag, commit(1, 2)), LogUnavailable)


@pytest.mark.parametrize("failing", ["write", "sync", "directory"])
def test_a_new_segment_that_cannot_be_begun(disk: SimDisk, failing: str) -> None:
    store = Driver(disk, SMALL)
    while store.store.snapshot().journal_bytes < SMALL.segment_bytes:
        store.must_append(LOG, commit(1, 1, *range(40)))
    before = store.octets(LOG)
    second = "journal-0000000000000002.log"
    if failing == "write":
        disk.fail_write = lambda name: 3 if name == second else None
    elif failing == "sync":
        disk.fail_sync = lambda name: name == second
    else:
        disk.fail_directory_sync = True
    outcome = store.append(LOG, log_tag([before]), commit(1, 2))
    assert isinstance(outcome, LogUnavailable if failing == "write" else LogUnsettled)
    disk.fail_write, disk.fail_sync, disk.fail_directory_sync = lambda name: None, lambda name: False, False
    if failing == "write":
        store.must_append(LOG, commit(1, 2))
        assert store.store.snapshot().segments == 2
        before += commit(1, 2)
    else:
        store.store.close()
        store = store.reopen()
    assert store.octets(LOG) == before
    disk.crash()
    assert store.reopen().octets(LOG) == before


# Life


def test_a_closed_log_goes_after_its_retention_and_its_segments_with_it(disk: SimDisk) -> None:
    """Decision 90: "hard-pinned until the session ends plus retention (1 h)"."""
    store = Driver(disk, SMALL)
    while store.store.snapshot().segments < 3:
        store.must_append(LOG, commit(1, 1, *range(40)))
    store.now = 3_000_000.0  # untouched since, but read now
    store.must_append(LOG, end(1))
    store.now += SMALL.log_retention_s - 1
    store.maintain()
    store.read(LOG)  # a reader does not prolong it
    assert store.store.snapshot().segments >= 3
    store.now += 1
    store.maintain()
    assert store.read(LOG) == LogMissing()
    assert store.store.snapshot().segments == 1
    disk.crash()
    assert store.reopen().read(LOG) == LogMissing()


def test_neither_a_fence_nor_a_move_makes_a_closed_log_younger(disk: SimDisk) -> None:
    store = Driver(disk, SMALL)
    store.must_append(LOG, end(1))
    store.now = SMALL.log_retention_s / 2
    store.must_append(LOG, fence(2))
    for number in range(60):
        store.must_append(f"v1/s/-/l/{number:022d}", commit(1, 1, *range(40)), end(1))
        store.batch([RemoveLog(name=f"v1/s/-/l/{number:022d}")])
        store.maintain()
    assert "journal-0000000000000001.log" not in disk.names(), "it was moved"
    store.now = SMALL.log_retention_s - 1
    store.maintain()
    assert store.octets(LOG) == end(1) + fence(2)
    store.now = SMALL.log_retention_s
    store.maintain()
    assert store.read(LOG) == LogMissing()


def test_an_open_log_stays_while_somebody_touches_it(disk: SimDisk) -> None:
    store = Driver(disk, SMALL)
    store.must_append(LOG, commit(1, 1))
    store.must_append(OTHER, commit(1, 1))
    for _ in range(3):
        store.now += SMALL.abandoned_log_retention_s - 1
        store.read(LOG)
        store.maintain()
    assert store.octets(LOG) == commit(1, 1)
    assert store.read(OTHER) == LogMissing()


def test_an_append_just_before_the_removal_saves_the_log(disk: SimDisk) -> None:
    store = Driver(disk)
    store.must_append(LOG, commit(1, 1))
    tag = store.tag(LOG)
    store.now += store.settings.abandoned_log_retention_s
    store.store.look_for_expired(store.now)
    assert isinstance(store.append(LOG, tag, commit(1, 2)), LogAppended)
    store.maintain()
    assert store.octets(LOG) == commit(1, 1) + commit(1, 2)


def test_a_removed_log_does_not_come_back(disk: SimDisk) -> None:
    store = Driver(disk)
    store.must_append(LOG, commit(1, 1))
    assert store.batch([RemoveLog(name=LOG), RemoveLog(name=LOG)]) == (LogRemoved(), LogMissing())
    disk.crash()
    again = store.reopen()
    assert again.read(LOG) == LogMissing()
    assert isinstance(again.create(LOG, commit(9, 1)), LogAppended)
    disk.crash()
    assert again.reopen().octets(LOG) == commit(9, 1)


def test_the_journal_does_not_grow_for_ever_behind_one_old_log(disk: SimDisk) -> None:
    """A straggler is written again at the end, so that the segment it began in can go."""
    store = Driver(disk, SMALL)
    store.must_append(OTHER, commit(1, 1))
    store.must_append(OTHER, fence(2))
    largest = 0
    for number in range(400):
        name = f"v1/s/-/l/{number:022d}"
        store.must_append(name, commit(1, 1, *range(40)), end(1))
        store.now += SMALL.log_retention_s
        if number % 10 == 0:
            store.must_append(OTHER, commit(2, number))
        store.maintain()
        largest = max(largest, store.store.snapshot().journal_bytes)
        assert disk.used_bytes <= SMALL.journal_bytes
    expected = commit(1, 1) + fence(2) + b"".join(commit(2, number) for number in range(0, 400, 10))
    assert largest < 5 * SMALL.segment_bytes
    assert store.octets(OTHER) == expected
    disk.crash()
    again = store.reopen()
    assert again.octets(OTHER) == expected
    assert again.append(OTHER, again.tag(OTHER), commit(1, 999)) == LogBelowFence(floor=2)
    assert again.store.take_facts() == []


def test_a_full_journal_gets_its_space_back(disk: SimDisk) -> None:
    store = Driver(disk, SMALL)
    names: list[str] = []
    while isinstance(
        store.create(name := f"v1/s/-/l/{len(names):022d}", commit(1, 1, *range(40)), end(1)), LogAppended
    ):
        names.append(name)
    survivors = names[::4]
    for name in names:
        if name not in survivors:
            store.batch([RemoveLog(name=name)])
    store.maintain()
    assert store.store.snapshot().journal_bytes < SMALL.journal_bytes // 2
    store.must_append(LOG, commit(1, 1))
    for name in survivors:
        assert store.octets(name) == commit(1, 1, *range(40)) + end(1)


def test_a_segment_that_cannot_be_given_back_is_told_and_tried_again_later(disk: SimDisk) -> None:
    store = Driver(disk, SMALL)
    while store.store.snapshot().segments < 2:
        store.must_append(LOG, commit(1, 1, *range(40)))
    store.batch([RemoveLog(name=LOG)])
    disk.fail_directory_sync = True
    store.batch([])
    assert [fact.kind for fact in store.store.take_facts()] == ["segment_not_given_back"]
    assert not store.store.maintenance_is_due()
    disk.fail_directory_sync = False
    store.maintain()
    assert store.store.snapshot().segments == 1


# Who may open it


def test_two_stores_never_share_a_directory(tmp_path: Path) -> None:
    first = LogStore.open(CacheSettings(), RealFiles(tmp_path), 0.0)
    with pytest.raises(StateInUse, match="stop that one first"):
        LogStore.open(CacheSettings(), RealFiles(tmp_path), 0.0)
    first.close()
    LogStore.open(CacheSettings(), RealFiles(tmp_path), 0.0).close()


def test_real_files_keep_a_log(tmp_path: Path) -> None:
    store = Driver(RealFiles(tmp_path / "state" / "log"))
    store.must_append(LOG, commit(1, 1))
    store.must_append(LOG, commit(1, 2))
    store.store.close()
    again = store.reopen()
    assert again.octets(LOG) == commit(1, 1) + commit(1, 2)
    again.store.close()
