"""Real roles under long and careless use: afterwards no task, socket, file or stream is left that was not there."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from sdcpd.edge.peers import PeerClient
from sdcpd.edge.wire_transport import WireClient
from sdcpd.protocol.messages import Output, SessionState, Verdict
from sdcpd.protocol.terms import Action
from sdcpd.roles.ports import Done, Peer
from sdcpd.roles.verifier_settings import VerifierSettings
from tests.edge.wire.pki import Authority
from tests.edge.wire.roles import PROMPT, RolesWorld, TalliedLogs, roles_world
from tests.support.messages import DRAFTER, ROUTER, SESSION, TARGET, TOKENIZER, contract, proposal, status
from tests.support.ports import CountingMeters, TrioClock
from tests.support.toy_engine import ToyEngine, greedy, next_token

SESSIONS, ROUNDS = 16, 625
"""Ten thousand rounds together."""


class Caller:
    """One node from outside, whose connections can be counted."""

    def __init__(self, client: WireClient, uri: str) -> None:
        self.client = client
        role = uri.rstrip("/").rpartition("/")[2]
        self.calls = PeerClient(client.transport(Peer(uri=uri, role=role), named=False), CountingMeters())


async def caller(w: RolesWorld, uri: str, **settings: Any) -> Caller:
    """Its connections last, however slow the machine: none of them ends for having been idle."""
    return Caller(await w.world.client(uri, **({"idle_connection_timeout_s": 3600} | settings)), uri)


def footprint(w: RolesWorld, *callers: Caller) -> dict[str, int]:
    """What may not grow."""
    return {
        "files and sockets": len(os.listdir("/proc/self/fd")),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "connections served": w.served.server.connections,
        "connections made": sum(one.client.connections for one in callers),
        "requests under way": w.served.app.under_way,
    }


async def at_rest(w: RolesWorld, *callers: Caller) -> dict[str, int]:
    """The least of each within a while: roles report and tend in passing tasks of their own, and these are not there
    all the time."""
    seen = []
    for _ in range(10):
        seen.append(footprint(w, *callers))
        await trio.sleep(0.02)
    return {what: min(one[what] for one in seen) for what in seen[0]}


@asynccontextmanager
async def nothing_left_behind(w: RolesWorld, *callers: Caller) -> AsyncIterator[None]:
    """Compares before and after; what ends by itself has a few seconds to do so."""
    before = await at_rest(w, *callers)
    yield
    await no_more(before, w, *callers)


async def no_more(than: dict[str, int], w: RolesWorld, *callers: Caller) -> None:
    """There comes a moment, soon, at which nothing is there that was not there before."""
    await until(
        lambda: all(count <= than[what] for what, count in footprint(w, *callers).items()),
        lambda: f"{than} became {footprint(w, *callers)}",
    )


async def until(what: Callable[[], bool], why: Callable[[], str], limit_s: float = 5) -> None:
    with trio.move_on_after(limit_s):
        while not what():
            await trio.sleep(0.02)
        return
    raise AssertionError(why())


async def opened(w: RolesWorld, router: Caller, session: bytes = SESSION, max_new: int = 32) -> SessionState:
    """A session that waits for DRAFTER's first proposal."""
    of = contract(stop=(), max_new=max_new)
    assert isinstance(await router.calls.open_session(w.base(), w.session_open(session, of)), SessionState)
    named = await router.calls.name_drafter(w.base(), w.assignment(session, of))
    assert isinstance(named, SessionState)
    return named


