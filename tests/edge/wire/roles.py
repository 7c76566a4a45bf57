"""A node of all four roles behind one real port: a toy engine, a real journal, TLS files; its roles call each other
through that port. Whoever comes from outside has a certificate of his own.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import trio

from sdcpd.cache.files import RealFiles
from sdcpd.cache.refs import log_reference
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.dispatch import (
    Dispatcher,
    cache_dispatcher,
    drafter_dispatcher,
    router_dispatcher,
    verifier_dispatcher,
)
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.peer_app import Mount
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.transport import Request, Response
from sdcpd.edge.wire_transport import WireTransport
from sdcpd.protocol.draft_session import Identity
from sdcpd.protocol.messages import Assignment, Contract, SessionOpen
from sdcpd.roles.cache import Cache
from sdcpd.roles.drafter import Drafter
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.drafting import LookupDrafting
from sdcpd.roles.ports import Appended, AppendOutcome, Objects, Peer, Ports, TagMismatch
from sdcpd.roles.router import Router
from sdcpd.roles.router_settings import RoutedModel, RouterSettings
from sdcpd.roles.verifier import Verifier
from sdcpd.roles.verifier_settings import VerifierSettings
from tests.edge.wire.pki import Authority
from tests.edge.wire.world import Served, TlsWorld, tls_world
from tests.support.cluster import OracleSource
from tests.support.messages import DRAFTER, SESSION, TARGET, TOKENIZER, assignment, contract, first_digest, session_open
from tests.support.ports import CountingMeters, InlineWorkers, MemoryLogs, SeededRandomness, TrioClock
from tests.support.toy_engine import VOCABULARY, ToyEngine, greedy

ROLES = ("router", "verifier", "drafter", "cache")
PROMPT = (1, 1, 1)
CONTRACT = contract(stop=())


class RolesWorld:
    """The node, and calls to it by others."""

    def __init__(self, world: TlsWorld, served: Served, verifier: Verifier, engine: ToyEngine) -> None:
        self.world = world
        self.served = served
        self.verifier = verifier
        self.engine = engine

    def base(self, role: str = "verifier") -> str:
        return self.served.base(role)

    async def transport(self, caller: Peer) -> WireTransport:
        return await self.world.calls(caller)

    async def calls(self, caller: Peer) -> PeerClient:
        return PeerClient(await self.transport(caller), CountingMeters())

    async def calls_as(self, uri: str) -> PeerClient:
        """By the role that the URI names."""
        return await self.calls(Peer(uri=uri, role=uri.rstrip("/").rpartition("/")[2]))

    def session_open(self, session: bytes = SESSION, of: Contract = CONTRACT) -> SessionOpen:
        log = log_reference(self.base("cache"), None, session)
        return session_open(session=session, contract=of, prompt=PROMPT, commit_log=log, router=self.base("router"))

    def assignment(self, session: bytes = SESSION, of: Contract = CONTRACT, drafter: str = DRAFTER) -> Assignment:
        return assignment(
            session=session,
            contract=of,
            prompt=PROMPT,
            verifier=self.base(),
            drafter=drafter,
            digest=first_digest(of, PROMPT),
            seq=1,
        )


class TalliedLogs(MemoryLogs):
    """Commit logs of which only the number of records and the tag are kept, so that long ones cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.appended: dict[str, int] = {}
        self._hashes: dict[str, Any] = {}

    async def create_log(self, ref: str, epoch: int, record: bytes = b"") -> AppendOutcome:
        await trio.lowlevel.checkpoint()
        if ref in self.appended:
            return TagMismatch()
        self.appended[ref], self._hashes[ref] = 0, sha256()
        return Appended(tag=self._tag(ref))

    async def append(self, ref: str, record: bytes, *, epoch: int, if_match: str) -> AppendOutcome:
        await trio.lowlevel.checkpoint()
        if if_match != self._tag(ref):
            return TagMismatch()
        self.appended[ref] += 1
        self._hashes[ref].update(record)
        return Appended(tag=self._tag(ref))

    def _tag(self, ref: str) -> str:
        return f'"{self._hashes[ref].hexdigest()}"'


@asynccontextmanager
async def roles_world(
    authority: Authority,
    journal: Path,
    *,
    objects: Objects | None = None,
    engine: ToyEngine | None = None,
    verifier: VerifierSettings | None = None,
    limit_s: float = 30,
) -> AsyncIterator[RolesWorld]:
    """`objects` takes the place of the node's own cache for the verifier."""
    clock, meters = TrioClock(), CountingMeters()
    engine = engine if engine is not None else ToyEngine(clock, model=TARGET, tokenizer=TOKENIZER, pass_s=0.001)
    async with tls_world(authority, limit_s) as world:
        served = await world.serve(dict.fromkeys(ROLES, _nobody))
        uris = {role: served.base(role) for role in ROLES}
        client = await world.client(*uris.values())

        def ports(role: str) -> Ports:
            transport = client.transport(Peer(uri=uris[role], role=role), named=True)
            return Ports(
                clock=clock,
                randomness=SeededRandomness(),
                workers=InlineWorkers(),
                meters=meters,
                peers=PeerClient(transport, meters),
                objects=objects if objects is not None else ObjectClient(transport, meters, (uris["cache"],)),
                engine=engine if role == "verifier" else None,
            )

        def serve(role: str, dispatcher: Dispatcher) -> None:
            served.app.withdraw(f"/{role}/")
            served.app.serve(Mount(f"/{role}/", dispatcher.handle, dispatcher.body_limit_bytes))

        cache = Cache(CacheSettings(), ports("cache"), RealFiles(journal))
        serve("cache", cache_dispatcher(cache, CacheSettings(), meters))
        router = Router(
            RouterSettings(),
            ports("router"),
            instance=uris["router"],
            cache=uris["cache"],
            models=(RoutedModel(name="toy", tokenizer=TOKENIZER, ladder=None),),
            ladders={},
        )
        serve("router", router_dispatcher(router, meters))
        drafter = Drafter(
            DrafterSettings(),
            ports("drafter"),
            identity=Identity(instance=uris["drafter"], model=bytes(32), tokenizer=TOKENIZER, vocabulary=VOCABULARY),
            drafting=LookupDrafting(OracleSource(greedy), InlineWorkers()),
            routers=(uris["router"],),
            caches=(uris["cache"],),
            boot=b"d" * 16,
        )
        serve("drafter", drafter_dispatcher(drafter, meters))
        role = Verifier(
            verifier if verifier is not None else VerifierSettings(),
            ports("verifier"),
            instance=uris["verifier"],
            routers=(uris["router"],),
            caches=(uris["cache"],),
            boot=b"v" * 16,
        )
        serve("verifier", verifier_dispatcher(role, meters))
        for one in (cache, router, drafter, role):
            await world.nursery.start(one.run)
        yield RolesWorld(world, served, role, engine)
        assert served.failures == []


async def _nobody(peer: Peer, request: Request) -> Response:
    raise AssertionError
