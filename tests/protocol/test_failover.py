"""A session is taken from a lost verifier, stepped by hand (draft 6.8, 6.9; decisions 30, 85, 86, 89, 91, 95)."""

from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from sdcpd.protocol.commit_log import EndRecord, FenceRecord, read_records
from sdcpd.protocol.directory import read_directory_record
from sdcpd.protocol.encoding import decode_tokens, encode
from sdcpd.protocol.messages import Output, SessionState
from sdcpd.protocol.placement_values import (
    Accepted,
    AskState,
    Assign,
    Close,
    Drop,
    Lost,
    Name,
    Open,
    Outcome,
    Patience,
    Phase,
    Publish,
    Read,
    ReadLog,
    ReadRecord,
    RecordText,
    Refused,
    WriteLog,
    WriteRecord,
)
from sdcpd.protocol.problems import StaleEpoch
from sdcpd.protocol.terms import Action, State
from tests.support.placement_world import (
    D1,
    INCARNATION,
    LOG,
    NONCE,
    OBJECTS,
    RECORD,
    ROUTER,
    V2,
    V3,
    VERIFIER,
    V,
    World,
)


def several(*drafters: str, **of: Any) -> World:
    """Drafting at V with three rounds committed, two of them read; V2 lives as well."""
    world = World(*(drafters or (D1,)), **of).drafting()
    world.commit(21, 22)
    world.commit(23)
    world.read()
    world.commit(24, 25)
    world.alive[V2] = VERIFIER
    world.report()
    return world


def die(world: World, verifier: str = V) -> None:
    """Its status expires; the poll that was open there is never answered."""
    world.todo = [step for step in world.todo if not isinstance(step, Read)]
    del world.alive[verifier]
    world.wait(3.25)


def resumed(world: World) -> Open:
    """The session-open after the log has answered; the one who takes over commits at its epoch from here on."""
    opening = world.store().next(Open)
    world.epoch = opening.message.epoch
    return opening


def test_the_order_of_6_9() -> None:
    world = several()
    die(world)
    assert world.wants() == ["ReadLog"]
    world.answer(world.next(ReadLog), world.stored(ReadLog(ref=LOG)))
    fence = world.next(WriteLog)
    assert (fence.epoch, fence.if_match) == (2, world.tag())
    world.answer(fence, world.stored(fence))
    assert world.fences() == [FenceRecord(epoch=2, by=f"{ROUTER}#{NONCE}")]
    assert world.wants() == ["ReadLog"], "it then reads the last commit record"
    world.answer(world.next(ReadLog), world.stored(ReadLog(ref=LOG)))
    publish = world.next(Publish)
    assert publish.ref == f"{OBJECTS}2/3/tokens"
    assert decode_tokens(publish.octets) == (21, 22, 23, 24, 25)
    assert world.machine.output.tokens(0) == (21, 22, 23, 24, 25), "what was committed is delivered from the log"
    assert "Open" not in world.wants()
    world.answer(publish, Accepted())
    opening = world.next(Open)
    assert opening.verifier == V2
    assert opening.message.epoch == 2
    resume = opening.message.resume
    assert resume is not UNSET
    assert (resume.round, resume.committed, resume.digest) == (3, 5, world.digest())
    assert resume.committed_tokens == publish.ref
    world.epoch = 2
    world.answer(opening, world.state(State.WAITING, seq=UNSET))
    naming = world.next(Name)
    assert (naming.verifier, naming.message.epoch, naming.message.drafter) == (V2, 2, D1)
    assert "Assign" not in world.wants(), "It then informs the verifier of the drafter and sends a new assignment"
    world.answer(naming, world.state(State.DRAFTING))
    message = world.next(Assign).message
    assert (message.verifier, message.epoch, message.committed_tokens) == (V2, 2, publish.ref)
    assert "Publish" not in world.wants(), "the object that the verifier read serves the drafter as well"


def test_output_of_the_lost_verifier_is_discarded() -> None:
    """ "front ends discard output carrying an older epoch" """
    world = several()
    late = world.next(Read)
    die(world)
    world.page(late, tokens=(99,))
    opening = resumed(world)
    world.answer(opening, world.state(State.WAITING, seq=UNSET))
    world.answer(world.next(Name), world.state(State.DRAFTING))
    read = world.next(Read)
    assert (read.verifier, read.start) == (V2, 5)
    page = Output(session=read.session, epoch=1, from_=5, tokens=(99,), final=False)
    world.answer(read, page)
    assert world.machine.output.tokens(0) == (21, 22, 23, 24, 25)
    world.commit(26)
    world.retry()
    world.read()
    assert world.machine.output.tokens(5) == (26,)


