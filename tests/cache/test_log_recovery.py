"""What a restart makes of the journal: torn ends, rotten bits, missing segments (bug 20; draft 6.8)."""

import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sdcpd.cache.files import RealFiles
from sdcpd.cache.journal import segment_file
from sdcpd.cache.journal_frames import MARK_BYTES, SEGMENT_HEADER_BYTES
from sdcpd.cache.log_requests import (
    AppendToLog,
    CreateLog,
    LogContent,
    LogDamaged,
    LogExists,
    LogMissing,
    LogRequest,
    RemoveLog,
    ReplaceRecord,
)
from sdcpd.cache.settings import KIB, CacheSettings
from sdcpd.protocol.commit_log import log_tag
from tests.cache.log_tools import EMPTY, LOGS, Driver, commit, end, fence, filled, records
from tests.cache.sim_disk import PowerLoss, SimDisk, first_octets, lose_power, pages

DIRECTORY = "v1/s/-/d/" + "0" * 22
NEW = "v1/s/-/l/NNNNNNNNNNNNNNNNNNNNNN"
FIRST = segment_file(1)
SMALL = CacheSettings(segment_bytes=4 * KIB, journal_bytes=64 * KIB, max_log_bytes=16 * KIB, max_record_bytes=1 * KIB)


def contents(store: Driver) -> dict[str, bytes]:
    return {name: store.octets(name) for name in LOGS}


def test_an_empty_directory_becomes_an_empty_store(disk: SimDisk) -> None:
    store = Driver(disk)
    assert store.read(LOGS[0]) == LogMissing()
    disk.crash()
    assert disk.names() == [FIRST]
    assert store.reopen().store.take_facts() == []


def test_all_that_was_acknowledged_is_there_after_a_loss_of_power(disk: SimDisk) -> None:
    store, expected = filled(disk)
    disk.crash()
    again = store.reopen()
    assert contents(again) == expected
    assert again.store.take_facts() == []


# Torn ends


@pytest.mark.parametrize("kind", ["append", "create", "remove"])
def test_a_write_torn_at_any_octet_costs_only_itself(kind: str) -> None:
    """Bug 20: "Log with a half last record: that record is ignored, the earlier ones hold"."""
    cut, whole = 0, False
    while not whole:
        disk = SimDisk()
        store, expected = filled(disk)
        tag = store.tag(LOGS[1])
        requests: dict[str, LogRequest] = {
            "append": AppendToLog(name=LOGS[1], if_match=tag, records=records(commit(1, 4))),
            "create": CreateLog(name=NEW),
            "remove": RemoveLog(name=LOGS[1]),
        }
        disk.seen[FIRST].unsynced.clear()  # the MARK of the batch before, which this one overwrites
        disk.fail_sync = lose_power
        with pytest.raises(PowerLoss):
            store.batch([requests[kind]])
        disk.fail_sync = lambda name: False
        (last,) = disk.seen[FIRST].unsynced
        whole = last.octets is not None and cut == len(last.octets)
        disk.crash(partial(first_octets, count_bytes=cut))
        for _ in range(2):  # and what recovery made of it is recovered the same
            store = store.reopen()
            assert {fact.kind for fact in store.store.take_facts()} <= {"torn_end_cut"}, cut
            if whole and kind == "append":
                assert store.octets(LOGS[1]) == expected[LOGS[1]] + commit(1, 4)
            elif whole and kind == "remove":
                assert store.read(LOGS[1]) == LogMissing()
            else:
                assert contents(store) == expected, cut
            assert isinstance(store.read(NEW), LogContent if whole and kind == "create" else LogMissing), cut
            store.must_append(LOGS[0], commit(1, 5))
            expected[LOGS[0]] += commit(1, 5)
            disk.crash()
        cut += 1
    assert cut > 200


def test_pages_of_a_torn_write_in_any_order_cost_only_that_write() -> None:
    """A disk may persist the pages of an unsynced write in any order: a good frame behind a bad one proves nothing."""
    for seed in range(300):
        chance = random.Random(seed)
        disk = SimDisk()
        store, expected = filled(disk)
        disk.fail_sync = lose_power
        requests = [AppendToLog(name=n, if_match=store.tag(n), records=records(commit(1, 4))) for n in LOGS]
        with pytest.raises(PowerLoss):
            store.batch(requests)
        disk.fail_sync = lambda name: False
        disk.crash(partial(pages, chance=chance, page_bytes=128))
        again = store.reopen()
        for name in LOGS:
            assert again.octets(name) in (expected[name], expected[name] + commit(1, 4)), seed
        assert {fact.kind for fact in again.store.take_facts()} <= {"torn_end_cut"}, seed


