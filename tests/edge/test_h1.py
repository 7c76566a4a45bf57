"""Large bodies by HTTP/1.1, with real TLS: what arrives, and what becomes of a peer that misbehaves."""

import ssl
import tracemalloc
from typing import Any

import pytest
import trio

from sdcpd.edge.peer_app import Mount, PeerApp
from sdcpd.edge.tls_stream import TlsStream
from sdcpd.edge.transport import Request, Response, TransportError
from sdcpd.roles.ports import Peer
from tests.edge.wire.doors import client_context
from tests.edge.wire.pki import Authority
from tests.edge.wire.world import DRAFTER, Served, TlsWorld, echo, tls_world

SOME = bytes(range(256)) * 4000
"""About a megabyte: many records, several pieces."""


def bulk(method: str = "GET", body: bytes = b"", path: str = "thing", **headers: str) -> Request:
    return Request(method, path, headers=headers, body=body, bulk=True)


@pytest.mark.parametrize("body", [b"", b"x", SOME])
async def test_bodies_arrive_both_ways_on_one_connection(authority: Authority, body: bytes) -> None:
    async with tls_world(authority) as world:
        served = await world.serve()
        client = await world.client(DRAFTER.uri)
        calls = client.transport(DRAFTER, named=False)
        for _ in range(3):
            answer = await calls.exchange(served.base(), bulk("PUT", body))
            assert (answer.status, answer.body) == (200, body)
            assert answer.headers["caller"] == f"drafter {DRAFTER.uri}"
            with trio.testing.assert_checkpoints():
                await calls.exchange(served.base(), bulk())
        assert client.connections == served.server.connections == 1
        assert not served.failures


async def test_a_request_is_the_same_by_either_protocol(authority: Authority) -> None:
    seen: list[Request] = []

    async def note(peer: Peer, request: Request) -> Response:
        seen.append(request)
        return Response(404, {"vary": "a"}, b"no")

    async with tls_world(authority) as world:
        served = await world.serve({"verifier": note})
        calls = await world.calls(DRAFTER)
        for by_http1 in (True, False):
            asked = Request("PUT", "a/b%2Fc", "from=1&x=%20", {"if-match": '"tag"'}, b"body", bulk=by_http1)
            answer = await calls.exchange(served.base(), asked)
            assert (answer.status, answer.headers["vary"], answer.body) == (404, "a", b"no")
        assert seen[0] == seen[1]
        assert served.server.connections == 2


async def test_head_and_304_have_a_length_and_no_body(authority: Authority) -> None:
    async def handle(peer: Peer, request: Request) -> Response:
        return Response(200 if request.method == "HEAD" else 304, {"content-length": "99"})

    async with tls_world(authority) as world:
        served = await world.serve({"verifier": handle})
        calls = await world.calls(DRAFTER)
        for method in ("HEAD", "GET", "HEAD"):
            answer = await calls.exchange(served.base(), bulk(method))
            assert (answer.headers["content-length"], answer.body) == ("99", b"")
        assert served.server.connections == 1


async def test_only_the_cache_is_served(authority: Authority) -> None:
    async with tls_world(authority) as world:
        mounts = [Mount("/cache/", echo, lambda method, path: 100)]
        app = PeerApp(lambda error: None, mounts, partial=True)
        served = await world.serve({"verifier": echo, "cache": echo}, app=app)
        calls = await world.calls(DRAFTER)
        assert (await calls.exchange(served.base("cache"), bulk())).status == 200
        assert (await calls.exchange(served.base("verifier"), bulk())).status == 421


