"""The real ports, with real threads; their waits are for events, never for time."""

import threading
from collections.abc import Sequence

import pytest
import trio

from sdcpd.engine.spans import EngineInfo, Row, Shelf, Span, Weighed
from sdcpd.node.real_ports import WORKERS_LIMIT, OsRandomness, PassThread, SystemClock, ThreadedEngine, ThreadWorkers


async def test_the_clock_goes_on_and_sleeps() -> None:
    clock = SystemClock()
    before = clock.now()
    await clock.sleep_until(before - 5)  # in the past: no wait
    await clock.sleep_until(before + 0.002)
    assert clock.now() >= before + 0.002


async def test_sleeping_for_ever_can_be_cancelled() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await SystemClock().sleep_until(float("inf"))
    assert scope.cancelled_caught


def test_draws() -> None:
    stream = OsRandomness().stream("session ids")
    assert len(stream.octets(16)) == 16
    assert stream.octets(16) != stream.octets(16)
    draws = [stream.uniform() for _ in range(2000)]
    assert all(0 <= draw < 1 for draw in draws)
    assert 0.4 < sum(draws) / len(draws) < 0.6


async def test_workers_leave_the_trio_thread() -> None:
    def add(a: int, b: int) -> tuple[int, int]:
        return a + b, threading.get_ident()

    total, thread = await ThreadWorkers().run(add, 2, 3)
    assert total == 5
    assert thread != threading.get_ident()


async def test_a_short_call_needs_no_thread() -> None:
    assert await ThreadWorkers().run_short(threading.get_ident) == threading.get_ident()


async def test_workers_are_few() -> None:
    """One call more than there are workers waits, is let go when it is cancelled, and runs when one is free."""
    workers, leave, entered = ThreadWorkers(), threading.Event(), threading.Semaphore(0)

    def stay() -> bool:
        entered.release()
        return leave.wait(10)

    async with trio.open_nursery() as nursery:
        for _ in range(WORKERS_LIMIT):
            nursery.start_soon(workers.run, stay)
        for _ in range(WORKERS_LIMIT):
            assert await trio.to_thread.run_sync(entered.acquire)
        with trio.move_on_after(0) as given_up:
            await workers.run(threading.get_ident)
        assert given_up.cancelled_caught
        leave.set()
    assert await workers.run(threading.get_ident) != threading.get_ident()


async def test_a_pass_thread_is_always_the_same_one() -> None:
    thread = PassThread("passes")
    assert await thread.run(threading.get_ident) == await thread.run(threading.get_ident) != threading.get_ident()


async def test_an_exception_comes_back() -> None:
    def fail() -> None:
        raise KeyError("page")

    with pytest.raises(KeyError, match="page"):
        await PassThread("passes").run(fail)


async def test_a_cancelled_caller_waits_for_a_pass_but_not_for_a_load() -> None:
    thread = PassThread("passes")
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> str:
        started.set()
        go.wait(20)
        ended.set()
        return "done"

    with trio.CancelScope() as load:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: thread.run(work, abandon_on_cancel=True))
            await trio.to_thread.run_sync(started.wait, 20)
            load.cancel()
    assert load.cancelled_caught
    assert not ended.is_set()
    go.set()
    await trio.to_thread.run_sync(ended.wait, 20)

    for event in (started, go, ended):
        event.clear()
    results: list[str] = []
    with trio.CancelScope() as passing:
        async with trio.open_nursery() as nursery:

            async def caller() -> None:
                results.append(await thread.run(work))

            nursery.start_soon(caller)
            await trio.to_thread.run_sync(started.wait, 20)
            passing.cancel()
            go.set()
    assert results == ["done"]
    assert ended.is_set()


class CountingEngine:
    """Answers each span with its last token; notes which thread plans and which runs."""

    info = EngineInfo(
        model=bytes(32),
        tokenizer=bytes(32),
        vocabulary=16,
        context_tokens=64,
        page_tokens=4,
        pages=8,
        dtype="fp32",
        device="cpu",
    )
    free_pages = 8

    def __init__(self) -> None:
        self.planned_in: list[int] = []
        self.ran_in: list[int] = []
        self.at_once = 0

    def open_sequence(self) -> int:
        return 7

    def close_sequence(self, sequence: int) -> None: ...

    @property
    def blocks(self) -> None:
        return None

    def reserve(self, sequence: int, length: int) -> bool:
        return length <= 32

    def plan(self, spans: Sequence[Span]) -> list[Span]:
        self.planned_in.append(threading.get_ident())
        return list(spans)

    def judge(self, shelf: Shelf, tokens: tuple[int, ...], weighed: Weighed) -> tuple[Row, ...]:
        raise AssertionError("nothing is kept on a shelf here")

    def run(self, plan: list[Span]) -> list[tuple[Row, ...]]:
        self.ran_in.append(threading.get_ident())
        self.at_once += 1
        assert self.at_once == 1
        self.at_once -= 1
        return [(Row(token=span.tokens[-1], margin=1.0, finite=True),) for span in plan]


async def test_a_pass_is_planned_before_anything_is_waited_for() -> None:
    """A sequence that is closed as soon as its pass was asked for has been planned: no pass meets a closed one."""
    inner = CountingEngine()
    engine = ThreadedEngine(inner, PassThread("passes"))
    call = engine.run_pass([Span(sequence=7, tokens=(1,), start=0, rows=1)])
    try:
        call.send(None)  # up to the first thing it waits for
        assert len(inner.planned_in) == 1
        assert inner.ran_in == []
    finally:
        call.close()


async def test_the_engine_plans_here_and_runs_there_one_pass_at_a_time() -> None:
    inner = CountingEngine()
    engine = ThreadedEngine(inner, PassThread("passes"))
    answers: list[list[tuple[Row, ...]]] = []

    async def one(token: int) -> None:
        answers.append(await engine.run_pass([Span(sequence=7, tokens=(token,), start=0, rows=1)]))

    async with trio.open_nursery() as nursery:
        for token in range(5):
            nursery.start_soon(one, token)
    assert sorted(rows[0][0].token for rows in answers) == [0, 1, 2, 3, 4]
    assert set(inner.planned_in) == {threading.get_ident()}
    assert len(set(inner.ran_in)) == 1
    assert set(inner.ran_in) != {threading.get_ident()}
    assert (engine.info.vocabulary, engine.free_pages, engine.open_sequence()) == (16, 8, 7)
    assert engine.reserve(7, 32)
    assert not engine.reserve(7, 33)
