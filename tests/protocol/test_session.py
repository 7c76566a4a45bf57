"""The verifier's machine, one rule at a time (draft 6.3; decisions 43, 57 to 64, 79 to 83, 110, 111)."""

from typing import Any

import msgspec
import pytest

from sdcpd.protocol import digests
from sdcpd.protocol.commit_log import CommitRecord, EndRecord, FenceRecord, read_record, write_record
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.messages import Proposal, SessionState, Verdict
from sdcpd.protocol.problems import (
    BadContract,
    BadProposal,
    Conflict,
    IllFormed,
    LimitExceeded,
    NotAssigned,
    SessionClosed,
    StaleBase,
    StaleEpoch,
)
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Append, Begin, Busy, Join, Replay, SessionLimits, Settled, Stopped
from sdcpd.protocol.terms import Action, LadderAction, State
from tests.support.messages import DRAFTER, OTHER_DRAFTER, VERIFIER, assignment, contract, proposal, session_open

LIMITS = SessionLimits()
SELF_LADDER: dict[str, Any] = {"fallback": (LadderAction.SELF_DECODE,), "low_rounds": 1, "self_load": 50, "self_max": 3}


def opened(now: float = 0.0, **of: Any) -> Session:
    return Session(
        session_open(contract=contract(**of)),
        instance=VERIFIER,
        prompt=(1, 1, 1),
        vocabulary=100,
        limits=LIMITS,
        log_tag='"t0"',
        now=now,
    )


def drafting(**of: Any) -> Session:
    session = opened(**of)
    session.assign(assignment(contract=session.contract, seq=1), now=0.0)
    return session


def next_proposal(session: Session, *tokens: int, **changes: Any) -> Proposal:
    at = session.prefix.at
    values = {"round": at.round + 1, "base": at.committed, "base_digest": at.digest} | changes
    return proposal(tokens, **values)


def state_of(session: Session) -> State:
    """Asked afresh each time: a type checker would remember the last assertion."""
    return session.state


def commit(session: Session, now: float = 0.0) -> Settled:
    assert session.to_append() is not None
    return session.appended(f'"t{session.prefix.at.round + 1}"', now)


def play(session: Session, tokens: tuple[int, ...], best: tuple[int, ...], load: int = 0, now: float = 0.0) -> Verdict:
    """One whole round."""
    sent = next_proposal(session, *tokens)
    begun = session.propose(DRAFTER, sent, now)
    assert isinstance(begun, Begin)
    assert session.scored(begun.work.ticket, best[: len(begun.work.tokens)], load=load)
    commit(session, now)
    verdict = session.awaited(sent.round)
    assert verdict is not None
    return verdict


# Scoring, cut and commit


def test_a_round() -> None:
    session = drafting()
    begun = session.propose(DRAFTER, next_proposal(session, 10, 11, 12), 0.0)
    assert isinstance(begun, Begin)
    assert (begun.work.start, begun.work.tokens) == (2, (1, 10, 11, 12)), "row 0 judges x1: the last token goes along"
    assert session.scored(begun.work.ticket, (10, 11, 50, 51), load=7)
    append = session.to_append()
    assert append is not None
    assert (append.epoch, append.if_match, append.acknowledged) == (1, '"t0"', 0)
    record = read_record(append.octets)
    assert isinstance(record, CommitRecord)
    assert (record.epoch, record.round, record.emitted, record.committed) == (1, 1, (10, 11, 50), 3)
    session.appended('"t1"', 0.0)
    verdict = session.awaited(1)
    assert verdict is not None
    assert (verdict.accepted, verdict.emitted, verdict.committed) == (2, (10, 11, 50), 3)
    assert verdict.digest == record.digest == digests.extend(assignment().digest, (10, 11, 50))
    assert (verdict.action, verdict.m_cap, verdict.low, verdict.load) == (Action.CONTINUE, 8, 0, 7)


