"""Traps that others fell into, each with the tests that keep us out of it.

Those whose place is a module's own test file are named in `PROOFS`; those that need two ends and a socket are below.
"""

import datetime
import re
import shutil
import ssl
from pathlib import Path
from typing import Any, Final

import h2.events
import pytest
import trio

from sdcpd.edge.transport import Request, Response, TransportError
from sdcpd.protocol.messages import Output, SessionState, Verdict
from sdcpd.roles.ports import Peer
from tests.edge.wire.doors import client_context, secure
from tests.edge.wire.pki import Authority
from tests.edge.wire.raw import Raw
from tests.edge.wire.roles import CONTRACT, PROMPT, roles_world
from tests.edge.wire.world import DRAFTER, GET, POST, memory_world, tls_world
from tests.support import messages
from tests.support.toy_engine import greedy

EDGE: Final = Path(__file__).parents[1]
ROOT: Final = EDGE.parents[1]

PROOFS: Final = """
# The server's stack by itself
a connection ends after 1000 requests
    edge/wire/test_leaks.py::test_ten_thousand_proposals_on_one_connection
    edge/wire/test_endurance.py::test_ten_thousand_requests_on_one_connection
    edge/wire/test_tools.py::test_h2load_over_tls
idle connections end after 5 s
    edge/wire/test_traps.py::test_an_idle_connection_is_used_again
    edge/test_h2_server.py::test_idle_connections_are_retired_busy_ones_are_not
100 streams a connection
    edge/wire/test_leaks.py::test_100_open_polls_beside_proposals
    edge/wire/test_tools.py::test_h2load_without_tls
an answer before the body was read
    edge/test_h2_server.py::test_an_answer_before_the_body_was_read_leaves_the_connection_whole
    edge/wire/test_problems.py::test_bodies_over_their_limit
send() to a peer that has left
    edge/test_h2_server.py::test_a_peer_that_resets_or_leaves_ends_the_wait
    edge/test_peer_server.py::test_an_end_is_bounded_whatever_peers_do
    edge/wire/test_traps.py::test_an_answer_to_a_peer_that_has_left
no client certificate in the ASGI scope
    edge/test_peer_server.py::test_the_certificate_says_who_calls
no certificate is asked for by default
    edge/test_peer_server.py::test_who_is_not_let_in
TLS 1.2 and HTTP/1.1 are let in by default
    edge/test_peer_server.py::test_who_is_not_let_in
    edge/wire/test_tools.py::test_whom_the_port_does_not_talk_to
bodies larger than the windows
    edge/wire/test_endurance.py::test_large_bodies_arrive_whole_both_ways_beside_small_ones
    edge/wire/test_tools.py::test_nghttp_moves_large_bodies_both_ways
    edge/test_h2_client.py::test_large_bodies_pass_small_windows
# Certificates
session tickets skip the certificate
    edge/wire/test_traps.py::test_sessions_are_not_resumed
renewed certificates
    edge/wire/test_traps.py::test_certificates_are_renewed_while_polls_are_open
expired certificates
    edge/test_peer_server.py::test_an_expired_certificate_is_not_let_in
    edge/wire/test_traps.py::test_a_server_whose_certificate_has_expired
# Restarts
GOAWAY in mid-flight
    edge/wire/test_traps.py::test_goaway_in_mid_flight
    edge/test_h2_pool.py::test_what_is_asked_again
    edge/wire/test_endurance.py::test_connections_that_are_retired_under_load_lose_nothing
    edge/wire/test_endurance.py::test_a_server_restarted_under_load_leaves_nothing_behind
# From public trackers, by the number in the project's list
21 work for a client that has gone
    edge/wire/test_leaks.py::test_a_caller_that_comes_and_goes
    frontend/test_server.py::test_fifty_clients_that_leave_free_everything
26 hostile bodies
    edge/wire/test_bugs.py::test_hostile_bodies_cost_nothing_and_are_refused
    edge/wire/test_bugs.py::test_a_body_of_64_mib_is_413
    edge/test_h2_server.py::test_a_body_without_end_is_not_read_on
27 slots lost by cancellation and long polls
    edge/wire/test_leaks.py::test_300_cancelled_polls
    edge/wire/test_leaks.py::test_100_open_polls_beside_proposals
28 who is calling
    edge/wire/test_bugs.py::test_who_may_do_what_is_the_certificates_to_say
    edge/wire/test_callers.py::test_a_claim_adds_nothing_to_a_certificate
29 the CPU instead of the GPU
    node/test_device.py::test_auto_says_and_exports_what_it_took
"""


