"""The real world behind the ports: the only file that asks the operating system for time, randomness and threads.

Passes of a model run in one thread of their own, always the same: a compute library keeps a pool of helper threads for
each thread that calls it, so passes that wandered over a thread pool would breed several of them, and they would
fight for the cores. Bookkeeping stays in the trio thread (design 1.1): `plan` there, `run` in the pass thread.
"""

import contextlib
import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

import outcome
import trio

from sdcpd.engine.kv_blocks import KvBlocks
from sdcpd.engine.spans import EngineInfo, Row, Shelf, Span, Weighed

T = TypeVar("T")
P = TypeVar("P")

WORKERS_LIMIT: Final = 16
"""Blocking calls at once (fsyncs, digests of prompts). They wait for disks, not for cores; more only queue there."""


class SystemClock:
    """Clock port: the monotonic clock of the machine, seconds."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep_until(self, at: float) -> None:
        """Return at `at` or soon after; at once (after a checkpoint) when that has passed; never for infinity."""
        await trio.sleep(max(0.0, at - self.now()))


class OsRandomStream:
    """RandomStream port: the system's generator. Streams need no state of their own to be independent."""

    def octets(self, count: int) -> bytes:
        return os.urandom(count)

    def uniform(self) -> float:
        """In [0, 1), 53 bits."""
        return (int.from_bytes(os.urandom(7), "big") >> 3) / (1 << 53)


class OsRandomness:
    """Randomness port."""

    def stream(self, name: str) -> OsRandomStream:
        """A stream; the name only matters in simulation, where it makes draws repeatable."""
        assert name
        return OsRandomStream()


Deliver = Callable[[outcome.Outcome[T]], None]


async def _in_thread(start: Callable[[Deliver[T]], None], *, abandon_on_cancel: bool = False) -> T:
    """What a thread delivers, to whom `start` gives the work: the shortest way there and back.

    Cancellation is held back until it has delivered, except with `abandon_on_cancel`: then the caller goes at once and
    nobody hears of the result.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    task = trio.lowlevel.current_task()
    token = trio.lowlevel.current_trio_token()
    waiting = True

    def wake(result: outcome.Outcome[T]) -> None:
        if waiting:
            trio.lowlevel.reschedule(task, result)

    def deliver(result: outcome.Outcome[T]) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # an abandoned call may outlive the whole run
            token.run_sync_soon(wake, result)

    def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        nonlocal waiting
        if not abandon_on_cancel:
            return trio.lowlevel.Abort.FAILED
        waiting = False
        return trio.lowlevel.Abort.SUCCEEDED

    start(deliver)
    result: T = await trio.lowlevel.wait_task_rescheduled(abort)
    return result


class ThreadWorkers:
    """Workers port: trio's threads, at most `WORKERS_LIMIT` at once.

    A cancelled caller waits until its function has returned: what a thread does to a file is then settled.
    `trio.to_thread` does the same in more steps, and a sync of the commit log waits for each of them.
    """

    def __init__(self) -> None:
        self._free: Final = trio.Semaphore(WORKERS_LIMIT)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        try:
            self._free.acquire_nowait()
        except trio.WouldBlock:
            await self._free.acquire()
        try:
            return await _in_thread(partial(trio.lowlevel.start_thread_soon, partial(function, *args)))
        finally:
            self._free.release()

    async def run_short(self, function: Callable[..., T], *args: object) -> T:
        """Here and now, without suspending."""
        return function(*args)


def memlock_limit_bytes() -> int | None:
    """How much memory this process may lock; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


class PassThread:
    """One thread that runs functions in order, for as long as the process lives.

    It is a daemon thread: a process told to stop in the middle of loading a model does not wait for the load.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # filled by awaiting callers only
        self._running = False
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def _loop(self) -> None:
        while True:
            function = self._work.get()
            self._running = True
            function()
            self._running = False

    @property
    def busy(self) -> bool:
        """Whether a function runs or waits; true after the end only for one that was abandoned."""
        return self._running or not self._work.empty()

    async def run(self, function: Callable[[], T], *, abandon_on_cancel: bool = False) -> T:
        """`function()` in the thread, its result or exception here; `abandon_on_cancel` as `_in_thread` has it."""

        def start(deliver: Deliver[T]) -> None:
            self._work.put(lambda: deliver(outcome.capture(function)))

        return await _in_thread(start, abandon_on_cancel=abandon_on_cancel)


class LoadedEngine(Protocol[P]):
    """What engine/forward.py offers: bookkeeping and planning for the trio thread, `run` for the pass thread."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def blocks(self) -> KvBlocks | None: ...
    def open_sequence(self) -> int: ...
    def close_sequence(self, sequence: int) -> None: ...
    def reserve(self, sequence: int, length: int) -> bool: ...
    def plan(self, spans: Sequence[Span]) -> P: ...
    def run(self, plan: P) -> list[tuple[Row, ...]]: ...
    def judge(self, shelf: Shelf, tokens: tuple[int, ...], weighed: Weighed) -> tuple[Row, ...]: ...


class ThreadedEngine:
    """Engine port over a loaded engine: passes one at a time in `thread`, all else here in the trio thread."""

    def __init__(self, engine: LoadedEngine[P], thread: PassThread) -> None:
        self._engine = engine
        self._thread = thread
        self._plan = partial(_planned, engine)
        self._turn = trio.Lock()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def free_pages(self) -> int:
        return self._engine.free_pages

    @property
    def blocks(self) -> KvBlocks | None:
        return self._engine.blocks

    def open_sequence(self) -> int:
        return self._engine.open_sequence()

    def close_sequence(self, sequence: int) -> None:
        self._engine.close_sequence(sequence)

    def reserve(self, sequence: int, length: int) -> bool:
        return self._engine.reserve(sequence, length)

    async def run_pass(self, spans: Sequence[Span]) -> list[tuple[Row, ...]]:
        """One pass. A caller cancelled in the middle waits for its end, so that no pass outlives who planned it.

        Planned before anything is waited for: while a turn is waited for, a session may end and close its sequence.
        """
        run = self._plan(spans)
        async with self._turn:
            return await self._thread.run(run)

    async def passes_ended(self) -> None:
        """Return when the passes planned so far have ended: turns are taken in the order of asking."""
        async with self._turn:
            pass

    async def judge(self, shelf: Shelf, tokens: tuple[int, ...], weighed: Weighed) -> tuple[Row, ...]:
        """Judge what a pass left on a shelf; between passes, in their thread."""
        async with self._turn:
            return await self._thread.run(partial(self._engine.judge, shelf, tokens, weighed))


def _planned(engine: LoadedEngine[P], spans: Sequence[Span]) -> Callable[[], list[tuple[Row, ...]]]:
    return partial(engine.run, engine.plan(spans))
