"""One client connection against a scripted peer, in virtual time: every way in which a request can end."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h2.errors
import h2.events
import pytest
import trio
from hyperframe.frame import DataFrame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from sdcpd.edge.h2_client import AnswerLost, ClientConnection, NotProcessed
from sdcpd.edge.transport import Response, TransportError
from sdcpd.edge.wire_settings import PeerClientSettings
from tests.edge.wire.raw import REQUEST, Raw
from tests.support.ports import TrioClock

HEAD = [(name.encode(), value.encode()) for name, value in REQUEST]
CODES = h2.errors.ErrorCodes


class Stand:
    def __init__(self, connection: ClientConnection, peer: Raw, nursery: trio.Nursery, stream: Any) -> None:
        self.connection = connection
        self.peer = peer
        self.nursery = nursery
        self.stream = stream
        self.ended = trio.Event()

    async def ask(self, body: bytes = b"") -> "Asked":
        asked = Asked()
        self.nursery.start_soon(asked.run, self.connection, body)
        await wait_all_tasks_blocked()
        return asked

    async def tend_until(self, at: float) -> None:
        while trio.current_time() < at:
            await trio.sleep(0.5)
            self.connection.tend(trio.current_time())


class Asked:
    """A request under way; `outcome()` waits for its end."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self._over = trio.Event()
        self._outcome: Response | TransportError | None = None

    async def run(self, connection: ClientConnection, body: bytes) -> None:
        with self.scope:
            try:
                self._outcome = await connection.request(HEAD, body)
            except TransportError as error:
                self._outcome = error
        self._over.set()

    async def outcome(self) -> Response | TransportError | None:
        await self._over.wait()
        return self._outcome

    async def response(self) -> Response:
        outcome = await self.outcome()
        assert isinstance(outcome, Response), outcome
        return outcome

    async def failed(self, kind: type[TransportError], words: str) -> None:
        outcome = await self.outcome()
        assert type(outcome) is kind, outcome
        assert words in str(outcome), outcome


@asynccontextmanager
async def stand(settings: dict[str, Any] | None = None, **peer_settings: int) -> AsyncIterator[Stand]:
    ours, theirs = memory_stream_pair()
    clock = TrioClock()
    connection = ClientConnection(ours, None, PeerClientSettings(**(settings or {})), clock, lambda: None)
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            made = Stand(connection, Raw(theirs, client=False, **peer_settings), nursery, ours)

            async def run(task_status: trio.TaskStatus[None]) -> None:
                await connection.run(task_status=task_status)
                made.ended.set()

            nursery.start_soon(made.peer.start)
            await nursery.start(run)
            yield made
            nursery.cancel_scope.cancel()


async def test_a_request_and_its_answer(autojump_clock: Any) -> None:
    async with stand() as s:
        asked = await s.ask(b"question")
        request = await s.peer.next(h2.events.RequestReceived)
        assert request.headers is not None
        assert [(str(name), str(value)) for name, value in request.headers] == REQUEST
        assert (await s.peer.next(h2.events.DataReceived)).data == b"question"
        assert s.connection.load == 1
        s.peer.h2.send_headers(1, [(":status", "100")])
        s.peer.h2.send_headers(1, [(":status", "201"), ("etag", '"x"'), ("vary", "a"), ("vary", "b")])
        await s.peer.flush()
        s.peer.h2.send_data(1, b"ans")
        s.peer.h2.send_data(1, b"wer", end_stream=True)
        await s.peer.flush()
        assert await asked.response() == Response(201, {"etag": '"x"', "vary": "a, b"}, b"answer")
        assert s.connection.load == 0


async def test_a_small_request_is_one_write(autojump_clock: Any) -> None:
    async with stand() as s:
        await wait_all_tasks_blocked()
        writes: list[None] = []
        pump = s.stream.send_stream.send_all_hook

        async def note() -> None:
            writes.append(None)
            await pump()

        s.stream.send_stream.send_all_hook = note
        asked = await s.ask(b"x" * 300)
        await s.peer.answer(await s.peer.next_request(), b"y")
        await asked.response()
        assert len(writes) == 1