def test_the_proofs_are_there() -> None:
    named = re.findall(r"(\S+\.py)::(\w+)", PROOFS)
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


async def test_an_idle_connection_is_used_again(autojump_clock: Any) -> None:
    """For as long as the client keeps it, which is less than the server does."""
    async with memory_world() as world:
        for idle_s in (0, 6, 59, 30, 59):
            await trio.sleep(idle_s)
            assert (await world.ask(POST)).status == 200
        assert len(world.network.streams) == 1
        await trio.sleep(62)
        assert world.client.connections == 0, "dropped by the client, so that it never uses a dying one"
        assert (await world.ask(POST)).status == 200


async def test_an_answer_to_a_peer_that_has_left(authority: Authority) -> None:
    """Its request is cancelled at once, and if it answers nevertheless, nothing is raised and nothing waits."""
    begun, cancelled, answered = 0, 0, 0

    async def stubborn(peer: Peer, request: Request) -> Response:
        nonlocal begun, cancelled, answered
        begun += 1
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled += 1
            if request.query == "stubborn":
                with trio.CancelScope(shield=True):
                    await trio.sleep(0.05)
                answered += 1
                return Response(200, body=bytes(3 << 20))
            raise
        raise AssertionError

    async with tls_world(authority) as world:
        served = await world.serve({"verifier": stubborn})
        files = authority.issue(DRAFTER.uri)
        for reset in (True, False):
            stream = await secure(served, client_context(files, files.ca))
            raw = Raw(stream, client=True)
            await raw.start()
            numbers = [await raw.ask(path=f"/verifier/x?{query}") for query in ("plain", "stubborn")]
            while begun < (2 if reset else 4):
                await trio.sleep(0.01)
            if reset:
                for number in numbers:
                    await raw.reset(number)
            else:
                stream.transport_stream.socket.close()
            with trio.fail_after(2):
                while served.app.under_way:
                    await trio.sleep(0.01)
            await trio.aclose_forcefully(stream)
        assert (begun, cancelled, answered) == (4, 4, 2)
        with trio.fail_after(3):
            while served.server.connections:
                await trio.sleep(0.01)
        assert served.failures == []


async def test_sessions_are_not_resumed(authority: Authority) -> None:
    """A resumed session would not look at certificates again: no ticket is sent, and one that is shown is not taken."""
    async with tls_world(authority) as world:
        served, files = await world.serve(), authority.issue(DRAFTER.uri)
        context = client_context(files, files.ca)
        shown: ssl.SSLSession | None = None
        for _ in range(2):
            stream = await secure(served, context)
            coded = stream._ssl_object  # trio has no name for its session
            if shown is not None:
                coded.session = shown
            raw = Raw(stream, client=True)
            await raw.start()
            assert (await raw.whole(await raw.ask()))[0] == 200
            shown = coded.session
            assert shown is not None
            assert not shown.has_ticket
            assert not coded.session_reused
            await trio.aclose_forcefully(stream)


async def test_certificates_are_renewed_while_polls_are_open(authority: Authority, tmp_path: Path) -> None:
    """A reload in mid-poll: the polls are answered where they are, what is asked next meets the new certificate."""
    async with roles_world(authority, tmp_path) as w:
        router_client = await w.world.client(messages.ROUTER)
        router, drafter = await w.calls_as(messages.ROUTER), await w.calls_as(messages.DRAFTER)
        named = await router.open_session(w.base(), w.session_open())
        assert isinstance(named, SessionState)
        assert isinstance(await router.name_drafter(w.base(), w.assignment()), SessionState)
        pages: list[object] = []

        async def poll() -> None:
            pages.append(await router.read_output(w.base(), messages.SESSION, 0, 20))

        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(poll)
            while w.served.app.under_way < 30:
                await trio.sleep(0.01)
            newer = authority.issue(*(w.base(role) for role in ("router", "verifier", "drafter", "cache", "renewed")))
            shutil.copy(newer.certificate, w.served.tls.settings.certificate)
            shutil.copy(newer.key, w.served.tls.settings.key)
            assert w.served.tls.reload() is None
            w.served.server.retire()
            await trio.sleep(0.6)
            assert not pages
            # over a new connection: only the new certificate carries this name
            fresh = router_client.transport(Peer(uri=messages.ROUTER, role="router"), named=False)
            assert (await fresh.exchange(w.base("renewed"), GET)).status == 404
            proposed = messages.proposal(tuple(greedy(PROMPT, 4)), base_digest=messages.first_digest(CONTRACT, PROMPT))
            with trio.fail_after(2):
                verdict = await drafter.propose(w.base(), proposed)
            assert isinstance(verdict, Verdict)
        assert {page.tokens for page in pages if isinstance(page, Output)} == {verdict.emitted}
        assert len(pages) == 30