def test_events_of_the_old_epoch_are_refused() -> None:
    world = several()
    die(world)
    world.epoch = 1
    world.event(Action.SWITCH)  # while it is being taken over: too late to matter, no fault
    world.answer(resumed(world), world.state(State.WAITING, seq=UNSET))
    world.epoch = 1
    with pytest.raises(StaleEpoch):
        world.event(Action.SWITCH)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_fence_whose_answer_is_lost_is_found_by_reading(lost: int) -> None:
    """Decision 85: ours by its `by`; never fenced twice."""
    world = several()
    die(world)
    while not any(isinstance(step, Open) for step in world.todo):
        world.store(lose=lost)
        world.wait(0.25)
    assert world.fences() == [FenceRecord(epoch=2, by=f"{ROUTER}#{NONCE}")]
    assert world.next(Open).message.epoch == 2


def test_a_fence_that_did_not_arrive_is_set_again() -> None:
    world = several()
    die(world)
    world.answer(world.next(ReadLog), world.stored(ReadLog(ref=LOG)))
    world.answer(world.next(WriteLog), Lost("?"))
    assert world.wants() == [], "a store in trouble is not hammered"
    world.retry()
    assert resumed(world).message.epoch == 2
    assert len(world.fences()) == 1


def test_a_commit_that_slips_in_before_the_fence_counts() -> None:
    world = several()
    die(world)
    read = world.next(ReadLog)
    world.answer(read, world.stored(read))
    world.commit(26)  # the zombie was quicker
    opening = resumed(world)
    resume = opening.message.resume
    assert resume is not UNSET
    assert resume.committed == 6
    assert world.machine.output.tokens(0) == (21, 22, 23, 24, 25, 26)


def test_a_log_that_was_never_created_is_created_with_the_fence_alone() -> None:
    """Decision 86: the verifier died before it could."""
    world = World(D1)
    world.alive[V2] = VERIFIER
    world.log = None
    world.take(world.machine.start(world.now))
    world.next(Open)
    die(world)
    world.answer(world.next(ReadLog), Refused(status=404))
    fence = world.next(WriteLog)
    assert fence.if_match is None
    world.answer(fence, world.stored(fence))
    opening = resumed(world)
    resume = opening.message.resume
    assert resume is not UNSET
    assert (resume.round, resume.committed, resume.digest) == (0, 0, world.digest())
    assert decode_tokens(world.published[resume.committed_tokens]) == ()
    world.answer(opening, world.state(State.WAITING, seq=UNSET))
    world.answer(world.next(Name), world.state(State.DRAFTING))
    assert world.next(Assign).message.committed_tokens is UNSET


def test_an_empty_log_is_fenced() -> None:
    """The verifier died between the log's creation and its first commit."""
    world = World(D1).opened()
    world.alive[V2] = VERIFIER
    die(world)
    assert resumed(world).message.epoch == 2
    assert len(world.fences()) == 1


def test_a_log_that_is_gone_with_tokens_delivered_is_a_store_fault() -> None:
    world = several()
    die(world)
    world.log = None
    world.store()
    world.failed("log_lost")


def test_a_log_that_lost_delivered_tokens_is_a_store_fault() -> None:
    world = several()
    die(world)
    world.log = b""
    world.store()
    world.failed("log_damaged")


def test_a_log_that_is_refused_for_good_fails_the_session() -> None:
    world = several()
    die(world)
    world.answer(world.next(ReadLog), Refused(status=403))
    world.failed("log_unusable")


def test_a_damaged_log_fails_the_session() -> None:
    world = several()
    die(world)
    world.log = b"\xa1"
    world.store()
    world.failed("log_damaged")


@pytest.mark.parametrize("how", ["action", "stop token", "max_new", "end", "cancelled"])
def test_a_closed_log_is_never_resumed_and_its_pages_are_served(how: str) -> None:
    """Decision 91."""
    world = several()
    match how:
        case "action":
            world.commit(26, action=Action.FINISH)
        case "stop token":
            world.commit(2)
        case "max_new":
            world.commit(*range(30, 65))
        case _:
            world.append(EndRecord(epoch=1, end=Action.FAIL, reason=how))
    die(world)
    world.store()
    ending = world.ending()
    assert ending is not None
    assert ending.finish is (Action.FAIL if how in ("end", "cancelled") else Action.FINISH)
    assert ending.cancelled is (how == "cancelled")
    assert world.machine.output.tokens(0) == tuple(world.output)
    assert world.fences() == []
    assert "Close" not in world.wants()


