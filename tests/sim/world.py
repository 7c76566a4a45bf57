"""One seed, one run: nodes, clients, faults and checkers in virtual time; two phases; an outcome (design 5.8).

Phase 1: the workload under the seed's faults. Phase 2: all faults stop, everybody is up again, and whatever is still
open has to end: finished with the oracle's text, or failed for a reason that the atlas allows. One more, quiet request
must then finish, and nothing may be left over anywhere.
"""

import random
import traceback
from collections.abc import Awaitable, Callable
from typing import Final

import trio
from msgspec import Struct

from sdcpd.cache.refs import LogName
from sdcpd.cache.settings import KIB, CacheSettings
from sdcpd.edge.dispatch import cache_dispatcher, drafter_dispatcher, router_dispatcher, verifier_dispatcher
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.transport import Request, Response
from sdcpd.protocol.draft_session import Identity
from sdcpd.protocol.placement_values import Patience
from sdcpd.protocol.problems import Conflict, Problem, UnknownResource
from sdcpd.roles.cache import Cache
from sdcpd.roles.drafter import Drafter
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.drafting import LookupDrafting
from sdcpd.roles.ports import Peer, Ports, RandomStream
from sdcpd.roles.router import Router
from sdcpd.roles.router_settings import RoutedModel, RouterSettings
from sdcpd.roles.verifier import Verifier
from sdcpd.roles.verifier_settings import VerifierSettings
from tests.sim import atlas, determinism, faults, oracle
from tests.sim.checkers import Checkers
from tests.sim.injector import Injector
from tests.sim.options import ClientPlan, Rows, SimOptions
from tests.sim.row_checks import Draws
from tests.sim.sim_clock import SimClock
from tests.sim.sim_draft import PlainPeers, RoguePeers, ToySource
from tests.sim.sim_engine import SimEngine
from tests.sim.sim_files import SimFiles, SimWorkers
from tests.sim.sim_network import SimNetwork, SimTransport, Taps
from tests.sim.sim_node import Incarnation, Role, SimNode
from tests.sim.trace import Trace, logs_into
from tests.sim.workload import Client
from tests.support.messages import TOKENIZER
from tests.support.ports import CountingMeters, SeededRandomness

WORKLOAD_LIMIT_S: Final = 40.0
HEALED_LIMIT_S: Final = 400.0
QUIET_LIMIT_S: Final = 120.0
OK, WRONG, NO_PROGRESS, CRASH = range(4)
WORDS: Final = ("ok", "wrong output", "no progress", "crash")
CACHE: Final = CacheSettings(segment_bytes=4 * KIB, journal_bytes=512 * KIB, max_record_bytes=1 * KIB)
PROBE: Final = ClientPlan(
    begins_s=0.0,
    model="a",
    prompt=(3, 1, 4),
    max_new=12,
    stop=(),
    speculation=False,
    leaves_after=None,
    reads_s=0.0,
)


class Outcome(Struct, frozen=True):
    """How a run ended. `kind` is the exit code of scripts/simulate."""

    options: SimOptions
    kind: int
    text: str
    trace_hash: str
    lines: tuple[str, ...]
    injected: dict[str, int]
    ends: dict[str, int]
    rounds: int
    virtual_s: float