async def test_a_cancelled_request_is_reset_and_frees_its_place(autojump_clock: Any) -> None:
    async with stand(max_concurrent_streams=2) as s:
        assert s.connection.room == 2
        asked = await s.ask()
        number = await s.peer.next_request()
        assert s.connection.room == 1
        asked.scope.cancel()
        reset = await s.peer.next(h2.events.StreamReset)
        assert (reset.stream_id, reset.error_code) == (number, CODES.CANCEL)
        assert s.connection.room == 2
        # what still comes for it is dropped
        s.peer.h2.receive_data(b"")
        await s.peer.stream.send_all(DataFrame(number, data=b"late").serialize())
        other = await s.ask()
        await s.peer.answer(await s.peer.next_request())
        assert (await other.response()).status == 200


@pytest.mark.parametrize("together", [False, True])
async def test_after_goaway_what_will_be_answered_is_waited_for(together: bool, autojump_clock: Any) -> None:
    """h2 itself would take the connection for dead, and with it the answers that the peer promised."""
    async with stand() as s:
        first, second = await s.ask(), await s.ask()
        numbers = [await s.peer.next_request(), await s.peer.next_request()]
        assert numbers == [1, 3]
        s.peer.h2.send_headers(1, [(":status", "200")])
        s.peer.h2.send_data(1, b"kept", end_stream=True)
        answer = s.peer.h2.data_to_send()
        await s.peer.goaway(1, then=answer if together else b"")
        await second.failed(NotProcessed, "the peer goes away")
        assert (s.connection.open, s.connection.room) == (False, 0)
        if not together:
            await wait_all_tasks_blocked()
            assert not s.ended.is_set()
            await s.peer.stream.send_all(answer)
        assert (await first.response()).body == b"kept"
        assert await s.peer.ended()
        await s.ended.wait()


async def test_a_peer_that_leaves_while_idle(autojump_clock: Any) -> None:
    async with stand() as s:
        await s.peer.goaway(0)
        await s.ended.wait()
        assert await s.peer.ended()
        with pytest.raises(AssertionError, match="looks first"):
            await s.connection.request(HEAD, b"")


async def test_a_lost_connection_says_what_is_known_of_each_request(autojump_clock: Any) -> None:
    async with stand() as s:
        sent = await s.ask()
        await s.peer.next_request()
        stuck = trio.Event()
        s.stream.send_stream.send_all_hook = stuck.wait
        going = await s.ask()  # being written: may arrive
        await wait_all_tasks_blocked()
        waiting = await s.ask()  # still in the buffer
        await wait_all_tasks_blocked()
        await s.peer.stream.aclose()
        await sent.failed(AnswerLost, "closed")
        await going.failed(AnswerLost, "closed")
        await waiting.failed(NotProcessed, "closed")
        await s.ended.wait()


async def test_resets(autojump_clock: Any) -> None:
    async with stand() as s:
        for code, kind in ((CODES.REFUSED_STREAM, NotProcessed), (CODES.INTERNAL_ERROR, AnswerLost), (99, AnswerLost)):
            asked = await s.ask()
            await s.peer.reset(await s.peer.next_request(), code)
            await asked.failed(kind, "reset")
        cut_short = await s.ask()
        number = await s.peer.next_request()
        await s.peer.answer(number, b"beginning", end=False)
        await s.peer.reset(number, CODES.NO_ERROR)
        await cut_short.failed(AnswerLost, "reset")
        assert s.connection.load == 0
        assert not [event for event in s.peer.events if isinstance(event, h2.events.StreamReset)], (
            "resets are not echoed"
        )


