"""An assignment that arrived while a proposal was out, once the outcome is known (draft 6.2; decision 43)."""

from sdcpd.protocol.draft_session import DraftSession
from sdcpd.protocol.draft_steps import Proceed
from sdcpd.protocol.messages import Sampling, SessionState, Verdict
from sdcpd.protocol.terms import Action
from tests.support.draft_sessions import CONTRACT, PROMPT, assigned, session
from tests.support.messages import SESSION, status
from tests.support.verifying import chain

TRUTH = (7, 8, 9, 10, 11)


def digest(count: int) -> bytes:
    return chain(CONTRACT, PROMPT, TRUTH)[count]


def ahead() -> DraftSession:
    """Round 1 is out; an assignment tells of round 3, five tokens committed."""
    machine = session(m_init=4, seq=1)
    machine.propose((7,), status())
    machine.assign(assigned(tokens=TRUTH, round=3, seq=2, m_init=2), TRUTH, now=1.0)
    assert machine.committed == 0
    return machine


def test_a_verdict_that_is_behind_it_is_followed_by_it() -> None:
    machine = ahead()
    verdict = Verdict(
        session=SESSION,
        epoch=1,
        round=1,
        accepted=1,
        emitted=(7, 8),
        committed=2,
        digest=digest(2),
        action=Action.CONTINUE,
        m_cap=4,
        low=0,
        load=0,
    )
    assert isinstance(machine.verdict(verdict, now=2.0), Proceed)
    assert (machine.round, machine.tokens_from(0), machine.m_cap) == (3, TRUTH, 2)


def test_a_stale_base_that_is_behind_it_is_followed_by_it() -> None:
    machine = session(tokens=(7, 8), round=1, seq=1)
    machine.propose((9,), status())
    machine.assign(assigned(tokens=TRUTH, round=3, seq=2, m_init=2), TRUTH, now=1.0)
    state = SessionState(session=SESSION, epoch=1, round=0, committed=0, digest=digest(0))
    step = machine.refused(409, "sdcp-stale-base", state=state, retry_after_s=None, m_cap=None)
    assert isinstance(step, Proceed)
    assert (machine.round, machine.tokens_from(0), machine.m_cap) == (3, TRUTH, 2)


def test_the_profile_of_the_latest_assignment_is_in_force() -> None:
    """6.6: the router includes it in the "sampling" member of subsequent assignments."""
    machine = session(seq=1)
    machine.assign(assigned(seq=2, sampling=Sampling(top_k=3)), None, now=1.0)
    assert machine.sampling == Sampling(top_k=3)