class World(Taps):
    """A cluster and all that is done to it."""

    def __init__(self, options: SimOptions, story: "Story | None" = None) -> None:
        """`story` is what is done to the cluster in place of the faults that strike by themselves."""
        seed = options.seed
        self._story = story
        self.options = options
        self.trace = Trace()
        self.inject = Injector(seed, options.faults)
        self.failure: tuple[int, str] | None = None
        self.checkers = Checkers(self.wrong, self.inject)
        self.disk = SimFiles(random.Random(f"{seed} disk"), self.inject)
        self.network = SimNetwork(random.Random(f"{seed} network"), self.inject, self.trace, self._spawn, self)
        self.clocks: dict[str, SimClock] = {}
        self.nodes: dict[str, SimNode] = {}
        self.doubles: list[Incarnation] = []  # routers that run on although another process is in their place
        self.clients = [Client(self, f"k{number}", plan) for number, plan in enumerate(options.clients)]
        self.cache_uri = _uri("c1", "cache")
        self._router_uri = _uri("r1", "router")
        self._engines: dict[str, SimEngine] = {}
        self._nursery: trio.Nursery | None = None
        self._random = random.Random(f"{seed} nodes")
        self._add("c1", "cache", self._cache)
        self._add("r1", "router", self._router)
        for number in range(options.verifiers):
            self._add(f"v{number + 1}", "verifier", self._verifier)
        for number in range(len(options.drafters)):
            self._add(f"d{number + 1}", "drafter", self._drafter)

    # The run

    async def run(self) -> Outcome:
        with trio.move_on_after(WORKLOAD_LIMIT_S + HEALED_LIMIT_S + 2 * QUIET_LIMIT_S) as limit:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for node in self.nodes.values():
                    self.start(node)
                await self._phases()
                nursery.cancel_scope.cancel()
        if limit.cancelled_caught:
            self._fail(NO_PROGRESS, "the virtual limit of the run was reached")
        kind, text = self.failure or (OK, "")
        ends: dict[str, int] = {}
        for client in self.clients:
            how = "open" if client.ended is None else f"{client.ended.how} {client.ended.reason}".strip()
            ends[how] = ends.get(how, 0) + 1
        return Outcome(
            options=self.options,
            kind=kind,
            text=text,
            trace_hash=self.trace.hash,
            lines=tuple(self.trace.last(200)),
            injected=dict(sorted(self.inject.injected.items())),
            ends=ends,
            rounds=self.checkers.rounds,
            virtual_s=trio.current_time(),
        )

    async def _phases(self) -> None:
        async with trio.open_nursery() as storm:
            if self._story is None:
                storm.start_soon(faults.Faults(self).run)
            else:
                storm.start_soon(self._story, self)
            async with trio.open_nursery() as clients:
                for client in self.clients:
                    self._spawn(client.run)
                clients.start_soon(self._until, self._served_all, WORKLOAD_LIMIT_S)
            storm.cancel_scope.cancel()
        await self._heal()
        if not await self._until(self._served_all, HEALED_LIMIT_S):
            waiting = [client.name for client in self.clients if client.ended is None]
            self._fail(NO_PROGRESS, f"{' '.join(waiting)} not served {HEALED_LIMIT_S:g} s after all faults were over")
        self._judge_ends()
        await self._until(lambda: False, self.options.ttl_ms / 1000)  # until the router has seen who restarted
        probe = Client(self, "k*", PROBE)
        self._spawn(probe.run)
        if not await self._until(lambda: probe.ended is not None, QUIET_LIMIT_S):
            self._fail(NO_PROGRESS, "a request to the healed cluster is not served")
        elif probe.ended is not None and probe.ended.how != "finished":
            self._fail(NO_PROGRESS, f"a request to the healed cluster failed: {probe.ended}")
        if not await self._until(lambda: not self._left_over(), QUIET_LIMIT_S):
            self._fail(NO_PROGRESS, f"left over when all was done: {self._left_over()}")
        await self._compare_logs()

    async def _until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Whether `done` came true within the limit, or the run has failed anyhow."""
        with trio.move_on_after(limit_s):
            while not done() and self.failure is None:
                await trio.sleep(0.25)
            return True
        return False

    def _served_all(self) -> bool:
        return all(client.ended is not None for client in self.clients)

    async def _heal(self) -> None:
        self.trace.say("!", "all faults are over")
        self.inject.over = True
        self.network.heal()
        self.disk.capacity_bytes = None
        await self.end_doubles()
        for node in self.nodes.values():
            if node.incarnation is None:
                self.start(node)
            else:
                node.incarnation.resume()
        cache = self.nodes["c1"]
        await self._until(lambda: cache.up, QUIET_LIMIT_S)
        if isinstance(cache.role, Cache) and cache.role.snapshot().stopped is not None:
            await self.crash(cache, power=False)
            self.start(cache)

    def _judge_ends(self) -> None:
        """Liveness: nobody fails but for what was done to the cluster."""
        for client in self.clients:
            ended = client.ended
            if ended is None or ended.how in ("finished", "left"):
                continue
            ladder = self.options.ladders[client.plan.model]
            if not atlas.excused(ended, ladder, self.inject):
                self._fail(NO_PROGRESS, f"{client.name} {ended.how}: {ended.reason} ({ended.detail})")

    def _left_over(self) -> list[str]:
        """Item 12: what is still held although nobody is served."""
        left = [f"{self.network.under_way} requests under way"] if self.network.under_way else []
        for name, node in self.nodes.items():
            match node.role:
                case Verifier() as verifier:
                    snapshot = verifier.snapshot()
                    held = snapshot.pages - snapshot.free_pages
                    if held or verifier.status().queue:
                        left.append(f"{name}: {held} pages and {verifier.status().queue} sessions")
                case Drafter() as drafter if drafter.snapshot().sessions:
                    left.append(f"{name}: {len(drafter.snapshot().sessions)} sessions")
                case Router() as router if router.snapshot().in_care:
                    left.append(f"{name}: {router.snapshot().in_care} in care")
                case Cache() as cache:
                    store = cache.snapshot()
                    if store.waiting_appends or (store.damaged_logs and not self.inject.any("bit_rot")):
                        left.append(f"{name}: {store.waiting_appends} appends, {store.damaged_logs} damaged logs")
                    if store.live_bytes > store.journal_bytes:
                        left.append(f"{name}: {store.live_bytes} live of {store.journal_bytes} octets")
                case None:
                    left.append(f"{name} is down")
                case _:
                    pass
        return left

    # Failures

    def wrong(self, text: str) -> None:
        self._fail(WRONG, text)

    def _fail(self, kind: int, text: str) -> None:
        """The first failure is the run's; what comes after it may be its consequence."""
        if self.failure is None:
            self.failure = (kind, text)
            self.trace.say("!!", text)

    def _node_failed(self, name: str, error: BaseException) -> None:
        """A role let an exception out. A cache that its disk does not let start is started again, as by systemd."""
        if name == "c1" and _only_os_errors(error):
            self.trace.say(name, "ends: its disk failed")
            self._spawn(self._start_later, self.nodes[name])
            return
        told = "".join(traceback.format_exception(error)[-12:])
        self._fail(CRASH, f"{name} ended by {error!r}\n{told}")

    async def _start_later(self, node: SimNode) -> None:
        self.disk.kill()
        await trio.sleep(1.0)
        if node.incarnation is None:
            await node.run()

    # Nodes

    def start(self, node: SimNode) -> None:
        if node.incarnation is None:
            self._spawn(node.run)

    async def crash(self, node: SimNode, *, power: bool) -> None:
        """End a process; with its power, what its disk had not synced is lost."""
        with trio.CancelScope(shield=True):
            await node.crash()
            if node.name == "c1":
                self.trace.say("!", "c1 loses its power" if power else "c1 is killed")
                self.disk.lose_power() if power else self.disk.kill()

    async def end_doubles(self) -> None:
        with trio.CancelScope(shield=True):
            while self.doubles:
                await self.nodes["r1"].crash(self.doubles.pop())

    def client_peers(self, name: str) -> PeerClient:
        """For a client that reads by the network."""
        peer = Peer(uri=f"https://{name}.sim/client/", role="client")
        return PeerClient(SimTransport(self.network, Incarnation(name, 1), peer), CountingMeters())

    def _spawn(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(task, *args)

    def _add(
        self, name: str, kind: str, build: Callable[[Incarnation], tuple[Role, Callable[..., Awaitable[Response]]]]
    ) -> None:
        uri = _uri(name, kind)
        handlers: list[Callable[..., Awaitable[Response]]] = []

        def make(own: Incarnation) -> Role:
            role, handler = build(own)
            handlers[:] = [handler]
            return role

        self.nodes[name] = SimNode(
            name,
            uri,
            build=make,
            serve=lambda own, role: self.network.serve(uri, own, handlers[0]),
            withdraw=lambda: self.network.withdraw(uri),
            prepared=self._prepared,
            failed=self._node_failed,
            trace=self.trace,
        )

    async def _prepared(self, role: Role) -> None:
        """A cache that came back is compared with what it had acknowledged."""
        if not isinstance(role, Cache):
            return
        for session in list(self.checkers.asked):
            await self._compare_log(role, session)

    async def _compare_logs(self) -> None:
        cache = self.nodes["c1"].role
        if isinstance(cache, Cache) and self.failure is None:
            await self._prepared(cache)

    async def _compare_log(self, cache: Cache, session: bytes) -> None:
        try:
            content = await cache.read_log(Peer(uri=self._router_uri, role="router"), LogName(None, session))
        except (UnknownResource, Conflict):
            self.checkers.gone(session)
        except Problem as problem:
            self.trace.say("c1", f"log not read: {problem.detail}")
        else:
            self.checkers.recovered(session, content.octets)

    # Roles

    def _ports(self, own: Incarnation, uri: str, kind: str, peers: PeerClient | None = None) -> Ports:
        clock = self.clocks.get(own.name)
        rate = self.options.faults.get("clock_rate", 0.0)
        if clock is None or own.number > 1:
            skew = 1.0 + self._random.uniform(-rate, rate)
            clock = self.clocks[own.name] = SimClock(own.gate, offset_s=self._random.uniform(0, 1e5), rate=skew)
            if rate:
                self.inject.note("clock_rate")
        transport = SimTransport(self.network, own, Peer(uri=uri, role=kind))
        meters = CountingMeters()
        chance = random.Random(f"{self.options.seed} {own.name} workers {own.number}")
        return Ports(
            clock=clock,
            randomness=_Streams(f"{self.options.seed} {own.name} {own.number}"),
            workers=SimWorkers(chance, self.inject, own.gate, self.checkers.worked, lambda: self._power_lost(own)),
            meters=meters,
            peers=peers if peers is not None else PeerClient(transport, meters),
            objects=ObjectClient(transport, meters, (self.cache_uri,)),
        )

    def _power_lost(self, own: Incarnation) -> None:
        """In the middle of a write."""
        own.alive = False
        node = self.nodes[own.name]

        async def end() -> None:
            await self.crash(node, power=atlas.may_lose_power(self.options))
            await trio.sleep(0.5)
            self.start(node)

        self._spawn(end)

    def _cache(self, own: Incarnation) -> tuple[Role, Callable[..., Awaitable[Response]]]:
        settings = CACHE if self.options.durable else _unsynced(CACHE)
        ports = self._ports(own, self.cache_uri, "cache")
        cache = Cache(settings, ports, self.disk)
        return cache, cache_dispatcher(cache, settings, ports.meters).handle

    def _router(self, own: Incarnation) -> tuple[Role, Callable[..., Awaitable[Response]]]:
        ports = self._ports(own, self._router_uri, "router")
        router = Router(
            RouterSettings(
                open_deadline_s=15.0, patience=Patience(open_give_up_s=60.0, read_give_up_s=20.0, poll_s=10.0)
            ),
            ports,
            instance=self._router_uri,
            cache=self.cache_uri,
            models=tuple(RoutedModel(name=name, tokenizer=TOKENIZER, ladder=name) for name in self.options.ladders),
            ladders=self.options.ladders,
        )
        return router, router_dispatcher(router, ports.meters).handle

    def _verifier(self, own: Incarnation) -> tuple[Role, Callable[..., Awaitable[Response]]]:
        uri = _uri(own.name, "verifier")
        ports = self._ports(own, uri, "verifier")
        chance = random.Random(f"{self.options.seed} {own.name} engine {own.number}")
        streams = _Streams(f"{self.options.seed} {own.name} {own.number}", self.wrong)
        engine = SimEngine(
            ports.clock, chance, self.inject, streams.draws, pages=self.options.pages, pass_s=self.options.pass_s
        )
        ports = Ports(**(vars(ports) | {"engine": engine, "randomness": streams}))
        verifier = Verifier(
            VerifierSettings(
                ttl_ms=self.options.ttl_ms,
                waiting_limit_s=self.options.waiting_limit_s,
                proposal_deadline_ms=2_000,
                first_proposal_deadline_ms=10_000,
                append_timeout_s=2.0,
                append_give_up_s=30.0,
            ),
            ports,
            instance=uri,
            routers=(self._router_uri,),
            caches=(self.cache_uri,),
            boot=chance.randbytes(16),
        )
        return verifier, verifier_dispatcher(verifier, ports.meters).handle

    def _drafter(self, own: Incarnation) -> tuple[Role, Callable[..., Awaitable[Response]]]:
        uri, number = _uri(own.name, "drafter"), int(own.name[1:])
        plan = self.options.drafters[number - 1]
        seed = f"{self.options.seed} {own.name} {own.number}"
        peers: PeerClient | None = None
        transport = SimTransport(self.network, own, Peer(uri=uri, role="drafter"))
        if plan.rogue:
            peers = RoguePeers(transport, CountingMeters(), random.Random(f"{seed} rogue"), self.inject, own.spawn)
        elif plan.rows is Rows.BY_REFERENCE:
            peers = PlainPeers(transport, CountingMeters())
        ports = self._ports(own, uri, "drafter", peers)
        drafter = Drafter(
            DrafterSettings(ttl_ms=self.options.ttl_ms, verdict_timeout_s=3.0, silence_limit_s=20.0),
            ports,
            identity=Identity(
                instance=uri, model=bytes([number]) * 32, tokenizer=TOKENIZER, vocabulary=oracle.VOCABULARY
            ),
            drafting=LookupDrafting(ToySource(seed, plan.agrees, plan.rows is not Rows.CERTAIN), ports.workers),
            routers=(self._router_uri,),
            caches=(self.cache_uri,),
            boot=random.Random(f"{seed} boot").randbytes(16),
        )
        return drafter, drafter_dispatcher(drafter, ports.meters).handle

    # Taps

    def arrived(self, node: Incarnation, uri: str, peer: Peer, request: Request) -> None:
        if uri.endswith("/verifier/"):
            self.checkers.arrived(peer, request)
        elif uri.endswith("/drafter/"):
            self.checkers.asked_to_draft(request)

    def served(self, node: Incarnation, uri: str, peer: Peer, request: Request, response: Response) -> None:
        self.checkers.served(node, uri.split("/")[-2], peer, request, response)

    def heard(self, caller: Incarnation, uri: str, request: Request, response: Response) -> None:
        self.checkers.heard(caller, request, response)

    def refused_instead(self, uri: str, request: Request) -> Response | None:
        return faults.refused_instead(self, uri, request)

    async def tampered(self, uri: str, request: Request, response: Response) -> Response:
        return await faults.tampered(self, uri, request, response)


class _Streams:
    """Named streams of one process; a verifier's draws are watched."""

    def __init__(self, seed: str, wrong: Callable[[str], None] | None = None) -> None:
        self._seed = seed
        name = "verifier draws"
        self.draws = Draws(SeededRandomness().stream(f"{seed} {name}"), seed, wrong or _unwatched)

    def stream(self, name: str) -> RandomStream:
        return self.draws if name == "verifier draws" else SeededRandomness().stream(f"{self._seed} {name}")


def _unwatched(text: str) -> None:
    raise AssertionError(text)  # nobody but a verifier draws from that stream


Story = Callable[[World], Awaitable[None]]


def run_options(options: SimOptions, story: Story | None = None) -> Outcome:
    """One run. The same options give the same outcome, to the hash of the trace."""
    world = World(options, story)
    with logs_into(world.trace):
        return determinism.run(f"{options.seed} scheduler", world.run)


def run_seed(seed: int) -> Outcome:
    return run_options(SimOptions.from_seed(seed))


def _uri(name: str, kind: str) -> str:
    return f"https://{name}.sim/{kind}/"


def _unsynced(settings: CacheSettings) -> CacheSettings:
    return CacheSettings(
        commit_durability="page_cache",
        segment_bytes=settings.segment_bytes,
        journal_bytes=settings.journal_bytes,
        max_record_bytes=settings.max_record_bytes,
    )


def _only_os_errors(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_only_os_errors, error.exceptions))
    return isinstance(error, OSError)