def test_durable_before_visible() -> None:
    """ "only after that append succeeds does it send the verdict and make the tokens available as output" """
    session = drafting()
    begun = session.propose(DRAFTER, next_proposal(session, 10), 0.0)
    assert isinstance(begun, Begin)
    session.scored(begun.work.ticket, (10, 11), load=0)
    assert session.awaited(1) is None
    assert session.output(0) is None
    assert session.session_state().committed == 0
    commit(session)
    page = session.output(0)
    assert page is not None
    assert page.tokens == (10, 11)


def test_stop_token_inside_a_block() -> None:
    session = drafting(stop=(2,))
    verdict = play(session, (10, 11, 2, 12), (10, 11, 2, 12, 13))
    assert (verdict.accepted, verdict.emitted, verdict.action) == (4, (10, 11, 2), Action.FINISH)
    assert verdict.digest == digests.extend(
        digests.prompt_digest(digests.contract_digest(session.contract), (1, 1, 1)), (10, 11, 2)
    )
    page = session.output(0)
    assert page is not None
    assert (page.tokens, page.final, page.finish) == ((10, 11, 2), True, Action.FINISH)
    assert state_of(session) is State.FINISHED
    with pytest.raises(SessionClosed):
        session.propose(DRAFTER, next_proposal(session, 13), 0.0)


@pytest.mark.parametrize(("max_new", "emitted"), [(1, (10,)), (5, (10, 11, 12, 13, 14))])
def test_max_new_inside_a_block(max_new: int, emitted: tuple[int, ...]) -> None:
    session = drafting(stop=(), max_new=max_new)
    verdict = play(session, (10, 11, 12, 13), (10, 11, 12, 13, 14))
    assert verdict.emitted == emitted
    assert verdict.action is Action.FINISH
    assert verdict.committed == max_new


def test_a_drafter_may_propose_beyond_max_new() -> None:
    """Decision 58: legal; what can never be emitted is not even scored, so the context has room for it."""
    session = drafting(stop=(), max_new=2)
    begun = session.propose(DRAFTER, next_proposal(session, 10, 11, 12, 13), 0.0)
    assert isinstance(begun, Begin)
    assert begun.work.tokens == (1, 10, 11)


def test_max_new_zero_is_finished_at_once() -> None:
    session = opened(max_new=0)
    append = session.to_append()
    assert append is not None
    assert read_record(append.octets) == EndRecord(epoch=1, end=Action.FINISH, reason="max_new is 0")
    session.appended('"t1"', 0.0)
    page = session.output(0)
    assert page is not None
    assert (page.tokens, page.final, page.finish) == ((), True, Action.FINISH)


def test_non_finite_logits_fail_the_session_without_a_commit() -> None:
    session = drafting()
    begun = session.propose(DRAFTER, next_proposal(session, 10), 0.0)
    assert isinstance(begun, Begin)
    assert session.score_failed(begun.work.ticket, "non-finite logits")
    append = session.to_append()
    assert append is not None
    assert isinstance(read_record(append.octets), EndRecord)
    commit(session)
    page = session.output(0)
    assert page is not None
    assert (page.tokens, page.finish, page.reason) == ((), Action.FAIL, "non-finite logits")
    assert [event.kind for event in session.take_events()] == [Action.FAIL]


def test_rows_of_dropped_work_are_dropped() -> None:
    session = drafting()
    begun = session.propose(DRAFTER, next_proposal(session, 10), 0.0)
    assert isinstance(begun, Begin)
    session.cancel("cancelled")
    assert not session.scored(begun.work.ticket, (10, 11), load=0)
    with pytest.raises(SessionClosed, match="session has ended"):
        session.awaited(1)


# Idempotency and the order of the steps


def test_a_repeated_proposal_gets_the_identical_verdict_for_the_sessions_life() -> None:
    session = drafting()
    first = next_proposal(session, 10)
    octets = encode(play(session, (10,), (10, 11)))
    play(session, (12,), (12, 13))
    for again in (first, msgspec.structs.replace(first, tokens=(99,))):
        answer = session.propose(DRAFTER, again, 0.0)
        assert isinstance(answer, Replay)
        assert encode(answer.verdict) == octets


