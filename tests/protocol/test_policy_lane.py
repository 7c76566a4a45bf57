"""The router's policies on their way to the verifier (draft 6.6; decisions 18, 36, 50, 51)."""

from typing import Any

from msgspec import UNSET

from sdcpd.protocol.messages import ContractSampling, Sampling, SessionState
from sdcpd.protocol.placement_values import Lost, Patience, Plan, Refused, SetPolicy
from sdcpd.protocol.policy_lane import ROUNDS_AHEAD, PolicyLane
from sdcpd.protocol.retry_lane import Outbox
from tests.support.messages import LOG, ROUTER, SESSION, VERIFIER, contract

SECRET = Sampling(temperature_milli=700, seed=42)
HOT = Sampling(temperature_milli=2000)


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "session": SESSION,
        "contract": contract(rule=2),
        "prompt": (1,),
        "verifier": VERIFIER,
        "verifier_boot": None,
        "vocabulary": 50,
        "router": ROUTER,
        "commit_log": LOG,
        "objects": "https://c.example/cache/v1/s/-/o/x/",
        "m_init": 8,
        "incarnation": 1,
        "speculation": True,
    }
    return Plan(**(values | changes))


class Stand:
    def __init__(self, of: Plan) -> None:
        self.outbox = Outbox(Patience(), 1.0)
        self.lane = PolicyLane(of, self.outbox)

    def sent(self) -> list[tuple[int, Sampling]]:
        steps = self.outbox.take()
        assert all(isinstance(step, SetPolicy) for step in steps)
        return [(step.message.from_round, step.message.sampling) for step in steps if isinstance(step, SetPolicy)]


def state(round_: int = 0) -> SessionState:
    return SessionState(session=SESSION, epoch=1, round=round_, committed=0, digest=bytes(32))


def test_nothing_is_sent_without_a_wish() -> None:
    stand = Stand(plan())
    assert not stand.lane.holds_back(0.0)
    assert stand.lane.for_drafters() is UNSET
    assert stand.sent() == []


def test_a_secret_seed_goes_first_and_to_the_verifier_alone() -> None:
    stand = Stand(plan(policy=SECRET))
    assert stand.lane.holds_back(0.0)
    assert stand.lane.holds_back(0.0)
    assert stand.sent() == [(1, SECRET)]
    assert stand.lane.for_drafters() == Sampling(temperature_milli=700)
    assert stand.lane.outcome(state(), 0.1)
    assert not stand.lane.holds_back(0.2)


def test_another_verifier_is_told_before_anybody_is_named() -> None:
    stand = Stand(plan())
    stand.lane.reopened("https://w.example/verifier/", 7)
    assert not stand.lane.holds_back(0.0)
    stand.lane.change(HOT, 7, 0.0)
    assert stand.lane.outcome(state(7), 0.1)
    stand.sent()
    stand.lane.reopened("https://x.example/verifier/", 12)
    assert stand.lane.holds_back(1.0)
    assert stand.lane.lane.action is not None
    assert stand.lane.lane.action.verifier == "https://x.example/verifier/"
    assert stand.sent() == [(13, HOT)]


def test_too_late_is_tried_further_on() -> None:
    stand = Stand(plan())
    stand.lane.change(HOT, 4, 0.0)
    assert stand.sent() == [(5, HOT)]
    assert not stand.lane.outcome(Refused(status=409, state=state(9)), 0.1)
    assert stand.sent() == [(9 + ROUNDS_AHEAD, HOT)]
    assert stand.lane.outcome(state(10), 0.2)


def test_another_seed_may_be_named() -> None:
    stand = Stand(plan(policy=SECRET))
    stand.lane.holds_back(0.0)
    stand.lane.outcome(state(), 0.1)
    stand.sent()
    stand.lane.change(Sampling(seed=7), 3, 0.2)
    assert stand.sent() == [(4, Sampling(seed=7))]


def test_a_lost_answer_is_sent_again_unchanged() -> None:
    stand = Stand(plan())
    stand.lane.change(HOT, 0, 0.0)
    first = stand.sent()
    assert not stand.lane.outcome(Lost("gone"), 0.1)
    stand.lane.lane.repeat(10.0)
    assert stand.sent() == first


def test_a_newer_wish_follows_the_one_on_its_way() -> None:
    """While naming waits for the first policy, a change waits too, and goes out behind it."""
    stand = Stand(plan(policy=SECRET))
    stand.lane.holds_back(0.0)
    stand.lane.change(HOT, 0, 0.1)
    kept = Sampling(temperature_milli=2000, seed=42)
    assert stand.sent() == [(1, SECRET)]
    assert not stand.lane.outcome(state(), 0.2)
    assert stand.sent() == [(1, kept)]
    assert stand.lane.outcome(state(), 0.3)
    assert stand.lane.for_drafters() == HOT


def test_a_first_policy_that_is_refused_for_good_is_told() -> None:
    for status, refused in ((501, False), (400, True), (404, False), (410, False)):
        stand = Stand(plan(policy=SECRET))
        stand.lane.holds_back(0.0)
        assert not stand.lane.outcome(Refused(status=status), 0.1)
        assert stand.lane.refused == refused


def test_a_refusal_for_good_ends_it() -> None:
    stand = Stand(plan())
    stand.lane.change(HOT, 0, 0.0)
    assert not stand.lane.outcome(Refused(status=410), 0.1)
    assert stand.lane.lane.action is None


def test_the_seed_of_rule_65281_is_kept_and_no_secret() -> None:
    of = contract(rule=65281, sampling=ContractSampling(seed=5))
    stand = Stand(plan(contract=of))
    stand.lane.change(HOT, 0, 0.0)
    wanted = Sampling(temperature_milli=2000, seed=5)
    assert stand.sent() == [(1, wanted)]
    assert stand.lane.for_drafters() == wanted
