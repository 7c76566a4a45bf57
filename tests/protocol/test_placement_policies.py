"""Sampling policies in the router's machine for a session (draft 6.6; decisions 18, 51)."""

from msgspec import UNSET
from msgspec.structs import replace

from sdcpd.protocol.directory import read_directory_record
from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.placement import Placement
from sdcpd.protocol.placement_values import (
    Accepted,
    Assign,
    Close,
    Name,
    Open,
    Patience,
    Phase,
    Refused,
    SetPolicy,
    WriteRecord,
)
from sdcpd.protocol.policy_lane import ROUNDS_AHEAD, PolicyLane
from sdcpd.protocol.retry_lane import Outbox
from sdcpd.protocol.terms import Action, State
from tests.support.placement_world import D1, RECORD, World

SECRET, HOT = Sampling(temperature_milli=700, seed=42), Sampling(temperature_milli=2000)


def seeded() -> World:
    """A session under rule 2 whose seed is for the verifier alone; its open is answered."""
    world = World(D1)
    plan = replace(world.machine.plan, contract=replace(world.machine.plan.contract, rule=2), policy=SECRET)
    world.machine = Placement(plan, world.fleet, Patience())
    world.take(world.machine.start(world.now))
    world.answer(world.next(Open), world.state(State.WAITING))
    return world


def test_nobody_is_named_before_the_policy_is_in_force() -> None:
    world = seeded()
    assert "Name" not in world.wants()
    policy = world.next(SetPolicy)
    assert (policy.message.from_round, policy.message.sampling) == (1, SECRET)
    world.event(Action.SWITCH, seq=None)  # the verifier grows impatient
    assert "Name" not in world.wants()
    world.answer(policy, world.state(State.WAITING))
    assert world.next(Name).message.sampling == Sampling(temperature_milli=700)


def test_a_verifier_that_refuses_it_fails_the_session() -> None:
    world = seeded()
    world.answer(world.next(SetPolicy), Refused(status=400))
    world.failed("policy_refused")
    world.next(Close)


def test_a_busy_verifier_is_asked_again() -> None:
    world = seeded()
    policy = world.next(SetPolicy)
    world.answer(policy, Refused(status=503))
    world.wait(5.0)
    again = world.next(SetPolicy)
    assert again.message == policy.message
    world.answer(again, world.state(State.WAITING))
    world.next(Name)


def test_a_router_that_takes_the_session_up_finds_the_profile() -> None:
    """Decision 106: the directory keeps it, since neither contract nor assignments hold the seed."""
    world = World(D1, record=RECORD)
    plan = replace(world.machine.plan, contract=replace(world.machine.plan.contract, rule=2), policy=SECRET)
    world.machine = Placement(plan, world.fleet, Patience())
    world.take(world.machine.start(world.now))
    (policy,) = read_directory_record(world.next(WriteRecord).octets).policies
    assert policy.sampling == SECRET


def test_leaving_meanwhile_closes_the_session() -> None:
    world = seeded()
    policy = world.next(SetPolicy)
    world.take(world.machine.cancel(world.now))
    world.next(Close)
    world.answer(policy, world.state(State.WAITING))
    assert "Name" not in world.wants()


def test_a_change_is_told_to_verifier_then_drafter() -> None:
    """ "the router includes it in the "sampling" member of subsequent assignments; the contract in those assignments is
    unchanged." """
    world = World(D1).drafting()
    seq = world.machine.seq
    world.take(world.machine.set_sampling(HOT, world.now))
    assert world.wants().count("Assign") == 0
    world.answer(world.next(SetPolicy), world.state(State.DRAFTING))
    naming = world.next(Name)
    assert naming.message.drafter == D1
    world.answer(naming, world.state(State.DRAFTING))
    assigned = world.next(Assign)
    assert (assigned.message.sampling, assigned.message.seq) == (HOT, seq + 1)
    assert assigned.message.contract == world.machine.plan.contract
    world.answer(assigned, Accepted())
    assert world.machine.phase is Phase.SETTLED


def test_a_change_while_the_verifier_decodes_alone_needs_no_assignment() -> None:
    world = World().self_decoding()
    world.take(world.machine.set_sampling(HOT, world.now))
    world.answer(world.next(SetPolicy), world.state(State.SELF_DECODING))
    assert "Name" not in world.wants()


def test_a_change_during_a_naming_rides_on_its_assignment() -> None:
    world = World(D1).opened()
    naming = world.next(Name)
    assert naming.message.sampling is UNSET
    world.take(world.machine.set_sampling(HOT, world.now))
    world.answer(world.next(SetPolicy), world.state(State.WAITING))
    world.answer(naming, world.state(State.DRAFTING))
    assert world.next(Assign).message.sampling == HOT


def test_a_session_that_ends_takes_no_change() -> None:
    world = World(D1).drafting()
    world.take(world.machine.cancel(world.now))
    world.take(world.machine.set_sampling(HOT, world.now))
    assert "SetPolicy" not in world.wants()


def test_a_later_change_is_never_for_an_earlier_round() -> None:
    """50: of several that are pending the one of the highest `from_round` would come last, and be in force for good."""
    world = World(D1).drafting()
    world.take(world.machine.set_sampling(SECRET, world.now))
    late = world.next(SetPolicy)
    world.answer(late, Refused(status=409, state=world.state(State.DRAFTING, round=3)))
    first = world.next(SetPolicy)
    assert first.message.from_round == 3 + ROUNDS_AHEAD
    world.answer(first, world.state(State.DRAFTING))
    world.take(world.machine.set_sampling(HOT, world.now))
    assert world.next(SetPolicy).message.from_round == first.message.from_round


def taken_up(*profiles: Sampling) -> PolicyLane:
    """A router knows from the directory what a session began with; its log, of two rounds, names these profiles."""
    plan = replace(World(D1).machine.plan, policy=SECRET)
    lane = PolicyLane(plan, Outbox(Patience(), 1.0))
    lane.found(plan.verifier, 2, profiles[-1] if profiles else UNSET)
    return lane


def test_a_profile_that_was_replaced_does_not_return_with_a_restarted_router() -> None:
    lane = taken_up(SECRET, HOT)
    assert not lane.holds_back(0.0), "its verifier has it"
    assert lane.wanted == HOT
    lane.reopened("http://v2/verifier/", 2, HOT)
    assert lane.holds_back(0.0)
    assert lane.lane.action is not None
    assert lane.lane.action.message.sampling == HOT


def test_before_any_round_it_is_told_again() -> None:
    lane = taken_up()
    lane.found("http://v/verifier/", 0)
    assert lane.holds_back(0.0)
    assert lane.wanted == SECRET


def test_a_wish_of_this_router_stands_above_the_log() -> None:
    lane = taken_up(SECRET)
    lane.change(HOT, 2, 0.0)
    lane.found("http://v/verifier/", 3, SECRET)
    assert lane.holds_back(0.0)
    assert lane.wanted == replace(HOT, seed=SECRET.seed)
