"""A connection from a peer, over memory streams against plain h2: each trap that others fell into is a test."""

import email.utils
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import h2.errors
import h2.events
import h2.settings
import pytest
import structlog
import trio
from hyperframe.frame import PingFrame
from trio.testing import lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from sdcpd.edge.h2_frames import FRAME_BYTES, READ_BYTES, STREAM_WINDOW_BYTES, UNSENT_LIMIT_BYTES, Frames
from sdcpd.edge.h2_server import PeerConnection
from sdcpd.edge.identity import CertificateNames, CertifiedIdentity
from sdcpd.edge.peer_server import PeerServer
from sdcpd.edge.transport import Handler, Request, Response
from sdcpd.edge.wire_settings import PeerServerSettings
from sdcpd.roles.ports import Peer
from tests.edge.wire.raw import Raw
from tests.edge.wire.world import DRAFTER, app_of, echo
from tests.support.ports import TrioClock

CODES = h2.errors.ErrorCodes


class Stand:
    def __init__(self, peer: Raw, server: PeerServer, under_way: Callable[[], int], ended: trio.Event) -> None:
        self.peer = peer
        self.server = server
        self.under_way = under_way
        self.ended = ended


@asynccontextmanager
async def stand(
    handler: Handler = echo,
    *,
    limit_bytes: int = 16 << 20,
    pair: Callable[[], tuple[Any, Any]] = memory_stream_pair,
    peer: dict[str, int] | None = None,
    **settings: Any,
) -> AsyncIterator[Stand]:
    app, _ = app_of({"verifier": handler}, limit_bytes)
    server = PeerServer(app, PeerServerSettings(insecure_loopback=True, **settings), TrioClock(), None)
    ours, theirs = pair()
    ended = trio.Event()

    async def serve() -> None:
        await server.serve_stream(theirs, CertifiedIdentity(CertificateNames(uris=(DRAFTER.uri,)), {}))
        ended.set()

    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            nursery.start_soon(server._tend)
            raw = Raw(ours, client=True, **(peer or {}))
            await raw.start()
            yield Stand(raw, server, lambda: app.under_way, ended)
            nursery.cancel_scope.cancel()


async def test_an_answer(autojump_clock: Any) -> None:
    async with stand() as s:
        status, fields, body = await s.peer.whole(await s.peer.ask(method="POST", body=b"question"))
        assert (status, body) == (200, b"question")
        assert fields["caller"] == f"drafter {DRAFTER.uri}"
        assert fields["content-length"] == "8"
        assert email.utils.parsedate(fields["date"]) is not None
        assert "server" not in fields
        settings = s.peer.h2.remote_settings
        assert settings.max_concurrent_streams == 512
        assert settings.initial_window_size == STREAM_WINDOW_BYTES


async def test_a_request_as_the_application_sees_it(autojump_clock: Any) -> None:
    seen: list[Request] = []

    async def note(peer: Peer, request: Request) -> Response:
        seen.append(request)
        return Response(204)

    async with stand(note) as s:
        number = await s.peer.ask(("x", "1"), ("x", "2"), path="/verifier/a%2Fb?from=1&y=?%20")
        assert (await s.peer.whole(number))[0] == 204
        assert seen == [Request("GET", "a%2Fb", "from=1&y=?%20", {"x": "1, 2"})]


@pytest.mark.parametrize("path", ["/verifier/thing", "/nowhere"])
async def test_an_answer_to_head_has_no_body(path: str, autojump_clock: Any) -> None:
    """Nor has a refusal, whatever made it; its length is what GET would have."""

    async def answer(peer: Peer, request: Request) -> Response:
        return Response(200, {"content-type": "text/plain"}, b"eight...")

    async with stand(answer) as s:
        whole = await s.peer.whole(await s.peer.ask(path=path))
        head = await s.peer.whole(await s.peer.ask(method="HEAD", path=path))
        assert head[2] == b""
        assert head[:2] == whole[:2]
        assert head[1]["content-length"] == str(len(whole[2]))


