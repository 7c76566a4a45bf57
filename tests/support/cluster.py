"""A whole cluster in one process: real roles, real encoding and dispatch, the real log store; a toy engine.

The network is the loopback of edge/transport.py. Under trio's MockClock all of it runs in virtual time. A `Cluster` is
one of each role, with as many drafters as sources are given, and behind them those that draft otherwise.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from sdcpd.cache.files import RealFiles
from sdcpd.cache.settings import CacheSettings
from sdcpd.drafting.source import Draft, DraftSource
from sdcpd.edge.dispatch import cache_dispatcher, drafter_dispatcher, router_dispatcher, verifier_dispatcher
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.transport import LoopbackNetwork
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


class Cluster:
    """Running roles. `drafters` maps a base URI to its role; `stop` kills one as a crash would."""

    def __init__(self, engine: Engine, meters: CountingMeters, network: LoopbackNetwork) -> None:
        self.engine = engine
        self.meters = meters
        self.network = network
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
        while not self.router.ready()[0] or len(self.router.snapshot().instances) < 1 + len(self.drafters):
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
    workers: Workers | None = None,
) -> AsyncIterator[Cluster]:
    clock, randomness, meters = TrioClock(), SeededRandomness(), CountingMeters()
    engine = engine if engine is not None else ToyEngine(clock, model=TARGET, tokenizer=TOKENIZER)
    network = LoopbackNetwork()
    cluster = Cluster(engine, meters, network)
    uris = {role: f"{BASE}{role}/" for role in ("router", "verifier", "cache")}

    def ports(role: str, uri: str) -> Ports:
        transport = network.transport(Peer(uri=uri, role=role))
        return Ports(
            clock=clock,
            randomness=randomness,
            workers=workers if workers is not None else InlineWorkers(),
            meters=meters,
            peers=PeerClient(transport, meters),
            objects=ObjectClient(transport, meters, (uris["cache"],)),
            engine=engine if role == "verifier" else None,
        )

    cache_settings = CacheSettings()
    cluster.cache = Cache(cache_settings, ports("cache", uris["cache"]), RealFiles(state_dir))
    network.serve(uris["cache"], cache_dispatcher(cluster.cache, cache_settings, meters).handle)
    cluster.verifier = Verifier(
        verifier if verifier is not None else VerifierSettings(),
        ports("verifier", uris["verifier"]),
        instance=uris["verifier"],
        routers=(uris["router"],),
        caches=(uris["cache"],),
        boot=b"v" * 16,
    )
    network.serve(uris["verifier"], verifier_dispatcher(cluster.verifier, meters).handle)
    cluster.router = Router(
        router if router is not None else RouterSettings(),
        ports("router", uris["router"]),
        instance=uris["router"],
        cache=uris["cache"],
        models=(RoutedModel(name=MODEL, tokenizer=engine.info.tokenizer, ladder="test" if ladder else None),),
        ladders={"test": ladder} if ladder is not None else {},
    )
    network.serve(uris["router"], router_dispatcher(cluster.router, meters).handle)
    for number, drafting in enumerate([*(LookupDrafting(source, InlineWorkers()) for source in sources), *draftings]):
        uri = f"http://127.0.0.{number + 2}:8470/drafter/"
        identity = Identity(
            instance=uri,
            model=bytes([number]) * 32,
            tokenizer=engine.info.tokenizer,
            vocabulary=engine.info.vocabulary,
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
        for part in (cluster.cache, cluster.router, cluster.verifier):
            await nursery.start(part.run)
        for uri, role in cluster.drafters.items():
            cluster.scopes[uri] = await nursery.start(_run_scoped, role)
        await cluster.ready()
        yield cluster
        nursery.cancel_scope.cancel()


async def _run_scoped(role: Drafter, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(role.run)
            task_status.started(scope)


assert VOCABULARY > 3
