"""The drafter's machine (draft 6.2, end of 6.3, Table 2; decisions 42 to 45, 52, 58, 61, 62, 111)."""

import contextlib
import random
from typing import Any

import pytest
from msgspec.structs import replace

from sdcpd.protocol import digests
from sdcpd.protocol.draft_steps import Ignored, Proceed, Resend, Settled, Stop, StopReason
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.problems import (
    Problem,
    SessionClosed,
)
from sdcpd.protocol.terms import Action
from tests.support.draft_sessions import (
    CONTRACT,
    PROMPT,
    START,
    VOCABULARY,
    exchange,
    refuse,
    session,
    verifier,
)
from tests.support.messages import DRAFTER, SESSION, contract, proposal, status
from tests.support.tiny_verifier import TinyVerifier

# Proposals


def test_a_proposal_extends_what_was_last_learned() -> None:
    """ "base and base_digest equal to the committed length and digest it last learned, and round equal to the last
    verdict's round plus one"."""
    machine, peer = session(), verifier()
    first = machine.propose(peer.truth(2), status())
    assert (first.round, first.base, first.base_digest, first.drafter) == (1, 0, START, DRAFTER)
    assert exchange(machine, peer) == Proceed(settled=Settled(proposed=2, accepted=2), after_verdict=True)
    second = machine.propose((0,), status())
    assert (second.round, second.base, second.base_digest) == (2, 3, peer.digest)
    assert machine.tokens_from(0) == peer.tokens


def test_never_two_outstanding_proposals() -> None:
    """ "A drafter MUST NOT have more than one outstanding proposal per session."""
    machine = session()
    machine.propose((5,), status())
    with pytest.raises(AssertionError, match=r"6\.2"):
        machine.propose((5,), status())
    machine.give_up(StopReason.DROPPED, "test")
    with pytest.raises(AssertionError, match="stopped"):
        machine.propose((5,), status())


def test_m_is_within_every_limit() -> None:
    """ "1 <= M <= min(m_max, m_cap), where m_cap is the limit from the last verdict (m_init before the first)"; 58."""
    assert session(m_init=3).limit == 3
    assert session(m_init=60).limit == CONTRACT.m_max == 8
    near_end = tuple(range(10, 10 + 19))
    assert session(near_end, round=9).limit == 4, "the fifth of the five that remain is the verifier's own"
    assert session((*near_end, 5, 5, 5, 5), round=9).limit == 1
    machine, peer = session(), verifier()
    machine.propose((49, 49, 49), status())
    peer.next_action = Action.REDUCE
    exchange(machine, peer)
    assert machine.limit == machine.m_cap == 4
    with pytest.raises(AssertionError):
        machine.propose((5,) * 5, status())


def test_nothing_is_proposed_behind_a_stop_token() -> None:
    assert session().propose((5, 6, 2, 7), status()).tokens == (5, 6, 2)


# Verdicts


def test_a_verdict_is_followed_by_emitted_never_by_accepted() -> None:
    """Decision 52: a can exceed the emitted count; here by the body of a drafter that does not mind max_new."""
    terms = contract(max_new=2)
    peer = TinyVerifier(terms, PROMPT, session=SESSION, vocabulary=VOCABULARY)
    peer.drafter = DRAFTER
    verdict = peer.answer(proposal(peer.truth(4), base_digest=peer.start))
    assert (verdict.accepted, len(verdict.emitted)) == (4, 2)
    machine = session(contract=terms)
    machine.propose(peer.truth(1), status())
    assert exchange(machine, peer) == Stop(StopReason.FINISHED, "action finish")
    assert machine.committed == 2


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Action.SWITCH, StopReason.SWITCHED),
        (Action.SELF_DECODE, StopReason.SELF_DECODING),
        (Action.FAIL, StopReason.FAILED),
    ],
)
def test_actions_that_end_drafting(action: Action, reason: StopReason) -> None:
    """ "the current drafter MUST stop proposing for the session" (6.5.2)."""
    machine, peer = session(), verifier()
    machine.propose((5,), status())
    peer.next_action = action
    step = exchange(machine, peer)
    assert isinstance(step, Stop)
    assert (step.reason, machine.stopped) == (reason, reason)
    assert not reason.declined