async def test_a_peer_without_http1_is_asked_by_http2(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve(bulk=False)
        served.tls.server.set_alpn_protocols(["h2"])
        calls = await world.calls(DRAFTER)
        for _ in range(2):
            assert (await calls.exchange(served.base(), bulk("PUT", SOME))).body == SOME


async def test_a_body_over_its_limit_is_answered_and_the_connection_closed(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve(limit_bytes=100_000)
        calls = await world.calls(DRAFTER)
        assert (await calls.exchange(served.base(), bulk("PUT", SOME))).status == 200  # `echo` has no limit of its own
        assert (await calls.exchange(served.base(), bulk())).status == 200


async def test_an_answer_over_our_limit_is_not_taken(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve()
        calls = await world.calls(DRAFTER, max_answer_bytes=100_000)
        with pytest.raises(TransportError, match="longer than 100000 octets"):
            await calls.exchange(served.base(), bulk("PUT", SOME))
        assert (await calls.exchange(served.base(), bulk("PUT", b"x"))).body == b"x"


async def test_a_restarted_peer_is_asked_again_on_a_new_connection(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve()
        calls = await world.calls(DRAFTER)
        assert (await calls.exchange(served.base(), bulk())).status == 200
        served.scope.cancel()
        await served.returned.wait()
        again = await world.serve(port=served.bound.port)
        assert (await calls.exchange(again.base(), bulk())).status == 200


async def test_a_cancelled_exchange_takes_its_connection_along(authority: Authority) -> None:
    async def slow(peer: Peer, request: Request) -> Response:
        if request.path == "slow":
            await trio.sleep_forever()
        return await echo(peer, request)

    async with tls_world(authority) as world:
        served = await world.serve({"verifier": slow})
        client = await world.client(DRAFTER.uri)
        calls = client.transport(DRAFTER, named=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(calls.exchange, served.base(), bulk(path="slow"))
            while not served.app.under_way:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert client.connections == 0
        assert (await calls.exchange(served.base(), bulk())).status == 200


async def test_retired_connections_are_made_anew(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve()
        client = await world.client(DRAFTER.uri)
        calls = client.transport(DRAFTER, named=False)
        await calls.exchange(served.base(), bulk())
        client.retire()
        assert client.connections == 0
        await calls.exchange(served.base(), bulk())
        served.server.retire()
        while served.server.connections:
            await trio.sleep(0.01)
        assert (await calls.exchange(served.base(), bulk())).status == 200


async def _raw(world: TlsWorld, served: Served, octets: bytes) -> bytes:
    """All that a peer gets for these octets, until it is closed or said what it asked for."""
    settings = world.authority.issue(DRAFTER.uri)
    context = client_context(settings, settings.ca)
    context.set_alpn_protocols(["http/1.1"])
    stream = TlsStream(await trio.open_tcp_stream("127.0.0.1", served.bound.port), context)
    await stream.do_handshake()
    received = b""
    async with stream:
        await stream.send_all(octets)
        while piece := await stream.receive_some():
            received += piece
            if received.endswith(b"!"):
                break
    return received


HOST = b"Host: x\r\n"


@pytest.mark.parametrize(
    ("octets", "status"),
    [
        (b"PUT /verifier/x HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n", 411),
        (b"GET /verifier/x HTTP/1.1\r\nHost x\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"\x00\x01\x02\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /verifier/x HTTP/1.1\r\n" + HOST + b"A: " + b"x" * 20_000, 431),
    ],
)
async def test_what_is_no_request_of_ours(authority: Authority, octets: bytes, status: int) -> None:
    async with tls_world(authority) as world:
        served = await world.serve()
        answer = await _raw(world, served, octets)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in answer
        assert not served.failures


async def test_requests_that_come_together_are_answered_in_order(authority: Authority) -> None:
    one = b"PUT /verifier/x HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\n"
    async with tls_world(authority) as world:
        answer = await _raw(world, await world.serve(), one + b"one" + one + b"wo!")
        assert answer.index(b"one") < answer.index(b"wo!")


async def test_a_tool_that_asks_before_it_sends_is_told_to_go_on(authority: Authority) -> None:
    head = b"PUT /verifier/x HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    async with tls_world(authority) as world:
        served = await world.serve()
        settings = authority.issue(DRAFTER.uri)
        context = client_context(settings, settings.ca)
        context.set_alpn_protocols(["http/1.1"])
        async with TlsStream(await trio.open_tcp_stream("127.0.0.1", served.bound.port), context) as stream:
            await stream.do_handshake()
            await stream.send_all(head)
            assert await stream.receive_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
            await stream.send_all(b"now")
            assert (await stream.receive_some()).endswith(b"\r\n\r\nnow")


async def test_no_connection_without_a_certificate(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve()
        context = client_context(None, str(authority.path))
        context.set_alpn_protocols(["http/1.1"])
        stream = TlsStream(await trio.open_tcp_stream("127.0.0.1", served.bound.port), context)
        with pytest.raises(trio.BrokenResourceError) as told:
            await stream.do_handshake()
            await stream.receive_some()
        assert isinstance(told.value.__cause__, ssl.SSLError)
        await trio.aclose_forcefully(stream)


async def test_a_silent_peer_is_given_up(authority: Authority) -> None:
    async def silent(peer: Peer, request: Request) -> Any:
        await trio.sleep_forever()

    async with tls_world(authority) as world:
        served = await world.serve({"verifier": silent})
        calls = await world.calls(DRAFTER, ping_interval_s=0.01, ping_timeout_s=0.01)
        with pytest.raises(TransportError, match="neither takes nor says anything"):
            await calls.exchange(served.base(), bulk())


async def test_a_large_body_lies_in_memory_once(authority: Authority) -> None:
    """It is sent from where it is, and read into where it stays: besides the two ends' own there are pieces only."""
    size = 24 << 20
    kept: list[bytes] = [bytes(size)]

    async def keep(peer: Peer, request: Request) -> Response:
        if request.method == "PUT":
            kept[0] = request.body
            return Response(204)
        return Response(200, body=kept[0])

    async with tls_world(authority) as world:
        served = await world.serve({"verifier": keep}, limit_bytes=size)
        calls = await world.calls(DRAFTER)
        await calls.exchange(served.base(), bulk("PUT", b"x"))
        for request, new in ((bulk("PUT", bytes(size)), size), (bulk(), size)):
            tracemalloc.start()
            try:
                answer = await calls.exchange(served.base(), request)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert len(kept[0]) == size
            assert len(answer.body) == (0 if request.method == "PUT" else size)
            assert new <= peak < new + size // 4