def test_what_recovery_lets_be_read_survives_the_next_loss_of_power(disk: SimDisk) -> None:
    """A killed process leaves its unsynced record in the page cache; whoever reads it must not see it vanish later."""
    store, expected = filled(disk)
    disk.fail_sync = lose_power
    with pytest.raises(PowerLoss):
        store.append(LOGS[0], store.tag(LOGS[0]), commit(1, 4))
    disk.fail_sync = lambda name: False
    disk.kill()
    again = store.reopen()
    assert again.octets(LOGS[0]) == expected[LOGS[0]] + commit(1, 4)
    disk.crash()
    assert again.reopen().octets(LOGS[0]) == expected[LOGS[0]] + commit(1, 4)


def test_recovery_that_cannot_sync_does_not_answer(disk: SimDisk) -> None:
    store, _ = filled(disk)
    disk.kill()
    disk.fail_sync = lambda name: True
    with pytest.raises(OSError, match="input/output error"):
        store.reopen()
    disk.fail_sync = lambda name: False
    store.reopen()  # the directory is free again


def test_a_segment_torn_while_it_was_begun(disk: SimDisk) -> None:
    store, expected = filled(disk)
    for cut in range(SEGMENT_HEADER_BYTES + 1):
        disk.kill()
        file = disk.open(segment_file(2))
        file.truncate(0)
        file.write_at(0, b"SDCPLOG1"[:cut].ljust(cut, b"\0"))
        again = store.reopen()
        assert contents(again) == expected
        assert again.store.snapshot().segments == 2


def test_only_the_last_segment_may_end_torn() -> None:
    """The MARK behind a segment's last batch is durable before the next segment is begun."""
    for cut in range(0, MARK_BYTES, 7):
        disk = SimDisk()
        store = Driver(disk, SMALL)
        expected = b""
        while store.store.snapshot().segments < 2:
            expected += commit(1, 1, *range(40))
            store.must_append(LOGS[0], commit(1, 1, *range(40)))
        disk.crash(partial(first_octets, count_bytes=cut))
        again = store.reopen()
        assert again.octets(LOGS[0]) == expected
        assert {fact.kind for fact in again.store.take_facts()} <= {"torn_end_cut"}


# Damage


def test_a_bit_flipped_anywhere_costs_at_most_one_log_and_never_in_silence() -> None:
    """One bad octet never makes acknowledged ones look like a torn end, not even the last ones."""
    disk = SimDisk()
    store, expected = filled(disk)
    disk.crash()  # even behind a loss of power that took the last MARK,
    store = store.reopen()  # once the store was opened again
    store.store.close()
    clean = disk.read(FIRST)
    costs = 0
    for offset in range(len(clean)):
        disk = SimDisk()
        file = disk.open(FIRST)
        file.write_at(0, clean)
        file.sync()
        disk.sync_directory()
        disk.flip(FIRST, offset, 1 << offset % 8)
        again = Driver(disk)
        facts = again.store.take_facts()
        found = {name: again.read(name) for name in LOGS}
        whole = {name for name, content in found.items() if isinstance(content, LogContent)}
        assert facts or whole == set(LOGS), offset
        assert all(isinstance(content, LogContent | LogDamaged) for content in found.values()), (offset, found)
        assert len(whole) >= len(LOGS) - 1, (offset, facts)
        for name in whole:
            assert again.octets(name) == expected[name], offset
        for name in set(LOGS) - whole:
            costs += 1
            assert {"segment_damaged", "log_damaged"} <= {fact.kind for fact in facts}, offset
            assert isinstance(again.append(name, EMPTY, commit(1, 4)), LogDamaged)
            assert again.create(name) == LogExists()
    assert costs == sum(map(len, expected.values())), "the payloads, and nothing else, are there once only"


def test_behind_an_unreadable_stretch_only_proven_logs_are_served(disk: SimDisk) -> None:
    """A log that may have lost its last records is not read as if it were whole; one that went on since then is."""
    store, expected = filled(disk)
    start = len(disk.read(FIRST)) - MARK_BYTES  # the MARK behind the last batch is there
    store.must_append(LOGS[3], commit(1, 4))
    stop = start + 300
    store.must_append(LOGS[0], commit(1, 4))
    store.must_append(LOGS[0], commit(1, 5))
    store.store.close()
    for offset in range(start, stop):
        disk.flip(FIRST, offset, 0xFF)
    again = store.reopen()
    assert again.octets(LOGS[0]) == expected[LOGS[0]] + commit(1, 4) + commit(1, 5)
    for name in LOGS[1:]:
        assert isinstance(again.read(name), LogDamaged), name
    kinds = [fact.kind for fact in again.store.take_facts()]
    assert kinds == ["segment_damaged", *["log_damaged"] * 3]