async def test_a_whole_answer_before_the_body_was_sent(autojump_clock: Any) -> None:
    """RFC 9113 section 8.1: the answer counts, the rest of the body is of no use."""
    async with stand() as s:
        asked = await s.ask(b"x" * 200_000)
        number = (await s.peer.next(h2.events.RequestReceived)).stream_id or 0
        await s.peer.answer(number, b"too large", "413")
        await s.peer.reset(number, CODES.NO_ERROR)
        assert (await asked.response()).status == 413
        other = await s.ask(b"y" * 100_000)  # not over the connection's window, which nobody opened for the first
        number = (await s.peer.next(h2.events.RequestReceived)).stream_id or 0
        await s.peer.answer(number, status="404")
        assert (await other.response()).status == 404
        assert (await s.peer.next(h2.events.StreamReset)).stream_id == number
        assert s.connection.load == 0


async def test_large_bodies_pass_small_windows(autojump_clock: Any) -> None:
    question, answer = random.Random(1).randbytes(300_000), random.Random(2).randbytes(3_000_000)
    async with stand(initial_window_size=1000, max_frame_size=20_000) as s:
        asked = await s.ask(question)
        number = (await s.peer.next(h2.events.RequestReceived)).stream_id or 0
        await s.peer.next(h2.events.StreamEnded, number)
        pieces = [e.data or b"" for e in s.peer.events if isinstance(e, h2.events.DataReceived)]
        assert b"".join(pieces) == question
        s.peer.h2.send_headers(number, [(":status", "200")])
        sent = 0
        while sent < len(answer):
            size = min(
                s.peer.h2.local_flow_control_window(number), s.peer.h2.max_outbound_frame_size, len(answer) - sent
            )
            if size == 0:
                await s.peer.read()
                continue
            s.peer.h2.send_data(number, answer[sent : sent + size], end_stream=sent + size == len(answer))
            sent += size
            await s.peer.flush()
        assert (await asked.response()).body == answer


async def test_a_body_is_given_up_while_it_waits_for_a_window(autojump_clock: Any) -> None:
    async with stand(initial_window_size=10) as s:
        asked, reset = await s.ask(b"x" * 100), await s.ask(b"x" * 100)
        await wait_all_tasks_blocked()
        asked.scope.cancel()
        assert await asked.outcome() is None
        assert (await s.peer.next(h2.events.StreamReset)).stream_id == 1
        await s.peer.reset(3)
        await reset.failed(AnswerLost, "reset")
        assert s.connection.load == 0


async def test_an_answer_over_the_limit_is_given_up(autojump_clock: Any) -> None:
    async with stand({"max_answer_bytes": 1024}) as s:
        asked = await s.ask()
        number = await s.peer.next_request()
        await s.peer.answer(number, b"x" * 1000, end=False)
        s.peer.h2.send_data(number, b"x" * 25)
        await s.peer.flush()
        await asked.failed(AnswerLost, "longer than 1024")
        assert (await s.peer.next(h2.events.StreamReset)).stream_id == number
        other = await s.ask()
        await s.peer.answer(await s.peer.next_request())
        await other.response()


async def test_a_silent_peer_is_pinged_and_then_given_up(autojump_clock: Any) -> None:
    async with stand({"ping_interval_s": 5, "ping_timeout_s": 3}) as s:
        begin = trio.current_time()
        asked = await s.ask()
        await s.tend_until(begin + 7.9)
        assert not s.ended.is_set()
        s.nursery.start_soon(s.tend_until, begin + 10)
        await asked.failed(AnswerLost, "does not answer a ping")
        assert trio.current_time() - begin <= 9
        await s.ended.wait()


async def test_a_peer_that_answers_pings_may_think_for_long(autojump_clock: Any) -> None:
    async with stand({"ping_interval_s": 5, "ping_timeout_s": 3}) as s:
        asked = await s.ask()
        number = await s.peer.next_request()

        async def answer_pings() -> None:
            while True:
                await s.peer.next(h2.events.PingReceived)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_pings)
            await s.tend_until(trio.current_time() + 100)
            nursery.cancel_scope.cancel()
        await s.peer.answer(number)
        assert (await asked.response()).status == 200
        await s.tend_until(trio.current_time() + 59)
        assert s.connection.open, "it is idle since the answer, not since the request"


