"""The SDCP port over real sockets and real TLS: who gets in, how it ends, and that neither can be held up (bug 28)."""

import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import h2.events
import pytest
import structlog
import trio

from sdcpd.edge.peer_app import PeerApp
from sdcpd.edge.peer_server import PeerListenFailed, PeerServer
from sdcpd.edge.tls import Tls
from sdcpd.edge.transport import Request, Response
from sdcpd.edge.wire_settings import PeerClientSettings, PeerServerSettings
from sdcpd.edge.wire_transport import WireClient, WireDialer
from sdcpd.roles.ports import Peer
from tests.edge.wire.doors import client_context, refusal, secure
from tests.edge.wire.pki import Authority
from tests.edge.wire.raw import Raw
from tests.edge.wire.world import DRAFTER, GET, ROUTER, app_of, echo, tls_world
from tests.support.ports import TrioClock


async def test_who_is_not_let_in(authority: Authority, tmp_path: Path) -> None:
    good = authority.issue(DRAFTER.uri)
    stranger = Authority(tmp_path, "stranger")
    with structlog.testing.capture_logs() as lines:
        async with tls_world(authority) as world:
            served = await world.serve()
            old = client_context(good, good.ca)
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            assert "PROTOCOL_VERSION" in await refusal(served, old)
            assert "CERTIFICATE_REQUIRED" in await refusal(served, client_context(None, good.ca))
            assert "UNKNOWN_CA" in await refusal(served, client_context(stranger.issue(DRAFTER.uri), good.ca))
            web = client_context(good, good.ca)
            web.set_alpn_protocols(["http/1.0"])
            assert await refusal(served, web) == "closed"
            plain = await trio.open_tcp_stream("127.0.0.1", served.bound.port)
            await plain.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert b"HTTP" not in await plain.receive_some()
            await plain.aclose()
            assert await refusal(served, client_context(good, good.ca)) == "let in"
            assert served.server.connections <= 1
    reasons = " ".join(str(line.get("reason")) for line in lines)
    for words in ("unsupported protocol", "did not return a certificate", "unable to get", "does not offer HTTP/2"):
        assert words in reasons.replace("_", " "), reasons
    assert {line["log_level"] for line in lines} == {"info"}


async def test_an_expired_certificate_is_not_let_in(authority: Authority) -> None:
    import datetime

    async with tls_world(authority) as world:
        served = await world.serve()
        old = authority.issue(DRAFTER.uri, life=-datetime.timedelta(minutes=1))
        assert "CERTIFICATE_EXPIRED" in await refusal(served, client_context(old, old.ca))


