"""The router's machine for one session, stepped by hand (draft 6.1, 6.5.2, 6.7, 6.9; decisions 30, 36, 37, 41, 110)."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from sdcpd.protocol.directory import read_directory_record
from sdcpd.protocol.encoding import decode_tokens, encode
from sdcpd.protocol.last_record import END_GIVE_UP_S
from sdcpd.protocol.messages import Output, SpeculationStats
from sdcpd.protocol.placement_values import (
    Accepted,
    Assign,
    Call,
    Close,
    Drop,
    Lost,
    Name,
    Open,
    Patience,
    Phase,
    Publish,
    Read,
    ReadLog,
    Refused,
    Stored,
    WriteLog,
    WriteRecord,
)
from sdcpd.protocol.problems import Conflict, Problem, StaleEpoch
from sdcpd.protocol.terms import Action, State
from tests.support.placement_world import CONTRACT, D1, D2, INCARNATION, PROMPT, RECORD, SESSION, V2, VERIFIER, V, World

# -- opening and the order of 6.1 ----------------------------------------------------------------------------------


def test_the_order_of_6_1() -> None:
    """It first informs the verifier with PUT drafter, and then sends the assignment to the drafter."""
    world = World(D1)
    world.take(world.machine.start(world.now))
    assert world.wants() == ["Open"]
    opening = world.next(Open)
    assert opening.verifier == V
    assert (opening.message.epoch, opening.message.prompt) == (1, PROMPT)
    assert opening.message.router == "http://r/router/"
    world.answer(opening, world.state(State.WAITING))
    assert sorted(world.wants()) == ["Name", "Read"]
    naming = world.next(Name)
    assert naming.verifier == V
    assert naming.message.drafter == D1
    assert naming.message.seq == (INCARNATION << 32) + 1
    world.answer(naming, world.state(State.DRAFTING))
    assert sorted(world.wants()) == ["Assign", "Read"]
    assigning = world.next(Assign)
    assert assigning.message == naming.message
    world.answer(assigning, Accepted())
    assert world.wants() == ["Read"]
    assert world.machine.drafter == D1
    assert world.moves == []


def test_an_open_that_timed_out_is_repeated_at_the_same_verifier() -> None:
    """Decisions 29, 30: identical body, never another verifier."""
    world = World(D1)
    world.take(world.machine.start(world.now))
    first = world.next(Open)
    world.answer(first, Lost("no answer"))
    assert world.wants() == []
    world.retry()
    second = world.next(Open)
    assert encode(second.message) == encode(first.message)
    assert second.verifier == first.verifier
    assert second.call != first.call
    world.answer(first, world.state(State.WAITING))  # the late answer of the first try was given up
    assert world.wants() == []
    world.answer(second, world.state(State.WAITING))
    assert sorted(world.wants()) == ["Name", "Read"]


def test_a_full_verifier_is_asked_again_after_retry_after_and_given_up_in_the_end() -> None:
    world = World(D1, patience=Patience(open_give_up_s=10))
    world.take(world.machine.start(world.now))
    tries = 0
    while world.ending() is None:
        world.answer(world.next(Open), Refused(status=503, retry_after_s=2))
        tries += 1
        if world.ending() is None:
            before = world.now
            world.retry()
            assert world.now - before >= 2
    assert tries == 6
    world.failed("verifier_overloaded")
    assert world.done()  # every try was refused: there is nothing to delete


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422, 429])
def test_a_refused_open_fails_at_once(status: int) -> None:
    world = World(D1)
    world.take(world.machine.start(world.now))
    world.answer(world.next(Open), Refused(status=status, suffix="sdcp-bad-contract", detail="no such model"))
    world.failed("verifier_refused")
    ending = world.ending()
    assert ending is not None
    assert ending.detail == f"{status} sdcp-bad-contract no such model"
    assert world.done()
    assert world.wants() == []


def test_an_open_that_finds_the_session_finished_only_reads() -> None:
    """max_new 0: finished at once (decision 14)."""
    world = World(D1)
    world.take(world.machine.start(world.now))
    world.answer(world.next(Open), world.state(State.FINISHED))
    assert world.wants() == ["Read"]
    world.read(Action.FINISH)
    ending = world.ending()
    assert ending is not None
    assert ending.finish is Action.FINISH
    assert world.done()


def test_the_directory_is_told_before_the_verifier() -> None:
    """Decision 106: "written before session-open"."""
    world = World(D1, record=RECORD)
    world.take(world.machine.start(world.now))
    first = world.next(WriteRecord)
    assert (first.ref, first.if_match) == (RECORD, None)
    record = read_directory_record(first.octets)
    assert (record.verifier, record.epoch, record.incarnation) == (V, 1, INCARNATION)
    world.answer(first, Lost("?"))
    assert world.wants() == []
    world.retry()
    second = world.next(WriteRecord)
    assert (second.octets, second.if_match) == (first.octets, None), "one that holds it already is done"
    world.answer(second, Stored('"t1"'))
    assert world.next(Open).message == record.open


@pytest.mark.parametrize(("status", "tries"), [(507, 1), (403, 1), (503, 3)])
def test_without_the_directory_no_session_begins(status: int, tries: int) -> None:
    world = World(D1, record=RECORD, patience=Patience(open_give_up_s=2.5))
    world.take(world.machine.start(world.now))
    for left in reversed(range(tries)):
        world.answer(world.next(WriteRecord), Refused(status=status, retry_after_s=1.5))
        if left:
            world.retry()
    world.failed("directory_unreachable")
    assert world.done()


def test_cancelled_while_the_directory_is_told() -> None:
    world = World(D1, record=RECORD)
    world.take(world.machine.start(world.now))
    world.take(world.machine.cancel(world.now))
    assert world.done()
    assert world.wants() == ["WriteRecord"], "nothing was opened that would have to be closed"


# -- naming and assigning ------------------------------------------------------------------------------------------


def test_the_assignment_copies_the_verifiers_answer() -> None:
    """Decision 41: and only with the tokens up to the answered `committed`, their chain checked."""
    world = World(D1, D2).drafting()
    world.commit(21, 22)
    world.commit(23)
    world.event(Action.SWITCH)
    naming = world.next(Name)
    assert naming.message.drafter == D2
    assert (naming.message.round, naming.message.committed) == (0, 0)  # the router cannot know; it is not asked
    world.answer(naming, world.state(State.DRAFTING))
    assert "Publish" not in world.wants()  # the tokens were not read yet
    assert "Assign" not in world.wants()
    world.read()
    publish = world.next(Publish)
    assert publish.ref == "http://c/cache/v1/s/-/o/x/1/2/tokens"
    assert decode_tokens(publish.octets) == (21, 22, 23)
    assert "Assign" not in world.wants()
    world.answer(publish, Accepted())
    message = world.next(Assign).message
    assert (message.round, message.committed, message.digest) == (2, 3, world.digest())
    assert message.committed_tokens == publish.ref
    assert message.seq == naming.message.seq


def test_output_that_is_ahead_of_the_answer_is_cut_to_it() -> None:
    world = World(D1).drafting()
    world.commit(21, 22)
    world.event(Action.SWITCH)
    answer = world.state(State.DRAFTING)
    world.commit(23)
    world.read()
    world.answer(world.next(Name), answer)
    publish = world.next(Publish)
    assert decode_tokens(publish.octets) == (21, 22)


def test_a_digest_that_does_not_continue_the_chain_fails_the_session() -> None:
    world = World(D1, D2).drafting()
    world.commit(21)
    world.read()
    world.event(Action.SWITCH)
    world.answer(world.next(Name), world.state(State.DRAFTING, digest=b"x" * 32))
    world.failed("digest_mismatch")
    assert world.next(Close).session == SESSION


def test_output_that_never_comes_does_not_hang_the_session() -> None:
    world = World(D1, D2, patience=Patience(gather_give_up_s=5)).drafting()
    world.commit(21)
    world.event(Action.SWITCH)
    world.answer(world.next(Name), world.state(State.DRAFTING))
    world.wait(5.5)
    world.failed("output_behind")


def test_a_poll_that_got_lost_does_not_hold_up_the_assignment() -> None:
    world = World(D1, D2).drafting()
    world.commit(21)
    lost = world.next(Read)
    world.event(Action.SWITCH)
    world.answer(world.next(Name), world.state(State.DRAFTING))
    assert "Read" not in world.wants()
    world.wait(2.1)
    world.read()
    assert decode_tokens(world.next(Publish).octets) == (21,)
    world.page(lost, tokens=(99,))  # its late answer, whatever it says, is ignored
    assert world.machine.output.tokens(0) == (21,)


def test_tokens_that_cannot_be_published_mean_decoding_alone_for_a_while() -> None:
    world = World(D1, D2).drafting()
    world.commit(21)
    world.read()
    world.event(Action.SWITCH)
    world.answer(world.next(Name), world.state(State.DRAFTING))
    for _ in range(2):
        world.answer(world.next(Publish), Lost("cache down"))
        world.retry()
    world.answer(world.next(Publish), Lost("cache down"))
    assert world.next(Name).message.drafter == V
    assert world.moves[-1] == ("tokens_unpublished", V)


def test_the_same_round_is_published_once() -> None:
    world = World(D1, D2).drafting()
    world.commit(21)
    world.read()
    world.event(Action.SWITCH)
    world.answer(world.next(Name), world.state(State.DRAFTING))
    world.answer(world.next(Publish), Accepted())
    world.answer(world.next(Drop), Accepted())
    world.answer(world.next(Assign), Refused(status=422))
    world.answer(world.next(Name), world.state(State.DRAFTING))
    assert world.next(Assign).message.committed_tokens == "http://c/cache/v1/s/-/o/x/1/1/tokens"


def test_a_put_without_answer_is_repeated_with_the_identical_body() -> None:
    world = World(D1).opened()
    first = world.next(Name)
    world.answer(first, Lost("?"))
    world.retry()
    second = world.next(Name)
    assert encode(second.message) == encode(first.message)
    world.answer(second, Refused(status=503, retry_after_s=1))  # a round is open (43)
    world.retry()
    assert encode(world.next(Name).message) == encode(first.message)


def test_a_put_refused_for_good_fails_and_closes_the_session() -> None:
    world = World(D1).opened()
    world.answer(world.next(Name), Refused(status=422, suffix="sdcp-bad-contract"))
    world.failed("verifier_refused")
    world.answer(world.next(Close), Accepted())
    assert world.done()


def test_a_verifier_that_forgot_the_session_is_lost() -> None:
    """Decision 95: a 404 from the named verifier to any call on the session."""
    world = World(D1).opened()
    world.answer(world.next(Name), Refused(status=404))
    assert world.machine.phase is Phase.RECOVERING
    assert world.failovers == ["forgotten"]


def test_a_put_to_a_session_that_just_ended_waits_for_the_last_page() -> None:
    world = World(D1).opened()
    world.answer(world.next(Name), Refused(status=410, suffix="sdcp-session-closed"))
    assert world.ending() is None
    world.commit(2)
    world.read(Action.FINISH)
    ending = world.ending()
    assert ending is not None
    assert ending.finish is Action.FINISH


def test_a_higher_seq_at_the_verifier_is_caught_up_with_only_within_this_incarnation() -> None:
    world = World(D1).opened()
    world.answer(world.next(Name), Refused(status=409, state=world.state(State.WAITING, seq=(INCARNATION << 32) + 9)))
    naming = world.next(Name)
    assert naming.message.seq == (INCARNATION << 32) + 10
    other_router = world.state(State.WAITING, seq=(INCARNATION + 1) << 32)
    world.answer(naming, Refused(status=409, state=other_router))
    world.wait(20)
    assert world.wants() == ["Read"], "another router has taken it up: this one only reads on"
    world.commit(2)
    world.read(Action.FINISH)
    ending = world.ending()
    assert ending is not None
    assert ending.finish is Action.FINISH


def test_catching_up_ends() -> None:
    world = World(D1).opened()
    for _ in range(20):
        if world.ending() is not None:
            break
        state = world.state(State.WAITING, seq=world.machine.seq + 1)
        world.answer(world.next(Name), Refused(status=409, state=state))
    world.failed("verifier_refused")


def test_a_drafter_that_refuses_is_never_asked_again() -> None:
    """Decision 44: 422 for a model or tokenizer it may not or cannot use."""
    world = World(D1, D2).opened()
    world.answer(world.next(Name), world.state(State.DRAFTING))
    world.answer(world.next(Assign), Refused(status=422))
    naming = world.next(Name)
    assert naming.message.drafter == D2
    world.answer(naming, world.state(State.DRAFTING))
    world.answer(world.next(Assign), Refused(status=409))
    naming = world.next(Name)
    assert naming.message.drafter == V
    world.answer(naming, world.state(State.SELF_DECODING))
    world.wait(30)
    assert "Name" not in world.wants()
    assert [reason for reason, _ in world.moves] == ["drafter_refused", "drafter_refused"]


def test_a_full_drafter_is_passed_over_until_it_asked_to_be_tried_again() -> None:
    world = World(D1).opened()
    world.answer(world.next(Name), world.state(State.DRAFTING))
    world.answer(world.next(Assign), Refused(status=503, retry_after_s=4))
    naming = world.next(Name)
    assert naming.message.drafter == V
    world.answer(naming, world.state(State.SELF_DECODING))
    world.wait(3.5)
    assert "Name" not in world.wants()
    world.wait(1)
    assert world.next(Name).message.drafter == D1
    assert world.moves == [("drafter_overloaded", V), ("drafter_appeared", D1)]


def test_a_drafter_that_does_not_answer_costs_time_only_and_rests_longer_each_time() -> None:
    world = World(D1).opened()
    world.answer(world.next(Name), world.state(State.DRAFTING))
    rests = []
    for _ in range(3):
        bodies = []
        for attempt in range(3):
            assigning = world.next(Assign)
            bodies.append(encode(assigning.message))
            world.answer(assigning, Lost("timeout"))
            if attempt < 2:
                world.retry()
        assert len(set(bodies)) == 1
        world.answer(world.next(Drop), Accepted())
        naming = world.next(Name)
        assert naming.message.drafter == V
        world.answer(naming, world.state(State.SELF_DECODING))
        since = world.now
        while "Name" not in world.wants():
            world.wait(0.25)
        rests.append(world.now - since)
        naming = world.next(Name)
        assert naming.message.drafter == D1
        world.answer(naming, world.state(State.DRAFTING))
    assert rests == pytest.approx([5, 10, 20], abs=0.5)


# -- decision 110 --------------------------------------------------------------------------------------------------


def test_without_a_live_drafter_the_verifier_is_told_to_decode_alone_until_one_appears() -> None:
    world = World().opened()
    naming = world.next(Name)
    assert naming.message.drafter == V
    world.answer(naming, world.state(State.SELF_DECODING))
    assert "Assign" not in world.wants()  # no assignment is sent
    assert world.machine.drafter is None
    world.wait(5)
    assert "Name" not in world.wants()
    world.alive[D1] = {"role": 1}
    world.wait(0.5)
    naming = world.next(Name)
    assert naming.message.drafter == D1
    assert naming.message.seq == (INCARNATION << 32) + 2
    world.answer(naming, world.state(State.DRAFTING))
    assert world.next(Assign).message.drafter == D1


def test_speculation_off_is_110_from_the_start_and_stays() -> None:
    world = World(D1, speculation=False).self_decoding()
    world.wait(10)
    assert "Name" not in world.wants()
    assert world.machine.target == V


def test_a_verifier_without_110_gets_a_drafter_instead() -> None:
    world = World(D1, speculation=False).opened()
    world.answer(world.next(Name), world.state(None))
    assert world.next(Name).message.drafter == D1


def test_a_verifier_without_110_waits_where_there_is_no_drafter() -> None:
    world = World().opened()
    world.answer(world.next(Name), world.state(State.WAITING))
    assert world.machine.target is None
    assert world.moves == [("self_decode_unknown", None)]
    world.wait(2)
    assert "Name" not in world.wants()
    world.alive[D1] = {"role": 1}
    world.wait(0.5)
    assert world.next(Name).message.drafter == D1


def test_unprofitable_and_profitable() -> None:
    world = World(D1).drafting()
    world.event(Action.SELF_DECODE, reason="unprofitable")
    world.answer(world.next(Drop), Accepted())
    world.answer(world.next(Name), world.state(State.SELF_DECODING))
    world.wait(10)
    assert "Name" not in world.wants()
    world.event(Action.SELF_DECODE, reason="profitable")
    assert world.next(Name).message.drafter == D1
    assert world.moves == [("unprofitable", V), ("profitable", D1)]


def test_speculation_is_turned_off_and_on_again() -> None:
    """A traffic class may do so at any time; the verifier then decodes by itself (decision 110)."""
    world = World(D1).drafting()
    world.machine.speculates = False
    world.wait(0.5)
    world.answer(world.next(Drop), Accepted())
    world.answer(world.next(Name), world.state(State.SELF_DECODING))
    world.wait(10)
    assert "Name" not in world.wants()
    world.machine.speculates = True
    world.wait(0.5)
    assert world.next(Name).message.drafter == D1
    assert world.moves == [("speculation_off", V), ("drafter_appeared", D1)]


# -- events --------------------------------------------------------------------------------------------------------


def test_a_switch_goes_to_another_drafter_and_drops_the_old_one() -> None:
    world = World(D1, D2).drafting()
    world.commit(21)
    world.event(Action.SWITCH)
    assert world.next(Drop).drafter == D1
    assert world.next(Name).message.drafter == D2
    assert world.moves == [("switch", D2)]


def test_a_switch_with_only_the_same_drafter_left_names_it_again_at_once() -> None:
    """Decision 82."""
    world = World(D1).drafting()
    world.commit(21)
    world.event(Action.SWITCH)
    naming = world.next(Name)
    assert naming.message.drafter == D1
    assert naming.message.seq == (INCARNATION << 32) + 2
    assert "Drop" not in world.wants()


def test_a_sole_drafter_without_one_token_is_not_named_again_at_once() -> None:
    """A silent drafter must not stall the session for one proposal deadline after the other."""
    world = World(D1).drafting()
    world.event(Action.SWITCH, reason="no proposal in time")
    world.answer(world.next(Drop), Accepted())
    naming = world.next(Name)
    assert naming.message.drafter == V
    world.answer(naming, world.state(State.SELF_DECODING))
    world.wait(6)
    assert world.next(Name).message.drafter == D1


def test_repeated_and_overtaken_events_do_nothing() -> None:
    """Decision 111: an event names its seq: lower than the router's latest is dropped."""
    world = World(D1, D2).drafting()
    old = world.machine.seq
    world.commit(21)
    world.event(Action.SWITCH, seq=old)
    world.next(Name)
    for _ in range(3):
        world.event(Action.SWITCH, seq=old)
        world.event(Action.SELF_DECODE, seq=old)
    assert "Name" not in world.wants()