def test_a_retry_of_the_final_round_gets_its_verdict_not_410() -> None:
    session = drafting(stop=(11,))
    last = next_proposal(session, 10)
    verdict = play(session, (10,), (10, 11))
    assert session.propose(DRAFTER, last, 0.0) == Replay(verdict=verdict)


def test_an_identical_proposal_joins_and_another_conflicts() -> None:
    session = drafting()
    sent = next_proposal(session, 10)
    session.propose(DRAFTER, sent, 0.0)
    assert session.propose(DRAFTER, sent, 0.0) == Join(round=1)
    louder = msgspec.structs.replace(sent, status=msgspec.structs.replace(sent.status, load=99))
    assert session.propose(DRAFTER, louder, 0.0) == Join(round=1), "status may differ between retries (decision 46)"
    with pytest.raises(StaleBase) as caught:
        session.propose(DRAFTER, next_proposal(session, 11), 0.0)
    assert caught.value.retry_after_s == 1
    assert caught.value.state == session.session_state()


def test_authorization_comes_first() -> None:
    session = drafting()
    with pytest.raises(NotAssigned):
        session.propose(OTHER_DRAFTER, next_proposal(session, 10, epoch=7), 0.0)
    with pytest.raises(NotAssigned):
        session.propose(DRAFTER, next_proposal(session, 10, drafter=OTHER_DRAFTER), 0.0)
    with pytest.raises(NotAssigned):
        opened().propose(DRAFTER, proposal((10,)), 0.0)


def test_then_the_epoch_then_the_base_then_the_limit_then_the_tokens() -> None:
    session = drafting()
    with pytest.raises(StaleEpoch):
        session.propose(DRAFTER, next_proposal(session, 10, epoch=2, base=7), 0.0)
    for wrong in ({"base": 1}, {"base_digest": bytes(32)}, {"round": 2}, {"base": 1, "tokens": (1,) * 9}):
        with pytest.raises(StaleBase) as stale:
            session.propose(DRAFTER, msgspec.structs.replace(next_proposal(session, 10), **wrong), 0.0)
        assert stale.value.state == session.session_state()
    with pytest.raises(LimitExceeded) as limit:
        session.propose(DRAFTER, next_proposal(session, *([1000] * 9)), 0.0)
    assert limit.value.m_cap == 8
    for token in (100, 2**32, 2**64 - 1):
        with pytest.raises(BadProposal, match=str(token)):
            session.propose(DRAFTER, next_proposal(session, token), 0.0)
        session.named.proposed()
    assert isinstance(session.propose(DRAFTER, next_proposal(session, 10), 0.0), Begin), "nothing was consumed"


def test_three_refusals_in_a_row_end_the_assignment() -> None:
    session = drafting()
    for _ in range(3):
        with pytest.raises(BadProposal):
            session.propose(DRAFTER, next_proposal(session, 100), 0.0)
    assert state_of(session) is State.WAITING
    assert [event.kind for event in session.take_events()] == [Action.SWITCH]
    with pytest.raises(NotAssigned):
        session.propose(DRAFTER, next_proposal(session, 10), 0.0)


def test_being_over_m_cap_is_no_refusal() -> None:
    session = drafting()
    for _ in range(5):
        with pytest.raises(LimitExceeded):
            session.propose(DRAFTER, next_proposal(session, *range(9)), 0.0)
    assert state_of(session) is State.DRAFTING


# Assignments


def test_an_assignment_for_a_fresh_drafter_sets_m_cap() -> None:
    session = drafting(fallback=(LadderAction.REDUCE,), low_rounds=1)
    assert play(session, (10,), (20, 21)).m_cap == 4
    session.assign(assignment(contract=session.contract, seq=2), 0.0)
    assert session.m_cap == 4, "the same drafter again while drafting: m_cap is kept (43)"
    session.assign(assignment(contract=session.contract, drafter=OTHER_DRAFTER, m_init=6, seq=3), 0.0)
    assert session.m_cap == 6


