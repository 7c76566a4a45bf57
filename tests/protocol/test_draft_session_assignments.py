"""The drafter's machine and assignments: first, repeated, late, meanwhile (decisions 30, 42 to 44, 111)."""

import pytest
from msgspec.structs import replace

from sdcpd.protocol.draft_session import DraftSession, check_identity
from sdcpd.protocol.draft_steps import Assigned, Ignored, Proceed, Stop
from sdcpd.protocol.problems import (
    BadContract,
    Conflict,
    IllFormed,
    SessionClosed,
    StaleEpoch,
)
from sdcpd.protocol.terms import Action
from tests.support.draft_sessions import (
    IDENTITY,
    PROMPT,
    START,
    VOCABULARY,
    assigned,
    exchange,
    refuse,
    session,
    verifier,
)
from tests.support.messages import OTHER_DRAFTER, contract, status


def test_an_assignment_must_lead_to_its_digest() -> None:
    tokens = (7, 8)
    good = assigned(tokens=tokens, round=1)
    for bad, given_tokens, problem in (
        (replace(good, digest=START), tokens, Conflict),
        (good, (8, 7), Conflict),
        (good, (7,), Conflict),
        (good, None, Conflict),
        (good, (7, 50), IllFormed),
        (replace(good, m_init=0), tokens, IllFormed),
    ):
        with pytest.raises(problem):
            DraftSession(bad, PROMPT, given_tokens, vocabulary=VOCABULARY, now=0.0, silence_limit_s=1.0)
    with pytest.raises(Conflict):
        DraftSession(good, (1, 1), tokens, vocabulary=VOCABULARY, now=0.0, silence_limit_s=1.0)
    with pytest.raises(IllFormed):
        DraftSession(good, (1, 1, 1 << 32), tokens, vocabulary=VOCABULARY, now=0.0, silence_limit_s=1.0)


def test_a_session_with_nothing_left_is_closed() -> None:
    for tokens in ((7, 2), tuple(range(10, 34))):
        with pytest.raises(SessionClosed):
            session(tokens, round=1)
    with pytest.raises(SessionClosed):
        session(contract=contract(max_new=0))


def test_who_may_be_assigned_what() -> None:
    """Decisions 9, 10, 12, 44."""
    for rule in (1, 2, 65281):
        check_identity(assigned(contract=contract(rule=rule)), IDENTITY)
    check_identity(assigned(contract=contract(drafters=(b"\x01" * 32, IDENTITY.model))), IDENTITY)
    for refused in (
        contract(tokenizer=b"\x03" * 32),
        contract(drafters=(b"\x01" * 32,)),
        contract(rule=3),
    ):
        with pytest.raises(BadContract):
            check_identity(assigned(contract=refused), IDENTITY)
    with pytest.raises(IllFormed):
        check_identity(assigned(drafter=OTHER_DRAFTER), IDENTITY)


def test_late_and_repeated_assignments() -> None:
    """Decisions 44 and 111."""
    machine = session(seq=5)
    for late in (assigned(seq=4), assigned(epoch=0), assigned(epoch=0, seq=9)):
        with pytest.raises(StaleEpoch):
            machine.assign(late, None, now=1.0)
    assert machine.assign(assigned(seq=5), None, now=1.0) is Assigned.REPEATED
    assert machine.next_deadline() == 60.0, "a repetition is no sign of life"
    assert machine.assign(assigned(seq=6), None, now=1.0) is Assigned.KEPT
    assert machine.next_deadline() == 61.0
    without = session()
    assert without.assign(assigned(), None, now=1.0) is Assigned.REPEATED
    assert without.assign(assigned(m_init=2), None, now=1.0) is Assigned.KEPT


def test_a_later_assignment_with_an_older_round_keeps_prefix_round_and_cap() -> None:
    """Decision 44: "a policy re-sends the assignment with what the router knows late"."""
    machine, peer = session(seq=1), verifier()
    machine.propose(peer.truth(2), status())
    peer.next_action = Action.REDUCE
    exchange(machine, peer)
    outstanding = machine.propose(peer.truth(1), status())
    assert machine.assign(assigned(seq=2), None, now=2.0) is Assigned.KEPT
    assert (machine.round, machine.committed, machine.m_cap, machine.outstanding) == (1, 3, 4, outstanding)
    assert isinstance(exchange(machine, peer), Proceed)