def test_events_without_seq_are_told_apart_by_kind_and_committed() -> None:
    """Decision 49."""
    world = World(D1, D2).drafting()
    world.commit(21)
    world.event(Action.SWITCH, seq=None)
    world.next(Name)
    world.event(Action.SWITCH, seq=None)
    assert "Name" not in world.wants()
    world.commit(22)
    world.event(Action.SWITCH, seq=None)
    world.next(Name)


def test_a_switch_that_comes_before_the_answer_to_its_naming_is_acted_on() -> None:
    world = World(D1, D2).opened()
    first = world.next(Name)
    world.event(Action.SWITCH)
    second = world.next(Name)
    assert second.message.drafter != first.message.drafter
    world.answer(first, world.state(State.DRAFTING))  # the late answer to what is no longer wanted
    assert "Assign" not in world.wants()
    world.answer(second, world.state(State.DRAFTING))
    assert world.next(Assign).message.drafter == second.message.drafter


def test_the_end_of_self_decoding_may_name_the_same_drafter() -> None:
    """Decision 81."""
    world = World(D1).drafting()
    world.commit(21)
    world.event(Action.SELF_DECODE)
    assert world.next(Name).message.drafter == D1
    assert world.moves == [("self_decode_end", D1)]


def test_events_of_another_epoch_or_of_a_seq_never_given_out_are_refused() -> None:
    world = World(D1).drafting()
    with pytest.raises(StaleEpoch):
        world.event(Action.SWITCH, epoch=0)
    with pytest.raises(StaleEpoch):
        world.event(Action.SWITCH, epoch=2)
    with pytest.raises(Conflict):
        world.event(Action.SWITCH, seq=world.machine.seq + 1)
    assert "Name" not in world.wants()