def test_a_failed_ladder_in_the_log_is_a_failure() -> None:
    world = several()
    world.commit(26, action=Action.FAIL)
    die(world)
    world.store()
    world.failed("the fallback ladder is exhausted")


# Whom to ask next


def test_the_same_verifier_restarted_takes_it_back() -> None:
    world = several()
    del world.alive[V2]
    world.wait(3.5)
    world.alive[V] = {**VERIFIER, "boot": b"c" * 16}
    world.wait(0.25)
    assert world.failovers == ["restarted"]
    opening = resumed(world)
    assert (opening.verifier, opening.message.epoch) == (V, 2)
    world.answer(opening, world.state(State.WAITING, seq=UNSET))
    world.wait(1)
    assert world.failovers == ["restarted"], "its new boot is known now"


def test_a_lost_verifier_is_avoided_while_there_is_another() -> None:
    world = several()
    world.answer(world.next(Read), Refused(status=404))
    assert resumed(world).verifier == V2


def test_for_want_of_another_the_same_verifier_is_asked() -> None:
    world = several()
    del world.alive[V2]
    world.wait(3.5)
    world.answer(world.next(Read), Refused(status=404))
    assert resumed(world).verifier == V


def test_with_no_verifier_alive_it_waits_for_one() -> None:
    world = several()
    del world.alive[V2]
    die(world)
    world.store()
    world.wait(30)
    assert "Open" not in world.wants()
    assert world.machine.output.tokens(0) == tuple(world.output)
    world.alive[V3] = VERIFIER
    world.wait(0.5)
    assert world.next(Open).verifier == V3


def test_the_wait_for_a_verifier_ends_and_the_log_is_closed_first() -> None:
    """Decision 83: "appends `end` before its final page"."""
    world = several(patience=Patience(failover_give_up_s=20))
    del world.alive[V2]
    die(world)
    world.store()
    world.wait(21)
    assert world.ending() is None
    assert world.wants() == ["WriteLog"]
    world.store()
    world.failed("verifier_lost")
    last = read_records(world.log or b"")[-1][0]
    assert last == EndRecord(epoch=2, end=Action.FAIL, reason="verifier_lost")
    world.answer(world.next(Drop), Accepted())
    assert world.done()


def test_an_end_that_cannot_be_written_does_not_hold_the_reader_for_ever() -> None:
    world = several(patience=Patience(failover_give_up_s=20))
    del world.alive[V2]
    die(world)
    world.store()
    world.wait(21)
    started = world.now
    while world.ending() is None:
        for step in list(world.todo):
            world.todo.remove(step)
            assert isinstance(step, ReadLog | WriteLog)
            world.answer(step, Lost("?"))
        world.wait(0.25)
    assert world.now - started <= 6
    world.failed("verifier_lost")


def test_a_log_that_cannot_be_reached_ends_in_time() -> None:
    world = several(patience=Patience(failover_give_up_s=10))
    die(world)
    while world.ending() is None:
        for step in list(world.todo):
            world.todo.remove(step)
            assert isinstance(step, ReadLog)
            world.answer(step, Refused(status=503))
        world.wait(0.25)
        assert world.now < 1030
    world.failed("log_unreachable")


REFUSALS: list[Outcome] = [Refused(status=409), Refused(status=422), Refused(status=503, retry_after_s=1)]


@pytest.mark.parametrize("outcome", REFUSALS)
def test_every_attempt_at_another_verifier_takes_a_new_fenced_epoch(outcome: Outcome) -> None:
    """Decision 30."""
    world = several()
    world.alive[V3] = VERIFIER
    die(world)
    first = resumed(world)
    world.answer(first, outcome)
    second = resumed(world)
    assert (first.message.epoch, second.message.epoch) == (2, 3)
    assert second.verifier != first.verifier
    assert [fence.epoch for fence in world.fences()] == [2, 3]
    assert second.message.resume != first.message.resume, "its tokens are published under its epoch"