async def test_a_small_answer_is_one_write(autojump_clock: Any) -> None:
    async with stand() as s:
        number = await s.peer.ask(method="POST", body=b"x" * 300)
        await s.peer.next(h2.events.ResponseReceived, number)
        assert [e for e in s.peer.events if isinstance(e, h2.events.StreamEnded) and e.stream_id == number]


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES, FRAME_BYTES + 1, 1_000_000])
async def test_answers_of_all_sizes_pass_small_windows(size: int, autojump_clock: Any) -> None:
    body = random.Random(size).randbytes(size)

    async def handle(peer: Peer, request: Request) -> Response:
        return Response(204 if size == 0 else 200, {}, body)

    async with stand(handle, peer={"initial_window_size": 2000}) as s:
        status, fields, received = await s.peer.whole(await s.peer.ask())
        assert (status, received) == (204 if size == 0 else 200, body)
        assert ("content-length" in fields) == (size > 0)
        assert s.server.connections == 1


async def test_an_answer_before_the_body_was_read_leaves_the_connection_whole(autojump_clock: Any) -> None:
    """404, 413: whoever still sends the body is told to stop, and may ask the next thing."""
    async with stand(limit_bytes=1000) as s:
        for path, status in (("/nowhere", 404), ("/verifier/thing", 200)):
            number = await s.peer.ask(method="POST", body=b"x" * 500, end=False, path=path)
            if status == 200:
                s.peer.h2.send_data(number, b"x" * 501)
                await s.peer.flush()
            await s.peer.next(h2.events.StreamEnded, number)
            reset = await s.peer.next(h2.events.StreamReset, number)
            assert reset.error_code == CODES.NO_ERROR
        assert (await s.peer.whole(await s.peer.ask(method="POST", body=b"y")))[2] == b"y"
        assert s.under_way() == 0


async def test_data_that_was_on_its_way_when_the_answer_came(autojump_clock: Any) -> None:
    async with stand(limit_bytes=1000) as s:
        number = await s.peer.ask(method="POST", body=b"x" * 1001, end=False)
        for _ in range(5):  # in the client's view nothing was answered yet
            s.peer.h2.send_data(number, b"x" * 10_000)
        other = await s.peer.ask(method="POST", body=b"y")
        assert (await s.peer.whole(other))[2] == b"y"


@pytest.mark.parametrize("size", [1, 100_000])
async def test_a_body_without_end_is_not_read_on(size: int, autojump_clock: Any) -> None:
    """64 MiB against a limit of 256 KiB: 413 long before, and the rest is neither kept nor waited for."""
    limit_bytes = 256 << 10

    async def handle(peer: Peer, request: Request) -> Response:
        assert len(request.body) == limit_bytes + 1, "enough to be refused for, and no more"
        return Response(413, {}, b"large" * size)

    async with stand(handle, limit_bytes=limit_bytes) as s:
        number = await s.peer.ask(method="POST", body=b"", end=False)
        sent = 0
        while not any(isinstance(event, h2.events.StreamReset) for event in s.peer.events):
            room = min(s.peer.h2.local_flow_control_window(number), 16384)
            if room:
                s.peer.h2.send_data(number, bytes(room))
                sent += room
                await s.peer.flush()
            else:
                await s.peer.read()
        assert sent <= 8 * STREAM_WINDOW_BYTES  # a large answer takes its turns
        assert (await s.peer.whole(number))[0] == 413
        await wait_all_tasks_blocked()
        assert s.under_way() == 0


async def test_one_request_that_is_not_read_does_not_block_the_others(autojump_clock: Any) -> None:
    """A short queue between connection and application would fill, and the connection read no further."""

    async def handle(peer: Peer, request: Request) -> Response:
        if request.query == "slow":
            await trio.sleep(10)
        return Response(200, {}, request.query.encode())

    async with stand(handle, limit_bytes=10) as s:
        number = await s.peer.ask(method="POST", body=b"x" * 11, end=False, path="/verifier/thing?slow")
        for _ in range(50):
            s.peer.h2.send_data(number, b"x" * 100)
            await s.peer.flush()
        begin = trio.current_time()
        assert (await s.peer.whole(await s.peer.ask()))[0] == 200
        assert trio.current_time() == begin


async def test_a_peer_that_resets_or_leaves_ends_the_wait(autojump_clock: Any) -> None:
    async def wait(peer: Peer, request: Request) -> Response:
        await trio.sleep_forever()
        raise AssertionError

    async with stand(wait) as s:
        numbers = [await s.peer.ask() for _ in range(3)]
        await wait_all_tasks_blocked()
        assert s.under_way() == 3
        await s.peer.reset(numbers[0])
        await wait_all_tasks_blocked()
        assert s.under_way() == 2
        await s.peer.stream.aclose()
        await s.ended.wait()
        assert s.under_way() == 0
        assert s.server.connections == 0


