"""How a session at its verifier ends or is lost, in the less common ways (draft 6.3 step 8; decisions 30, 64, 81)."""

import pytest
from msgspec import UNSET

from sdcpd.protocol.commit_log import CommitRecord, write_record
from sdcpd.protocol.problems import BadProposal
from sdcpd.protocol.session_values import Stopped
from sdcpd.protocol.terms import Action, LadderAction, State
from tests.support.messages import OTHER_DRAFTER, VERIFIER, assignment
from tests.support.verifying import Verifying


def scored() -> Verifying:
    """A round committed, and the record of the next one on its way."""
    bench = Verifying()
    bench.assign()
    bench.good()
    bench.propose(20)
    bench.score(20, 21)
    return bench


def test_another_writers_record_ends_serving() -> None:
    """Decision 30: a record in the log that it did not write counts as being fenced."""
    bench = scored()
    foreign = CommitRecord(epoch=1, round=2, emitted=(99,), committed=3, digest=bytes(32))
    bench.log.append(write_record(foreign))
    found = bench.append()
    assert isinstance(found, Stopped)
    assert found.reason == bench.session.stopped == "another writer's record is in the log"


def test_a_log_that_lost_records_ends_serving_loudly() -> None:
    bench = scored()
    bench.log.clear()
    found = bench.append("lost")
    assert isinstance(found, Stopped)
    assert "store fault" in found.reason


def test_a_failed_pass_of_dropped_work_changes_nothing() -> None:
    bench = Verifying()
    bench.assign()
    bench.propose(20)
    assert bench.work is not None
    ticket = bench.work.ticket
    bench.session.cancel("cancelled")
    ending = [bench.session.ending]
    assert not bench.session.score_failed(ticket, "non-finite logits")
    bench.append()
    assert [*ending, bench.session.ending] == [True, False]
    assert bench.state.reason == "cancelled"


def test_a_period_that_is_over_hands_back_with_its_last_append() -> None:
    """81: what ends the period is known while a token is still on its way; nobody is asked for before it is durable."""
    bench = Verifying(fallback=(LadderAction.SELF_DECODE,), low_rounds=1, self_load=50, self_max=2)
    bench.assign()
    bench.low()
    for token in (40, 41):
        bench.self_work()
        bench.score(token)
    bench.append()
    assert bench.self_work() is None
    assert bench.self_work() is None, "once over, it stays so"
    assert (bench.state.state, bench.events()) == (State.SELF_DECODING, [])
    bench.append()
    assert bench.state.state == State.WAITING
    assert [(event.kind, event.committed) for event in bench.events()] == [(Action.SELF_DECODE, 3)]


def test_assignments_without_seq_follow_the_draft_and_43() -> None:
    """111, without `seq`: the latest received counts, and the same drafter again changes nothing."""
    bench = Verifying()
    plain = assignment(contract=bench.contract)
    bench.session.assign(plain, 0.0)
    assert bench.state.seq is UNSET
    bench.good()
    cap = bench.session.m_cap
    bench.session.assign(assignment(contract=bench.contract, m_init=1), 0.0)
    assert bench.session.m_cap == cap, "m_cap is kept"
    bench.session.assign(assignment(contract=bench.contract, drafter=OTHER_DRAFTER, m_init=1), 0.0)
    assert bench.session.m_cap == 1
    bench.propose(20, peer=OTHER_DRAFTER, drafter=OTHER_DRAFTER)


def test_refusals_count_in_a_row() -> None:
    """82: a good proposal between two bad ones starts the count anew."""
    bench = Verifying()
    bench.assign()
    for _ in range(3):
        for _ in range(2):
            with pytest.raises(BadProposal):
                bench.propose(100)
        bench.good()
    assert bench.state.state == State.DRAFTING


def test_nothing_runs_out_while_the_verifier_decodes_alone() -> None:
    """82: both waits are for somebody else."""
    bench = Verifying()
    bench.assign(VERIFIER)
    assert bench.session.next_deadline() is None
    bench.wait(1000)
    assert bench.state.state == State.SELF_DECODING


def test_one_token_is_computed_at_a_time() -> None:
    bench = Verifying()
    bench.assign(VERIFIER)
    assert bench.self_work() is not None
    assert bench.self_work() is None
    bench.score(40)
    assert bench.self_work() is not None


def test_a_second_cancel_changes_nothing() -> None:
    """37: neither while the end is on its way nor once it is durable, and not where the session was lost."""
    bench = Verifying()
    bench.session.cancel("cancelled")
    bench.session.cancel("again")
    bench.append()
    bench.session.cancel("and again")
    assert bench.append() is None
    assert bench.state.reason == "cancelled"
    lost = scored()
    lost.fence()
    lost.append()
    lost.session.cancel("cancelled")
    assert lost.append() is None


def test_a_session_that_never_had_a_drafter_says_nothing_while_it_waits() -> None:
    """82: without an assignment in this epoch the session is the router's to move."""
    bench = Verifying(self_load=100)
    bench.wait(5)
    assert (bench.state.state, bench.events()) == (State.WAITING, [])