async def test_the_certificate_says_who_calls(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve()
        for caller in (DRAFTER, ROUTER):
            answer = await (await world.calls(caller)).exchange(served.base(), GET)
            assert answer.headers["caller"] == f"{caller.role} {caller.uri}"


async def test_silent_connections_push_out_each_other_and_nobody_else(authority: Authority) -> None:
    """Slow loris: handshakes that do not go on. Four may, for ten seconds; a peer that speaks is served meanwhile."""
    async with tls_world(authority) as world:
        served = await world.serve(max_handshakes=4, handshake_timeout_s=10)
        silent = [await trio.open_tcp_stream("127.0.0.1", served.bound.port) for _ in range(20)]
        for stream in silent[::2]:
            await stream.send_all(b"\x16\x03\x01\x02")  # a beginning
        with trio.fail_after(2):
            calls = await world.calls()
            assert (await calls.exchange(served.base(), GET)).status == 200
        for stream in silent[:10]:
            with trio.fail_after(2):
                assert await _closed(stream)
        assert len(served.server._handshakes) <= 4
        for stream in silent:
            await stream.aclose()


async def test_handshakes_that_fail_fill_no_log(authority: Authority) -> None:
    with structlog.testing.capture_logs() as lines:
        async with tls_world(authority) as world:
            served = await world.serve()
            for number in range(31):
                if number == 30:
                    await trio.sleep(1.1)
                stream = await trio.open_tcp_stream("127.0.0.1", served.bound.port)
                await stream.send_all(b"no TLS at all")
                assert b"no TLS" not in await stream.receive_some()
                await stream.aclose()
    told = [line["left_out"] for line in lines if line["event"] == "peer handshake failed"]
    assert sum(told) + len(told) >= 31 - 10
    assert len(told) <= 21


async def test_a_handshake_has_its_time(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve(handshake_timeout_s=0.2)
        stream = await trio.open_tcp_stream("127.0.0.1", served.bound.port)
        with trio.fail_after(2):
            assert await _closed(stream)
        await stream.aclose()
        assert not served.server._handshakes


async def _closed(stream: trio.SocketStream) -> bool:
    try:
        return await stream.receive_some() == b""
    except trio.BrokenResourceError:
        return True


async def test_connections_over_the_limit_are_closed(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve(max_connections=1)
        calls = await world.calls()
        assert (await calls.exchange(served.base(), GET)).status == 200
        stream = await trio.open_tcp_stream("127.0.0.1", served.bound.port)
        assert await _closed(stream)
        await stream.aclose()
        assert (await calls.exchange(served.base(), GET)).status == 200


async def test_new_connections_get_new_certificates_and_old_ones_are_replaced_on_request(
    authority: Authority,
) -> None:
    async def slow(peer: Peer, request: Request) -> Response:
        await trio.sleep(0.7 if request.query == "slow" else 0)
        return await echo(peer, request)

    async with tls_world(authority) as world:
        served = await world.serve({"verifier": slow})
        client = await world.client(DRAFTER.uri)
        calls = client.transport(DRAFTER, named=False)
        assert (await calls.exchange(served.base(), GET)).status == 200
        newer = authority.issue(served.base(), served.base("cache"))
        shutil.copy(newer.certificate, served.tls.settings.certificate)
        shutil.copy(newer.key, served.tls.settings.key)
        assert served.tls.reload() is None
        answers: list[Response] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                answers.append(await calls.exchange(served.base(), Request("POST", "x", "slow")))

            nursery.start_soon(ask)
            await trio.sleep(0.1)
            served.server.retire()
            await trio.sleep(0.4)
            # over a new connection: only the new certificate carries this name
            assert (await calls.exchange(served.base("cache"), GET)).status == 404
            assert not answers
        assert [answer.status for answer in answers] == [200]
        with trio.fail_after(3):
            while served.server.connections > 1 or client.connections > 1:
                await trio.sleep(0.02)


async def test_a_stop_lets_running_requests_finish(authority: Authority) -> None:
    async def slow(peer: Peer, request: Request) -> Response:
        await trio.sleep(0.5)
        return await echo(peer, request)

    async with tls_world(authority) as world:
        served = await world.serve({"verifier": slow})
        calls = await world.calls()
        idle = await world.calls(ROUTER)
        await idle.exchange(served.base(), GET)
        answers: list[Response] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                answers.append(await calls.exchange(served.base(), Request("POST", "x", body=b"kept")))

            nursery.start_soon(ask)
            await trio.sleep(0.2)
            served.server.stop()
            await trio.sleep(0.1)
            with pytest.raises(OSError, match="connect"):
                await trio.open_tcp_stream("127.0.0.1", served.bound.port)
        assert [answer.body for answer in answers] == [b"kept"]
        with trio.fail_after(1):
            await served.returned.wait()


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_an_end_is_bounded_whatever_peers_do(how: str, authority: Authority) -> None:
    """One waits for an answer that does not come, one is in its handshake, one takes nothing of a large answer."""

    async def handle(peer: Peer, request: Request) -> Response:
        if request.query != "large":
            await trio.sleep_forever()
        return Response(200, {}, bytes(8 << 20))

    async with tls_world(authority) as world:
        served = await world.serve({"verifier": handle}, grace_s=0.3)
        silent = await trio.open_tcp_stream("127.0.0.1", served.bound.port)
        files = authority.issue(DRAFTER.uri)
        stuck = await secure(served, client_context(files, files.ca))
        raw = Raw(stuck, client=True, initial_window_size=(1 << 31) - 1)
        await raw.start()
        raw.h2.increment_flow_control_window((1 << 31) - 1 - 65535)
        await raw.ask(path="/verifier/x?large")
        await raw.ask()
        while served.app.under_way < 2:
            await trio.sleep(0.01)
        await trio.sleep(0.2)
        if how == "stop":
            served.server.stop()
        else:
            served.scope.cancel()
        with trio.fail_after(2):
            await served.returned.wait()
        assert served.app.under_way == 0
        assert served.server.connections == 0
        await trio.aclose_forcefully(stuck)
        await silent.aclose()


def insecure(**settings: Any) -> PeerServer:
    app, _ = app_of({"verifier": echo})
    return PeerServer(app, PeerServerSettings(insecure_loopback=True, **settings), TrioClock(), None)


async def test_without_tls_the_claim_is_who_calls() -> None:
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            server = insecure(listen="127.0.0.1:0")
            bound = await nursery.start(server.run)
            client = WireClient(WireDialer(None, insecure_loopback=True), PeerClientSettings(), TrioClock())
            await nursery.start(client.run)
            base = f"http://127.0.0.1:{bound.port}/verifier/"
            answer = await client.transport(ROUTER, named=True).exchange(base, GET)
            assert answer.headers["caller"] == f"router {ROUTER.uri}"
            assert (await client.transport(ROUTER, named=False).exchange(base, GET)).status == 403
            # no HTTP/1.1, and no upgrade from it
            stream = await trio.open_tcp_stream("127.0.0.1", bound.port)
            upgrade = (
                b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
            )
            await stream.send_all(b"GET /verifier/x HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
            received = b""
            while octets := await stream.receive_some():
                received += octets
            assert b"HTTP/1.1" not in received
            await stream.aclose()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
async def test_without_tls_only_loopback_is_listened_on(listen: str) -> None:
    if "::" in listen and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with pytest.raises(PeerListenFailed, match=r"not a loopback address.*any caller may claim"):
        await insecure(listen=listen).run()


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def test_ipv6_loopback() -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    async with trio.open_nursery() as nursery:
        bound = await nursery.start(insecure(listen="[::1]:0").run)
        await (await trio.open_tcp_stream("::1", bound.port)).aclose()
        nursery.cancel_scope.cancel()


def test_tls_or_insecure_but_not_both_or_neither(authority: Authority) -> None:
    tls = Tls(authority.issue(DRAFTER.uri))
    app = PeerApp(lambda error: None)
    for given, allowed in ((tls, True), (None, False)):
        with pytest.raises(ValueError, match="either TLS files or insecure_loopback"):
            PeerServer(app, PeerServerSettings(insecure_loopback=allowed), TrioClock(), given)


async def test_an_address_in_use_is_named(authority: Authority) -> None:
    async with tls_world(authority) as world:
        served = await world.serve()
        with pytest.raises(PeerListenFailed, match=str(served.bound.port)):
            await insecure(listen=f"127.0.0.1:{served.bound.port}").run()


async def test_a_forged_field_over_the_wire_is_403(authority: Authority) -> None:
    """The field as a peer would send it by itself, past our own client."""
    async with tls_world(authority) as world:
        served = await world.serve()
        files = authority.issue(DRAFTER.uri)
        stream = await secure(served, client_context(files, files.ca))
        raw = Raw(stream, client=True)
        await raw.start()
        assert (await raw.whole(await raw.ask()))[0] == 200
        for forged in (ROUTER.uri, "https://other.example/drafter/", ""):
            assert (await raw.whole(await raw.ask(("sdcpd-as", forged))))[0] == 403
        assert not [event for event in raw.events if isinstance(event, h2.events.StreamReset)]
        await trio.aclose_forcefully(stream)
