"""A conversation stays where its prefix is, weighed against load (draft 6.1: router policy)."""

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from sdcpd.protocol.affinity import LEAST_TOKENS, Affinity, weight
from sdcpd.protocol.drafter_choice import DrafterChoice
from sdcpd.protocol.fleet import Fleet, VerifierNeed
from sdcpd.protocol.messages import Status
from sdcpd.protocol.placement_values import Patience
from tests.support.placement_world import CONTRACT, D1, D2, V2, World

LENGTH = 256
VERIFIERS = tuple(f"http://v{number}/verifier/" for number in range(4))
DRAFTERS = tuple(f"http://d{number}/drafter/" for number in range(4))


def turn(conversation: int, more: int = 0) -> tuple[int, ...]:
    """The prompt of a turn: all of the turn before, and `more` tokens."""
    return (conversation, *range(LENGTH - 1), *range(more))


def status(instance: str, **members: Any) -> Status:
    verifier = instance.endswith("/verifier/")
    fields: dict[str, Any] = {"load": 0, "queue": 0, "ttl_ms": 3000, "tokenizer": CONTRACT.tokenizer}
    fields |= {"role": 2, "model": CONTRACT.target} if verifier else {"role": 1}
    return Status(instance=instance, **fields | members)


def fleet_of(affinity: Affinity | None = None) -> Fleet:
    fleet = Fleet(affinity=affinity or Affinity())
    for instance in (*VERIFIERS, *DRAFTERS):
        fleet.report(status(instance), 0.0)
    return fleet


def places(fleet: Fleet, prompt: tuple[int, ...]) -> tuple[str, str]:
    """The verifier and the drafter at which a session would begin now."""
    need = VerifierNeed(tokenizer=CONTRACT.tokenizer, target=None, rule=1, prefix=fleet.affinity.prefix(prompt))
    plan = replace(World().machine.plan, prompt=prompt, vocabulary=None)
    drafter = DrafterChoice(plan, fleet, Patience()).candidate(0.0, avoid=None, dropping=())
    assert drafter is not None
    return fleet.verifiers(need, 0.0)[0].uri, drafter.uri


def test_two_turns_of_a_conversation_meet_the_same_verifier_and_drafter() -> None:
    for conversation in range(20):
        fleet = fleet_of()
        first = places(fleet, turn(conversation))
        for instance in first:
            fleet.placed(instance)
        assert places(fleet, turn(conversation, 50)) == first
        assert places(fleet_of(), turn(conversation, 900)) == first, "at any router, and after a restart"


def test_new_conversations_spread() -> None:
    fleet = fleet_of()
    found = [places(fleet, turn(conversation)) for conversation in range(400)]
    for instances in (VERIFIERS, DRAFTERS):
        counts = Counter(one for pair in found for one in pair if one in instances)
        assert set(counts) == set(instances)
        assert max(counts.values()) < 2 * min(counts.values())


@pytest.mark.parametrize("members", [{"load": 90}, {"load": 25}, {"queue": 5}])
def test_one_that_is_overloaded_or_much_busier_is_passed_over_and_found_again(members: dict[str, Any]) -> None:
    fleet = fleet_of()
    verifier, drafter = places(fleet, turn(1))
    for instance in (verifier, drafter):
        fleet.report(status(instance, accept_milli=1000, **members), 0.0)
    for other in {*VERIFIERS, *DRAFTERS} - {verifier, drafter}:
        fleet.report(status(other, accept_milli=1000), 0.0)
    second = places(fleet, turn(1))
    assert second[0] != verifier
    assert second[1] != drafter
    assert places(fleet, turn(1, 10)) == second, "it stays there, too"
    for instance in (verifier, drafter):
        fleet.report(status(instance, accept_milli=1000), 0.0)
    assert places(fleet, turn(1)) == (verifier, drafter)


def test_busier_by_the_number_alone_is_still_a_home() -> None:
    """As gateways have it: where all are busy, twenty percent more are no reason to run a prefill again."""
    affinity = Affinity()
    assert affinity.may_stay(load=80, cost=800, least=560)
    assert not affinity.may_stay(load=80, cost=800, least=500)
    assert affinity.may_stay(load=20, cost=200, least=0)