@pytest.mark.parametrize("event_first", [True, False])
@pytest.mark.parametrize("kind", [Action.FINISH, Action.FAIL])
def test_event_and_final_page_agree_in_either_order(kind: Action, event_first: bool) -> None:
    world = World(D1).drafting()
    world.commit(21, 22)
    stats = SpeculationStats(rounds=1, drafts=1, draft_tokens=1, accepted_tokens=1)
    reason = UNSET if kind is Action.FINISH else "ladder exhausted"
    if event_first:
        world.event(kind, reason=reason)
        assert world.machine.phase is Phase.ENDING
        assert world.ending() is None  # the last tokens are still to be read
    world.read(kind, reason=reason, stats=stats)
    ending = world.ending()
    assert ending is not None
    assert (ending.finish, ending.stats) == (kind, stats)
    assert ending.reason == (None if kind is Action.FINISH else "ladder exhausted")
    assert world.machine.output.tokens(0) == (21, 22)
    world.event(kind, reason=reason)
    assert world.ending() is ending
    drops = [step for step in world.todo if isinstance(step, Drop)]
    assert len(drops) == (0 if kind is Action.FINISH else 1)  # a finishing drafter learns it from its verdict
    assert "Close" not in world.wants()


def test_an_announced_end_counts_if_the_output_is_no_longer_served_but_was_read() -> None:
    world = World(D1).drafting()
    world.commit(21, 2)
    world.read()
    world.event(Action.FINISH)
    world.answer(world.next(Read), Refused(status=410))
    ending = world.ending()
    assert ending is not None
    assert ending.finish is Action.FINISH