async def test_a_thousand_streams_that_were_reset_are_forgotten(autojump_clock: Any) -> None:
    """A tree of streams that keeps them is full at a thousand."""

    async def wait(peer: Peer, request: Request) -> Response:
        await trio.sleep(10 if request.query == "wait" else 0)
        return Response(204)

    async with stand(wait) as s:
        for _ in range(1100):
            await s.peer.reset(await s.peer.ask(path="/verifier/thing?wait"))
        assert (await s.peer.whole(await s.peer.ask()))[0] == 204
        (connection,) = s.server._connections
        assert connection.requests == 0


async def test_many_cancelled_requests_do_not_harm_those_that_are_not(autojump_clock: Any) -> None:
    """A cancelled request must not take frames along: header compression builds on each of them."""
    draw = random.Random(5)

    async def handle(peer: Peer, request: Request) -> Response:
        await trio.sleep(draw.choice([0, 0, 1]))
        return Response(200, {f"x-{draw.randrange(40)}": str(draw.randrange(1000))}, request.body)

    async with stand(handle) as s:
        for turn in range(60):
            numbers = [await s.peer.ask(method="POST", body=b"%d" % turn) for _ in range(4)]
            if draw.random() < 0.5:
                await trio.sleep(draw.choice([0, 1]))
            for number in numbers[1:]:
                await s.peer.reset(number)
            status, _, body = await s.peer.whole(numbers[0])
            assert (status, body) == (200, b"%d" % turn)
        await wait_all_tasks_blocked()
        assert s.under_way() == 0


async def test_a_request_that_is_none_costs_its_stream_only(autojump_clock: Any) -> None:
    async with stand() as s:
        s.peer.h2.send_headers(1, [(":method", "CONNECT"), (":authority", "x")], end_stream=True)
        s.peer.h2.send_headers(
            3,
            [(":method", "GET"), (":scheme", "https"), (":authority", "x"), (":path", "/verif\xffier")],
            end_stream=True,
        )
        await s.peer.flush()
        for number in (1, 3):
            assert (await s.peer.next(h2.events.StreamReset, number)).error_code == CODES.PROTOCOL_ERROR
        s.peer.h2.prioritize(5, depends_on=3, weight=10)
        s.peer.h2.prioritize(7, depends_on=5, exclusive=True)
        assert (await s.peer.whole(await s.peer.ask()))[0] == 200


async def test_octets_that_are_no_frames_end_the_connection_quietly(autojump_clock: Any) -> None:
    with structlog.testing.capture_logs():
        for octets in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 100, b""):
            async with stand() as s:
                await s.peer.stream.send_all(octets)
                if not octets:
                    await s.peer.stream.aclose()
                await s.ended.wait()


def mutated(draw: random.Random) -> bytes:
    """Some requests as a peer would send them, with a few octets changed, lost or added."""
    frames = Frames(client=True)
    frames.greet({h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: 1 << 16}, 1 << 20)
    for _ in range(draw.randrange(1, 5)):
        number = frames.get_next_available_stream_id()
        fields = {":method": "POST", ":scheme": "https", ":authority": "x", ":path": "/verifier/x", "y": "z"}
        frames.send_headers(number, [(name.encode(), value.encode()) for name, value in fields.items()])
        frames.send_data(number, draw.randbytes(draw.randrange(50)), end_stream=draw.random() < 0.8)
        if draw.random() < 0.2:
            frames.reset_stream(number)
    octets = bytearray(frames.data_to_send())
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(24, len(octets))  # behind the preface
        match draw.randrange(3):
            case 0:
                octets[place] ^= 1 << draw.randrange(8)
            case 1:
                del octets[place : place + draw.randrange(1, 20)]
            case _:
                octets[place:place] = draw.randbytes(draw.randrange(1, 20))
    return bytes(octets)


async def test_broken_frames_cost_their_connection_and_nothing_more(autojump_clock: Any) -> None:
    """Whatever h2 makes of them, nothing escapes that would end the node."""
    with structlog.testing.capture_logs():
        for seed in range(300):
            ours, theirs = memory_stream_pair()
            app, failures = app_of({"verifier": echo})
            server = PeerServer(app, PeerServerSettings(insecure_loopback=True), TrioClock(), None)
            async with trio.open_nursery() as nursery:
                identity = CertifiedIdentity(CertificateNames(uris=(DRAFTER.uri,)), {})
                nursery.start_soon(server.serve_stream, theirs, identity)
                await ours.send_all(mutated(random.Random(seed)))
                await wait_all_tasks_blocked()
                await ours.aclose()
            assert (failures, app.under_way, app._bodies_bytes, server.connections) == ([], 0, 0, 0), seed


