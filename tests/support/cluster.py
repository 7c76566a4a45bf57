"""A whole cluster in one process: real roles, real encoding and dispatch, the real log store; a toy engine.

The network is the loopback of edge/transport.py, with links that can be cut and calls that can be lost. Under trio's
MockClock all of it runs in virtual time. A `Cluster` is one cache and one router, with as many drafters as sources are
given, behind them those that draft otherwise, and as many verifiers as asked for. The first verifier is `verifier`, its
engine `engine`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from msgspec import UNSET

from sdcpd.cache.files import RealFiles
from sdcpd.cache.settings import CacheSettings
from sdcpd.drafting.source import Draft, DraftSource
from sdcpd.drafting.traffic_class import TrafficClass
from sdcpd.edge.dispatch import cache_dispatcher, drafter_dispatcher, router_dispatcher, verifier_dispatcher
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.transport import LoopbackNetwork, Request, Response, TransportError
from sdcpd.protocol.draft_session import Identity
from sdcpd.protocol.ladder import Ladder
from sdcpd.protocol.messages import Output
from sdcpd.roles.cache import Cache
from sdcpd.roles.drafter import Drafter
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.drafting import Drafting, LookupDrafting
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.ports import Engine, Peer, Ports, Workers
from sdcpd.roles.router import Router
from sdcpd.roles.router_settings import RoutedModel, RouterSettings
from sdcpd.roles.verifier import Verifier
from sdcpd.roles.verifier_settings import VerifierSettings
from tests.support.messages import TARGET, TOKENIZER
from tests.support.ports import CountingMeters, InlineWorkers, SeededRandomness, TrioClock
from tests.support.toy_engine import VOCABULARY, ToyEngine

BASE = "http://127.0.0.1:8470/"
MODEL = "toy"


class OracleSource:
    """Drafts by a function of the whole context: right, wrong or random, as a test needs it."""

    def __init__(self, continue_: Callable[[Sequence[int], int], list[int]]) -> None:
        self._continue = continue_
        self._contexts: dict[bytes, list[int]] = {}

    def open(self, session: bytes, prompt: Sequence[int], scope: bytes | None = None) -> None:
        self._contexts[session] = list(prompt)

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        self._contexts[session] += committed

    def propose(self, session: bytes, limit: int, assumed: Sequence[int] = ()) -> Draft:
        tokens = self._continue([*self._contexts[session], *assumed], limit)
        return Draft(tokens=tuple(tokens[:limit]), matched=0)

    def close(self, session: bytes) -> None:
        self._contexts.pop(session, None)


class LossyNetwork(LoopbackNetwork):
    """`fault` is asked about each exchange, with the caller's URI, the callee's, method and path.

    "cut": it never arrives. "lost": it is carried out and its answer lost. None: it goes through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[str, str, str, str], str | None] = lambda *_: None

    async def carry(self, caller: Peer, base_uri: str, request: Request) -> Response:
        fault = self.fault(caller.uri, base_uri, request.method, request.path)
        if fault == "cut":
            raise TransportError("the link is cut")
        response = await super().carry(caller, base_uri, request)
        if fault == "lost":
            raise TransportError("the answer was lost")
        return response


class Cluster:
    """Running roles. `drafters` maps a base URI to its role, `verifiers` likewise; `stop` kills one as a crash would.

    `nursery` runs whatever a test starts later.
    """

    nursery: trio.Nursery
    start_verifier: Callable[[str, bytes], Awaitable[Verifier]]
    start_router: Callable[[], Awaitable[Router]]

    def __init__(self, engine: Engine, meters: CountingMeters, network: LossyNetwork) -> None:
        self.engine = engine
        self.engines: dict[str, Engine] = {}
        self.meters = meters
        self.network = network
        self.verifiers: dict[str, Verifier] = {}
        self.router: Router
        self.verifier: Verifier
        self.cache: Cache
        self.drafters: dict[str, Drafter] = {}
        self.scopes: dict[str, trio.CancelScope] = {}

    def stop(self, uri: str) -> None:
        """The role at `uri` is gone: nobody answers there any more."""
        self.network.withdraw(uri)
        self.scopes[uri].cancel()

    async def ready(self) -> None:
        """Until the router would take a request and knows all drafters."""
        known = len(self.verifiers) + len(self.drafters)
        while not self.router.ready()[0] or len(self.router.snapshot().instances) < known:
            await trio.sleep(0.01)

    async def generate(
        self,
        prompt: Sequence[int],
        max_new: int | None,
        *,
        stop: tuple[int, ...] = (),
        speculation: bool = True,
        **sampling: Any,
    ) -> tuple[list[int], Output]:
        """`sampling` holds members of GenerationRequest."""
        request = GenerationRequest(
            model=MODEL, prompt=tuple(prompt), max_new=max_new, stop=stop, speculation=speculation, **sampling
        )
        tokens: list[int] = []
        async with self.router.generation(request) as generation:
            async for page in generation.pages():
                assert page.from_ == len(tokens)
                tokens += page.tokens
                if page.final:
                    return tokens, page
        raise AssertionError("no final page")