def test_an_assignment_waits_for_the_open_round() -> None:
    session = drafting()
    begun = session.propose(DRAFTER, next_proposal(session, 10), 0.0)
    assert isinstance(begun, Begin)
    other = assignment(drafter=OTHER_DRAFTER, seq=2)
    assert session.assign(other, 0.0) == Busy()
    session.scored(begun.work.ticket, (10, 11), load=0)
    assert session.assign(other, 0.0) == Busy()
    commit(session)
    state = session.assign(other, 0.0)
    assert isinstance(state, SessionState)
    assert (state.round, state.committed, state.seq) == (1, 2, 2), "the answer is the truth, not what was sent (41)"
    with pytest.raises(NotAssigned):
        session.propose(DRAFTER, next_proposal(session, 12), 0.0)


def test_late_and_conflicting_assignments() -> None:
    session = drafting()
    session.assign(assignment(drafter=OTHER_DRAFTER, seq=5), 0.0)
    with pytest.raises(Conflict, match="behind") as late:
        session.assign(assignment(seq=4), 0.0)
    assert late.value.state == session.session_state()
    with pytest.raises(Conflict, match="another drafter"):
        session.assign(assignment(seq=5), 0.0)
    assert isinstance(session.assign(assignment(drafter=OTHER_DRAFTER, seq=5), 0.0), SessionState)


def test_bad_assignments_say_why() -> None:
    session = drafting()
    with pytest.raises(StaleEpoch):
        session.assign(assignment(epoch=2, seq=9), 0.0)
    with pytest.raises(BadContract):
        session.assign(assignment(contract=contract(max_new=1), seq=9), 0.0)
    with pytest.raises(IllFormed, match="m_init"):
        session.assign(assignment(m_init=0, seq=9), 0.0)
    session.cancel("cancelled")
    with pytest.raises(SessionClosed):
        session.assign(assignment(seq=9), 0.0)


# Escalation in the session


def test_switch_voids_the_assignment_but_answers_retries() -> None:
    session = drafting(fallback=(LadderAction.SWITCH,), low_rounds=1)
    first = next_proposal(session, 10)
    verdict = play(session, (10,), (20, 21))
    assert verdict.action is Action.SWITCH
    assert session.propose(DRAFTER, first, 0.0) == Replay(verdict=verdict)
    with pytest.raises(NotAssigned):
        session.propose(DRAFTER, next_proposal(session, 10), 0.0)
    (event,) = session.take_events()
    assert (event.kind, event.committed, event.round, event.seq) == (Action.SWITCH, 1, 1, 1)
    assert session.session_state().state == State.WAITING


def test_an_exhausted_ladder_fails_after_delivering_its_round() -> None:
    session = drafting(fallback=(LadderAction.FAIL,), low_rounds=1)
    verdict = play(session, (10,), (20, 21))
    assert (verdict.action, verdict.emitted) == (Action.FAIL, (20,))
    page = session.output(0)
    assert page is not None
    assert (page.tokens, page.final, page.finish) == ((20,), True, Action.FAIL)
    assert [event.kind for event in session.take_events()] == [Action.FAIL]


def test_finish_beats_the_ladder() -> None:
    session = drafting(fallback=(LadderAction.FAIL,), low_rounds=1, stop=(20,))
    assert play(session, (10,), (20, 21)).action is Action.FINISH


# Self-decoding


def self_token(session: Session, token: int, load: int = 0) -> Settled:
    work = session.self_work(load, 0.0)
    assert work is not None
    assert len(work.tokens) == 1
    assert session.scored(work.ticket, (token,), load=load)
    return commit(session)