BENT: dict[str, dict[str, Any]] = {
    "other session": {"session": b"x" * 16},
    "other epoch": {"epoch": 2},
    "other round": {"round": 2},
    "committed": {"committed": 4},
    "digest": {"digest": b"\x00" * 32},
    "tokens swapped": {"emitted": (9, 9, 9)},
    "too many emitted": {"accepted": 1},
    "accepted beyond m_max": {"accepted": 9},
    "token outside the vocabulary": {"emitted": (50, 1, 1)},
    "token outside uint32": {"emitted": (1 << 40, 1, 1)},
    "no cap": {"m_cap": 0},
}


@pytest.mark.parametrize("changes", BENT.values(), ids=BENT.keys())
def test_a_verdict_that_does_not_verify_ends_the_session_loudly(changes: dict[str, Any]) -> None:
    machine, peer = session(), verifier()
    sent = machine.propose(peer.truth(2), status())
    step = machine.verdict(replace(peer.answer(sent), **changes), now=1.0)
    assert isinstance(step, Stop)
    assert step.reason is StopReason.BAD_VERDICT
    assert step.reason.declined
    assert machine.committed == 0


def test_a_verdict_that_goes_on_with_nothing_or_after_the_end_does_not_verify() -> None:
    nothing = {"accepted": 0, "emitted": (), "committed": 0, "digest": START}
    stop_token = {"accepted": 0, "emitted": (2,), "committed": 1, "digest": digests.extend(START, (2,))}
    peer = verifier()
    sent = session().propose(peer.truth(2), status())
    verdict = peer.answer(sent)
    for changes in (nothing, stop_token):
        machine = session()
        machine.propose(sent.tokens, status())
        step = machine.verdict(replace(verdict, **changes), now=1.0)
        assert isinstance(step, Stop)
        assert step.reason is StopReason.BAD_VERDICT
    failed = replace(verdict, action=Action.FAIL, **nothing)
    machine = session()
    machine.propose((5,), status())
    step = machine.verdict(failed, now=1.0)
    assert isinstance(step, Stop)
    assert step.reason is StopReason.FAILED, "a failing round may commit nothing (bug 7)"


def test_a_verdict_beyond_max_new_does_not_verify() -> None:
    tokens = tuple(range(10, 33))
    machine, peer = session(tokens, round=1), verifier()
    peer.tokens, peer.round = tokens, 1
    sent = machine.propose((7,), status())
    beyond = (7, 8)
    bent = replace(
        peer.answer(sent), accepted=1, emitted=beyond, committed=25, digest=digests.extend(sent.base_digest, beyond)
    )
    step = machine.verdict(bent, now=1.0)
    assert isinstance(step, Stop)
    assert step.reason is StopReason.BAD_VERDICT


def test_a_cap_above_m_max_is_read_as_m_max() -> None:
    machine, peer = session(), verifier()
    sent = machine.propose((5,), status())
    assert isinstance(machine.verdict(replace(peer.answer(sent), m_cap=64), now=1.0), Proceed)
    assert machine.m_cap == machine.limit == 8


def test_the_verdict_of_another_body_is_followed_but_teaches_nothing() -> None:
    """Decision 61: "After a verdict exists it is returned whatever the retry holds"."""
    peer = verifier()
    before = session()
    before.propose(peer.truth(3), status())
    exchange(before, peer)
    machine = session()  # a restarted drafter, assigned as of round 0
    machine.propose((0, 0), status())
    assert exchange(machine, peer) == Proceed(settled=None, after_verdict=True)
    assert machine.tokens_from(0) == peer.tokens