def test_an_announced_end_does_not_hide_tokens_that_were_never_read() -> None:
    """They are in the log (decision 91)."""
    world = World(D1).drafting()
    world.commit(21, 2)
    world.event(Action.FINISH)
    world.answer(world.next(Read), Refused(status=410))
    world.store()
    ending = world.ending()
    assert ending is not None
    assert ending.finish is Action.FINISH
    assert world.machine.output.tokens(0) == (21, 2)
    assert world.fences() == []


def test_an_announced_end_whose_last_page_never_comes_fails() -> None:
    world = World(D1, patience=Patience(read_give_up_s=8)).drafting()
    world.commit(21)
    world.event(Action.FINISH)
    started = world.now
    while world.ending() is None:
        for _ in range(world.wants().count("Read")):
            world.page(world.next(Read), tokens=())
        world.wait(0.25)
    assert world.now - started < 9
    world.failed("output_behind")


# -- failures of instances (6.9) -----------------------------------------------------------------------------------


def test_when_a_drafters_status_expires_its_session_is_reassigned() -> None:
    world = World(D1, D2).drafting()
    del world.alive[D1]
    world.wait(2.75)
    assert "Name" not in world.wants()
    world.wait(0.5)
    assert world.next(Name).message.drafter == D2
    assert "Drop" not in world.wants()  # nobody would answer
    assert world.moves == [("drafter_expired", D2)]


