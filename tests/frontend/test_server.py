"""The client port over real sockets: both versions of HTTP, clients that misbehave, and a stop that ends."""

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx2
import pytest
import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import RawData
from hypercorn.trio.worker_context import WorkerContext

from sdcpd.frontend.server import Bound, FrontendServer, ListenFailed, _ClientStream, _Connection
from sdcpd.frontend.settings import FrontendSettings
from tests.support.frontend import EOS, Step, World, make_world, model_text, page, read_events, tokens_of
from tests.support.ports import TrioClock

HELLO = [page(tokens_of("Hel")), page([*tokens_of("lo"), EOS], final=True)]
ASK = {"model": "m", "prompt": "hi"}
LOOPBACK = {"listen": "127.0.0.1:0"}


@dataclass
class Served:
    world: World
    server: FrontendServer
    bound: Bound
    scope: trio.CancelScope  # of the server's task
    returned: trio.Event

    def client(self, version: int) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.bound.url, http1=version == 1, http2=version == 2, trust_env=False)

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream(self.bound.host, self.bound.port)


@asynccontextmanager
async def serving(script: Sequence[Step] = (), *, words: Sequence[str] = (), **settings: Any) -> AsyncIterator[Served]:
    """A server on a free port. All must be over in 20 s."""
    read = FrontendSettings(**(LOOPBACK | settings))
    world = make_world(script, settings=read, text=model_text(words=words))
    server = FrontendServer(world.app, read, TrioClock())
    scope = trio.CancelScope()
    returned = trio.Event()

    async def run(task_status: trio.TaskStatus[Bound]) -> None:
        with scope:
            await server.run(task_status=task_status)
        returned.set()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(run)
            yield Served(world, server, bound, scope, returned)
            scope.cancel()


