"""Rule 2 in the session machine: what a round waits for, and how it is given up (draft 6.3 step 5; 46, 53, 63, 82)."""

import pytest

from sdcpd.protocol.acceptance import draw_each
from sdcpd.protocol.draft_rows import inline, one_hot
from sdcpd.protocol.draws import RoundDraws
from sdcpd.protocol.messages import Proposal
from sdcpd.protocol.problems import BadProposal, LimitExceeded, NotAssigned
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Begin, Join, SessionLimits, Settled
from sdcpd.protocol.terms import State
from tests.support.messages import DRAFTER, VERIFIER, assignment, contract, proposal, session_open

OF = contract(rule=2, stop=())
REF = "https://c.example/cache/v1/s/-/o/AAECAwQFBgcICQoLDA0ODw/1/1/q"


def session() -> Session:
    machine = Session(
        session_open(contract=OF),
        instance=VERIFIER,
        prompt=(1, 1, 1),
        vocabulary=50,
        limits=SessionLimits(round_row_bytes=3 * 4 * 50),
        log_tag='"0"',
        now=0.0,
    )
    machine.assign(assignment(contract=OF), 0.0)
    return machine


def message(machine: Session, tokens: tuple[int, ...], **changes: object) -> Proposal:
    at = machine.prefix.at
    return proposal(tokens, round=at.round + 1, base=at.committed, base_digest=at.digest, q_rows=REF, **changes)


def begin(machine: Session, tokens: tuple[int, ...] = (7, 8)) -> Begin:
    answer = machine.propose(DRAFTER, message(machine, tokens), 1.0)
    assert isinstance(answer, Begin)
    return answer


def waiting(machine: Session) -> bool:
    return machine.state is State.WAITING


def test_a_round_commits_what_passed_its_tests() -> None:
    machine = session()
    begun = begin(machine)
    assert begun.rows is None
    assert machine.rows_obtained(begun.work.ticket)
    assert isinstance(machine.propose(DRAFTER, message(machine, (7, 8)), 1.0), Join)
    assert machine.scored(begun.work.ticket, (7, 30), load=0)
    settled = machine.appended('"1"', 2.0)
    assert isinstance(settled, Settled)
    verdict = machine.awaited(1)
    assert verdict is not None
    assert (verdict.accepted, verdict.emitted) == (1, (7, 30))


def test_rows_that_come_along_are_checked_at_once() -> None:
    machine = session()
    answer = machine.propose(DRAFTER, message(machine, (7,), q=inline([one_hot(7)])), 1.0)
    assert isinstance(answer, Begin)
    assert answer.rows is not None
    assert [row.chosen for row in answer.rows] == [1.0]
    other = session()
    with pytest.raises(BadProposal):
        other.propose(DRAFTER, message(other, (7,), q=inline([one_hot(8)])), 1.0)
    with pytest.raises(BadProposal, match="q_rows: missing"):
        other.propose(DRAFTER, proposal((7,), base_digest=other.prefix.at.digest), 1.0)


def test_a_round_given_up_can_come_again_with_other_tokens() -> None:
    machine = session()
    first = begin(machine)
    assert machine.rows_refused(first.work.ticket, 2.0)
    assert machine.settled
    assert machine.next_deadline() is not None
    second = begin(machine, (9,))
    assert second.work.round == first.work.round == 1
    assert not machine.rows_refused(first.work.ticket, 2.0)
    assert not machine.rows_obtained(first.work.ticket)
    assert not machine.scored(first.work.ticket, (7, 8, 9), load=0)


def test_three_in_a_row_end_the_assignment() -> None:
    """A proposal whose rows were obtained begins the count anew; being over a limit is no refusal."""
    machine = session()
    for _ in range(2):
        machine.rows_refused(begin(machine).work.ticket, 2.0)
    good = begin(machine)
    machine.rows_obtained(good.work.ticket)
    machine.scored(good.work.ticket, (7, 8, 9), load=0)
    machine.appended('"1"', 3.0)
    for _ in range(2):
        machine.rows_refused(begin(machine).work.ticket, 4.0)
    with pytest.raises(LimitExceeded) as limited:
        begin(machine, (1, 2, 3, 4))
    assert limited.value.m_cap == 3
    assert waiting(machine) is False
    machine.rows_refused(begin(machine).work.ticket, 5.0)
    assert waiting(machine)
    with pytest.raises(NotAssigned):
        begin(machine)


def test_bad_tokens_count_with_bad_rows() -> None:
    machine = session()
    machine.rows_refused(begin(machine).work.ticket, 2.0)
    for _ in range(2):
        with pytest.raises(BadProposal):
            begin(machine, (50,))
    assert machine.state is State.WAITING


def test_a_waiting_assignment_comes_in_once_the_round_is_given_up() -> None:
    machine = session()
    begun = begin(machine)
    other = assignment(contract=OF, drafter="https://e.example/drafter/")
    machine.assign(other, 1.0)
    machine.rows_refused(begun.work.ticket, 2.0)
    machine.assign(other, 2.0)
    assert machine.named.uri == "https://e.example/drafter/"


def test_each_row_draws_with_its_own_value() -> None:
    assert draw_each([[1, 1], [1, 3], [0, 2]], RoundDraws((), (0.6, 0.2, 0.0))) == (1, 0, 1)