def test_when_the_last_drafter_expires_the_verifier_decodes_alone() -> None:
    world = World(D1).drafting()
    del world.alive[D1]
    world.wait(3.25)
    assert world.next(Name).message.drafter == V


@pytest.mark.parametrize("stage", ["naming", "gathering", "publishing", "assigning"])
def test_a_drafter_that_dies_while_it_is_being_assigned(stage: str) -> None:
    world = World(D1).drafting()
    world.commit(21)
    world.alive[D2] = {"role": 1}
    world.report()
    world.event(Action.SWITCH)
    world.answer(world.next(Drop), Accepted())
    if stage != "naming":
        world.answer(world.next(Name), world.state(State.DRAFTING))
    if stage in ("publishing", "assigning"):
        world.read()
    if stage == "assigning":
        world.answer(world.next(Publish), Accepted())
    assert world.machine.phase.value == stage
    del world.alive[D2]
    world.wait(3.25)
    assert world.machine.drafter == D1
    assert world.machine.phase is Phase.NAMING


def test_a_drafter_that_restarted_forgot_the_session() -> None:
    world = World(D1).drafting()
    world.alive[D1]["boot"] = b"c" * 16
    world.wait(0.25)
    naming = world.next(Name)
    assert naming.message.drafter == D1
    assert "Drop" not in world.wants()
    assert world.moves == [("drafter_restarted", D1)]