def test_an_open_that_got_no_answer_is_repeated_at_the_same_verifier_only() -> None:
    world = several()
    world.alive[V3] = VERIFIER
    die(world)
    first = resumed(world)
    world.answer(first, Lost("?"))
    world.retry()
    second = world.next(Open)
    assert (second.verifier, second.message) == (first.verifier, first.message)
    del world.alive[first.verifier]
    world.wait(3.5)
    third = resumed(world)
    assert third.message.epoch == 3
    assert third.verifier != first.verifier


def test_a_session_fenced_before_it_began_goes_on() -> None:
    """Decision 65: the first verifier may refuse what concerns the request, not what became of the log meanwhile."""
    world = World(D1, record=RECORD)
    world.take(world.machine.start(world.now))
    world.store()
    world.answer(world.next(Open), Refused(status=409, suffix="sdcp-stale-epoch"))
    world.append(FenceRecord(epoch=2, by="http://other/router/#n9"))
    world.store()
    world.retry()
    world.store()
    world.answer(world.next(ReadRecord), Refused(status=404))
    assert resumed(world).message.epoch == 3


def test_three_failovers_without_a_committed_round_fail_the_session() -> None:
    """Decision 91: a poisonous request must not walk the fleet."""
    world = several()
    world.alive[V3] = VERIFIER
    die(world)
    for epoch in (2, 3, 4):
        opening = resumed(world)
        assert opening.message.epoch == epoch
        world.answer(opening, world.state(State.WAITING, seq=UNSET))
        world.answer(world.next(Name), Refused(status=404))
    world.store()
    world.failed("verifier_lost")
    assert [fence.epoch for fence in world.fences()] == [2, 3, 4]
    assert isinstance(read_records(world.log or b"")[-1][0], EndRecord)


def test_a_committed_round_makes_the_count_begin_anew() -> None:
    world = several()
    die(world)
    for _ in range(7):
        opening = resumed(world)
        world.answer(opening, world.state(State.WAITING, seq=UNSET))
        world.commit(26)
        world.answer(world.next(Name), Refused(status=404))
    assert world.ending() is None


def given_up(world: World) -> WriteLog:
    """Four failovers without a round; the `end` record that is to be written."""
    die(world)
    for _ in range(3):
        world.answer(resumed(world), world.state(State.WAITING, seq=UNSET))
        world.answer(world.next(Name), Refused(status=404))
    read = world.next(ReadLog)
    world.answer(read, world.stored(read))
    return world.next(WriteLog)


def test_an_end_that_somebody_came_before_is_written_behind_them() -> None:
    world = several()
    end = given_up(world)
    world.append(FenceRecord(epoch=9, by="http://other/router/#n9"))
    world.answer(end, Refused(status=412))
    world.store()
    world.failed("verifier_lost")
    last = read_records(world.log or b"")[-1][0]
    assert isinstance(last, EndRecord)
    assert last.epoch == 9


def test_an_end_whose_log_is_gone_is_not_waited_for() -> None:
    world = World(D1).drafting()
    world.log = None
    del world.alive[V]
    world.wait(3.25)
    for _ in range(3):
        world.answer(world.next(ReadLog), Refused(status=404))
        world.answer(world.next(WriteLog), Accepted())  # and the store forgets it
        world.todo.clear()
        world.take(world.machine.fail_over(world.now))
    world.answer(world.next(ReadLog), Refused(status=404))
    world.failed("verifier_lost")


def test_an_end_before_which_the_log_goes_is_not_waited_for() -> None:
    world = World(D1, patience=Patience(failover_give_up_s=10.0)).drafting()
    del world.alive[V]
    world.wait(3.25)
    world.store()
    world.wait(10)
    end = world.next(WriteLog)
    world.answer(end, Refused(status=412))
    world.answer(world.next(ReadLog), Refused(status=404))
    world.failed("verifier_lost")


def test_a_verifier_that_is_too_small_is_not_chosen() -> None:
    world = several()
    world.alive[V2] = {**VERIFIER, "context_tokens": 4}
    world.report()
    die(world)
    world.store()
    assert "Open" not in world.wants()


# Two routers (decision 89)


def test_a_router_whose_fence_lost_stands_back_and_looks_again() -> None:
    world = several()
    die(world)
    read = world.next(ReadLog)
    world.answer(read, world.stored(read))
    world.append(FenceRecord(epoch=2, by="http://other/router/#n9"))  # the other one was quicker
    world.store()
    assert world.wants() == []
    before = world.now
    world.retry()
    assert world.now - before >= 2
    opening = resumed(world)
    assert opening.message.epoch == 3
    assert [fence.epoch for fence in world.fences()] == [2, 3]


