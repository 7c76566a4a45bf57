"""A resume is checked against the log and the tokens before it is believed (draft 6.9; decisions 29, 91, 92)."""

from typing import Any

import pytest
from msgspec import UNSET

from sdcpd.protocol import digests
from sdcpd.protocol.commit_log import CommitRecord, Control, EndRecord, FenceRecord, Record, write_record
from sdcpd.protocol.messages import Resume, SessionOpen
from sdcpd.protocol.problems import Conflict, IllFormed, Problem, StaleEpoch
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Replay, SessionLimits
from sdcpd.protocol.takeover import Takeover, check_epoch, take_over
from sdcpd.protocol.terms import Action, State
from tests.support.messages import CACHE, DRAFTER, VERIFIER, assignment, contract, first_digest, proposal, session_open

PROMPT, TOKENS = (1, 1, 1), (10, 11, 12)
PLAIN = contract(stop=(2,))
D3 = digests.extend(first_digest(PLAIN), TOKENS)
FENCE = FenceRecord(epoch=2, by="r#n")


def control(**of: Any) -> Control:
    values: dict[str, Any] = {"c": 1, "g": 0, "j": 1, "accepted": 1, "action": Action.CONTINUE, "m_cap": 4, "low": 1}
    return Control(**values | {"load": 3} | of)


def first() -> CommitRecord:
    digest = digests.extend(first_digest(PLAIN), (10, 11))
    return CommitRecord(epoch=1, round=1, emitted=(10, 11), committed=2, digest=digest, ctl=control())


def second(**of: Any) -> CommitRecord:
    values: dict[str, Any] = {"epoch": 1, "round": 2, "emitted": (12,), "committed": 3, "digest": D3}
    return CommitRecord(**values | {"ctl": control(c=2, j=2, accepted=UNSET, m_cap=UNSET)} | of)


def opening(**resume: Any) -> SessionOpen:
    values: dict[str, Any] = {"round": 2, "committed": 3, "digest": D3, "committed_tokens": f"{CACHE}v1/s/-/o/t"}
    return session_open(contract=PLAIN, epoch=2, resume=Resume(**values | resume))


def taken(*records: Record, tokens: tuple[int, ...] = TOKENS, **resume: Any) -> Takeover:
    log = b"".join(map(write_record, records or (first(), second(), FENCE)))
    return take_over(opening(**resume), PROMPT, tokens, log)


def resumed() -> Session:
    return Session(
        opening(), instance=VERIFIER, prompt=PROMPT, vocabulary=100, limits=SessionLimits(), now=0.0, taken=taken()
    )


def test_a_session_goes_on_where_the_log_ends() -> None:
    session = resumed()
    state = session.session_state()
    assert (state.epoch, state.round, state.committed, state.digest) == (2, 2, 3, D3)
    assert session.state is State.WAITING, "decision 40: state 2 also after a resume"
    page = session.output(1)
    assert page is not None
    assert (page.epoch, page.tokens) == (2, (11, 12))
    counters = session.prefix.at.counters
    assert (counters.c, counters.g, counters.j, counters.limit) == (2, 0, 2, PLAIN.m_max), "decisions 42, 92"


def test_its_first_record_follows_the_fence() -> None:
    session = resumed()
    session.assign(assignment(contract=PLAIN, epoch=2, drafter=VERIFIER), now=0.0)
    work = session.self_work(0, 0.0)
    assert work is not None
    assert (work.start, work.tokens, work.round) == (5, (12,), 3)
    assert session.scored(work.ticket, [13], load=0)
    append = session.to_append()
    assert append is not None
    assert (append.epoch, append.if_match, append.acknowledged) == (2, taken().history.tag, 3)


def test_verdicts_of_rounds_that_others_committed_are_answered() -> None:
    """Decision 62, as far as the records tell them; self-decoded rounds have none."""
    session = resumed()
    session.assign(assignment(contract=PLAIN, epoch=2), now=0.0)
    answer = session.propose(DRAFTER, proposal((10,), epoch=2, round=1), 0.0)
    assert isinstance(answer, Replay)
    verdict = answer.verdict
    assert (verdict.round, verdict.epoch, verdict.accepted, verdict.emitted, verdict.m_cap) == (1, 1, 1, (10, 11), 4)
    with pytest.raises(Problem, match="round"):
        session.propose(DRAFTER, proposal((10,), epoch=2, round=2, base=3, base_digest=D3), 0.0)


def test_proposals_of_the_old_epoch_are_rejected() -> None:
    """ "Proposals carrying an older epoch are rejected" """
    session = resumed()
    session.assign(assignment(contract=PLAIN, epoch=2), now=0.0)
    with pytest.raises(StaleEpoch):
        session.propose(DRAFTER, proposal((10,), epoch=1, round=3, base=3, base_digest=D3), 0.0)
    with pytest.raises(StaleEpoch):
        session.assign(assignment(contract=PLAIN, epoch=1), now=0.0)


def test_before_any_commit() -> None:
    """Decision 91: round 0, committed 0, d[0], an empty token array."""
    start = first_digest(PLAIN)
    found = taken(FENCE, tokens=(), round=0, committed=0, digest=start)
    assert (found.counters.c, found.counters.j, found.history.round) == (0, 0, 0)


def test_a_writer_without_ctl_leaves_no_counters() -> None:
    found = taken(first(), second(ctl=UNSET), FENCE)
    assert (found.counters.c, found.counters.g, found.counters.j) == (0, 0, 0)


@pytest.mark.parametrize(
    ("records", "error"),
    [
        ((first(), second()), Conflict),
        ((first(), second(), FENCE, FenceRecord(epoch=3)), StaleEpoch),
        ((first(), FENCE), Conflict),
        ((first(), second(), FENCE, second(round=3, committed=4, epoch=2)), Conflict),
        ((first(), second(digest=bytes(32)), FENCE), Conflict),
        ((first(), second(epoch=2), FENCE), Conflict),
        ((first(), second(), EndRecord(epoch=1, end=Action.FAIL), FENCE), Conflict),
        ((first(), second(ctl=control(action=Action.FINISH)), FENCE), Conflict),
    ],
    ids=["no fence", "fenced higher", "behind", "ahead", "chain", "served at this epoch", "ended", "finished"],
)
def test_a_log_that_says_otherwise_is_409(records: tuple[Record, ...], error: type[Problem]) -> None:
    with pytest.raises(error) as raised:
        taken(*records)
    assert raised.value.status == 409


@pytest.mark.parametrize("resume", [{"round": 1}, {"committed": 2}, {"digest": bytes(32)}])
def test_a_resume_that_is_not_the_last_commit_is_409(resume: dict[str, Any]) -> None:
    with pytest.raises(Conflict, match="last commit"):
        taken(**resume)


@pytest.mark.parametrize("tokens", [(), (10, 11), (10, 11, 13), (10, 11, 12, 13)])
def test_tokens_that_do_not_lead_to_the_digest_are_409(tokens: tuple[int, ...]) -> None:
    with pytest.raises(Conflict, match="committed_tokens"):
        taken(tokens=tokens)


def test_a_damaged_log_is_409() -> None:
    with pytest.raises(Conflict):
        take_over(opening(), PROMPT, TOKENS, b"\xff")


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (session_open(epoch=0), "epoch"),
        (session_open(epoch=2), "resume"),
        (session_open(epoch=1, resume=opening().resume), "resume"),
    ],
)
def test_epoch_1_begins_and_higher_ones_resume(message: SessionOpen, word: str) -> None:
    with pytest.raises(IllFormed, match=word):
        check_epoch(message)