def test_a_drafter_that_declines_the_session_is_not_given_it_again() -> None:
    """Decision 102."""
    world = World(D1).drafting()
    world.alive[D1]["declined"] = (SESSION,)
    world.wait(0.25)
    world.answer(world.next(Drop), Accepted())
    world.answer(world.next(Name), world.state(State.SELF_DECODING))
    del world.alive[D1]["declined"]
    world.wait(20)
    assert "Name" not in world.wants()


@pytest.mark.parametrize("bring", [World.opened, World.drafting], ids=["while naming", "while drafting"])
def test_a_verifier_whose_status_expires_is_given_up(bring: Callable[[World], World]) -> None:
    world = bring(World(D1))
    del world.alive[V]
    world.wait(2.75)
    assert world.machine.phase is not Phase.RECOVERING
    world.wait(0.5)
    assert world.failovers == ["expired"]


def test_a_verifier_that_restarted_is_given_up_at_once() -> None:
    world = World(D1).drafting()
    world.alive[V] = {**VERIFIER, "boot": b"c" * 16}
    world.wait(0.25)
    assert world.failovers == ["restarted"]


def test_a_verifier_that_dies_during_the_open() -> None:
    world = World(D1)
    world.take(world.machine.start(world.now))
    del world.alive[V]
    world.wait(3.25)
    assert world.failovers == ["expired"]


# -- cancel --------------------------------------------------------------------------------------------------------


def test_cancel_deletes_at_verifier_and_drafter_at_once() -> None:
    """Decision 37, 45."""
    world = World(D1).drafting()
    world.take(world.machine.cancel(world.now))
    close = world.next(Close)
    assert close.verifier == V
    ending = world.ending()
    assert ending is not None
    assert ending.cancelled
    world.answer(close, Accepted())
    assert not world.done()
    world.answer(world.next(Drop), Accepted())
    assert world.done()
    assert world.machine.next_deadline() is None


def test_cancel_before_anything_was_sent() -> None:
    world = World(D1)
    world.take(world.machine.cancel(world.now))
    assert world.done()
    assert world.wants() == []


def test_a_cancel_that_overtakes_the_open_is_repeated_until_the_open_has_ended() -> None:
    world = World(D1)
    world.take(world.machine.start(world.now))
    opening = world.next(Open)
    world.take(world.machine.cancel(world.now))
    world.answer(world.next(Close), Refused(status=404))
    for _ in range(20):  # a long prefill: longer than close_give_up_s
        world.retry()
        world.answer(world.next(Close), Refused(status=503, retry_after_s=1))
    assert not world.done()
    world.answer(opening, world.state(State.WAITING))
    assert world.wants() == ["Close"]  # at once, and nothing is placed
    world.answer(world.next(Close), Accepted())
    assert world.done()


def test_a_404_is_final_once_the_open_was_refused() -> None:
    world = World(D1)
    world.take(world.machine.start(world.now))
    opening = world.next(Open)
    world.take(world.machine.cancel(world.now))
    close = world.next(Close)
    world.answer(opening, Refused(status=422))
    world.answer(close, Refused(status=404))
    world.store()  # whether there is a log that somebody has to close: there is none
    assert world.done()


def test_a_lost_open_is_asked_after_for_a_while() -> None:
    world = World(D1)
    world.take(world.machine.start(world.now))
    world.answer(world.next(Open), Lost("?"))
    world.take(world.machine.cancel(world.now))
    started, tries = world.now, 0
    while not world.done():
        world.answer(world.next(Close), Refused(status=404))
        tries += 1
        world.store()  # in the end: whether there is a log to be closed
        if not world.done():
            world.retry()
    assert tries > 3
    assert 8 <= world.now - started <= 14


