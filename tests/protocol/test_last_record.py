"""A session that ends while no verifier can write so is closed in its log by the router (decisions 83, 112)."""

import pytest

from sdcpd.protocol.commit_log import EndRecord, FenceRecord, read_records
from sdcpd.protocol.last_record import END_GIVE_UP_S
from sdcpd.protocol.log_history import read_history
from sdcpd.protocol.placement_values import Accepted, Close, Lost, ReadLog, Refused, WriteLog
from sdcpd.protocol.terms import Action
from tests.support.placement_world import CONTRACT, PROMPT, V, World


def lost() -> World:
    """Two tokens are committed, and the only verifier is gone: nobody can take the session."""
    world = World().self_decoding()
    world.commit(20, 21)
    del world.alive[V]
    world.wait(4.0)
    world.store()
    return world


def records(world: World) -> list[str]:
    return [type(record).__name__ for record, _ in read_records(world.log or b"")]


def closed(world: World) -> bool:
    """As a router, or a verifier, that finds the log later sees it."""
    ending = read_history(world.log or b"", CONTRACT, PROMPT).ending
    return ending is not None and (ending.finish, ending.reason) == (Action.FAIL, "cancelled")


def cancel(world: World) -> None:
    world.take(world.machine.cancel(world.now))


@pytest.mark.parametrize("lose", [0, 1, 2])
def test_cancelled_while_no_verifier_lives(lose: int) -> None:
    """The failover's own fence stands already: the end goes behind it. Lost answers are settled by reading."""
    world = lost()
    cancel(world)
    world.store(lose=lose)
    while not world.done():
        world.retry()
        world.store()
    assert records(world) == ["CommitRecord", "FenceRecord", "EndRecord"]
    assert closed(world)


def test_cancelled_before_the_failover_has_fenced() -> None:
    world = World().self_decoding()
    world.commit(20, 21)
    del world.alive[V]
    world.wait(4.0)
    cancel(world)
    world.store()
    assert records(world) == ["CommitRecord", "FenceRecord", "EndRecord"]
    assert world.fences()[-1].epoch == 2
    assert world.done()


@pytest.mark.parametrize("answer", [Refused(status=404), Lost("?"), Refused(status=503)])
def test_a_verifier_that_does_not_close_it(answer: Refused | Lost) -> None:
    """It restarted and knows nothing of the session, or it is dead and not yet known to be."""
    world = World().self_decoding()
    world.commit(20, 21)
    cancel(world)
    while (close := next((step for step in world.todo if isinstance(step, Close)), None)) is not None:
        world.todo.remove(close)
        world.answer(close, answer)
        if world.machine.next_deadline() is not None and not any(isinstance(step, ReadLog) for step in world.todo):
            world.retry()
    world.store()
    assert closed(world)


def test_a_verifier_that_closed_it_needs_no_help() -> None:
    world = World().self_decoding()
    cancel(world)
    world.append(EndRecord(epoch=1, end=Action.FAIL, reason="cancelled"))
    world.answer(world.next(Close), Refused(status=410))
    world.store()
    assert records(world) == ["EndRecord"]


def test_another_routers_session_is_left_alone() -> None:
    world = lost()
    world.append(FenceRecord(epoch=9, by="http://r9/router/#x"))
    cancel(world)
    world.store()
    assert records(world)[-1] == "FenceRecord"
    assert world.done()


@pytest.mark.parametrize("log", [None, b"\xa1\x61"])
def test_without_a_log_or_with_a_damaged_one_there_is_nothing_to_close(log: bytes | None) -> None:
    world = lost()
    world.log = log
    cancel(world)
    if log is None:
        world.store()
    else:
        world.answer(world.next(ReadLog), world.stored(ReadLog(ref="")))
    assert world.log == log
    assert world.done()


def test_a_store_that_stays_away_is_not_waited_for_without_end() -> None:
    world = lost()
    cancel(world)
    began = world.now
    while not world.done():
        for step in [one for one in world.todo if isinstance(one, ReadLog | WriteLog)]:
            world.todo.remove(step)
            world.answer(step, Lost("?"))
        if not world.done():
            world.retry()
    assert world.now == pytest.approx(began + END_GIVE_UP_S, abs=3.0)


def test_a_closed_session_has_no_deadline() -> None:
    world = World().self_decoding()
    cancel(world)
    world.answer(world.next(Close), Accepted())
    assert not any(isinstance(step, ReadLog) for step in world.todo)