def test_a_home_that_drafts_much_worse_is_passed_over_and_one_without_a_figure_is_not() -> None:
    fleet = fleet_of()
    _, drafter = places(fleet, turn(1))
    for other in {*DRAFTERS} - {drafter}:
        fleet.report(status(other, accept_milli=900), 0.0)
    assert places(fleet, turn(1))[1] == drafter
    fleet.report(status(drafter, accept_milli=750), 0.0)
    assert places(fleet, turn(1))[1] == drafter
    fleet.report(status(drafter, accept_milli=300), 0.0)
    assert places(fleet, turn(1))[1] != drafter


def test_when_all_are_overloaded_load_decides() -> None:
    fleet = Fleet()
    for number, instance in enumerate((*VERIFIERS, *DRAFTERS)):
        fleet.report(status(instance, load=99 - number % 4), 0.0)
    for conversation in range(10):
        assert places(fleet, turn(conversation)) == (VERIFIERS[3], DRAFTERS[3])


def test_one_that_is_gone_never_wins_and_only_its_conversations_move() -> None:
    fleet = fleet_of()
    before = [places(fleet, turn(conversation)) for conversation in range(60)]
    gone = Fleet()
    for instance in (*VERIFIERS[1:], *DRAFTERS[1:]):
        gone.report(status(instance), 0.0)
    for conversation, (verifier, drafter) in enumerate(before):
        now = places(gone, turn(conversation))
        assert now[0] == verifier if verifier != VERIFIERS[0] else now[0] in VERIFIERS[1:]
        assert now[1] == drafter if drafter != DRAFTERS[0] else now[1] in DRAFTERS[1:]


def test_an_expired_home_never_wins() -> None:
    fleet = Fleet()
    fleet.report(status(V2, ttl_ms=150), 0.0)
    fleet.report(status(VERIFIERS[0], load=95), 0.0)
    need = VerifierNeed(tokenizer=CONTRACT.tokenizer, target=None, rule=1, prefix=b"p" * 32)
    assert fleet.verifiers(need, 0.0)[0].uri == V2
    for step in range(1, 5):
        fleet.tick(step * 0.04)
    assert [one.uri for one in fleet.verifiers(need, 0.16)] == [VERIFIERS[0]]


def test_the_prefix_is_the_first_tokens_of_a_long_prompt_and_the_fewer_of_a_short_one() -> None:
    affinity = Affinity()
    assert affinity.prefix(turn(1)) == affinity.prefix(turn(1, 500))
    assert affinity.prefix(turn(1)) != affinity.prefix(turn(2))
    young = turn(1)[:LEAST_TOKENS]
    assert affinity.prefix(young) == affinity.prefix(turn(1)[: LENGTH - 1]) != affinity.prefix(turn(1))
    assert affinity.prefix(young[:-1]) is None, "no full block of KV, no home"
    assert Affinity(tokens=16).prefix(young[:16]) == Affinity(tokens=16).prefix(young)
    assert Affinity(tokens=0).prefix(turn(1)) is None


def test_without_it_load_alone_decides() -> None:
    fleet = fleet_of(Affinity(tokens=0))
    assert {places(fleet, turn(conversation)) for conversation in range(10)} == {(VERIFIERS[0], DRAFTERS[0])}


def test_weights_are_for_ever() -> None:
    """Two versions of the program must agree, or all conversations would move with an upgrade."""
    assert weight(b"p" * 32, V2).hex().startswith("45587b72a30fc89a")


def test_a_switch_avoids_the_home() -> None:
    world = World(D1, D2)
    plan = replace(world.machine.plan, prompt=turn(1))
    choice = DrafterChoice(plan, world.fleet, Patience())
    home = choice.candidate(world.now, avoid=None, dropping=())
    assert home is not None
    other = choice.candidate(world.now, avoid=home.uri, dropping=())
    assert other is not None
    assert {home.uri, other.uri} == {D1, D2}