async def test_ten_thousand_proposals_on_one_connection(authority: Authority, tmp_path: Path) -> None:
    """Through the verifier, its engine and a log. hypercorn by itself ends a connection after 1000 requests."""
    pages = SESSIONS * (2 * ROUNDS // 16 + 2)
    engine = ToyEngine(TrioClock(), model=TARGET, tokenizer=TOKENIZER, pages=pages, context_tokens=2048, pass_s=0)
    logs = TalliedLogs()
    async with roles_world(authority, tmp_path, objects=logs, engine=engine, limit_s=300) as w:
        router, drafter = await caller(w, ROUTER), await caller(w, DRAFTER, max_connections=1)
        answered: list[int] = []

        async def draft(session: bytes, digest: bytes, ready: trio.Event, go: trio.Event) -> None:
            context = list(PROMPT)
            for number in range(1, ROUNDS + 1):
                base = len(context) - len(PROMPT)
                made = proposal((next_token(context),), session=session, round=number, base=base, base_digest=digest)
                verdict = await drafter.calls.propose(w.base(), made)
                answered.append(number)
                assert isinstance(verdict, Verdict), verdict
                assert (verdict.accepted, verdict.committed) == (1, base + 2)
                assert verdict.action is Action.CONTINUE
                context += verdict.emitted
                digest = verdict.digest
                if number == 1:
                    ready.set()
                    await go.wait()
            assert context == [*PROMPT, *greedy(PROMPT, 2 * ROUNDS)]

        async with trio.open_nursery() as nursery:
            go, ready = trio.Event(), [trio.Event() for _ in range(SESSIONS)]
            for number in range(SESSIONS):
                session = bytes([number]) * 16
                state = await opened(w, router, session, max_new=2 * ROUNDS + 1)
                nursery.start_soon(draft, session, state.digest, ready[number], go)
            for event in ready:
                await event.wait()
            before = await at_rest(w, router, drafter)
            go.set()
        before["tasks"] -= SESSIONS  # of the test itself
        await no_more(before, w, router, drafter)
        assert len(answered) == 10_000
        assert (drafter.client.connections, set(logs.appended.values())) == (1, {ROUNDS})
        for number in range(SESSIONS):
            assert isinstance(await router.calls.cancel_session(w.base(), bytes([number]) * 16), Done)
        await until(lambda: engine.free_pages == pages, lambda: f"{engine.free_pages} of {pages} pages are free")


async def test_300_cancelled_polls(authority: Authority, tmp_path: Path) -> None:
    """Bug 27 (a): each after 10 ms; then calls on the same connections are answered at once."""
    async with roles_world(authority, tmp_path) as w:
        router, drafter = await caller(w, ROUTER), await caller(w, DRAFTER)
        state = await opened(w, router)
        assert isinstance(await drafter.calls.report_status(w.base("router"), status(instance=DRAFTER)), Done)
        assert isinstance(await router.calls.read_output(w.base(), SESSION, 0, 0), Output)

        async def poll() -> None:
            with trio.move_on_after(0.01):
                await router.calls.read_output(w.base(), SESSION, 100, 20)

        async with nothing_left_behind(w, router, drafter):
            for _ in range(3):
                async with trio.open_nursery() as nursery:
                    for _ in range(100):
                        nursery.start_soon(poll)
            with trio.fail_after(1):
                assert isinstance(await router.calls.read_output(w.base(), SESSION, 0, 0), Output)
                assert isinstance(await router.calls.session_state(w.base(), SESSION), SessionState)
        with trio.fail_after(1):
            proposed = proposal(tuple(greedy(PROMPT, 4)), base_digest=state.digest)
            assert isinstance(await drafter.calls.propose(w.base(), proposed), Verdict)


async def test_100_open_polls_beside_proposals(authority: Authority, tmp_path: Path) -> None:
    """Bug 27 (b): six rounds, a hundred readers of each; and more polls at once than one connection's hundred."""
    async with roles_world(authority, tmp_path, verifier=VerifierSettings(max_waiters=400)) as w:
        router, drafter = await caller(w, ROUTER), await caller(w, DRAFTER)
        state = await opened(w, router)
        assert isinstance(await router.calls.read_output(w.base(), SESSION, 0, 0), Output)
        assert isinstance(await drafter.calls.report_status(w.base("router"), status(instance=DRAFTER)), Done)
        truth, base, digest = greedy(PROMPT, 32), 0, state.digest
        async with nothing_left_behind(w, router, drafter):
            for number in range(1, 7):
                pages: list[object] = []

                async def poll(start: int = base, pages: list[object] = pages) -> None:
                    pages.append(await router.calls.read_output(w.base(), SESSION, start, 20))

                readers = 100 if number < 6 else 250
                begin = trio.current_time()
                async with trio.open_nursery() as nursery:
                    for _ in range(readers):
                        nursery.start_soon(poll)
                    await until(lambda n=readers: w.served.app.under_way >= n, lambda: "polls do not arrive")  # type: ignore[misc]  # mypy does not type the default
                    proposed = proposal(tuple(truth[base : base + 3]), round=number, base=base, base_digest=digest)
                    with trio.fail_after(2):
                        verdict = await drafter.calls.propose(w.base(), proposed)
                    assert isinstance(verdict, Verdict)
                assert trio.current_time() - begin < 10, "all readers heard of it"
                assert len(pages) == readers
                assert {page.tokens for page in pages if isinstance(page, Output)} == {verdict.emitted}
                base, digest = verdict.committed, verdict.digest


async def test_a_caller_that_comes_and_goes(authority: Authority, tmp_path: Path) -> None:
    """Fifty nodes that connect, poll and vanish, all in mid-poll: what they held is free within 2 s (bug 21)."""
    async with roles_world(authority, tmp_path) as w:
        router = await caller(w, ROUTER)
        await opened(w, router)
        assert isinstance(await router.calls.session_state(w.base(), SESSION), SessionState)
        async with nothing_left_behind(w, router):
            for turn in range(5):
                async with trio.open_nursery() as nursery:
                    for number in range(10):
                        nursery.start_soon(come_and_go, w, f"https://f{turn}{number}.example/client/")
            await until(lambda: w.served.app.under_way == 0, lambda: "polls of nobody go on", 2)


async def come_and_go(w: RolesWorld, uri: str) -> None:
    from sdcpd.edge.tls import Tls
    from sdcpd.edge.wire_settings import PeerClientSettings
    from sdcpd.edge.wire_transport import WireDialer

    dialer = WireDialer(Tls(w.world.authority.issue(uri)), insecure_loopback=False)
    client = WireClient(dialer, PeerClientSettings(), TrioClock())
    async with trio.open_nursery() as nursery:
        await nursery.start(client.run)
        calls = Caller(client, uri).calls
        assert isinstance(await calls.read_output(w.base(), SESSION, 0, 0), Output)
        for _ in range(3):
            nursery.start_soon(calls.read_output, w.base(), SESSION, 0, 20)
        await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
