"""Faults that others met in the field (bugs 26, 27, 28), against a real verifier behind real TLS."""

import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import cbor2
import trio

from sdcpd.edge.dispatch import router_dispatcher, verifier_dispatcher
from sdcpd.edge.peer_app import Mount
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.problem_body import refusal
from sdcpd.edge.transport import Request
from sdcpd.edge.wire_transport import WireTransport
from sdcpd.protocol.encoding import MEDIA_TYPE, encode
from sdcpd.protocol.messages import SessionState, Verdict
from sdcpd.roles.ports import Done, Peer, Peers, Ports, Refusal, Unreachable
from sdcpd.roles.verifier import Verifier
from sdcpd.roles.verifier_settings import VerifierSettings
from tests.edge.services import Recorder
from tests.edge.wire.pki import Authority
from tests.edge.wire.world import Served, TlsWorld, tls_world
from tests.support.messages import (
    CACHE,
    DRAFTER,
    OTHER_DRAFTER,
    ROUTER,
    SESSION,
    TARGET,
    TOKENIZER,
    VERIFIER,
    assignment,
    contract,
    proposal,
    session_open,
    status,
)
from tests.support.ports import CountingMeters, InlineWorkers, MemoryLogs, RecordedPeers, SeededRandomness, TrioClock
from tests.support.toy_engine import ToyEngine, greedy

PROMPT = (1, 1, 1)
A = Peer(uri=DRAFTER, role="drafter")
B = Peer(uri=OTHER_DRAFTER, role="drafter")
R = Peer(uri=ROUTER, role="router")


class Stand:
    """A verifier and a router on one port; `router` answers whatever it is told."""

    def __init__(self, world: TlsWorld, served: Served) -> None:
        self.world = world
        self.served = served

    async def transport(self, caller: Peer) -> WireTransport:
        return await self.world.calls(caller)

    async def calls(self, caller: Peer) -> PeerClient:
        return PeerClient(await self.transport(caller), CountingMeters())


@asynccontextmanager
async def stand(authority: Authority) -> AsyncIterator[Stand]:
    meters = CountingMeters()
    ports = Ports(
        clock=TrioClock(),
        randomness=SeededRandomness(),
        workers=InlineWorkers(),
        meters=meters,
        peers=cast(Peers, RecordedPeers()),
        objects=MemoryLogs(),
        engine=ToyEngine(TrioClock(), model=TARGET, tokenizer=TOKENIZER, pass_s=0.001),
    )
    verifier = Verifier(
        VerifierSettings(), ports, instance=VERIFIER, routers=(ROUTER,), caches=(CACHE,), boot=bytes(16)
    )
    async with tls_world(authority) as world:
        await world.nursery.start(lambda task_status: verifier.run(task_status=task_status))
        served = await world.serve({"verifier": _nobody, "router": _nobody})
        for role, dispatcher in (
            ("verifier", verifier_dispatcher(verifier, meters)),
            ("router", router_dispatcher(Recorder(), meters)),
        ):
            served.app.withdraw(f"/{role}/")
            served.app.serve(Mount(f"/{role}/", dispatcher.handle, dispatcher.body_limit_bytes))
        yield Stand(world, served)
        assert served.failures == []


async def _nobody(peer: Peer, request: Request) -> Any:
    raise AssertionError


HOSTILE = {
    "endless array": bytes.fromhex("9affffffff"),
    "endless array, 64 bits": bytes.fromhex("9bffffffffffffffff"),
    "deep": b"\x81" * 100_000 + b"\0",
    "duplicate key": bytes.fromhex("a2616101616102"),
    "trailing octet": encode(proposal((1,))) + b"\0",
    "empty": b"",
    "no map": cbor2.dumps([1, 2]),
    "endless text": bytes.fromhex("7bffffffffffffffff"),
}


async def test_hostile_bodies_cost_nothing_and_are_refused(authority: Authority) -> None:
    """Bug 26. In 50 ms (the best of three, on a busy machine) and 10 MB."""
    async with stand(authority) as s:
        drafter = await s.transport(A)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for name, body in HOSTILE.items():
            took = []
            for _ in range(3):
                begin = time.perf_counter()
                request = Request("POST", "proposals", headers={"content-type": MEDIA_TYPE}, body=body)
                answer = await drafter.exchange(s.served.base(), request)
                took.append(time.perf_counter() - begin)
                assert answer.status == 400, name
                assert answer.headers["content-type"] == "application/problem+json"
            assert min(took) < 0.05, name
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


