"""Base URIs to connections: whom we call, as whom, over which connection, and what never gets that far."""

from typing import Any

import pytest
import trio

from sdcpd.edge import wire_transport
from sdcpd.edge.tls import Tls
from sdcpd.edge.transport import Request, Response, TransportError
from sdcpd.edge.wire_settings import PeerClientSettings
from sdcpd.edge.wire_transport import WireClient, WireDialer
from sdcpd.roles.ports import Peer
from tests.edge.wire.pki import Authority
from tests.edge.wire.world import (
    DRAFTER,
    GET,
    MEMORY_BASE,
    POLL,
    POST,
    ROUTER,
    app_of,
    echo,
    memory_world,
    polls_wait,
    tls_world,
)
from tests.support.ports import TrioClock

V = "https://127.0.0.1:1/verifier/"


async def test_a_request_arrives_as_it_was_meant(autojump_clock: Any) -> None:
    seen: list[tuple[Peer, Request]] = []

    async def note(peer: Peer, request: Request) -> Response:
        seen.append((peer, request))
        return Response(201, {"location": "x", "vary": "a"}, b"\0\xff")

    asked = Request("PUT", "a/b%2Fc", "from=1&x=%20", {"if-match": '"tag"', "content-type": "text/plain"}, b"body")
    async with memory_world(note) as world:
        answer = await world.transport.exchange("HTTPS://V.example:443/verifier", asked)
        assert (answer.status, answer.body) == (201, b"\0\xff")
        assert answer.headers.items() >= {"location": "x", "vary": "a", "content-length": "2"}.items()
        ((peer, request),) = seen
        assert peer == DRAFTER
        assert (request.method, request.path, request.query) == ("PUT", "a/b%2Fc", "from=1&x=%20")
        assert request.body == b"body"
        expected = asked.headers | {"content-length": "4"}  # type: ignore[operator]  # a dict
        assert request.headers == expected


@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 1000])
async def test_an_exchange_always_suspends(body: bytes, autojump_clock: Any) -> None:
    async with memory_world() as world:
        for _ in range(2):
            with trio.testing.assert_checkpoints():
                assert (await world.ask(Request("POST", "x", body=body))).body == body


async def test_polls_and_control_have_connections_of_their_own(autojump_clock: Any) -> None:
    async with memory_world(polls_wait()) as world:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(world.ask, POLL)
            await trio.sleep(1)
            begin = trio.current_time()
            assert (await world.ask(POST)).status == 200
            assert trio.current_time() == begin
        assert len(world.network.streams) == 2