def post(path: str, body: bytes, extra: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + extra + b"\r\n" + body


ASK_BODY = json.dumps(ASK).encode()
ASK_REQUEST = post("/v1/completions", ASK_BODY)


async def read_response(stream: trio.SocketStream) -> bytes:
    """Head and body of an answer with a content-length."""
    octets = b""
    while b"\r\n\r\n" not in octets:
        piece = await stream.receive_some()
        assert piece, octets
        octets += piece
    head, _, body = octets.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += await stream.receive_some()
    return head + b"\r\n\r\n" + body


async def check_alive(served: Served) -> None:
    async with served.client(1) as client:
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("version", [1, 2])
async def test_answers_whole_and_streamed(version: int) -> None:
    async with serving(HELLO) as served, served.client(version) as client:
        whole = await client.post("/v1/completions", json=ASK)
        assert whole.http_version == ("HTTP/1.1" if version == 1 else "HTTP/2")
        assert whole.json()["choices"][0]["text"] == "Hello"
        assert "server" not in whole.headers
        async with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as streamed:
            events = read_events(await streamed.aread())
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Hello"
        assert events[-1] == "[DONE]"
        refused = await client.post("/v1/completions", json=ASK | {"n": 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert (await client.head("/health")).content == b""


@pytest.mark.parametrize("version", [1, 2])
async def test_a_stream_arrives_as_it_is_committed(version: int) -> None:
    """The second page is committed only once the first was read."""
    read = trio.Event()
    texts = []
    async with (
        serving([HELLO[0], read, HELLO[1]]) as served,
        served.client(version) as client,
        client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as streamed,
    ):
        async for line in streamed.aiter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                read.set()
    assert texts == ["Hel", "lo", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_up_frees_the_session(stream: bool) -> None:
    """Bug 21. A raw socket that closes, before anything was answered (whole) or in mid-stream."""
    async with serving([page(tokens_of("a")), "hang"]) as served:
        connection = await served.connect()
        await connection.send_all(post("/v1/completions", json.dumps(ASK | {"stream": stream}).encode()))
        await served.world.generations.wait_open(1)
        if stream:
            octets = b""
            while b"data: " not in octets:
                octets += await connection.receive_some()
        await connection.aclose()
        with trio.fail_after(2):
            await served.world.generations.wait_open(0)
        assert served.world.generations.left_early == 1


async def test_a_hang_up_behind_unread_octets_frees_the_session() -> None:
    """hypercorn reads no further while more octets wait, so it cannot see the end of them."""
    async with serving(["hang"]) as served:
        connection = await served.connect()
        await connection.send_all(ASK_REQUEST + b"\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await served.world.generations.wait_open(1)
        await connection.aclose()
        with trio.fail_after(2):
            await served.world.generations.wait_open(0)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(HELLO) as served:
        connection = await served.connect()
        await connection.send_all(ASK_REQUEST + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        octets = b""
        while b'{"status":"ok"}' not in octets:
            octets += await connection.receive_some()
        assert octets.index(b"Hello") < octets.index(b'{"status":"ok"}')
        await connection.aclose()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
async def test_an_answer_that_ends_its_connection_is_whole(version: bytes, stream: bool) -> None:
    """hypercorn says that the client has left as soon as it has closed the connection itself."""
    async with serving(HELLO) as served:
        body = json.dumps(ASK | {"stream": stream}).encode()
        request = post("/v1/completions", body, b"Connection: close\r\n").replace(b"HTTP/1.1", version)
        async with await served.connect() as connection:
            await connection.send_all(request)
            octets = b""
            while piece := await connection.receive_some():
                octets += piece
        assert (b"[DONE]" if stream else b'"Hello"') in octets
        await trio.testing.wait_all_tasks_blocked()
        assert ("requests_total", 1, {"endpoint": "/v1/completions", "status": "200"}) in served.world.meters.labelled
        await check_alive(served)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [1, 2])
async def test_answers_that_were_served_count_as_served(version: int, stream: bool) -> None:
    """None as left by its client (499): neither where the connection is kept, nor where it is closed upon the last
    octet."""
    async with serving(HELLO) as served:
        for _ in range(3):
            async with served.client(version) as client:
                for _ in range(5):
                    assert b"lo" in (await client.post("/v1/completions", json=ASK | {"stream": stream})).content
        await trio.testing.wait_all_tasks_blocked()
        totals = [labels["status"] for name, _, labels in served.world.meters.labelled if name == "requests_total"]
        assert totals == ["200"] * 15


async def test_fifty_clients_that_leave_free_everything() -> None:
    async with serving([page(tokens_of("a")), "hang"]) as served:
        connections = [await served.connect() for _ in range(50)]
        for number, connection in enumerate(connections):
            body = json.dumps(ASK | {"stream": number % 2 == 0, "max_tokens": 1000}).encode()
            await connection.send_all(post("/v1/completions", body))
        await served.world.generations.wait_open(50)
        for connection in connections:
            await connection.aclose()
        with trio.fail_after(2):
            await served.world.generations.wait_open(0)
        await trio.testing.wait_all_tasks_blocked()
        assert served.world.app.snapshot().requests_running == 0
        await check_alive(served)


class H2Client:
    """A client that sends what it is told to."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.statuses: dict[int, bytes] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()

    async def flush(self) -> None:
        await self.stream.send_all(self.state.data_to_send())

    async def request(self, method: str, path: str, body: bytes | None, *, end: bool = True) -> int:
        number = self.state.get_next_available_stream_id()
        headers = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x")]
        self.state.send_headers(number, [*headers, ("content-type", "application/json")], end_stream=body is None)
        if body is not None:
            self.state.send_data(number, body, end_stream=end)
        await self.flush()
        return number

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            octets = await self.stream.receive_some()
            assert octets, "the server closed the connection"
            for event in self.state.receive_data(octets):
                match event:
                    case h2.events.ResponseReceived(stream_id=int(number), headers=list(headers)):
                        self.statuses[number] = bytes(dict(headers)[b":status"])
                    case h2.events.DataReceived(stream_id=int(number), data=bytes(data), flow_controlled_length=size):
                        self.bodies[number] = self.bodies.get(number, b"") + data
                        self.state.acknowledge_received_data(size or 0, number)
                    case h2.events.StreamEnded(stream_id=int(number)):
                        self.ended.add(number)
                    case _:
                        pass
            await self.flush()


@asynccontextmanager
async def h2_client(served: Served) -> AsyncIterator[H2Client]:
    async with await served.connect() as stream:
        client = H2Client(stream)
        client.state.initiate_connection()
        await client.flush()
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reset_stream_frees_its_session_only(stream: bool) -> None:
    async with serving(["hang"]) as served, h2_client(served) as client:
        body = json.dumps(ASK | {"stream": stream}).encode()
        first = await client.request("POST", "/v1/completions", body)
        await client.request("POST", "/v1/completions", body)
        await served.world.generations.wait_open(2)
        client.state.reset_stream(first)
        await client.flush()
        with trio.fail_after(2):
            await served.world.generations.wait_open(1)
        health = await client.request("GET", "/health", None)
        await client.until(lambda: health in client.ended)


async def test_resets_do_not_harm_other_streams() -> None:
    """A request that is cancelled while it sends must not take octets of the shared connection with it."""
    script = [page(tokens_of(f"{number:04d}")) for number in range(150)]
    whole = "".join(f"{number:04d}" for number in range(150))
    async with serving([*script, page([], final=True)]) as served, h2_client(served) as client:
        body = json.dumps(ASK | {"stream": True, "max_tokens": 1000}).encode()
        numbers = [await client.request("POST", "/v1/completions", body) for _ in range(20)]
        for position, number in enumerate(numbers[::2]):
            await client.until(lambda wanted=position * 1500, of=number: len(client.bodies.get(of, b"")) > wanted)  # type: ignore[misc]  # defaults bind the loop's variables
            client.state.reset_stream(number)
            await client.flush()
        await client.until(lambda: client.ended.issuperset(numbers[1::2]))
        for number in numbers[1::2]:
            assert "".join(event["choices"][0]["text"] for event in read_events(client.bodies[number])[:-1]) == whole
        await trio.testing.wait_all_tasks_blocked()
        assert served.world.app.snapshot().requests_running == 0


async def test_sending_is_not_cancelled_half_way() -> None:
    client, server = trio.socket.socketpair()
    async with trio.SocketStream(client) as near, trio.SocketStream(server) as far:
        connection = _Connection(make_world().app, Config(), WorkerContext(None), _ClientStream(far, 30))
        with trio.CancelScope() as scope:
            scope.cancel()
            await connection.protocol_send(RawData(b"abc"))
        assert await near.receive_some() == b"abc"


@pytest.mark.parametrize("version", [1, 2])
async def test_early_refusals_leave_the_connection_whole(version: int) -> None:
    """A large body to a wrong path, of a wrong type, or over the limit: its sender sees why, and may go on."""
    async with serving(HELLO, max_body_bytes=100_000) as served, served.client(version) as client:
        large = b"x" * 300_000
        for path, kind, status in (
            ("/nowhere", "application/json", 404),
            ("/v1/completions", "text/plain", 415),
            ("/v1/completions", "application/json", 413),
        ):
            answer = await client.post(path, content=large, headers={"content-type": kind})
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["message"]
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200


async def test_a_body_without_end_costs_its_connection() -> None:
    async with serving(max_body_bytes=1024) as served, await served.connect() as stream:
        with trio.fail_after(5), pytest.raises(trio.BrokenResourceError):
            await stream.send_all(post("/v1/completions", b"").replace(b"Length: 0", b"Length: 1000000000"))
            while True:
                await stream.send_all(b"x" * 10_000)
        await check_alive(served)


async def test_a_body_without_end_costs_its_connection_over_http_2() -> None:
    async with serving(max_body_bytes=1024) as served, h2_client(served) as client:
        number = await client.request("POST", "/v1/completions", b"", end=False)
        for _ in range(2000):
            client.state.send_data(number, b"x" * 10)
        await client.flush()
        with trio.fail_after(5), pytest.raises((AssertionError, trio.BrokenResourceError)):
            await client.until(lambda: False)
        assert client.statuses[number] == b"413"
        await check_alive(served)


async def raw(served: Served, octets: bytes) -> bytes:
    """All that comes back for these octets, until the server closes or has answered."""
    received = b""
    async with await served.connect() as stream:
        await stream.send_all(octets)
        try:
            with trio.move_on_after(0.5):
                while piece := await stream.receive_some():
                    received += piece
                    if b"\r\n\r\n" in received:
                        break
        except trio.BrokenResourceError:
            pass
    return received


async def no_ascii_path(served: Served) -> None:
    await raw(served, b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n")


async def no_ascii_path_h2(served: Served) -> None:
    async with await served.connect() as stream:
        client = H2Client(stream)
        client.state.config.header_encoding = False
        client.state.initiate_connection()
        headers = [(b":method", b"GET"), (b":path", b"/\xff"), (b":scheme", b"http"), (b":authority", b"x")]
        client.state.send_headers(1, headers, end_stream=True)
        with contextlib.suppress(AssertionError, trio.BrokenResourceError):
            await client.flush()
            await client.until(lambda: False)


async def no_http(served: Served) -> None:
    assert b" 400 " in await raw(served, b"\x00\x01\x02\r\n\r\n")


async def huge_head(served: Served) -> None:
    assert b" 431 " in await raw(served, b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000 + b"\r\n\r\n")


async def broken_frames(served: Served) -> None:
    await raw(served, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100)


async def websocket(served: Served) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    assert b" 403 " in await raw(served, b"GET / HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")


async def connect_method(served: Served) -> None:
    async with h2_client(served) as client:
        client.state.send_headers(1, [(":method", "CONNECT"), (":authority", "x")], end_stream=True)
        await client.flush()
        with trio.move_on_after(0.2):
            await client.stream.receive_some()


async def data_after_the_answer(served: Served) -> None:
    async with h2_client(served) as client:
        number = await client.request("POST", "/nowhere", b"x" * 10_000, end=False)
        await client.until(lambda: number in client.ended)
        assert client.statuses[number] == b"404"
        with contextlib.suppress(trio.BrokenResourceError):
            client.state.send_data(number, b"x" * 10_000)
            await client.flush()
            with trio.move_on_after(0.2):
                await client.stream.receive_some()


@pytest.mark.parametrize(
    "misbehave",
    [
        no_ascii_path,
        no_ascii_path_h2,
        no_http,
        huge_head,
        broken_frames,
        websocket,
        connect_method,
        data_after_the_answer,
    ],
)
async def test_one_client_cannot_harm_the_others(misbehave: Callable[[Served], Awaitable[None]]) -> None:
    async with serving([page(tokens_of("a")), "hang"], body_timeout_s=0.5) as served, h2_client(served) as other:
        await other.request("POST", "/v1/completions", ASK_BODY)
        await served.world.generations.wait_open(1)
        await misbehave(served)
        assert served.world.generations.open == 1
        health = await other.request("GET", "/health", None)
        await other.until(lambda: health in other.ended)
        await check_alive(served)


FLOOD: list[Step] = [page([258] * 16) for _ in range(120)]
"""Of a word of 4096 letters: more than the buffers between two sockets hold."""


async def take_nothing(served: Served) -> trio.SocketStream:
    """Ask for a stream, never read it."""
    connection = trio.socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await connection.connect((served.bound.host, served.bound.port))
    stream = trio.SocketStream(connection)
    await stream.send_all(post("/v1/completions", json.dumps(ASK | {"stream": True}).encode()))
    return stream


async def test_a_client_that_takes_nothing_is_dropped() -> None:
    """hypercorn would wait for it for ever, shielded from cancellation."""
    async with serving([*FLOOD, "hang"], words=["x" * 4096], stalled_client_timeout_s=0.3) as served:
        stuck = await take_nothing(served)
        await served.world.generations.wait_open(1)
        with trio.fail_after(5):
            await served.world.generations.wait_open(0)
        await stuck.aclose()


async def test_a_client_that_takes_nothing_and_closes_its_side_is_dropped_at_once() -> None:
    async with serving([*FLOOD, "hang"], words=["x" * 4096]) as served:
        stuck = await take_nothing(served)
        await served.world.generations.wait_open(1)
        await trio.testing.wait_all_tasks_blocked(0.1)
        await stuck.send_eof()
        with trio.fail_after(2):
            await served.world.generations.wait_open(0)
        await stuck.aclose()


async def test_connections_over_the_limit_are_closed() -> None:
    async with serving(max_connections=2) as served:
        held = [await served.connect() for _ in range(2)]
        for connection in held:  # until both are certainly being served
            await connection.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await read_response(connection)
        refused = await served.connect()
        assert await refused.receive_some() == b""
        await refused.aclose()
        for connection in held:
            await connection.aclose()


async def test_a_connection_serves_more_than_a_thousand_requests() -> None:
    """hypercorn's default closes it then, over HTTP/2 in mid-flight."""
    async with serving() as served, await served.connect() as stream:
        for _ in range(1100):
            await stream.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"connection: close" not in await read_response(stream)


async def test_a_stop_lets_running_answers_finish() -> None:
    async with serving([page(tokens_of("Hel")), 0.2, HELLO[1]]) as served:
        async with served.client(1) as client, trio.open_nursery() as nursery:

            async def ask() -> None:
                answer = await client.post("/v1/completions", json=ASK)
                assert answer.json()["choices"][0]["text"] == "Hello"

            idle = await served.connect()
            nursery.start_soon(ask)
            await served.world.generations.wait_open(1)
            served.server.stop()
            assert await idle.receive_some() == b""  # an idle connection is closed at once
            await idle.aclose()
        with trio.fail_after(2):
            await served.returned.wait()
        with pytest.raises(OSError, match="connect"):
            await served.connect()


async def test_a_stop_tells_answers_that_outlast_its_grace() -> None:
    """A stream ends with an event and whole, and an answer of which nothing was sent with its own status."""
    async with serving([page(tokens_of("Hel")), "hang"], grace_s=0.2) as served, served.client(1) as client:
        statuses: list[int] = []

        async def ask() -> None:
            answer = await client.post("/v1/completions", json=ASK)
            assert answer.json()["error"]["code"] == "server_stopping"
            statuses.append(answer.status_code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            async with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as streamed:
                await served.world.generations.wait_open(2)
                served.server.stop()
                events = read_events(await streamed.aread())
        assert events[0]["choices"][0]["text"] == "Hel"
        assert [event["error"]["code"] for event in events[1:]] == ["server_stopping"]
        assert statuses == [503]
        with trio.fail_after(2):
            await served.returned.wait()
        assert served.world.generations.open == 0


async def test_a_stop_tells_answers_that_outlast_its_grace_over_http_2() -> None:
    """What is said arrives; hypercorn's GOAWAY may come before the end of the stream, so that is not waited for."""
    async with serving([page(tokens_of("Hel")), "hang"], grace_s=0.2) as served, h2_client(served) as client:
        streamed = await client.request("POST", "/v1/completions", json.dumps(ASK | {"stream": True}).encode())
        whole = await client.request("POST", "/v1/completions", ASK_BODY)
        await served.world.generations.wait_open(2)
        served.server.stop()
        await client.until(lambda: all(b"server_stopping" in client.bodies.get(n, b"") for n in (streamed, whole)))
        assert (client.statuses[streamed], client.statuses[whole]) == (b"200", b"503")
        assert read_events(client.bodies[streamed])[0]["choices"][0]["text"] == "Hel"
        with trio.fail_after(2):
            await served.returned.wait()


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_an_end_is_bounded_whatever_clients_do(how: str) -> None:
    """One client waits for an answer that does not come, one takes nothing of its stream."""
    async with serving([*FLOOD, "hang"], words=["x" * 4096], grace_s=0.2) as served:
        waiting = await served.connect()
        await waiting.send_all(ASK_REQUEST)
        stuck = await take_nothing(served)
        await served.world.generations.wait_open(2)
        await trio.testing.wait_all_tasks_blocked(0.1)
        if how == "stop":
            served.server.stop()
        else:
            served.scope.cancel()
        with trio.fail_after(3):
            await served.returned.wait()
        assert served.world.generations.open == 0
        await waiting.aclose()
        await stuck.aclose()


async def test_an_address_in_use_is_named() -> None:
    async with serving() as served:
        taken = FrontendSettings(listen=f"127.0.0.1:{served.bound.port}")
        with pytest.raises(ListenFailed, match=str(served.bound.port)):
            await FrontendServer(served.world.app, taken, TrioClock()).run()


async def test_ipv6_loopback() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with serving(listen="[::1]:0") as served:
        assert served.bound.url.startswith("http://[::1]:")
        await check_alive(served)


async def test_nothing_is_printed_and_no_text_logged(capfd: pytest.CaptureFixture[str]) -> None:
    with structlog.testing.capture_logs() as lines:
        async with serving(HELLO) as served, served.client(1) as client:
            await client.post("/v1/completions", json=ASK | {"prompt": "Kolibri"})
            await no_http(served)
            await client.post("/Kolibri", content=b"Kolibri")
    assert "Kolibri" not in repr(lines)
    assert [line["event"] for line in lines if line["event"] == "completion ended"] == ["completion ended"]
    assert capfd.readouterr() == ("", "")


async def test_faults_of_the_application_are_logged_through_ours() -> None:
    with structlog.testing.capture_logs() as lines:
        async with serving([page(tokens_of("a"))]) as served, served.client(1) as client:
            answer = await client.post("/v1/completions", json=ASK)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
            await check_alive(served)
    assert [line["log_level"] for line in lines if line["event"] == "http server"] == ["error"]