def test_closing_gives_up_and_drops_are_bounded() -> None:
    world = World(D1).drafting()
    world.take(world.machine.cancel(world.now))
    started, drops = world.now, 0
    while not world.done():
        for step in list(world.todo):
            world.todo.remove(step)
            if isinstance(step, Close | Drop):
                drops += isinstance(step, Drop)
                world.answer(step, Lost("?"))
            elif isinstance(step, ReadLog):
                world.answer(step, Refused(status=404))
        if not world.done() and not world.todo:
            world.retry()
    assert drops == 3
    assert world.now - started <= 14


def test_cancel_after_the_end_does_nothing() -> None:
    world = World(D1).drafting()
    world.read(Action.FINISH)
    before = world.ending()
    world.take(world.machine.cancel(world.now))
    assert world.ending() is before
    assert world.wants() == []


def test_no_assignment_goes_where_a_drop_is_under_way() -> None:
    """The drop carries no seq: it could end the new assignment."""
    world = World(D1, D2).drafting()
    world.commit(21)
    world.event(Action.SWITCH)
    drop = world.next(Drop)
    world.answer(world.next(Name), world.state(State.DRAFTING))
    world.commit(22)
    world.event(Action.SWITCH)
    assert world.next(Name).message.drafter == D2
    world.answer(drop, Accepted())
    world.commit(23)
    world.event(Action.SWITCH)
    assert world.next(Name).message.drafter == D1


# -- output --------------------------------------------------------------------------------------------------------


def test_output_is_read_on_from_where_it_is() -> None:
    world = World(D1).drafting()
    assert world.todo[0] == replace(world.next(Read), start=0)
    assert world.wants() == []


def test_pages_extend_the_copy_and_overlaps_are_cut() -> None:
    world = World(D1).drafting()
    world.commit(21, 22)
    world.read()
    read = world.next(Read)
    assert read.start == 2
    world.commit(23)
    world.answer(read, Output(session=SESSION, epoch=1, from_=1, tokens=(22, 23), final=False))
    assert world.machine.output.tokens(0) == (21, 22, 23)
    assert world.machine.output.digest == world.digest()


@pytest.mark.parametrize(
    "members",
    [
        {"from_": 3, "tokens": (24,)},
        {"from_": 0, "tokens": (99, 22)},
        {"from_": 0, "tokens": (21,), "final": True, "finish": Action.FINISH},
        {"from_": 2, "tokens": (100,)},
        {"from_": 2, "tokens": (1 << 40,)},
        {"from_": 2, "tokens": tuple(range(10, 50))},
        {"from_": 2, "tokens": (1,), "session": b"x" * 16},
    ],
)
def test_pages_that_no_verifier_may_send_end_the_session(members: dict[str, Any]) -> None:
    world = World(D1).drafting()
    world.commit(21, 22)
    world.read()
    world.page(world.next(Read), **members)
    world.failed("verifier_breach")
    assert world.machine.output.tokens(0) == (21, 22)
    assert "Close" in world.wants()


def test_output_of_a_lower_epoch_is_discarded() -> None:
    """6.7: a front end that receives output with a lower epoch than one it has seen discards it."""
    world = World(D1).drafting()
    world.page(world.next(Read), tokens=(77,), epoch=0)
    assert len(world.machine.output) == 0
    assert world.ending() is None
    world.retry()
    world.commit(21)
    world.read()
    assert world.machine.output.tokens(0) == (21,)


def test_a_final_page_without_finish_or_with_an_unknown_one_is_a_failure() -> None:
    world = World(D1).drafting()
    world.read(Action.FINISH, finish=UNSET)
    world.failed("failed")


def test_unreadable_output_is_retried_and_given_up() -> None:
    world = World(D1, patience=Patience(read_give_up_s=6)).drafting()
    world.answer(world.next(Read), Lost("?"))
    world.retry()
    world.commit(21)
    world.read()
    assert world.machine.output.tokens(0) == (21,)
    while not world.failovers:
        world.answer(world.next(Read), Refused(status=503))
        if not world.failovers:
            world.retry()
    assert world.failovers == ["unreadable"]


@pytest.mark.parametrize(
    ("status", "suffix", "kind"),
    [(404, None, "forgotten"), (409, "sdcp-stale-epoch", "fenced"), (410, None, "closed"), (403, None, "unreadable")],
)
def test_output_refused_for_good(status: int, suffix: str | None, kind: str) -> None:
    world = World(D1).drafting()
    world.answer(world.next(Read), Refused(status=status, suffix=suffix))
    assert world.failovers == [kind]


def test_empty_pages_that_come_at_once_are_not_polled_in_a_tight_loop() -> None:
    world = World(D1).drafting()
    started = world.now
    for _ in range(20):
        world.page(world.next(Read), tokens=())
        assert "Read" not in world.wants()
        due = world.machine.next_deadline()
        assert due is not None
        world.now = due
        world.take(world.machine.tick(world.now))
    assert world.now - started >= 1.9


