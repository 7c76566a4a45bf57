"""A router dies and comes back: readers of its output get the rest, each token once (37, 39, 84, 106, 111)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from sdcpd.edge.peers import PeerClient
from sdcpd.protocol.messages import Output
from sdcpd.protocol.terms import Action
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.ports import Peer, Refusal
from sdcpd.roles.router_settings import RouterSettings
from tests.support.cluster import BASE, MODEL, Cluster, OracleSource, running_cluster, verifier_uri
from tests.support.ports import CountingMeters
from tests.support.toy_engine import greedy
from tests.system.test_cluster import half_right

PROMPT = (5, 6, 7, 8)
LENGTH = 60
ROUTER = f"{BASE}router/"
V1 = verifier_uri(0)


@asynccontextmanager
async def cluster_of(
    path: Path, verifiers: int = 2, settings: RouterSettings | None = None, pass_s: float = 0.2
) -> AsyncIterator[Cluster]:
    with trio.fail_after(7200):
        sources = [OracleSource(half_right)]
        async with running_cluster(path, sources, verifiers=verifiers, router=settings, pass_s=pass_s) as cluster:
            yield cluster


class Reader:
    """A front end that reads GET sessions/{id}/output at the router, whatever becomes of the router meanwhile."""

    def __init__(self, cluster: Cluster, session: bytes) -> None:
        self.session = session
        self.tokens: list[int] = []
        self.entries: list[bytes] = []  # of log-probabilities, where the session has them
        self.final: Output | None = None
        self._epoch = 0
        self._peers = PeerClient(
            cluster.network.transport(Peer(uri="http://127.0.0.9:8470/client/", role="client")), CountingMeters()
        )

    async def page(self) -> Output | Refusal | None:
        """One poll; None when nobody answered."""
        with trio.move_on_after(30):
            page = await self._peers.read_output(ROUTER, self.session, len(self.tokens), 5)
            if isinstance(page, Output):
                assert page.from_ == len(self.tokens)
                assert page.epoch >= self._epoch, "an epoch stepped back"
                self._epoch = page.epoch
                self.tokens += page.tokens
                self.entries += page.logprobs if isinstance(page.logprobs, tuple) else ()
                self.final = page if page.final else None
                return page
            if isinstance(page, Refusal):
                assert page.status in (503, 404, 410), page
                return page
        return None

    async def read(self, until: int | None = None) -> None:
        """To the end, or until there are this many tokens."""
        while self.final is None and (until is None or len(self.tokens) < until):
            page = await self.page()
            assert not isinstance(page, Refusal) or page.status == 503, page
            if not isinstance(page, Output):
                await trio.sleep(0.25)

    def whole(self) -> None:
        assert self.final is not None
        assert self.final.finish is Action.FINISH, self.final.reason
        assert self.tokens == greedy(PROMPT, LENGTH)


async def abandoned(cluster: Cluster, at: int, *, speculation: bool = True, logprobs: int | None = None) -> Reader:
    """A session whose router is killed once `at` tokens are there, and one who had read them."""
    request = GenerationRequest(
        model=MODEL, prompt=PROMPT, max_new=LENGTH, stop=(), speculation=speculation, logprobs=logprobs
    )
    async with cluster.router.generation(request) as generation:
        reader = Reader(cluster, generation.session)
        await reader.read(until=at)
        cluster.stop(ROUTER)
        await trio.sleep(0.1)
    return reader


@pytest.mark.parametrize(
    ("at", "gone_s", "speculation"), [(1, 0.0, True), (20, 0.5, True), (20, 2.0, False), (20, 20.0, False)]
)
async def test_the_router_restarts_and_the_reader_gets_the_rest(
    tmp_path: Path, at: int, gone_s: float, speculation: bool, autojump_clock: MockClock
) -> None:
    async with cluster_of(tmp_path) as cluster:
        reader = await abandoned(cluster, at, speculation=speculation)
        await trio.sleep(gone_s)
        await cluster.start_router()
        await reader.read()
        reader.whole()
        assert cluster.meters.counts["adopted_sessions_total"] == 1
        assert "failover_total" not in cluster.meters.counts, "it lives where the directory says"
        (shown,) = cluster.router.snapshot().sessions
        assert (shown.model, shown.epoch) == (MODEL, 1)


async def test_its_verifier_died_meanwhile(tmp_path: Path, autojump_clock: MockClock) -> None:
    """ "else fence and resume" """
    async with cluster_of(tmp_path) as cluster:
        reader = await abandoned(cluster, 20)
        cluster.stop(V1)
        await cluster.start_router()
        await reader.read()
        reader.whole()
        assert reader.final is not None
        assert reader.final.epoch == 2


async def test_its_verifier_restarted_meanwhile(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, verifiers=1) as cluster:
        reader = await abandoned(cluster, 20)
        cluster.stop(V1)
        await cluster.start_verifier(V1, b"second life here")
        await cluster.start_router()
        await reader.read()
        reader.whole()


async def test_killed_between_fence_and_open(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path) as cluster:
        killed: list[str] = []

        def fault(caller: str, to: str, method: str, path: str) -> str | None:
            if "/router/" not in caller or killed:
                return None
            if (method, path) == ("POST", "sessions"):
                killed.append(to)
                cluster.stop(ROUTER)
                return "cut"
            return None

        request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=LENGTH, stop=())
        async with cluster.router.generation(request) as generation:
            reader = Reader(cluster, generation.session)
            await reader.read(until=20)
            cluster.network.fault = fault
            cluster.stop(V1)
            while not killed:
                await trio.sleep(0.05)
        await cluster.start_router()
        await reader.read()
        reader.whole()
        assert reader.final is not None
        assert reader.final.epoch >= 3, "the epoch that it had fenced is used by nobody"


async def test_it_restarts_twice(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path) as cluster:
        reader = await abandoned(cluster, 20)
        await cluster.start_router()
        await reader.read(until=40)
        cluster.stop(ROUTER)
        await trio.sleep(1)
        await cluster.start_router()
        await reader.read()
        reader.whole()


async def test_nobody_reads_for_30_s(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, pass_s=1.0) as cluster:
        await abandoned(cluster, 10, speculation=False)
        await cluster.start_router()
        started = trio.current_time()
        while not cluster.router.snapshot().sessions:
            await trio.sleep(0.1)
        while any(one.state not in ("cancelled", "finished") for one in cluster.router.snapshot().sessions):
            await trio.sleep(0.5)
        (shown,) = cluster.router.snapshot().sessions
        assert shown.state == "cancelled"
        assert 29 < trio.current_time() - started < 40
        while any(engine.free_pages < engine.info.pages for engine in cluster.engines.values()):
            await trio.sleep(0.5)


async def test_it_ended_while_the_router_was_gone(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Decision 39: served from the log for ten minutes, then 410. Decision 106: the record goes then."""
    async with cluster_of(tmp_path, pass_s=0.01) as cluster:
        reader = await abandoned(cluster, 20, speculation=False)
        await trio.sleep(30)
        assert cluster.verifiers[V1].snapshot().sessions[0].state == "finished"
        await cluster.start_router()
        await reader.read()
        reader.whole()
        again = Reader(cluster, reader.session)
        await again.read()
        again.whole()
        assert cluster.cache.snapshot().directory_records == 1
        await trio.sleep(610)
        refused = await again.page()
        assert isinstance(refused, Refusal)
        assert refused.status == 410
        assert cluster.cache.snapshot().directory_records == 0


