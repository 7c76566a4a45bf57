"""One node: its roles built over their ports, started and stopped in order.

Roles of one node talk inside the process, through the same encoding and dispatch as on a wire; other nodes are reached
through network.py. What the node takes from the operating system comes in as a `World`, so that a test may run the
whole of it with another engine or draft source.

A part that fails takes the node down: the exception leaves `run`, and the service manager starts a fresh process. What
an operator can mend (a model that is no model, a port in use) is raised as NotStarted before anything serves.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import structlog
import trio
from msgspec import Struct

from sdcpd import __version__
from sdcpd.cache.files import Files, StateInUse
from sdcpd.drafting.source import DraftSource
from sdcpd.edge.admin import Admin, SocketRefused, bind_admin_socket, serve_admin
from sdcpd.edge.dispatch import (
    Dispatcher,
    cache_dispatcher,
    drafter_dispatcher,
    object_cache_dispatcher,
    router_dispatcher,
    verifier_dispatcher,
)
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.peer_server import PeerListenFailed
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.tls import TlsRefused
from sdcpd.engine.model_config import ModelRefused
from sdcpd.engine.model_digest import tokenizer_digest
from sdcpd.engine.spans import EngineInfo
from sdcpd.frontend.api import FrontendApp
from sdcpd.frontend.keys import KeyRing
from sdcpd.frontend.keys_file import KeysRefused, read_keys
from sdcpd.frontend.ports import FrontendPorts
from sdcpd.frontend.server import FrontendServer, ListenFailed
from sdcpd.frontend.settings import FrontendSettings
from sdcpd.frontend.text import ModelFolderUnusable, ModelText, load_model_text
from sdcpd.node.client_tls import ClientTls
from sdcpd.node.config import Config, RoleName
from sdcpd.node.draft_parts import MODEL_METHODS, drafter_identity, drafter_settings, make_drafting
from sdcpd.node.health import HealthApp
from sdcpd.node.logs import library_logger
from sdcpd.node.metrics import Gauge, RegistryMeters
from sdcpd.node.network import Network
from sdcpd.node.notify import Notifier
from sdcpd.node.stages import Stages
from sdcpd.roles.cache import Cache
from sdcpd.roles.drafter import Drafter
from sdcpd.roles.object_cache import ObjectCache
from sdcpd.roles.ports import Clock, Engine, Ports, Randomness, Workers
from sdcpd.roles.router import Router
from sdcpd.roles.router_settings import RoutedModel
from sdcpd.roles.verifier import Verifier

log = structlog.get_logger(__name__)

READY_LOOK_S: Final = 0.02
"""How often the start looks whether the router has heard from the verifier."""

OPERATOR_FAULTS: Final = (
    ModelRefused,
    ModelFolderUnusable,
    ListenFailed,
    PeerListenFailed,
    SocketRefused,
    StateInUse,
    TlsRefused,
    KeysRefused,
)
"""What an operator can mend; each says how in its text."""

ENDED_STATES: Final = frozenset({"finished", "failed", "cancelled"})


class NotStarted(Exception):
    """The node cannot start, and the operator can mend it. The text says how."""


@dataclass(frozen=True)
class World:
    """What a node takes from outside. In production all of it is node/start.py's."""

    clock: Clock
    wall_clock: Callable[[], float]
    randomness: Randomness
    workers: Workers
    files: Callable[[], Files]
    load_engine: Callable[[], Awaitable[Engine]]
    draft_source: Callable[[], DraftSource]
    load_draft_engine: Callable[[], Awaitable[Engine]] | None = None  # where the drafter's method has a model