def test_a_fence_of_an_earlier_life_is_not_ours() -> None:
    """Two placements of one session differ by their nonces."""
    world = several(nonce="n2")
    world.append(FenceRecord(epoch=2, by=f"{ROUTER}#{NONCE}"))
    die(world)
    world.store()
    assert "Open" not in world.wants()
    world.wait(2.25)
    assert resumed(world).message.epoch == 3


def test_two_routers_with_the_same_new_epoch() -> None:
    """Decision 89: one compare-and-set wins; the other finds the session alive at that epoch and follows."""
    one, other = several(nonce="n1", record=RECORD), several(nonce="n2", record=RECORD)
    for world in (one, other):
        die(world)
        world.answer(world.next(ReadLog), world.stored(ReadLog(ref=LOG)))
    first, second = one.next(WriteLog), other.next(WriteLog)
    assert (first.epoch, second.epoch) == (2, 2)
    one.answer(first, one.stored(first))
    other.log = one.log
    other.answer(second, other.stored(second))
    other.store()
    opening = resumed(one)
    one.answer(opening, one.state(State.WAITING, seq=UNSET))
    assert other.wants() == []
    other.retry()  # it has stood back
    other.store()
    look = other.next(ReadRecord)
    assert look.ref == RECORD
    other.answer(look, RecordText(one.record, '"record"'))
    ask = other.next(AskState)
    assert ask.verifier == V2
    other.epoch = 2
    other.answer(ask, one.state(State.WAITING, seq=UNSET))
    assert (other.machine.verifier, other.machine.epoch, other.machine.phase) == (V2, 2, Phase.SETTLED)
    other.wait(20)
    assert other.wants() == ["Read"], "it names nobody"
    other.commit(2)
    other.read(Action.FINISH)
    ending = other.ending()
    assert ending is not None
    assert ending.finish is Action.FINISH
    assert len(one.fences()) == 1


def test_output_of_a_newer_epoch_is_another_routers_doing() -> None:
    """It has taken the session up at the same verifier: the log and the directory tell, and nothing is fenced."""
    world = World(D1, record=RECORD).drafting()
    world.append(FenceRecord(epoch=2, by="http://other/router/#n9"))
    world.page(world.next(Read), epoch=2)
    assert world.failovers == ["moved"]
    world.store()
    world.retry()
    world.store()
    moved = replace(read_directory_record(world.record), epoch=2, incarnation=INCARNATION + 1)
    world.answer(world.next(ReadRecord), RecordText(encode(moved), '"theirs"'))
    world.answer(world.next(AskState), world.state(State.WAITING, epoch=2, seq=UNSET))
    assert (world.machine.epoch, world.machine.phase) == (2, Phase.SETTLED)
    assert world.wants() == ["Read"]
    assert [fence.epoch for fence in world.fences()] == [2]


def test_another_routers_session_that_does_not_live_is_fenced_anew() -> None:
    world = several(record=RECORD)
    die(world)
    read = world.next(ReadLog)
    world.answer(read, world.stored(read))
    world.append(FenceRecord(epoch=2, by="http://other/router/#n9"))
    world.store()
    world.retry()
    world.store()
    world.answer(world.next(ReadRecord), RecordText(world.record, '"record"'))  # it still tells of epoch 1
    assert resumed(world).message.epoch == 3


@pytest.mark.parametrize("answer", [RecordText(b"\xa1", '"t"'), Lost("?"), Refused(status=404), "dead"])
def test_another_router_that_cannot_be_found_is_fenced(answer: Outcome | str) -> None:
    world = several(record=RECORD)
    die(world)
    read = world.next(ReadLog)
    world.answer(read, world.stored(read))
    world.append(FenceRecord(epoch=2, by="http://other/router/#n9"))
    world.store()
    world.retry()
    world.store()
    moved = RecordText(encode(replace(read_directory_record(world.record), epoch=2)), '"t"')
    for _ in range(3):
        looks = [step for step in world.todo if isinstance(step, ReadRecord)]
        if looks:
            world.answer(world.next(ReadRecord), moved if isinstance(answer, str) else answer)
            world.wait(1.0)
    if answer == "dead":
        world.answer(world.next(AskState), Refused(status=404))
    assert resumed(world).message.epoch == 3
    assert "not_found" not in world.failovers, "it is the other's verifier that was not there"