# -- any input in any state ----------------------------------------------------------------------------------------

STATES = st.sampled_from([None, *State])
REFUSALS = st.builds(
    Refused,
    status=st.sampled_from([400, 403, 404, 409, 410, 422, 500, 503]),
    retry_after_s=st.sampled_from([None, 0, 1, 1e9]),
)
FAULTS = REFUSALS | st.builds(Lost, st.just("?"))
INPUTS = st.one_of(
    st.tuples(st.just("good"), st.integers(0, 5), STATES),
    st.tuples(st.just("fault"), st.integers(0, 5), FAULTS),
    st.tuples(st.just("odd"), st.integers(0, 40), STATES),
    st.tuples(st.just("event"), st.sampled_from(list(Action)), st.integers(-2, 1) | st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.05, 0.4, 2.0, 7.0]), st.none()),
    st.tuples(st.just("die"), st.sampled_from([V, V2, D1, D2]), st.none()),
    st.tuples(st.just("live"), st.sampled_from([V, V2, D1, D2]), st.none()),
    st.tuples(st.just("operator"), st.sampled_from([None, V, V2]), st.none()),
    st.tuples(st.just("class"), st.none(), st.none()),
    st.tuples(st.just("boot"), st.sampled_from([V, V2, D1, D2]), st.none()),
    st.tuples(st.just("commit"), st.integers(1, 6), st.none()),
    st.tuples(st.just("cancel"), st.none(), st.none()),
)


def feed(world: World, kind: str, first: Any, second: Any) -> None:
    match kind:
        case "good" if world.todo:
            call = world.todo.pop(first % len(world.todo))
            assert isinstance(call, Call)
            if isinstance(call, ReadLog | WriteLog | Publish):
                world.answer(call, world.stored(call))
            elif isinstance(call, Read):
                ended = {State.FINISHED: Action.FINISH, State.FAILED: Action.FAIL}.get(second)
                world.page(call, ended)
            else:
                answered = isinstance(call, Open | Name)
                world.epoch = max(world.epoch, world.machine.epoch if isinstance(call, Open) else 0)
                world.answer(call, world.state(second, seq=UNSET) if answered else Accepted())
        case "fault" if world.todo:
            call = world.todo.pop(first % len(world.todo))
            assert isinstance(call, Call)
            world.answer(call, second)
        case "odd":  # the wrong kind of answer, or one to a call long gone
            world.take(world.machine.outcome(first, world.state(second, epoch=first % 2), world.now))
        case "event":
            seq = None if second is None else world.machine.seq + second
            try:
                world.event(first, seq=seq, reason="unprofitable" if second == -2 else UNSET)
            except Problem:
                assert second == 1  # never given out
        case "wait":
            world.wait(first)
        case "die":
            world.alive.pop(first, None)
        case "live":
            world.alive.setdefault(first, VERIFIER if first in (V, V2) else {"role": 1})
        case "boot" if first in world.alive:
            world.alive[first] = {**world.alive[first], "boot": bytes([len(world.output)]) * 16}
        case "class":
            world.machine.speculates = not world.machine.speculates
        case "operator":
            world.take(world.machine.fail_over(world.now, to=first))
            world.take(world.machine.switch(world.now))
        case "commit" if len(world.output) + first <= CONTRACT.max_new:
            world.commit(*range(20, 20 + first))
        case "cancel":
            world.take(world.machine.cancel(world.now))
        case _:
            pass


@settings(max_examples=300, deadline=None)
@given(inputs=st.lists(INPUTS, max_size=60), speculation=st.booleans())
def test_any_input_in_any_state_gives_steps_and_never_an_exception(
    inputs: list[tuple[str, Any, Any]], speculation: bool
) -> None:
    world = World(D1, D2, speculation=speculation)
    world.take(world.machine.start(world.now))
    seqs: list[int] = []
    for kind, first, second in inputs:
        ended = world.ending()
        held = len(world.machine.output)
        feed(world, kind, first, second)
        assert ended is None or (world.ending() is ended and len(world.machine.output) == held)
        assert world.machine.output.tokens(0) == tuple(world.output[: len(world.machine.output)])
        seqs.append(world.machine.seq)
    assert seqs == sorted(seqs)  # decision 111
    # Whatever happened, a cancelled session is gone soon, even if nobody answers any more.
    world.take(world.machine.cancel(world.now))
    started = world.now
    while not world.done():
        for step in list(world.todo):
            world.todo.remove(step)
            assert isinstance(step, Call)
            world.answer(step, Lost("silence"))
        if not world.done():
            world.wait(0.5)
        assert world.now - started <= END_GIVE_UP_S + 12  # close_give_up_s and steps of the clock here, then its log
