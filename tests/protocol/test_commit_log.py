"""Commit-log records and what a log says (draft 6.8; decisions 64, 85, 88, 91)."""

import hashlib

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol.commit_log import (
    CommitRecord,
    Control,
    EndRecord,
    FencedOff,
    FenceRecord,
    ForeignWriter,
    LogShrank,
    OurRecordAbsent,
    OurRecordStands,
    Record,
    fenced_above,
    log_tag,
    look_for,
    read_record,
    read_records,
    view,
    write_record,
)
from sdcpd.protocol.problems import IllFormed
from sdcpd.protocol.terms import Action


def commit(round_: int, epoch: int = 1, action: Action = Action.CONTINUE) -> CommitRecord:
    control = Control(c=0, g=1, j=0, accepted=0, action=action, m_cap=8, low=0, load=0)
    return CommitRecord(
        epoch=epoch, round=round_, emitted=(5,), committed=round_, digest=bytes([round_]) * 32, ctl=control
    )


RECORDS: list[Record] = [
    commit(1),
    FenceRecord(epoch=2, by="r#1"),
    FenceRecord(epoch=3),
    EndRecord(epoch=1, end=Action.FAIL),
]
ours = write_record(commit(2))


def octets(*records: Record) -> bytes:
    return b"".join(write_record(record) for record in records)


@pytest.mark.parametrize("record", RECORDS)
def test_records_round_trip_and_are_deterministic(record: Record) -> None:
    raw = write_record(record)
    assert read_record(raw) == record
    assert cbor2.dumps(cbor2.loads(raw), canonical=True) == raw


def test_a_log_is_a_sequence_of_records_with_a_running_hash_as_tag() -> None:
    assert [record for record, _ in read_records(octets(*RECORDS))] == RECORDS
    raws = [raw for _, raw in read_records(octets(*RECORDS))]
    assert log_tag(raws) == f'"{hashlib.sha256(octets(*RECORDS)).hexdigest()}"'
    assert read_records(b"") == []


@given(st.integers(1, 200))
def test_a_cut_log_is_damaged_not_shorter(cut: int) -> None:
    whole = octets(commit(1), commit(2))
    cut = min(cut, len(whole) - 1)
    if cut == len(write_record(commit(1))):
        assert len(read_records(whole[:cut])) == 1
    else:
        with pytest.raises(IllFormed):
            read_records(whole[:cut])


def test_a_commit_below_a_fence_before_it_does_not_count() -> None:
    """ "after a fence record with epoch E+1, appends carrying an epoch lower than E+1 MUST fail" """
    seen = view([commit(1), FenceRecord(epoch=2), commit(2), commit(2, epoch=2)])
    assert [record.epoch for record in seen.commits] == [1, 2]
    assert seen.fence == 2
    assert seen.last == commit(2, epoch=2)


@pytest.mark.parametrize(
    ("records", "closed"),
    [
        ([], False),
        ([commit(1)], False),
        ([commit(1, action=Action.FINISH)], True),
        ([commit(1, action=Action.FAIL)], True),
        ([commit(1), EndRecord(epoch=1, end=Action.FAIL)], True),
        ([FenceRecord(epoch=2), EndRecord(epoch=1, end=Action.FAIL)], False),
    ],
)
def test_closed_logs(records: list[Record], closed: bool) -> None:
    assert view(records).closed is closed


@pytest.mark.parametrize(
    ("after_ours", "found"),
    [
        ((), OurRecordAbsent),
        ((commit(2),), OurRecordStands),
        ((FenceRecord(epoch=2),), FencedOff),
        ((FenceRecord(epoch=2), commit(2)), FencedOff),
        ((commit(2), FenceRecord(epoch=2)), OurRecordStands),
        ((commit(9),), ForeignWriter),
        ((commit(2), commit(3)), ForeignWriter),
        ((FenceRecord(epoch=1), commit(2)), ForeignWriter),
    ],
)
def test_a_lost_answer_is_settled_by_the_log(after_ours: tuple[Record, ...], found: type) -> None:
    log = octets(commit(1), *after_ours)
    assert isinstance(look_for(log, record=ours, acknowledged=1, epoch=1), found)


def test_a_fence_behind_our_record_is_reported_with_the_tag_to_go_on_from() -> None:
    log = octets(commit(1), commit(2), FenceRecord(epoch=2))
    assert look_for(log, record=ours, acknowledged=1, epoch=1) == OurRecordStands(
        tag=log_tag(raw for _, raw in read_records(log)), fenced=True
    )


def test_a_log_that_lost_acknowledged_records_is_a_store_fault() -> None:
    assert look_for(b"", record=ours, acknowledged=1, epoch=1) == LogShrank()


@pytest.mark.parametrize("octets", [b"", write_record(FenceRecord(epoch=1)) * 2])
def test_one_record_is_one_record(octets: bytes) -> None:
    with pytest.raises(IllFormed, match="log records where one was expected"):
        read_record(octets)


@pytest.mark.parametrize("octets", [b"\x01", b"\x80", write_record(FenceRecord(epoch=1)) + b"\xf6"])
def test_what_is_no_map_is_no_record(octets: bytes) -> None:
    with pytest.raises(IllFormed, match="not a map"):
        read_records(octets)


def test_whether_a_log_is_fenced_above_an_epoch() -> None:
    log = write_record(FenceRecord(epoch=3))
    assert [fenced_above(log, epoch) for epoch in (2, 3, 4)] == [True, False, False]
    assert not fenced_above(b"", 1)
    assert not fenced_above(log + b"\xff", 1), "a damaged log says nothing"