async def test_retired_what_is_under_way_is_answered_and_nothing_else(autojump_clock: Any) -> None:
    async def slow(peer: Peer, request: Request) -> Response:
        await trio.sleep(3)
        return Response(200, {}, b"kept")

    async with stand(slow) as s:
        first = await s.peer.ask()
        await wait_all_tasks_blocked()
        s.server.retire()
        goaway = await s.peer.next(h2.events.ConnectionTerminated)
        assert (goaway.last_stream_id, goaway.error_code) == (first, CODES.NO_ERROR)
        # plain h2 asks nothing after GOAWAY, so what others would ask is written by hand
        s.peer.h2.state_machine.state = h2.connection.ConnectionState.CLIENT_OPEN
        late = await s.peer.ask()
        assert (await s.peer.next(h2.events.StreamReset, late)).error_code == CODES.REFUSED_STREAM
        assert (await s.peer.whole(first))[2] == b"kept"
        begin = trio.current_time()
        await s.ended.wait()  # the peer does not close: the server does
        assert 1 <= trio.current_time() - begin < 2


async def test_idle_connections_are_retired_busy_ones_are_not(autojump_clock: Any) -> None:
    async def slow(peer: Peer, request: Request) -> Response:
        await trio.sleep(50)
        return Response(204)

    async with stand(slow, idle_connection_timeout_s=10) as s:
        for cancelled in (False, True):
            number = await s.peer.ask()
            if cancelled:
                await trio.sleep(5)
                await s.peer.reset(number)
            else:
                assert (await s.peer.whole(number))[0] == 204
        begin = trio.current_time()
        await s.peer.next(h2.events.ConnectionTerminated)
        assert 9 < trio.current_time() - begin < 11


async def test_a_peer_that_takes_nothing_is_dropped(autojump_clock: Any) -> None:
    """A send has no deadline of its own."""
    async with stand(pair=lambda: _deaf_pair(), stalled_peer_timeout_s=7) as s:
        begin = trio.current_time()
        await s.ended.wait()
        assert 7 <= trio.current_time() - begin < 9
        assert s.server.connections == 0


async def test_a_peer_that_pings_and_reads_nothing_fills_no_memory(autojump_clock: Any) -> None:
    pings = PingFrame(0, b"12345678").serialize() * 1000
    async with stand(pair=lambda: _deaf_pair(), stalled_peer_timeout_s=7) as s:
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await s.peer.stream.send_all(pings)
                await wait_all_tasks_blocked()
                for connection in s.server._connections:
                    assert isinstance(connection, PeerConnection)
                    assert connection._h2.unsent_bytes <= UNSENT_LIMIT_BYTES + READ_BYTES
                await trio.sleep(0.01)
        await s.ended.wait()


def _deaf_pair() -> tuple[Any, Any]:
    """What the server sends is never read."""
    ours, theirs = memory_stream_pair()
    deaf, _ = lockstep_stream_pair()
    return ours, trio.StapledStream(deaf.send_stream, theirs.receive_stream)


async def test_an_answer_that_is_not_taken_is_given_up(autojump_clock: Any) -> None:
    """A peer that opens no window for it."""

    async def large(peer: Peer, request: Request) -> Response:
        return Response(200, {}, bytes(100_000))

    async with stand(large) as s:
        s.peer.keeps_windows_open = False
        number = await s.peer.ask()
        assert (await s.peer.next(h2.events.StreamReset, number)).error_code == CODES.INTERNAL_ERROR
        await wait_all_tasks_blocked()
        assert s.under_way() == 0
        (connection,) = s.server._connections
        assert connection.requests == 0


async def test_more_streams_than_allowed_end_the_connection(autojump_clock: Any) -> None:
    async def wait(peer: Peer, request: Request) -> Response:
        await trio.sleep_forever()
        raise AssertionError

    async with stand(wait, streams_per_connection=5) as s:
        for _ in range(6):
            await s.peer.ask()
        await s.ended.wait()
        assert s.under_way() == 0