@asynccontextmanager
async def running_cluster(
    state_dir: Path,
    sources: Sequence[DraftSource],
    *,
    engine: Engine | None = None,
    ladder: Ladder | None = None,
    verifier: VerifierSettings | None = None,
    router: RouterSettings | None = None,
    drafter: DrafterSettings | None = None,
    draftings: Sequence[Drafting] = (),
    classes: Sequence[TrafficClass] = (),
    methods: Sequence[str] = (),
    workers: Workers | None = None,
    verifiers: int = 1,
    pass_s: float = 0.01,
) -> AsyncIterator[Cluster]:
    clock, randomness, meters = TrioClock(), SeededRandomness(), CountingMeters()
    engine = engine if engine is not None else ToyEngine(clock, model=TARGET, tokenizer=TOKENIZER, pass_s=pass_s)
    network = LossyNetwork()
    cluster = Cluster(engine, meters, network)
    uris = {role: f"{BASE}{role}/" for role in ("router", "verifier", "cache")}

    def ports(role: str, uri: str, engine: Engine | None = None) -> Ports:
        transport = network.transport(Peer(uri=uri, role=role))
        return Ports(
            clock=clock,
            randomness=randomness,
            workers=workers if workers is not None else InlineWorkers(),
            meters=meters,
            peers=PeerClient(transport, meters),
            objects=ObjectClient(transport, meters, (uris["cache"],)),
            engine=engine,
        )

    async def start_verifier(uri: str, boot: bytes) -> Verifier:
        """A new process at `uri`; the first one of all runs the engine that the caller may have given."""
        first = uri == uris["verifier"] and uri not in cluster.engines
        cluster.engines[uri] = engine if first else ToyEngine(clock, model=TARGET, tokenizer=TOKENIZER, pass_s=pass_s)
        started = cluster.verifiers[uri] = Verifier(
            verifier if verifier is not None else VerifierSettings(),
            ports("verifier", uri, cluster.engines[uri]),
            instance=uri,
            routers=(uris["router"],),
            caches=(uris["cache"],),
            boot=boot,
        )
        network.serve(uri, verifier_dispatcher(started, meters).handle)
        cluster.scopes[uri] = await cluster.nursery.start(_run_scoped, started)
        return started

    async def start_router() -> Router:
        uri = uris["router"]
        cluster.router = Router(
            router if router is not None else RouterSettings(),
            ports("router", uri),
            instance=uri,
            cache=uris["cache"],
            models=(RoutedModel(name=MODEL, tokenizer=engine.info.tokenizer, ladder="test" if ladder else None),),
            ladders={"test": ladder} if ladder is not None else {},
            classes=classes,
        )
        network.serve(uri, router_dispatcher(cluster.router, meters).handle)
        cluster.scopes[uri] = await cluster.nursery.start(_run_scoped, cluster.router)
        return cluster.router

    cluster.start_verifier, cluster.start_router = start_verifier, start_router
    cache_settings = CacheSettings(commit_durability="page_cache")  # no test here cuts the power
    cluster.cache = Cache(cache_settings, ports("cache", uris["cache"]), RealFiles(state_dir))
    network.serve(uris["cache"], cache_dispatcher(cluster.cache, cache_settings, meters).handle)
    for number, drafting in enumerate([*(LookupDrafting(source, InlineWorkers()) for source in sources), *draftings]):
        uri = f"http://127.0.0.{number + 2}:8470/drafter/"
        identity = Identity(
            instance=uri,
            model=bytes([number]) * 32,
            tokenizer=engine.info.tokenizer,
            vocabulary=engine.info.vocabulary,
            method=methods[number] if number < len(methods) else UNSET,
        )
        cluster.drafters[uri] = Drafter(
            drafter if drafter is not None else DrafterSettings(),
            ports("drafter", uri),
            identity=identity,
            drafting=drafting,
            routers=(uris["router"],),
            caches=(uris["cache"],),
            boot=bytes([number]) * 16,
        )
        network.serve(uri, drafter_dispatcher(cluster.drafters[uri], meters).handle)
    async with trio.open_nursery() as nursery:
        cluster.nursery = nursery
        await nursery.start(cluster.cache.run)
        await start_router()
        for number in range(verifiers):
            await start_verifier(verifier_uri(number), bytes([100 + number]) * 16)
        cluster.verifier = cluster.verifiers[uris["verifier"]]
        for uri, role in cluster.drafters.items():
            cluster.scopes[uri] = await nursery.start(_run_scoped, role)
        await cluster.ready()
        yield cluster
        nursery.cancel_scope.cancel()


def verifier_uri(number: int) -> str:
    """Base URI of the verifier with this number, from 0."""
    return f"{BASE}verifier/" if number == 0 else f"http://127.0.1.{number}:8470/verifier/"


async def _run_scoped(role: Drafter | Verifier | Router, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(role.run)
            task_status.started(scope)


assert VOCABULARY > 3
