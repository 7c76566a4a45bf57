"""When a session has waited long enough, and what is no waiting (decision 82)."""

from sdcpd.protocol.deadlines import Deadlines
from sdcpd.protocol.session_values import SessionLimits
from sdcpd.protocol.terms import State

LIMITS = SessionLimits(
    proposal_deadline_s=5.0, first_proposal_deadline_s=20.0, waiting_limit_s=60.0, switch_repeat_s=5.0
)


def test_nothing_runs_while_the_kv_is_not_there() -> None:
    """Pages that are waited for, a long context that is computed: neither is anybody's delay."""
    deadlines = Deadlines(LIMITS, 0.0)
    assert deadlines.next(State.WAITING) == 5.0
    deadlines.hold(2.0)
    deadlines.hold(50.0)
    assert deadlines.next(State.WAITING) is None
    assert deadlines.go_on(1002.0)
    assert not deadlines.go_on(1003.0)
    assert deadlines.next(State.WAITING) == 1005.0
    assert not deadlines.waited_too_long(1059.0)
    assert deadlines.waited_too_long(1060.0)


def test_a_wait_that_began_meanwhile_begins_when_the_kv_is_there() -> None:
    deadlines = Deadlines(LIMITS, 0.0)
    deadlines.hold(2.0)
    deadlines.assigned(100.0)
    assert deadlines.next(State.DRAFTING) is None
    assert deadlines.go_on(300.0)
    assert deadlines.next(State.DRAFTING) == 320.0
    deadlines.hold(310.0)
    assert deadlines.go_on(400.0)
    assert deadlines.next(State.DRAFTING) == 410.0
    deadlines.hold(401.0)
    deadlines.handed_back(402.0)
    assert deadlines.go_on(500.0)
    assert deadlines.next(State.WAITING) == 505.0