async def test_a_session_that_ended_is_read_at_the_router_while_it_is_remembered(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with cluster_of(tmp_path, pass_s=0.01) as cluster:
        request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=LENGTH, stop=())
        async with cluster.router.generation(request) as generation:
            async for _ in generation.pages():
                pass
        await trio.sleep(5)
        reader = Reader(cluster, generation.session)
        await reader.read()
        reader.whole()
        unknown = Reader(cluster, b"?" * 16)
        refused = await unknown.page()
        assert isinstance(refused, Refusal)
        assert refused.status == 404


async def test_the_cache_answers_late(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The directory is asked until it answers; a reader is put off meanwhile, not sent away."""
    async with cluster_of(tmp_path) as cluster:
        reader = await abandoned(cluster, 20)
        late = trio.current_time() + 8

        def fault(caller: str, to: str, method: str, path: str) -> str | None:
            away = "/cache/" in to and "/router/" in caller and trio.current_time() < late
            return "cut" if away else None

        cluster.network.fault = fault
        await cluster.start_router()
        refused = await reader.page()
        assert isinstance(refused, Refusal)
        assert refused.status == 503
        await reader.read()
        reader.whole()


async def test_the_first_router_was_only_paused(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Two lives of one router at once: the older one's assignments are behind, it reads on and disturbs nobody."""
    async with cluster_of(tmp_path) as cluster:
        old = cluster.router
        request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=LENGTH, stop=())
        results: dict[str, list[int]] = {}
        async with old.generation(request) as generation:
            reader = Reader(cluster, generation.session)
            pages = generation.pages()
            tokens = list((await pages.__anext__()).tokens)
            cluster.network.withdraw(ROUTER)
            await cluster.start_router()
            await reader.read(until=30)
            await old.commands.switch(old.snapshot().sessions[0].session)
            async for page in pages:
                tokens += page.tokens
            results["old"] = tokens
            await reader.read()
        reader.whole()
        assert results["old"] == greedy(PROMPT, LENGTH)


async def test_two_lives_of_a_router_fence_each_other(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The older one hears of no status any more, takes all verifiers for dead and fences, wrongly.

    The younger one finds itself fenced, stands back and takes the session again (89); the older one cannot write the
    record (111) and follows.
    """
    async with cluster_of(tmp_path, verifiers=3) as cluster:
        old = cluster.router
        request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=LENGTH, stop=(), speculation=False)
        async with old.generation(request) as generation:
            reader = Reader(cluster, generation.session)
            pages = generation.pages()
            tokens = list((await pages.__anext__()).tokens)
            cluster.network.withdraw(ROUTER)
            await cluster.start_router()
            await reader.read(until=20)
            async for page in pages:
                tokens += page.tokens
            await reader.read()
        reader.whole()
        assert tokens == greedy(PROMPT, LENGTH)
        assert cluster.meters.counts["failover_total"] > 1


async def test_readers_beyond_the_limit_are_put_off(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, settings=RouterSettings(max_readers=2), pass_s=5.0) as cluster:
        request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=LENGTH, stop=())
        async with cluster.router.generation(request) as generation:
            answers: list[object] = []

            async def one() -> None:
                answers.append(await Reader(cluster, generation.session).page())

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(one)
            assert sorted(type(answer).__name__ for answer in answers) == ["Output", "Output", "Refusal"]