async def test_a_node_of_several_roles_says_which_of_them_is_calling(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve({"verifier": echo, "cache": echo})
        client = await world.client(DRAFTER.uri, ROUTER.uri)
        for caller in (DRAFTER, ROUTER):
            calls = client.transport(caller, named=True)
            for role in ("verifier", "cache"):
                answer = await calls.exchange(served.base(role), GET)
                assert answer.headers["caller"] == f"{caller.role} {caller.uri}"
        assert client.connections == 1
        assert (await client.transport(DRAFTER, named=False).exchange(served.base(), GET)).status == 403


async def test_drafter_a_cannot_speak_for_b(authority: Authority) -> None:
    """Bug 28, with our own client."""
    other = Peer(uri="https://e.example/drafter/", role="drafter")
    async with tls_world(authority) as world:
        served = await world.serve()
        client = await world.client(DRAFTER.uri)
        assert (await client.transport(other, named=True).exchange(served.base(), GET)).status == 403


async def test_a_server_must_be_the_one_at_the_base_uri(authority: Authority) -> None:
    """Its certificate is good, but names a drafter next door (decision 32)."""
    async with tls_world(authority) as world:
        served = await world.serve({"drafter": echo})
        calls = await world.calls(ROUTER)
        assert (await calls.exchange(served.base("drafter"), GET)).status == 200
        with pytest.raises(TransportError, match=f"does not name {served.base('verifier')}"):
            await calls.exchange(served.base("verifier"), GET)
        assert (await calls.exchange(served.base("drafter"), GET)).status == 200


async def test_a_server_of_another_authority_is_not_talked_to(authority: Authority, tmp_path: Any) -> None:
    async with tls_world(authority) as world:
        served = await world.serve()
        stranger = await world.client(DRAFTER.uri, authority=Authority(tmp_path, "stranger"))
        with pytest.raises(TransportError, match=r"no TLS with 127\.0\.0\.1:.*certificate verify failed"):
            await stranger.transport(DRAFTER, named=False).exchange(served.base(), GET)
        assert stranger.connections == 0


async def test_a_server_that_does_not_let_us_in_says_why(authority: Authority) -> None:
    import datetime

    async with tls_world(authority) as world:
        served = await world.serve()
        good = authority.issue(DRAFTER.uri)
        tls = Tls(good)
        old = authority.issue(DRAFTER.uri, life=-datetime.timedelta(minutes=1))
        tls.client.load_cert_chain(old.certificate, old.key)
        client = WireClient(WireDialer(tls, insecure_loopback=False), PeerClientSettings(), TrioClock())
        await world.nursery.start(client.run)
        with pytest.raises(TransportError, match="CERTIFICATE_EXPIRED"):
            await client.transport(DRAFTER, named=False).exchange(served.base(), POST)


async def test_what_never_leaves_the_node(authority: Authority) -> None:
    tls = Tls(authority.issue(DRAFTER.uri))
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for dialer, base_uri, words in (
                (WireDialer(tls, insecure_loopback=False), "http://127.0.0.1:1/verifier/", "is not https"),
                (WireDialer(tls, insecure_loopback=True), "http://v.example/verifier/", "is not https"),
                (WireDialer(None, insecure_loopback=True), V, "has no certificate"),
                (WireDialer(tls, insecure_loopback=False), V, "no connection to 127.0.0.1:1"),
                (WireDialer(tls, insecure_loopback=False), "https://a..b/verifier/", "no connection to a..b"),
                (WireDialer(tls, insecure_loopback=False), f"https://{'a' * 99}.b/verifier/", "no connection to aaa"),
                (WireDialer(tls, insecure_loopback=False), "ftp://h/verifier/", "does not begin with"),
            ):
                client = WireClient(dialer, PeerClientSettings(), TrioClock())
                calls = client.transport(DRAFTER, named=False)
                with pytest.raises(TransportError, match=r"has not started|does not begin"):
                    await calls.exchange(base_uri, GET)
                await nursery.start(client.run)
                with pytest.raises(TransportError, match=words.replace("has no certificate", "no certificate")):
                    await calls.exchange(base_uri, GET)
            nursery.cancel_scope.cancel()


async def test_peers_that_are_called_no_more_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: Any
) -> None:
    """A base URI is a peer's choice: ever new ones must not fill our memory."""
    monkeypatch.setattr(wire_transport, "POOLS_LIMIT", 4)
    monkeypatch.setattr(wire_transport, "TARGETS_LIMIT", 4)
    async with memory_world() as world:
        assert (await world.ask(GET)).status == 200
        world.network.refuse = True
        for number in range(50):
            with pytest.raises(TransportError, match="refused"):
                await world.transport.exchange(f"https://h{number}.example/verifier/", GET)
        assert (len(world.client._pools), len(world.client._targets)) <= (4, 4)
        assert (await world.ask(GET)).status == 200
        assert len(world.network.streams) == 1
        world.network.refuse = False
        with pytest.raises(TransportError, match="4 peers have connections"):
            for number in range(5):
                await world.transport.exchange(f"https://i{number}.example/verifier/", GET)


async def test_when_the_node_stops_calls_end(autojump_clock: Any) -> None:
    app, _ = app_of({"verifier": polls_wait(1000)})
    outcomes: list[BaseException] = []
    async with memory_world(polls_wait(1000)) as world:
        client = WireClient(world.network, PeerClientSettings(), TrioClock())
        calls = client.transport(DRAFTER, named=False)
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def run(task_status: trio.TaskStatus[None]) -> None:
                with scope:
                    await client.run(task_status=task_status)

            async def ask() -> None:
                with pytest.raises(TransportError) as raised:
                    await calls.exchange(MEMORY_BASE, POLL)
                outcomes.append(raised.value)

            await nursery.start(run)
            nursery.start_soon(ask)
            await trio.sleep(1)
            scope.cancel()
        assert [str(one) for one in outcomes] == ["the node stops"]
        assert client.connections == 0
        with pytest.raises(TransportError, match="the node stops"):
            await calls.exchange(MEMORY_BASE, POLL)
    assert app.under_way == 0


async def test_a_reload_of_certificates_can_replace_connections(autojump_clock: Any) -> None:
    async with memory_world(polls_wait()) as world:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.ask, POLL)
            await world.ask(GET)
            await trio.sleep(1)
            world.client.retire()
            await world.ask(GET)
            assert len(world.network.streams) == 3
        await trio.sleep(1)
        assert world.client.connections == 1