class Role(Protocol):
    """What all four roles have in common."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None: ...
    def snapshot(self) -> Struct: ...


class Node:
    """One node of one process. `run` once."""

    def __init__(self, config: Config, world: World, notifier: Notifier) -> None:
        self.meters: Final = RegistryMeters()
        self.router: Router | None = None
        self.verifier: Verifier | None = None
        self.drafter: Drafter | None = None
        self.address: tuple[str, int] | None = None  # of the client port, once it listens
        self.network: Network | None = None
        self._config: Final = config
        self._world: Final = world
        self._notifier: Final = notifier
        self._snapshots: Final[dict[str, Callable[[], Struct]]] = {}
        self._boot: Final = world.randomness.stream("boot").octets(16)
        self._alive: Final = trio.CancelScope()
        self._server: FrontendServer | None = None
        self._client_app: FrontendApp | None = None
        self._client_tls: ClientTls | None = None

    def moves(self, limit_s: float) -> bool:
        """Whether the node gets on with its work; what the service manager's watchdog is told (design 4)."""
        return self.verifier is None or self.verifier.moves(limit_s)

    def ready(self) -> tuple[bool, str]:
        """Whether this node would do its work now, and in words why not (decision 97)."""
        missing = [role for role in self._config.roles if role not in self._snapshots]
        if missing:
            return False, f"{missing[0]}: not started yet"
        if self.verifier is not None and not self.verifier.accepted:
            return False, "verifier: no router has taken its status"
        if self.drafter is not None and not self.drafter.ready:
            return False, "drafter: no router has taken its status"
        return (True, "") if self.router is None else self.router.ready()

    def take(self, config: Config) -> str | None:
        """A configuration that was read again: ladders and traffic classes, for new sessions, certificates, for new
        connections, and API keys, for new requests.

        All else is of the next start. None, or why certificates or keys stay as they were.
        """
        if self.router is not None:
            by_model = {model.name: model.ladder for model in config.client_models()}
            self.router.take_ladders(config.ladder, config.router.default_ladder, by_model, classes=config.classes)
        kept = [None if self.network is None else self.network.reload()]
        kept.append(None if self._client_tls is None else self._client_tls.reload())
        if self._client_app is not None and self._config.frontend.keys is not None:
            try:
                self._client_app.take_keys(read_keys(Path(self._config.frontend.keys)))
            except KeysRefused as refused:
                kept.append(str(refused))
        return "; ".join(reason for reason in kept if reason is not None) or None

    def stop(self) -> None:
        """End the node in order, whatever it is at; `run` then returns."""
        self._alive.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start, serve until `stop`, stop. Raises NotStarted, in a group; any other exception is our own fault."""
        async with trio.open_nursery() as nursery:
            stages = Stages(nursery)
            with self._alive:
                try:
                    await self._start(stages)
                except OPERATOR_FAULTS as fault:
                    raise NotStarted(f"{fault}") from fault
                log.info("node ready", roles=self._config.roles, version=__version__)
                self._notifier.ready("ready")
                task_status.started()
                await trio.sleep_forever()
            log.info("node stops")
            self._notifier.stopping()
            await self._stop(stages)

    async def _start(self, stages: Stages) -> None:
        """The order of start.

        The admin socket and the ports come first, so that /health and sdcpctl answer while a model loads, and /ready
        says what is missing. Then each role before those that call it: the cache, which reads its journal back before
        it takes an append; the engine; the drafter, so that no session meets a node without one; and last the
        verifier, from whose reports the router learns that there is something to route to. Roles elsewhere are not
        waited for: hosts start in any order.
        """
        config = self._config
        admin = Admin(self._snapshots, __version__, lambda: self.router.commands if self.router is not None else None)
        await stages.start(
            "admin", partial(serve_admin, admin, bind_admin_socket(config.node.socket), library_logger())
        )
        self.network = network = Network(config, self._world.clock, self._world.wall_clock)
        self.meters.add_gauges(self._gauges)
        if config.metrics is not None:
            await stages.start("metrics port", self._metrics_port(config.metrics.listen).run)
        await network.start(stages)
        if "router" in config.roles:
            await self._start_router(stages)
        if "cache" in config.roles:
            await self._start_cache(stages)
        elif "cache" in config.served():
            objects = ObjectCache(config.cache, self._ports("cache"))
            await self._start_role(
                stages, "cache", objects, object_cache_dispatcher(objects, config.cache, self.meters)
            )
        engine = None
        if "verifier" in config.roles:
            self._notifier.status("loading the model")
            engine = await self._world.load_engine()
        if "drafter" in config.roles:
            self.drafter = drafter = await self._drafter(None if engine is None else engine.info)
            await self._start_role(stages, "drafter", drafter, drafter_dispatcher(drafter, self.meters))
        if engine is not None:
            await self._start_verifier(stages, engine)
            while self.router is not None and not self.router.ready()[0]:
                await self._world.clock.sleep_until(self._world.clock.now() + READY_LOOK_S)

    async def _stop(self, stages: Stages) -> None:
        """The order of stop: whoever asks before whoever answers, so that nobody meets a role that is gone.

        The client port takes nothing new, and what is being answered has its time to finish; then likewise the port
        for other nodes. The cache is the last of the roles: an append that was handed to it becomes durable.
        """
        if self._server is not None:
            await stages.stop("client port", ask=self._server.stop, grace_s=self._config.frontend.grace_s + 1)
        if self.network is not None:
            await self.network.stop_listening(stages)
        for part in ("router", "drafter", "verifier", "cache"):
            await stages.stop(part)
        if self.network is not None:
            await self.network.stop(stages)
        for part in ("metrics port", "admin"):
            await stages.stop(part)

    async def _start_router(self, stages: Stages) -> None:
        config = self._config
        models, texts = await self._world.workers.run(_read_models, config)
        keys = None if config.frontend.keys is None else read_keys(Path(config.frontend.keys))
        self._client_tls = None if config.frontend.tls is None else ClientTls(config.frontend.tls)
        self.router = router = Router(
            config.router,
            self._ports("router"),
            instance=config.role_uri("router"),
            cache=config.caches()[0],
            models=models,
            ladders=config.ladder,
            classes=config.classes,
        )
        await self._start_role(stages, "router", router, router_dispatcher(router, self.meters))
        self._server = server = self._client_port(router, texts, keys)
        bound = await stages.start("client port", server.run)
        self.address = (bound.host, bound.port)
        log.info("client port open", address=bound.url, keys=None if keys is None else len(keys))
        for name in sorted(name for name, text in texts.items() if text.template is None):
            log.warning("this model has no chat template: chat completions of it are refused", model=name)

    async def _start_verifier(self, stages: Stages, engine: Engine) -> None:
        config = self._config
        self.verifier = verifier = Verifier(
            config.verifier,
            self._ports("verifier", engine),
            instance=config.role_uri("verifier"),
            routers=config.routers(),
            caches=config.caches(),
            boot=self._boot,
        )
        self.meters.add_gauges(partial(_verifier_gauges, verifier, engine))
        await self._start_role(stages, "verifier", verifier, verifier_dispatcher(verifier, self.meters))

    async def _start_role(self, stages: Stages, role: RoleName, built: Role, dispatcher: Dispatcher) -> None:
        """Nobody inside calls a role before it serves: until then its own answer is that it does not run."""
        assert self.network is not None
        self.network.serve(role, dispatcher)
        await stages.start(role, built.run)
        self._snapshots[role] = built.snapshot

    async def _start_cache(self, stages: Stages) -> None:
        config = self._config
        try:
            cache = Cache(config.cache, self._ports("cache"), self._world.files())
            await self._start_role(stages, "cache", cache, cache_dispatcher(cache, config.cache, self.meters))
        except OSError as error:
            raise NotStarted(
                f"the journal below node.state_dir = {config.node.state_dir} cannot be used ({error}). Give the user "
                "that runs sdcpd a directory there that it may write, on a disk with room."
            ) from error

    def _client_port(self, router: Router, texts: dict[str, ModelText], keys: KeyRing | None) -> FrontendServer:
        world, settings = self._world, self._config.frontend
        ports = FrontendPorts(
            clock=world.clock,
            randomness=world.randomness,
            workers=world.workers,
            meters=self.meters,
            wall_clock=world.wall_clock,
            metrics_page=self.meters.scrape,
        )
        self._client_app = app = FrontendApp(settings, ports, router, texts, keys)
        tls = self._client_tls
        return FrontendServer(app, settings, world.clock, None if tls is None else tls.context)

    def _metrics_port(self, listen: str) -> FrontendServer:
        app = HealthApp(self.ready, self.meters.scrape)
        return FrontendServer(app, FrontendSettings(listen=listen, allow_non_loopback=True), self._world.clock)

    async def _drafter(self, target: EngineInfo | None) -> Drafter:
        config, world, ports = self._config, self._world, self._ports("drafter")
        engine = None
        if config.drafter.method in MODEL_METHODS:
            assert world.load_draft_engine is not None
            self._notifier.status("loading the draft model")
            engine = await world.load_draft_engine()
            self.meters.add_gauges(partial(_draft_gauges, engine))
        drafts = None if engine is None else engine.info
        identity = await world.workers.run(drafter_identity, config, target, drafts)
        lookup = await world.workers.run(world.draft_source)
        return Drafter(
            drafter_settings(config, drafts),
            ports,
            identity=identity,
            drafting=make_drafting(config.drafter, ports, lookup, engine),
            routers=config.routers(),
            caches=config.caches(),
            cache=config.role_uri("cache"),
            boot=self._boot,
        )

    def _ports(self, role: RoleName, engine: Engine | None = None) -> Ports:
        """Ports that speak for this role: who calls is settled here, by construction."""
        assert self.network is not None
        world = self._world
        transport = self.network.transport(role)
        own_cache = self._config.role_uri("cache")
        return Ports(
            clock=world.clock,
            randomness=world.randomness,
            workers=world.workers,
            meters=self.meters,
            peers=PeerClient(transport, self.meters),
            objects=ObjectClient(
                transport,
                self.meters,
                (*self._config.caches(), own_cache),
                near=(own_cache,),
                workers=world.workers,
            ),
            engine=engine,
        )

    def _gauges(self) -> Iterator[Gauge]:
        yield Gauge(
            "node_info", "What runs here.", 1, (("version", __version__), ("roles", ",".join(self._config.roles)))
        )
        yield Gauge("node_ready", "Whether the node would do its work now.", float(self.ready()[0]))
        if self.router is not None:
            snapshot = self.router.snapshot()
            running = sum(session.state not in ENDED_STATES for session in snapshot.sessions)
            yield Gauge("num_requests_running", "Sessions in the router's care.", running)
            for one in snapshot.classes:
                text = "Whether speculation is on for a traffic class."
                yield Gauge("class_speculation", text, float(one.speculation), (("traffic_class", one.name),))
        if self.network is not None:
            yield from self.network.gauges()
        if self._client_tls is not None:
            left_s = self._client_tls.expires_s - self._world.wall_clock()
            yield Gauge("client_certificate_expiry_seconds", "Until the client port's certificate expires.", left_s)


def _read_models(config: Config) -> tuple[tuple[RoutedModel, ...], dict[str, ModelText]]:
    """What the router and the front end know of each model that clients may name. Blocks. Raises OPERATOR_FAULTS."""
    models = config.client_models()
    texts = {model.name: load_model_text(model.name, Path(model.path)) for model in models}
    routed = tuple(
        RoutedModel(name=model.name, tokenizer=tokenizer_digest(Path(model.path)), ladder=model.ladder)
        for model in models
    )
    return routed, texts


def _draft_gauges(engine: Engine) -> Iterator[Gauge]:
    used = (engine.info.pages - engine.free_pages) / engine.info.pages
    yield Gauge("draft_kv_cache_usage_ratio", "Share of the draft model's pages in use.", used)


def _precision(info: EngineInfo) -> tuple[tuple[str, str], ...]:
    return (("dtype", info.dtype), ("quantization", info.quantization), ("numerics", info.numerics))


def _verifier_gauges(verifier: Verifier, engine: Engine) -> Iterator[Gauge]:
    info = engine.info
    labels = (("version", __version__), ("device", info.device), ("dtype", info.dtype))
    yield Gauge("build_info", "What the model runs on.", 1, labels)
    used = (info.pages - engine.free_pages) / info.pages
    yield Gauge("model_weights_bytes", "Memory of the model's weights.", info.weights_bytes, _precision(info))
    yield Gauge("kv_cache_usage_ratio", "Share of a tier's pages in use.", used, (("tier", info.device),))
    yield Gauge("num_sessions_waiting", "Sessions that wait for KV pages.", verifier.waiting_for_pages)
    for audit in verifier.snapshot().audits:
        if audit.z is not None:
            text = "Standard deviations between a drafter's tokens and the rows it shows; beyond 6 it is not honest."
            yield Gauge("draft_audit_z", text, audit.z, (("drafter", audit.drafter),))
    yield Gauge("verifier_load_ratio", "The load that the verifier reports.", verifier.load() / 100)