def test_a_ladder_period_makes_rounds_of_one_token_and_hands_back() -> None:
    session = drafting(**SELF_LADDER)
    assert play(session, (10,), (20, 21)).action is Action.SELF_DECODE
    assert session.take_events() == [], "no event at the start (81)"
    with pytest.raises(NotAssigned):
        session.propose(DRAFTER, next_proposal(session, 10), 0.0)
    before = session.prefix.at.counters
    for token in (30, 31, 32):
        settled = self_token(session, token)
        assert isinstance(settled.record, CommitRecord)
        assert settled.record.emitted == (token,)
    assert session.prefix.at.round == 4, "round numbers stay consecutive"
    assert session.prefix.at.counters == before, "self-decoded rounds leave the counters alone (80)"
    assert session.self_work(0, 0.0) is None, "self_max"
    assert [event.kind for event in session.take_events()] == [Action.SELF_DECODE]
    assert state_of(session) is State.WAITING
    assert session.prefix.verdict(session.id, 3) is None, "a self-decoded round has no verdict (62)"


def test_load_is_checked_before_every_token_but_the_first() -> None:
    session = drafting(**SELF_LADDER)
    play(session, (10,), (20, 21))
    self_token(session, 30, load=99)
    assert session.self_work(51, 0.0) is None
    assert state_of(session) is State.WAITING


def test_ordered_self_decoding_knows_no_bounds_and_ends_by_an_assignment() -> None:
    """Decision 110."""
    session = drafting(self_load=0, self_max=1)
    answer = session.assign(assignment(contract=session.contract, drafter=VERIFIER, seq=2), 0.0)
    assert isinstance(answer, SessionState)
    assert answer.state == State.SELF_DECODING
    for token in (30, 31, 32):
        self_token(session, token, load=100)
    assert session.self_work(100, 0.0) is not None
    answer = session.assign(assignment(contract=session.contract, seq=3), 0.0)
    assert isinstance(answer, SessionState)
    assert (answer.state, answer.committed) == (State.DRAFTING, 3)
    assert session.take_events() == []


def test_the_next_token_is_computed_while_the_last_is_being_appended() -> None:
    """Decision 81: released in order, never more than `appends_ahead` at once."""
    session = drafting()
    session.assign(assignment(drafter=VERIFIER, seq=2), 0.0)
    starts = []
    for token in (30, 31):
        work = session.self_work(0, 0.0)
        assert work is not None
        starts.append((work.start, work.tokens))
        session.scored(work.ticket, (token,), load=0)
    assert starts == [(2, (1,)), (3, (30,))]
    assert session.self_work(0, 0.0) is None
    assert session.output(0) is None
    assert session.assign(assignment(seq=3), 0.0) == Busy()
    commit(session)
    commit(session)
    page = session.output(0)
    assert page is not None
    assert page.tokens == (30, 31)
    assert isinstance(session.assign(assignment(seq=3), 0.0), SessionState)


def test_a_same_seq_repeat_does_not_end_a_period() -> None:
    """Decision 103."""
    session = drafting(**SELF_LADDER)
    play(session, (10,), (20, 21))
    session.assign(assignment(contract=session.contract, seq=1), 0.0)
    assert state_of(session) is State.SELF_DECODING
    session.assign(assignment(contract=session.contract, seq=2), 0.0)
    assert state_of(session) is State.DRAFTING


# The log


def scored_once(session: Session) -> Append:
    begun = session.propose(DRAFTER, next_proposal(session, 10), 0.0)
    assert isinstance(begun, Begin)
    session.scored(begun.work.ticket, (10, 11), load=0)
    append = session.to_append()
    assert append is not None
    return append


def test_a_lost_answer_to_an_append_that_stands_is_success() -> None:
    session = drafting()
    append = scored_once(session)
    settled = session.append_unknown(append.octets, 0.0)
    assert isinstance(settled, Settled)
    assert session.awaited(1) is not None
    assert session.stopped is None


def test_a_lost_append_is_sent_again_with_the_same_octets() -> None:
    session = drafting()
    append = scored_once(session)
    again = session.append_unknown(b"", 0.0)
    assert isinstance(again, Append)
    assert again.octets == append.octets
    assert session.awaited(1) is None