def test_a_write_that_the_disk_swallowed_is_told(disk: SimDisk) -> None:
    """The MARK is still there although a later batch says that it had been overwritten."""
    store, expected = filled(disk)
    before = disk.read(FIRST)
    start = len(before) - MARK_BYTES
    store.must_append(LOGS[1], commit(1, 4))
    after = len(disk.read(FIRST)) - MARK_BYTES
    store.must_append(LOGS[2], commit(1, 4))
    store.store.close()
    file = disk.open(FIRST)
    file.write_at(start, before[start:] + bytes(after - len(before)))
    file.sync()
    again = store.reopen()
    assert again.octets(LOGS[2]) == expected[LOGS[2]] + commit(1, 4)
    for name in (LOGS[0], LOGS[1], LOGS[3]):
        assert isinstance(again.read(name), LogDamaged)
    assert "segment_damaged" in {fact.kind for fact in again.store.take_facts()}


def test_a_missing_segment_is_told_and_costs_what_it_may_have_held(disk: SimDisk) -> None:
    store = Driver(disk, SMALL)
    store.must_append(LOGS[0], commit(1, 1))
    while store.store.snapshot().segments < 3:
        store.must_append(LOGS[1], commit(1, 1, *range(40)))
    store.must_append(LOGS[2], commit(1, 1))
    store.must_append(LOGS[2], commit(1, 2))
    store.store.close()
    disk.remove(segment_file(2))
    again = store.reopen()
    assert isinstance(again.read(LOGS[0]), LogDamaged)
    assert isinstance(again.read(LOGS[1]), LogDamaged)
    assert again.octets(LOGS[2]) == commit(1, 1) + commit(1, 2)
    assert [fact.kind for fact in again.store.take_facts()] == ["segment_missing", "log_damaged", "log_damaged"]


def test_a_damaged_log_stays_known_as_such_until_it_is_removed(disk: SimDisk) -> None:
    """Nor does it hold the journal: its segment is set aside under another name, the knowledge moves on."""
    store = Driver(disk, SMALL)
    store.must_append(LOGS[0], commit(1, 1))
    store.store.close()
    disk.flip(FIRST, disk.read(FIRST).index(commit(1, 1)))
    store = store.reopen()
    assert isinstance(store.read(LOGS[0]), LogDamaged)
    for number in range(200):
        name = f"v1/s/-/l/{number:020d}xx"
        store.must_append(name, commit(1, 1, *range(40)), end(1))
        store.batch([RemoveLog(name=name)])
        store.maintain()
    assert f"damaged-{FIRST}" in disk.names()
    assert store.store.snapshot().segments < 5
    assert isinstance(store.read(LOGS[0]), LogDamaged)
    disk.crash()
    store = store.reopen()
    assert isinstance(store.read(LOGS[0]), LogDamaged)
    store.now += SMALL.abandoned_log_retention_s
    store.maintain()
    assert store.read(LOGS[0]) == LogMissing()


def test_a_log_that_rots_while_the_store_runs_is_found_by_its_reader(disk: SimDisk) -> None:
    store, expected = filled(disk)
    disk.flip(FIRST, disk.read(FIRST).index(commit(1, 3)))
    plan = store.store.plan_read(LOGS[3], 0.0)
    assert not isinstance(plan, LogMissing | LogDamaged)
    result = store.store.read(plan)
    assert not isinstance(result, LogContent)
    store.store.spoiled(plan, "its octets on disk are not what was written")
    assert isinstance(store.read(LOGS[3]), LogDamaged)
    assert store.octets(LOGS[1]) == expected[LOGS[1]]
    assert [fact.kind for fact in store.store.take_facts()] == ["log_damaged"]


def test_a_rotten_log_is_not_carried_on_as_good(disk: SimDisk) -> None:
    """Moving a log reads it, and what does not agree with its tag becomes a damaged log."""
    store = Driver(disk, SMALL)
    store.must_append(LOGS[0], commit(1, 1))
    disk.flip(FIRST, disk.read(FIRST).index(commit(1, 1)))
    for number in range(100):
        name = f"v1/s/-/l/{number:020d}xx"
        store.must_append(name, commit(1, 1, *range(40)), end(1))
        store.batch([RemoveLog(name=name)])
        store.maintain()
    assert isinstance(store.read(LOGS[0]), LogDamaged)
    assert FIRST not in disk.names()
    disk.crash()
    assert isinstance(store.reopen().read(LOGS[0]), LogDamaged)


