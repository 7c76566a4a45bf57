"""The router's machine where verifiers say little or the wrong thing (draft 6.1, 6.7; decisions 41, 49)."""

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from sdcpd.protocol.fleet import Fleet
from sdcpd.protocol.messages import Event
from sdcpd.protocol.placement_values import Accepted, Lost, Phase, words
from sdcpd.protocol.terms import Action, State
from tests.scenarios.router_player import RouterPlayer
from tests.scenarios.trace import command
from tests.support.messages import SESSION


def played(*lines: str) -> RouterPlayer:
    """A router with verifier v and drafter d, after these commands of a scenario."""
    player = RouterPlayer()
    for line in ("status v", "status d", "start", *lines):
        player.do(command(line))
    return player


DRAFTING = ("answer open state waiting", "answer name state drafting", "answer assign ok")


@pytest.mark.parametrize("kind", [Action.CONTINUE, Action.REDUCE])
def test_events_that_ask_for_nothing_change_nothing(kind: Action) -> None:
    """Only switch, self_decode, finish and fail are events of 6.5.2; others are taken, as any later kind would be."""
    player = played(*DRAFTING)
    assert player.do(command(f"event {kind.name.lower()}")) == ["nothing to do"]
    assert player.placement.phase is Phase.SETTLED


def test_an_event_without_a_round() -> None:
    """49: `round` is an addition of ours; a verifier of others leaves it out."""
    player = played(*DRAFTING, "commit 20")
    event = Event(session=SESSION, epoch=1, kind=Action.SWITCH, committed=1, digest=bytes(32), seq=UNSET)
    assert player.placement.event(event, player.now) != ()
    assert player.placement.round == 0


@pytest.mark.parametrize("kind", ["open", "name"])
@pytest.mark.parametrize("wrong", [{"session": bytes(16)}, {"epoch": 2}])
def test_an_answer_for_another_session_or_epoch_is_a_breach(kind: str, wrong: dict[str, Any]) -> None:
    player = played(*(DRAFTING[:1] if kind == "name" else ()))
    call = player.calls[kind]
    state = msgspec.structs.replace(player.state(State.DRAFTING, None), **wrong)
    player.placement.outcome(call.call, state, player.now)
    assert player.placement.ending is not None
    assert player.placement.ending.reason == "verifier_breach"


def test_pages_that_come_short_keep_an_assignment_waiting() -> None:
    """41: assigned only with the tokens up to the answered `committed`; two pages may be needed to get there."""
    player = played("answer open state waiting", "commit 20,21,22", "answer name state drafting")
    assert player.placement.phase is Phase.GATHERING
    held, player.output = player.output, (20,)
    assert player.do(command("answer read tokens")) == ["read from 1"]
    assert player.placement.phase is Phase.GATHERING
    player.output = held
    assert player.do(command("answer read tokens")) == ["read from 3", "publish 1/1/tokens"]


def test_words_for_what_was_not_hoped_for() -> None:
    assert words(Lost("too slow")) == "no answer (too slow)"
    assert words(Accepted()) == "answered with Accepted"


def test_a_placement_at_somebody_unknown_is_not_counted() -> None:
    fleet = Fleet()
    fleet.placed("https://nobody.example/drafter/")
    assert fleet.instances() == ()


@pytest.mark.parametrize("kind", ["switch", "self_decode"])
def test_an_event_that_overtakes_the_answer_to_the_open(kind: str) -> None:
    """The open is under way or being repeated; its answer brings a fresh state, and the naming follows from that."""
    player = played()
    assert player.do(command(f"event {kind}")) == ["nothing to do"]
    assert player.placement.phase is Phase.OPENING
    assert player.do(command("answer open state waiting")) == ["read from 0", "name d at v, seq 1"]