@pytest.mark.parametrize("before", [FenceRecord(epoch=2), FenceRecord(epoch=9, by="r")])
def test_a_fence_stops_serving_and_releases_nothing(before: FenceRecord) -> None:
    """ "the verifier MUST discard the round, release no output, and stop serving the session" """
    session = drafting()
    scored_once(session)
    assert isinstance(session.append_unknown(write_record(before), 0.0), Stopped)
    for refused in (
        lambda: session.awaited(1),
        lambda: session.output(0),
        lambda: session.propose(DRAFTER, next_proposal(session, 10), 0.0),
        lambda: session.assign(assignment(seq=9), 0.0),
    ):
        with pytest.raises(StaleEpoch):
            refused()
    assert session.to_append() is None


def test_fenced_right_after_our_record_commits_and_stops() -> None:
    session = drafting()
    append = scored_once(session)
    settled = session.append_unknown(append.octets + write_record(FenceRecord(epoch=2)), 0.0)
    assert isinstance(settled, Settled)
    assert session.prefix.at.committed == 2
    assert session.stopped is not None


def test_cancel_settles_the_sent_record_first() -> None:
    """Decision 64: a round whose record was sent is never abandoned."""
    session = drafting()
    scored_once(session)
    session.cancel("cancelled")
    assert isinstance(commit(session).record, CommitRecord)
    assert not session.closed
    assert isinstance(commit(session).record, EndRecord)
    page = session.output(0)
    assert page is not None
    assert (page.tokens, page.final, page.finish, page.reason) == ((10, 11), True, Action.FAIL, "cancelled")


# Output


def test_output_pages() -> None:
    session = drafting(stop=())
    play(session, (10, 11), (10, 11, 12))
    page = session.output(1)
    assert page is not None
    assert (page.from_, page.tokens, page.final, page.epoch) == (1, (11, 12), False, 1)
    assert session.output(3) is None
    assert session.output(4) is None, "a caller cannot be ahead of durable output"