def test_a_log_that_cannot_be_read_now_is_neither_damaged_nor_lost(disk: SimDisk) -> None:
    store = Driver(disk, SMALL)
    store.must_append(LOGS[0], commit(1, 1))
    disk.fail_read = lambda name: name == FIRST
    for number in range(60):
        name = f"v1/s/-/l/{number:020d}xx"
        store.must_append(name, commit(1, 1, *range(40)), end(1))
        store.batch([RemoveLog(name=name)])
        store.maintain()
    assert "log_not_read" in {fact.kind for fact in store.store.take_facts()}
    disk.fail_read = lambda name: False
    store.maintain()
    assert store.octets(LOGS[0]) == commit(1, 1)
    assert FIRST not in disk.names()


# A real process and a real disk

WRITER = """
import sys
from functools import partial
from pathlib import Path
from sdcpd.cache.files import RealFiles
from sdcpd.cache.log_requests import (
    AppendToLog, CreateLog, LogAppended, LogMissing, ReplaceRecord, read_log_records
)
from sdcpd.cache.log_store import LogStore
from sdcpd.cache.settings import CacheSettings
from sdcpd.protocol.commit_log import CommitRecord, log_tag, write_record

settings = CacheSettings(segment_bytes=16384, journal_bytes=1 << 20, max_log_bytes=1 << 18)
store = LogStore.open(settings, RealFiles(Path(sys.argv[1])), 0.0)
names = [f"v1/s/-/l/{number:022d}" for number in range(3)]
directory = "v1/s/-/d/" + "0" * 22
tags = {}
for name in (*names, directory):
    position = store.position(name)
    tags[name] = None if isinstance(position, LogMissing) else position.tag
round_ = int(sys.argv[2])
while True:
    round_ += 1
    record = write_record(CommitRecord(epoch=1, round=round_, emitted=(round_,), committed=round_, digest=bytes(32)))
    records = read_log_records(record)
    requests = [
        CreateLog(name=name, records=records) if tags[name] is None
        else AppendToLog(name=name, if_match=tags[name], records=records)
        for name in names
    ]
    content = str(round_).encode() * 300
    requests.append(ReplaceRecord(name=directory, if_match=tags[directory], octets=content))
    copies = store.read_copies(store.plan_copies())
    batch = store.prepare(requests, copies, 0.0)
    outcomes = store.settle(batch, store.write_batch(batch), 0.0)
    assert all(isinstance(outcome, LogAppended) for outcome in outcomes), outcomes
    tags = {request.name: outcome.tag for request, outcome in zip(requests, outcomes)}
    sys.stdout.write(f"{round_}\\n")
    sys.stdout.flush()
"""


def test_a_killed_process_leaves_every_acknowledged_record(tmp_path: Path) -> None:
    """SIGKILL in the middle of appending, and of replacing a directory record, five times over the same directory."""
    acknowledged = 0
    names = [f"v1/s/-/l/{number:022d}" for number in range(3)]
    for run in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(acknowledged)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(20 + 7 * run):
            line = process.stdout.readline()
            assert line, "the writer ended by itself"
            acknowledged = int(line)
        process.kill()
        rest, _ = process.communicate()
        acknowledged = int(rest.split()[-1]) if rest.endswith(b"\n") else acknowledged
        store = Driver(RealFiles(tmp_path), CacheSettings(segment_bytes=16384, journal_bytes=1 << 20))
        assert {fact.kind for fact in store.store.take_facts()} <= {"torn_end_cut"}
        sure = b"".join(_record(round_) for round_ in range(1, acknowledged + 1))
        for name in names:
            octets = store.octets(name)
            assert octets in (sure, sure + _record(acknowledged + 1))
        contents = [str(round_).encode() * 300 for round_ in (acknowledged, acknowledged + 1)]
        held = store.octets(DIRECTORY)
        assert held in contents
        store.batch([ReplaceRecord(name=DIRECTORY, if_match=log_tag([held]), octets=contents[1])])
        # Bring all three to the same round, so that the next writer can go on.
        for name in names:
            if store.octets(name) == sure:
                store.must_append(name, _record(acknowledged + 1))
        acknowledged += 1
        store.store.close()
    assert acknowledged > 100


def _record(round_: int) -> bytes:
    from sdcpd.protocol.commit_log import CommitRecord, write_record

    return write_record(CommitRecord(epoch=1, round=round_, emitted=(round_,), committed=round_, digest=bytes(32)))


def test_a_fence_is_still_a_fence_after_a_restart(disk: SimDisk) -> None:
    store, _ = filled(disk)
    store.must_append(LOGS[0], fence(7))
    disk.crash()
    assert store.reopen().store.position(LOGS[0]) == store.store.position(LOGS[0])