async def test_idle_and_old_connections_are_closed(autojump_clock: Any) -> None:
    async with stand({"idle_connection_timeout_s": 60}) as s:
        await s.tend_until(trio.current_time() + 59)
        assert s.connection.open
        asked = await s.ask()
        await s.peer.answer(await s.peer.next_request())
        await asked.response()
        await s.tend_until(trio.current_time() + 59)
        assert s.connection.open
        await s.tend_until(trio.current_time() + 2)
        await s.ended.wait()
        assert await s.peer.ended()
        assert any(isinstance(event, h2.events.ConnectionTerminated) for event in s.peer.events), "with a GOAWAY"
    async with stand({"max_connection_age_s": 100, "ping_interval_s": 1000}) as s:
        asked = await s.ask()
        number = await s.peer.next_request()
        await s.tend_until(trio.current_time() + 101)
        assert (s.connection.open, s.ended.is_set()) == (False, False)
        await s.peer.answer(number)
        await asked.response()
        await s.ended.wait()


async def test_a_connection_that_ends_before_the_peer_has_spoken() -> None:
    ours, theirs = memory_stream_pair()
    connection = ClientConnection(ours, None, PeerClientSettings(), TrioClock(), lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(theirs.aclose)
        with pytest.raises(TransportError, match=r"the connection broke|closed the connection"):
            await nursery.start(connection.run)


async def test_a_peer_that_takes_nothing_is_not_given_more_and_more(autojump_clock: Any) -> None:
    async with stand() as s:
        s.stream.send_stream.send_all_hook = trio.sleep_forever
        for _ in range(10_000):
            if not s.connection.room:
                break
            asked = await s.ask()
            await wait_all_tasks_blocked()
            asked.scope.cancel()
            await asked.outcome()
        else:
            raise AssertionError("it takes requests for ever")


def _frame(draw: random.Random) -> bytes:
    number = draw.choice([0, 1, 1, 3, 5, 2])
    kind = draw.randrange(8)
    if kind == 0:
        return HeadersFrame(
            number or 1, data=draw.choice([b"\x88", b"", b"\xff" * 5]), flags=["END_HEADERS"]
        ).serialize()
    if kind == 1:
        return DataFrame(number or 1, data=draw.randbytes(draw.randrange(20)), flags=["END_STREAM"]).serialize()
    if kind == 2:
        return RstStreamFrame(number or 1, error_code=draw.randrange(20)).serialize()
    if kind == 3:
        return WindowUpdateFrame(number, window_increment=draw.choice([1, 2**31 - 1])).serialize()
    if kind == 4:
        return SettingsFrame(0, settings={draw.randrange(1, 9): draw.choice([0, 1, 100, 2**24, 2**32 - 1])}).serialize()
    if kind == 5:
        return PingFrame(0, opaque_data=b"12345678").serialize()
    if kind == 6:
        return bytes(3) + draw.randbytes(6)
    return draw.randbytes(draw.randrange(1, 30))


@pytest.mark.parametrize("block", range(4))
async def test_whatever_a_peer_sends_ends_requests_and_nothing_else(block: int, autojump_clock: Any) -> None:
    """Frames in any order, and octets that are none: each request has an end, and no exception gets out."""
    for seed in range(40):
        draw = random.Random(f"{block} {seed}")
        async with stand() as s:
            asked = [await s.ask(b"x" * 100), await s.ask()]
            await wait_all_tasks_blocked()
            for _ in range(draw.randrange(1, 6)):
                octets = _frame(draw)
                try:
                    await s.peer.stream.send_all(octets)
                except trio.BrokenResourceError:
                    break
                await wait_all_tasks_blocked()
            await s.peer.stream.aclose()
            for one in asked:
                assert await one.outcome() is not None
            await s.ended.wait()
            assert s.connection.load == 0