def test_a_late_outcome_changes_nothing() -> None:
    machine, peer = session(), verifier()
    sent = machine.propose((5,), status())
    verdict = peer.answer(sent)
    machine.verdict(verdict, now=1.0)
    assert machine.verdict(verdict, now=2.0) == Ignored()
    assert machine.unanswered() == Ignored()
    assert refuse(machine, SessionClosed("late")) == Ignored()
    assert machine.round == 1


# Refusals (Table 2, decision 36)


@pytest.mark.parametrize(
    ("code", "suffix", "reason"),
    [
        (403, "sdcp-not-assigned", StopReason.NOT_ASSIGNED),
        (403, None, StopReason.NOT_ASSIGNED),
        (404, None, StopReason.UNKNOWN_SESSION),
        (409, "sdcp-stale-epoch", StopReason.STALE_EPOCH),
        (409, "sdcp-stale-base", StopReason.LOST),
        (409, "sdcp-q-unavailable", StopReason.REFUSED),
        (409, None, StopReason.REFUSED),
        (410, "sdcp-session-closed", StopReason.SESSION_CLOSED),
        (422, "sdcp-bad-proposal", StopReason.REFUSED),
        (400, None, StopReason.REFUSED),
        (302, None, StopReason.REFUSED),
    ],
)
def test_refusals_that_end_drafting(code: int, suffix: str | None, reason: StopReason) -> None:
    machine = session()
    machine.propose((5,), status())
    step = machine.refused(code, suffix, state=None, retry_after_s=None, m_cap=None)
    assert isinstance(step, Stop)
    assert step.reason is reason
    assert machine.stopped is reason


def test_rows_that_a_verifier_could_not_have_are_published_and_the_round_comes_again() -> None:
    """Decisions 36, 63: the same octets, once the object behind `q_rows` is there."""
    machine = session()
    sent = machine.propose((5,), status(), q_rows="https://d.example/cache/v1/s/-/o/x/1/1/q")
    step = machine.refused(409, "sdcp-q-unavailable", state=None, retry_after_s=2, m_cap=None)
    assert step == Resend(sent, 2, publish=True)
    assert machine.stopped is None


def test_overload_and_silence_repeat_the_same_octets() -> None:
    """ "proposals and their verdicts are idempotent per round, so a drafter retries a proposal whose verdict it did not
    receive" (6.9); 46: the same octets."""
    machine = session()
    sent = encode(machine.propose((5, 6), status()))
    for step in (
        machine.unanswered(),
        machine.refused(503, None, state=None, retry_after_s=7, m_cap=None),
        machine.refused(500, None, state=None, retry_after_s=None, m_cap=None),
    ):
        assert isinstance(step, Resend)
        assert encode(step.proposal) == sent
    assert isinstance(step, Resend)
    assert step.retry_after_s is None


def test_a_limit_shortens_the_same_round() -> None:
    """Decision 36: "`sdcp-limit` carries member `m_cap`: shorten and resend"."""
    machine, peer = session(), verifier()
    peer.m_cap = 3
    first = machine.propose(peer.truth(8), status())
    step = exchange(machine, peer)
    assert step == Resend(replace(first, tokens=first.tokens[:3]), 0)
    assert exchange(machine, peer) == Proceed(settled=Settled(proposed=3, accepted=3), after_verdict=True)


@pytest.mark.parametrize("m_cap", [None, 0, 8, 100])
def test_a_limit_without_a_usable_cap_leaves_one_token(m_cap: int | None) -> None:
    machine = session()
    machine.propose((5,) * 8, status())
    step = machine.refused(422, "sdcp-limit", state=None, retry_after_s=None, m_cap=m_cap)
    assert isinstance(step, Resend)
    assert step.proposal.tokens == (5,)
    step = machine.refused(422, "sdcp-limit", state=None, retry_after_s=None, m_cap=m_cap)
    assert isinstance(step, Stop)
    assert step.reason is StopReason.REFUSED


# Resynchronization (6.3 step 4)