def test_what_contradicts_the_session_is_a_conflict_and_changes_nothing() -> None:
    machine, peer = session((7, 8), seq=1, round=2), verifier()
    for changes, tokens in (
        ({"contract": contract(max_new=25)}, (7, 8)),
        ({"verifier": "https://w.example/verifier/"}, (7, 8)),
        ({"round": 2}, (7, 9)),
        ({"round": 2}, (7, 8, 9)),
        ({"round": 3}, (7, 8)),
        ({"round": 3}, (7, 9, 9)),
        ({"round": 1}, (8,)),
    ):
        with pytest.raises(Conflict):
            machine.assign(assigned(tokens=tokens, seq=2, **changes), tokens, now=1.0)
    assert (machine.order, machine.round, machine.tokens_from(0)) == ((1, 1), 2, (7, 8))
    assert peer.round == 0


def test_an_assignment_that_is_ahead_waits_for_the_outcome_of_what_is_out() -> None:
    """The verifier decided our round and answered the router before its verdict reached us (43)."""
    machine, peer = session(seq=1), verifier()
    sent = machine.propose(peer.truth(2), status())
    verdict = peer.answer(sent)
    ahead = assigned(tokens=peer.tokens, round=1, seq=2, m_init=5)
    assert machine.assign(ahead, peer.tokens, now=1.0) is Assigned.PENDING
    assert machine.outstanding is sent
    assert machine.committed == 0
    assert isinstance(machine.verdict(verdict, now=1.0), Proceed)
    assert (machine.round, machine.tokens_from(0), machine.m_cap) == (1, peer.tokens, 8), "the verdict says it all"


def test_an_assignment_received_meanwhile_overtakes_a_refusal() -> None:
    peer = verifier()
    machine = session(seq=1)
    machine.propose((5,), status())
    peer.decode_alone(2)  # the round came too late: the verifier went on alone, then named us again
    machine.assign(assigned(tokens=peer.tokens, round=2, seq=2, m_init=5), peer.tokens, now=1.0)
    assert exchange(machine, peer) == Proceed()
    assert (machine.tokens_from(0), machine.round, machine.m_cap, machine.rewinds) == (peer.tokens, 2, 5, 0)
    machine.propose((5,), status())  # refused in state 2, while the router names us anew for the same round
    machine.assign(assigned(tokens=peer.tokens, round=2, seq=3, m_init=6), peer.tokens, now=1.0)
    step = machine.refused(403, "sdcp-not-assigned", state=None, retry_after_s=None, m_cap=None)
    assert (step, machine.m_cap, machine.outstanding) == (Proceed(), 6, None)


def test_the_end_of_a_session_is_not_overtaken() -> None:
    for problem in (SessionClosed("closed"), StaleEpoch("stale")):
        machine = session(seq=1)
        machine.propose((5,), status())
        machine.assign(assigned(seq=2), None, now=1.0)
        assert isinstance(refuse(machine, problem), Stop)


def test_a_new_epoch_forgets_what_is_out() -> None:
    """6.9: the proposal to the old verifier can no longer be committed."""
    machine = session(seq=1)
    machine.propose((5,), status())
    again = assigned(epoch=2, seq=1, verifier="https://w.example/verifier/", tokens=(7, 8), round=2, m_init=4)
    assert machine.assign(again, (7, 8), now=1.0) is Assigned.RESTARTED
    assert (machine.outstanding, machine.epoch, machine.verifier) == (None, 2, "https://w.example/verifier/")
    assert machine.unanswered() == Ignored()
    sent = machine.propose((5,), status())
    assert (sent.epoch, sent.round, sent.base) == (2, 3, 2)


def test_committed_tokens_we_hold_need_not_be_brought() -> None:
    machine = session((7, 8, 9), seq=1, round=3)
    again = assigned(epoch=2, seq=1, tokens=(7, 8), round=2)
    assert machine.assign(again, None, now=1.0) is Assigned.RESTARTED
    assert (machine.tokens_from(0), machine.rewinds) == ((7, 8), 1)


def test_a_stopped_session_lives_on_with_a_later_assignment() -> None:
    machine, peer = session(seq=1), verifier()
    machine.propose((5,), status())
    peer.next_action = Action.SELF_DECODE
    exchange(machine, peer)
    peer.decode_alone(3)
    peer.name(assigned(seq=2))
    assert machine.assign(assigned(tokens=peer.tokens, round=4, seq=2), peer.tokens, now=1.0) is Assigned.ADOPTED
    assert machine.stopped is None
    machine.propose(peer.truth(2), status())
    assert isinstance(exchange(machine, peer), Proceed)
