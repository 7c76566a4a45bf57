"""The figures of a session are those of its log, whoever wrote it (conventions of the field: counters)."""

from typing import Any

from msgspec import UNSET

from sdcpd.protocol.commit_log import CommitRecord, Control
from sdcpd.protocol.round_counts import RoundCounts
from sdcpd.protocol.terms import Action


def record(**ctl: Any) -> CommitRecord:
    control = Control(c=0, g=0, j=0, action=Action.CONTINUE, low=0, load=0, **ctl) if ctl else UNSET
    return CommitRecord(epoch=1, round=1, emitted=(1,), committed=1, digest=bytes(32), ctl=control)


def figures(*records: CommitRecord) -> tuple[int, int, int, int, tuple[int, ...]]:
    stats = RoundCounts(4, records).stats()
    assert isinstance(stats.accepted_histogram, tuple)
    return stats.rounds, stats.drafts, stats.draft_tokens, stats.accepted_tokens, stats.accepted_histogram


def test_drafted_and_self_decoded_rounds() -> None:
    rounds = (record(accepted=2, m_cap=4, proposed=3), record(sampling=UNSET), record(accepted=0, proposed=1))
    assert figures(*rounds) == (3, 2, 4, 2, (1, 0, 1, 0, 0))


def test_counting_on_is_counting_all() -> None:
    counts = RoundCounts(4, [record(accepted=1, proposed=4)])
    counts.committed(record(accepted=4, proposed=4))
    assert counts.stats() == RoundCounts(4, [record(accepted=4, proposed=4), record(accepted=1, proposed=4)]).stats()


def test_a_log_of_another_implementation_is_counted_as_far_as_it_tells() -> None:
    assert figures(record(), record(accepted=2)) == (2, 1, 2, 2, (0, 0, 1, 0, 0))
    assert figures(record(accepted=9, proposed=9)) == (1, 1, 9, 4, (0, 0, 0, 0, 1))