async def test_a_server_whose_certificate_has_expired(authority: Authority) -> None:
    """It would not start by itself (edge/tls.py tries its files): one that ran on past the date."""
    old = authority.issue("https://v.example/verifier/", life=-datetime.timedelta(minutes=1))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(old.certificate, old.key)
    context.set_alpn_protocols(["h2"])

    async def serve(plain: trio.SocketStream) -> None:
        with pytest.raises(trio.BrokenResourceError):
            await trio.SSLStream(plain, context, server_side=True).do_handshake()

    async with tls_world(authority) as world:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        world.nursery.start_soon(trio.serve_listeners, serve, [listener])
        calls = await world.calls()
        port = listener.socket.getsockname()[1]
        with pytest.raises(TransportError, match="certificate has expired"):
            await calls.exchange(f"https://127.0.0.1:{port}/verifier/", GET)


class GoingAway:
    """A server that says GOAWAY in mid-flight: it answers the first request, the second it has begun, the third it has
    not looked at; then it is gone. Its next connections answer all."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    async def serve(self, stream: trio.abc.Stream) -> None:
        seen: list[str] = []
        self.seen.append(seen)
        peer = Raw(stream, client=False)
        await peer.start()
        first = len(self.seen) == 1
        numbers: list[int] = []
        try:
            while True:
                request = await peer.next(h2.events.RequestReceived)
                await peer.next(h2.events.StreamEnded, request.stream_id)
                path = next(str(value) for name, value in request.headers or () if str(name) == ":path")
                seen.append(path.rpartition("/")[2])
                numbers.append(request.stream_id or 0)
                if not first:
                    await peer.answer(numbers[-1], b"later")
                elif len(numbers) == 3:
                    await peer.goaway(numbers[1])
                    await peer.answer(numbers[0], b"sooner")
                    await trio.sleep(0.1)
                    return
        except (AssertionError, trio.BrokenResourceError):
            return
        finally:
            await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_goaway_in_mid_flight(method: str, authority: Authority) -> None:
    """What is beyond the last stream is asked again; what was begun and lost, only if it changes nothing (36)."""
    going = GoingAway()
    async with tls_world(authority) as world:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        base = f"https://127.0.0.1:{listener.socket.getsockname()[1]}/verifier/"
        files = authority.issue(base)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
        context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols(["h2"])

        async def serve(plain: trio.SocketStream) -> None:
            stream = trio.SSLStream(plain, context, server_side=True, https_compatible=True)
            await stream.do_handshake()
            await going.serve(stream)

        world.nursery.start_soon(trio.serve_listeners, serve, [listener])
        calls = await world.calls()
        answers: dict[str, bytes | str] = {}

        async def ask(path: str) -> None:
            try:
                answers[path] = (await calls.exchange(base, Request(method, path, body=b"x" * (method == "POST")))).body
            except TransportError as error:
                answers[path] = type(error).__name__

        async with trio.open_nursery() as nursery:
            for number, path in enumerate(("one", "two", "three"), 1):
                nursery.start_soon(ask, path)
                while len(going.seen[0] if going.seen else ()) < number:  # in this order, however slow the machine
                    await trio.sleep(0.01)
    assert going.seen[0] == ["one", "two", "three"]
    assert answers == {
        "one": b"sooner",
        "two": b"later" if method == "GET" else "AnswerLost",
        "three": b"later",
    }
    assert sorted(going.seen[1]) == (["three", "two"] if method == "GET" else ["three"])