async def test_a_body_of_64_mib_is_413(authority: Authority) -> None:
    async with stand(authority) as s:
        drafter = await s.transport(A)
        request = Request("POST", "proposals", headers={"content-type": MEDIA_TYPE}, body=bytes(64 << 20))
        answer = await drafter.exchange(s.served.base(), request)
        assert (answer.status, refusal(answer).detail) == (413, "the body may hold 262144 octets")
        again = await drafter.exchange(s.served.base(), Request("GET", "proposals"))
        assert again.status == 405


async def test_who_may_do_what_is_the_certificates_to_say(authority: Authority) -> None:
    """Bug 28: a session of A's; B, whose certificate is of the same authority, proposes what A would."""
    async with stand(authority) as s:
        base = s.served.base()
        router, a, b = await s.calls(R), await s.calls(A), await s.calls(B)
        opened = await router.open_session(base, session_open(prompt=PROMPT, contract=contract(stop=())))
        assert isinstance(opened, SessionState)
        named = await router.name_drafter(base, assignment(prompt=PROMPT, contract=contract(stop=()), seq=1))
        assert isinstance(named, SessionState)
        perfect = proposal(tuple(greedy(PROMPT, 4)), base_digest=opened.digest)

        refused = await b.propose(base, perfect)
        assert isinstance(refused, Refusal)
        assert (refused.status, refused.suffix) == (403, "sdcp-not-assigned")
        forging = await s.transport(B)
        for field in ("sdcpd-as", "x-peer", "x-forwarded-client-cert", "forwarded"):
            request = Request(
                "POST", "proposals", headers={"content-type": MEDIA_TYPE, field: DRAFTER}, body=encode(perfect)
            )
            assert (await forging.exchange(base, request)).status == 403, field
        for who in (a, b):
            opening = await who.open_session(base, session_open(session=bytes(16)))
            assert isinstance(opening, Refusal)
            assert (opening.status, opening.suffix) == (403, None)
        verdict = await a.propose(base, perfect)
        assert isinstance(verdict, Verdict)
        assert verdict.accepted == 4


async def open_session(s: Stand) -> PeerClient:
    router = await s.calls(R)
    opened = await router.open_session(s.served.base(), session_open(prompt=PROMPT, contract=contract(stop=())))
    assert isinstance(opened, SessionState)
    return router


async def test_after_300_cancelled_polls_a_call_is_answered_at_once(authority: Authority) -> None:
    """Bug 27 (a)."""
    async with stand(authority) as s:
        router, base = await open_session(s), s.served.base()

        async def poll() -> None:
            with trio.move_on_after(0.01):
                await router.read_output(base, SESSION, 100, 20)

        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for _ in range(100):
                    nursery.start_soon(poll)
        with trio.fail_after(1):
            assert isinstance(await router.session_state(base, SESSION), SessionState)
            page = await router.read_output(base, SESSION, 0, 0)  # on the connection of the polls
            assert not isinstance(page, Refusal | Unreachable)
        with trio.fail_after(1):
            while s.served.app.under_way:
                await trio.sleep(0.01)


async def test_beside_100_open_polls_calls_are_answered_at_once(authority: Authority) -> None:
    """Bug 27 (b). All polls end when there is something to tell."""
    async with stand(authority) as s:
        router, drafter, base = await open_session(s), await s.calls(A), s.served.base()
        named = await router.name_drafter(base, assignment(prompt=PROMPT, contract=contract(stop=()), seq=1))
        assert isinstance(named, SessionState)
        pages: list[object] = []

        async def poll() -> None:
            pages.append(await router.read_output(base, SESSION, 0, 20))

        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(poll)
            while s.served.app.under_way < 100:
                await trio.sleep(0.01)
            report = status(instance=DRAFTER)
            for _ in range(20):
                with trio.fail_after(1):
                    assert isinstance(await drafter.report_status(s.served.base("router"), report), Done)
            assert not pages
            begin = trio.current_time()
            proposed = proposal(tuple(greedy(PROMPT, 4)), base_digest=named.digest)
            with trio.fail_after(1):
                assert isinstance(await drafter.propose(base, proposed), Verdict)
        assert trio.current_time() - begin < 5
        assert len({repr(page) for page in pages}) == 1
        assert len(pages) == 100


async def test_a_peer_that_is_not_there_is_unreachable(authority: Authority) -> None:
    async with tls_world(authority) as world:
        router = PeerClient(await world.calls(R), CountingMeters())
        outcome = await router.session_state("https://127.0.0.1:1/verifier/", SESSION)
        assert isinstance(outcome, Unreachable)
        assert "no connection to 127.0.0.1:1" in outcome.reason
