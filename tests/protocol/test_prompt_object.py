"""A long prompt goes as a reference, and its object lives while the session does (draft 5.2; decisions 25, 117)."""

import pytest

from sdcpd.protocol import prompt_object
from sdcpd.protocol.directory import read_directory_record
from sdcpd.protocol.encoding import decode_tokens
from sdcpd.protocol.placement_values import (
    Accepted,
    AskState,
    Assign,
    Lost,
    Name,
    Open,
    Patience,
    Publish,
    Refused,
)
from sdcpd.protocol.terms import State
from tests.support.placement_world import D1, D2, OBJECTS, PROMPT, RECORD, V2, VERIFIER, V, World

REF = f"{OBJECTS}1/0/tokens"
FULL = Refused(status=507)


def of_reference(*drafters: str, patience: Patience | None = None) -> World:
    return World(*drafters, prompt_ref=REF, record=RECORD, patience=patience)


def begun(patience: Patience | None = None) -> World:
    world = of_reference(patience=patience)
    world.take(world.machine.start(world.now))
    return world


@pytest.fixture
def too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any prompt is, for a message."""
    monkeypatch.setattr(prompt_object, "INLINE_LIMIT_BYTES", 2)


# -- before the open -----------------------------------------------------------------------------------------------


def test_it_is_published_before_anything_refers_to_it() -> None:
    world = of_reference(D1)
    world.take(world.machine.start(world.now))
    assert world.wants() == ["Publish"]
    publish = world.next(Publish)
    assert (publish.ref, decode_tokens(publish.octets)) == (REF, PROMPT)
    world.answer(publish, Accepted())
    assert world.wants() == ["WriteRecord"]
    world.store()
    assert read_directory_record(world.record).open.prompt == REF
    opening = world.next(Open)
    assert opening.message.prompt == REF
    world.answer(opening, world.state(State.WAITING))  # with the digest of the tokens, which is what is checked
    naming = world.next(Name)
    assert naming.message.prompt == REF
    world.answer(naming, world.state(State.DRAFTING))
    assert world.next(Assign).message.prompt == REF
    assert world.ending() is None


@pytest.mark.parametrize("refusal", [FULL, Refused(status=413), Refused(status=403)])
def test_a_cache_that_will_not_take_it_has_it_within_the_messages(refusal: Refused) -> None:
    world = begun()
    world.answer(world.next(Publish), refusal)
    world.store()
    assert read_directory_record(world.record).open.prompt == PROMPT
    opening = world.next(Open)
    assert opening.message.prompt == PROMPT
    world.answer(opening, world.state(State.WAITING))
    world.answer(world.next(Name), world.state(State.SELF_DECODING))
    world.wait(300)
    assert "Publish" not in world.wants()


def test_a_cache_that_does_not_answer_is_tried_a_few_times() -> None:
    world = begun()
    for _ in range(2):
        world.answer(world.next(Publish), Lost("no answer"))
        world.retry()
    world.answer(world.next(Publish), Lost("no answer"))
    world.store()
    assert world.next(Open).message.prompt == PROMPT


@pytest.mark.usefixtures("too_long")
def test_one_that_fits_nowhere_ends_a_session_that_has_not_begun() -> None:
    world = begun()
    world.answer(world.next(Publish), FULL)
    world.failed("prompt_unpublished")
    assert world.done()
    assert world.wants() == []


@pytest.mark.usefixtures("too_long")
def test_a_cache_that_is_silent_for_too_long_ends_it_as_well() -> None:
    world = begun(Patience(open_give_up_s=10))
    began = world.now
    while world.ending() is None:
        world.answer(world.next(Publish), Lost("no answer"))
        if world.ending() is None:
            world.retry()
    world.failed("prompt_unpublished")
    assert 10 <= world.now - began < 13


# -- while the session lives ---------------------------------------------------------------------------------------


def renewing() -> World:
    """A session that decodes by itself."""
    world = of_reference().self_decoding()
    assert world.wants() == ["Read"]
    return world


def test_its_life_is_prolonged() -> None:
    world = renewing()
    for _ in range(3):
        world.wait(199)
        assert "Publish" not in world.wants()
        world.wait(1)
        renewal = world.next(Publish)
        assert (renewal.ref, decode_tokens(renewal.octets)) == (REF, PROMPT)
        world.answer(renewal, Accepted())


@pytest.mark.parametrize("outcome", [Lost("no answer"), FULL, Refused(status=413)])
def test_a_renewal_that_failed_is_tried_again_later(outcome: Lost | Refused) -> None:
    world = renewing()
    world.wait(200)
    world.answer(world.next(Publish), outcome)
    world.wait(19)
    assert "Publish" not in world.wants()
    world.wait(1)
    world.answer(world.next(Publish), Accepted())
    assert world.ending() is None


def test_it_ends_with_the_session() -> None:
    world = renewing()
    world.take(world.machine.cancel(world.now))
    world.wait(300)
    assert "Publish" not in world.wants()


def lost_verifier(world: World) -> None:
    """The verifier goes away, another one is there, and all but the prompt is done that comes before its open."""
    del world.alive[V]
    world.alive[V2] = VERIFIER
    world.wait(4)
    world.epoch = 2


def test_it_is_published_again_for_the_next_verifier() -> None:
    world = renewing()
    lost_verifier(world)
    world.published.clear()
    world.store()
    assert decode_tokens(world.published[REF]) == PROMPT
    opening = world.next(Open)
    assert (opening.verifier, opening.message.epoch, opening.message.prompt) == (V2, 2, REF)


def until_published(world: World) -> Publish:
    """Answer all calls to stores up to the write of the prompt."""
    return world.store(spare=REF).next(Publish)


@pytest.mark.usefixtures("too_long")
def test_a_resumed_session_waits_for_room() -> None:
    world = renewing()
    lost_verifier(world)
    for _ in range(3):
        world.answer(until_published(world), FULL)
        assert world.ending() is None
        world.retry()
    world.answer(until_published(world), Accepted())
    world.store()
    assert world.next(Open).message.prompt == REF


def test_a_resumed_session_goes_on_within_the_messages() -> None:
    world = renewing()
    lost_verifier(world)
    world.answer(until_published(world), FULL)
    world.store()
    assert world.next(Open).message.prompt == PROMPT
    assert read_directory_record(world.record).open.prompt == PROMPT


# -- doubts --------------------------------------------------------------------------------------------------------


def test_a_verifier_that_could_not_read_it_finds_it_at_its_next_try() -> None:
    world = begun()
    world.store()
    began = world.now
    while world.now - began < 5:
        world.answer(world.next(Open), Refused(status=503, retry_after_s=2))
        assert "Publish" not in world.wants(), "it was written a moment ago"
        world.retry()
    world.answer(world.next(Open), Refused(status=503, retry_after_s=2))
    renewal = world.next(Publish)
    world.retry()
    world.answer(world.next(Open), Refused(status=503, retry_after_s=2))
    assert "Publish" not in world.wants(), "one is under way"
    world.answer(renewal, Accepted())
    world.retry()
    assert world.next(Open).message.prompt == REF


def test_a_drafter_that_could_not_read_it_is_followed_by_a_write() -> None:
    world = of_reference(D1, D2).opened()
    world.answer(world.next(Name), world.state(State.DRAFTING))
    world.wait(6)
    world.answer(world.next(Assign), Refused(status=503, retry_after_s=1))
    assert world.next(Publish).ref == REF
    assert "Name" in world.wants()


def test_nobody_doubts_what_goes_within_the_messages() -> None:
    world = World(D1, D2).opened()
    world.answer(world.next(Name), world.state(State.DRAFTING))
    world.wait(6)
    world.answer(world.next(Assign), Refused(status=503, retry_after_s=1))
    assert "Publish" not in world.wants()


# -- after a restart -----------------------------------------------------------------------------------------------


def test_a_router_that_takes_the_session_up_prolongs_it_first() -> None:
    world = of_reference()
    world.take(world.machine.adopt(1, '"record"', world.now))
    assert world.wants() == ["Publish", "ReadLog"]
    world.store()
    world.answer(world.next(AskState), world.state(State.SELF_DECODING))
    assert world.next(Name).message.prompt == REF
    world.wait(200)
    assert world.next(Publish).ref == REF


def test_a_renewal_that_a_failover_overtook_changes_nothing() -> None:
    world = of_reference()
    world.take(world.machine.adopt(1, '"record"', world.now))
    renewal = world.next(Publish)
    world.store()
    world.answer(world.next(AskState), Refused(status=404))
    again = until_published(world)
    world.answer(renewal, Refused(status=403))
    world.answer(again, Accepted())
    assert world.wants() == ["WriteRecord"]