def test_one_that_was_overtaken_never_fences_again() -> None:
    """Decision 111: the record has another incarnation than the one that was written."""
    world = several(record=RECORD)
    die(world)
    world.store(records=False)
    world.answer(world.next(WriteRecord), Refused(status=412))
    raised = replace(read_directory_record(world.record), incarnation=INCARNATION + 1)
    world.record = encode(raised)
    for _ in range(40):
        world.store()
        for step in list(world.todo):
            if isinstance(step, ReadRecord):
                world.todo.remove(step)
                world.answer(step, RecordText(world.record, '"record"'))
            elif isinstance(step, AskState):
                world.todo.remove(step)
                world.answer(step, Refused(status=404))
        world.wait(2)
    assert [fence.epoch for fence in world.fences()] == [2]
    world.failed("taken_over")


@pytest.mark.parametrize("gone", [False, True])
def test_its_own_earlier_record_is_nobody_elses(gone: bool) -> None:
    """A record of an earlier epoch whose write got no answer stands at a tag that was never told."""
    world = several(record=RECORD)
    die(world)
    world.store(records=False)
    refused = world.next(WriteRecord)
    world.answer(refused, Refused(status=412))
    world.answer(world.next(ReadRecord), Lost("?"))
    world.retry()
    look = world.next(ReadRecord)
    world.answer(look, Refused(status=404) if gone else RecordText(world.record, '"late"'))
    again = world.next(WriteRecord)
    assert (again.octets, again.if_match) == (refused.octets, None if gone else '"late"')
    world.answer(again, world.stored(again))
    assert resumed(world).message.epoch == 2


def test_a_resumed_session_waits_for_room_in_the_directory() -> None:
    """507 ends a session that has not begun; one that has, waits as it does with its commits."""
    world = several(record=RECORD)
    die(world)
    world.store(records=False)
    for _ in range(5):
        world.answer(world.next(WriteRecord), Refused(status=507, retry_after_s=1.0))
        world.retry()
    assert resumed(world).message.epoch == 2


@pytest.mark.parametrize("answer", [Refused(status=409, detail="damaged"), b"\xa1", "contested"])
def test_a_record_that_cannot_be_had_ends_a_resume(answer: Any) -> None:
    world = several(record=RECORD, patience=Patience(open_give_up_s=5.0))
    die(world)
    world.store(records=False)
    world.answer(world.next(WriteRecord), Refused(status=412))
    if answer == "contested":
        for _ in range(3):
            world.answer(world.next(ReadRecord), RecordText(world.record, '"late"'))
            world.wait(2.0)
            world.answer(world.next(WriteRecord), Refused(status=412))
    else:
        world.answer(world.next(ReadRecord), RecordText(answer, '"t"') if isinstance(answer, bytes) else answer)
    world.failed("directory_unreachable")


# A router that restarted (decision 106)


def test_a_session_that_lives_where_the_directory_says_is_adopted() -> None:
    world = World(D1)
    world.commit(21, 22)
    world.adopted()
    assert world.machine.output.tokens(0) == (21, 22)
    ask = world.next(AskState)
    assert ask.verifier == V
    world.answer(ask, world.state(State.DRAFTING, seq=7))
    naming = world.next(Name)
    assert (naming.message.drafter, naming.message.epoch) == (D1, 1)
    assert world.fences() == []
    assert world.next(Read).start == 2


def test_a_session_of_a_later_epoch_is_adopted_at_it() -> None:
    world = World(D1)
    world.append(FenceRecord(epoch=2, by="r#old"))
    world.epoch = 2
    world.commit(21)
    world.adopted(epoch=2)
    world.answer(world.next(AskState), world.state(State.WAITING))
    assert world.next(Name).message.epoch == 2


@pytest.mark.parametrize(
    "outcome", [Refused(status=404), Refused(status=409, suffix="sdcp-stale-epoch"), "old", "lost"]
)
def test_one_that_does_not_is_fenced_and_resumed(outcome: Outcome | str) -> None:
    world = World(D1)
    world.append(FenceRecord(epoch=2, by="r#old"))
    world.alive[V2] = VERIFIER
    world.report()
    world.adopted(epoch=2)
    while not any(isinstance(step, Open) for step in world.todo):
        ask = world.next(AskState)
        said = world.state(State.WAITING, epoch=1) if outcome == "old" else Lost("?")
        world.answer(ask, said if isinstance(outcome, str) else outcome)
        if world.machine.next_deadline() is not None and not world.todo:
            world.retry()
        world.store()
    assert world.next(Open).message.epoch == 3
    assert world.failovers == ["not_found"]