def test_final_page_carries_counts_that_add_up() -> None:
    session = drafting(stop=(13,))
    play(session, (10, 99), (10, 12, 50))
    play(session, (13,), (13, 14))
    page = session.output(0)
    assert page is not None
    stats = page.stats
    assert stats
    assert (stats.rounds, stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (2, 2, 3, 2)
    assert stats.accepted_histogram[:3] == (0, 2, 0)


# Waiting too long (decision 82)


def test_a_silent_drafter_is_switched() -> None:
    session = drafting()
    assert session.next_deadline() == LIMITS.first_proposal_deadline_s
    session.expire(59.9, 0)
    assert state_of(session) is State.DRAFTING
    session.expire(60.0, 0)
    assert state_of(session) is State.WAITING
    assert [event.kind for event in session.take_events()] == [Action.SWITCH]


def test_the_wait_is_shorter_after_a_verdict_and_stands_still_during_a_round() -> None:
    session = drafting()
    play(session, (10,), (10, 11), now=100.0)
    assert session.next_deadline() == 100.0 + LIMITS.proposal_deadline_s
    session.propose(DRAFTER, next_proposal(session, 12), 101.0)
    assert session.next_deadline() is None


def test_waiting_repeats_the_event_then_fails() -> None:
    session = drafting()
    session.expire(60.0, 0)
    session.take_events()
    session.expire(65.0, 0)
    assert [event.kind for event in session.take_events()] == [Action.SWITCH]
    session.expire(120.0, 0)
    commit(session)
    assert state_of(session) is State.FAILED
    assert session.reason == "no drafter for too long"


def test_waiting_decodes_by_itself_where_the_contract_permits() -> None:
    session = drafting(self_load=50)
    session.expire(60.0, 0)
    session.expire(65.0, 51)
    assert state_of(session) is State.WAITING
    session.expire(70.0, 50)
    assert state_of(session) is State.SELF_DECODING


def test_a_session_that_never_got_a_drafter_fails_without_decoding() -> None:
    session = opened(self_load=100)
    session.expire(5.0, 0)
    assert state_of(session) is State.WAITING
    assert session.take_events() == []
    session.expire(60.0, 0)
    assert session.to_append() is not None


def test_rows_of_an_older_ticket_do_not_settle_newer_work() -> None:
    session = drafting()
    session.assign(assignment(drafter=VERIFIER, seq=2), 0.0)
    work = session.self_work(0, 0.0)
    assert work is not None
    session.assign(assignment(seq=3), 0.0)
    begun = session.propose(DRAFTER, next_proposal(session, 10), 0.0)
    assert isinstance(begun, Begin)
    assert not session.scored(work.ticket, (30,), load=0)
    assert session.to_append() is None
    assert session.scored(begun.work.ticket, (10, 11), load=0)


def test_nothing_is_computed_past_a_finish_that_is_not_durable_yet() -> None:
    session = drafting(stop=(30,))
    session.assign(assignment(contract=session.contract, drafter=VERIFIER, seq=2), 0.0)
    work = session.self_work(0, 0.0)
    assert work is not None
    session.scored(work.ticket, (30,), load=0)
    assert session.self_work(0, 0.0) is None


def test_self_decoded_rounds_leave_a_ladder_half_way_where_it_is() -> None:
    session = drafting(low_rounds=3)
    play(session, (10,), (20, 21))
    session.assign(assignment(contract=session.contract, drafter=VERIFIER, seq=2), 0.0)
    self_token(session, 30)
    assert session.prefix.at.counters.c == 1


# Speculation under load (74, 110)


def test_a_ceiling_is_told_in_the_verdict_and_holds_from_then_on() -> None:
    """Decision 57: against the cap last published, never against one still in the verifier's head."""
    session = drafting()
    begun = session.propose(DRAFTER, next_proposal(session, 10, 11, 12), 0.0)
    assert isinstance(begun, Begin)
    session.scored(begun.work.ticket, (10, 11, 12, 13), load=0, ceiling=2)
    assert session.m_cap == 8
    commit(session)
    verdict = session.awaited(1)
    assert verdict is not None
    assert (verdict.m_cap, session.m_cap) == (2, 2)
    with pytest.raises(LimitExceeded):
        session.propose(DRAFTER, next_proposal(session, 14, 15, 16), 0.0)


def test_advice_is_said_once_and_obeyed_by_the_router_alone() -> None:
    session = drafting()
    assert not session.advise(pays=True), "it drafts already"
    assert session.advise(pays=False)
    assert not session.advise(pays=False), "said"
    (event,) = session.take_events()
    assert (event.kind, event.reason, event.seq) == (Action.SELF_DECODE, "unprofitable", 1)
    assert state_of(session) is State.DRAFTING, "the assignment stays valid"
    play(session, (10,), (10, 11))
    assert not session.advise(pays=True), "until the router has ordered it"
    session.assign(assignment(contract=session.contract, drafter=VERIFIER, seq=2), now=0.0)
    assert state_of(session) is State.SELF_DECODING
    assert not session.advise(pays=False)
    assert session.advise(pays=True)
    assert not session.advise(pays=True)
    (event,) = session.take_events()
    assert (event.kind, event.reason, event.seq) == (Action.SELF_DECODE, "profitable", 2)
    session.assign(assignment(contract=session.contract, seq=3), now=0.0)
    assert session.advise(pays=False), "another assignment, another advice"


def test_who_decodes_alone_for_another_reason_gets_no_advice() -> None:
    session = drafting()
    session.assign(assignment(contract=session.contract, drafter=VERIFIER, seq=2), now=0.0)
    assert not session.advise(pays=True)
    waiting = opened()
    assert not waiting.advise(pays=False)


def test_what_is_over_or_lost_gets_no_advice() -> None:
    ending, lost = drafting(), drafting()
    ending.cancel("cancelled")
    lost.lost("fenced")
    assert not ending.advise(pays=False)
    assert not lost.advise(pays=False)