def test_a_state_we_hold_is_where_to_go_on() -> None:
    machine, peer = session(round=3), verifier()  # the assignment's round was wrong, its prefix was not
    machine.propose((5,), status())
    assert exchange(machine, peer) == Proceed()
    assert machine.propose(peer.truth(1), status()).round == 1
    assert isinstance(exchange(machine, peer), Proceed)


def test_a_state_that_is_a_shorter_prefix_rewinds() -> None:
    peer = verifier()
    peer.decode_alone(2)
    ahead = peer.truth(3)
    machine = session(peer.tokens + ahead, round=5)
    machine.propose((5,), status())
    assert exchange(machine, peer) == Proceed()
    assert (machine.tokens_from(0), machine.rewinds, machine.digest) == (peer.tokens, 1, peer.digest)


def test_a_state_out_of_reach_gives_the_session_up() -> None:
    """A drafter may not read output (33): it declines, and the router moves the session (102)."""
    machine, peer = session(), verifier()
    peer.decode_alone(3)
    machine.propose((5,), status())
    step = exchange(machine, peer)
    assert isinstance(step, Stop)
    assert (step.reason, step.reason.declined) == (StopReason.LOST, True)
    fork = replace(peer.state(), committed=0, digest=b"\x00" * 32)
    machine = session()
    machine.propose((5,), status())
    step = machine.refused(409, "sdcp-stale-base", state=fork, retry_after_s=None, m_cap=None)
    assert isinstance(step, Stop)
    assert step.reason is StopReason.LOST


def test_another_body_of_the_round_in_flight_is_waited_for() -> None:
    """Decision 107: 409 sdcp-stale-base with the session-state, while the first body is verified."""
    machine, peer = session(), verifier()
    sent = machine.propose((5,), status())
    step = machine.refused(409, "sdcp-stale-base", state=peer.state(), retry_after_s=1, m_cap=None)
    assert step == Resend(sent, 1)


def test_a_state_of_another_epoch_ends_it() -> None:
    machine, peer = session(), verifier()
    machine.propose((5,), status())
    peer.epoch = 2
    step = machine.refused(409, "sdcp-stale-base", state=peer.state(), retry_after_s=None, m_cap=None)
    assert isinstance(step, Stop)
    assert step.reason is StopReason.STALE_EPOCH


def test_silence_ends_the_session() -> None:
    """Decision 45: "it drops state after a TTL without a verdict"."""
    machine, peer = session(), verifier()
    machine.propose((5,), status())
    assert machine.expire(59.0) is None
    exchange(machine, peer, now=50.0)
    machine.propose((5,), status())
    assert machine.expire(109.0) is None
    step = machine.expire(110.0)
    assert isinstance(step, Stop)
    assert (step.reason, step.reason.declined) == (StopReason.SILENT, True)
    assert machine.expire(200.0) is None


# Whole conversations


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
def test_a_conversation_gives_the_targets_own_text(seed: int, skill: float) -> None:
    """Greedy equality seen from the drafter, with lost proposals, lost verdicts, limits and rising rounds."""
    draws = random.Random(f"{seed} {skill}")
    peer = verifier()
    truth = peer.truth(CONTRACT.max_new)
    machine = session(seq=1)
    outs = 0
    while machine.stopped is None:
        if machine.outstanding is None:
            right = peer.truth(machine.limit)
            tokens = [x if draws.random() < skill else draws.randrange(3, VOCABULARY) for x in right]
            machine.propose(tokens[: draws.randint(1, machine.limit)], status())
        outs += 1
        assert outs < 1000
        sent = machine.outstanding
        assert sent is not None
        peer.m_cap = draws.randint(1, 8) if sent.round not in peer.verdicts else peer.m_cap
        lost = draws.random()
        if lost < 0.2:
            machine.unanswered()
        elif lost < 0.4:
            with contextlib.suppress(Problem):
                peer.answer(sent)
            machine.unanswered()
        else:
            exchange(machine, peer)
    assert machine.stopped is StopReason.FINISHED
    assert machine.tokens_from(0) == peer.tokens == truth