def test_one_that_has_ended_is_read_to_its_end() -> None:
    world = World(D1)
    world.commit(21, 22)
    world.adopted()
    world.answer(world.next(AskState), world.state(State.FINISHED))
    world.read(Action.FINISH)
    ending = world.ending()
    assert ending is not None
    assert ending.finish is Action.FINISH
    assert "Name" not in world.wants()


def test_one_that_is_still_being_opened_is_waited_for() -> None:
    world = World(D1).adopted()
    for _ in range(8):
        world.answer(world.next(AskState), Refused(status=503, retry_after_s=1))
        world.retry()
    world.answer(world.next(AskState), world.state(State.WAITING))
    assert world.next(Name).verifier == V


def test_one_whose_log_was_never_created_is_fenced_all_the_same() -> None:
    world = World(D1)
    world.log = None
    world.adopted()
    world.answer(world.next(AskState), Refused(status=404))
    assert resumed(world).message.epoch == 2


def test_one_that_ended_meanwhile_is_served_from_the_log() -> None:
    world = World(D1)
    world.commit(21, 2)
    world.adopted()
    ending = world.ending()
    assert ending is not None
    assert ending.finish is Action.FINISH
    assert world.machine.output.tokens(0) == (21, 2)


def test_a_verifier_that_does_not_report_is_spared_for_a_while_and_then_given_up() -> None:
    """The router that restarted has heard of nobody yet."""
    world = World(D1)
    del world.alive[V]
    world.adopted()
    world.answer(world.next(AskState), world.state(State.WAITING))
    world.answer(world.next(Name), world.state(State.DRAFTING))
    world.wait(9)
    assert world.failovers == []
    world.wait(2)
    assert world.failovers == ["expired"]


# Operators


def test_an_operator_may_move_it_and_say_whereto() -> None:
    world = several()
    world.alive[V3] = VERIFIER
    world.report()
    world.take(world.machine.fail_over(world.now, V3))
    assert world.failovers == ["operator"]
    opening = resumed(world)
    assert (opening.verifier, opening.message.epoch) == (V3, 2)


def test_a_false_alarm_is_safe() -> None:
    """Decision 95: the only verifier there is rebuilds the session at the higher epoch."""
    world = several()
    del world.alive[V2]
    world.wait(3.5)
    world.take(world.machine.fail_over(world.now))
    opening = resumed(world)
    assert (opening.verifier, opening.message.epoch) == (V, 2)
    world.answer(opening, world.state(State.WAITING, seq=UNSET))
    world.answer(world.next(Name), world.state(State.DRAFTING))
    assert world.machine.phase is Phase.ASSIGNING


def test_cancelled_while_it_is_being_taken_over() -> None:
    world = several()
    die(world)
    world.take(world.machine.cancel(world.now))
    ending = world.ending()
    assert ending is not None
    assert ending.cancelled
    assert "Close" not in world.wants(), "nobody lives there"
    world.todo = [step for step in world.todo if not isinstance(step, ReadLog)]
    while not world.done():
        for step in list(world.todo):
            world.todo.remove(step)
            assert isinstance(step, Drop)
            world.answer(step, Accepted())
        world.wait(0.25)


def test_cancelled_while_it_is_being_resumed() -> None:
    world = several()
    die(world)
    opening = resumed(world)
    world.take(world.machine.cancel(world.now))
    close = world.next(Close)
    assert close.verifier == V2
    world.answer(close, Refused(status=404))
    assert not world.done(), "it may have overtaken the open"
    world.answer(opening, SessionState(session=close.session, epoch=2, round=3, committed=5, digest=world.digest()))
    world.answer(world.next(Close), Accepted())


def test_an_operator_may_switch_the_drafter() -> None:
    world = several(D1, "http://d2/drafter/")
    world.take(world.machine.switch(world.now))
    assert world.next(Name).message.drafter == "http://d2/drafter/"


def test_a_command_for_a_session_that_has_ended_does_nothing() -> None:
    world = several()
    world.take(world.machine.cancel(world.now))
    before = world.wants()
    world.take(world.machine.fail_over(world.now))
    world.take(world.machine.switch(world.now))
    assert world.wants() == before
    assert world.failovers == []
