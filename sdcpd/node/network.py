"""How the roles of a node reach others and are reached: inside the process, and over the SDCP port where there is one.

A call to a role of this node stays inside the process; any other goes over the wire (edge/wire_transport.py). Either
way it is the same request, and the callee is told the same caller: inside by construction, outside by certificate.

The port is opened before the roles run, since they may be called as soon as others learn of them. A role that has not
started yet, or has stopped, answers 503 there, never 404: a 404 from a verifier means that it has lost a session
(decision 95), and one from a cache that a log is gone.
"""

from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import urlsplit

import structlog
import trio

from sdcpd.edge.dispatch import Dispatcher
from sdcpd.edge.peer_app import Failures, Mount, PeerApp
from sdcpd.edge.peer_server import PeerBound, PeerServer
from sdcpd.edge.problem_body import problem_response
from sdcpd.edge.tls import EXPIRES_SOON_S, Tls, TlsRefused
from sdcpd.edge.transport import LoopbackNetwork, LoopbackTransport, Request, Response, Transport
from sdcpd.edge.wire_transport import WireClient, WireDialer
from sdcpd.node.config import Config, RoleName
from sdcpd.node.metrics import Gauge
from sdcpd.node.stages import Stages
from sdcpd.protocol.problems import Overloaded
from sdcpd.roles.ports import Clock, Peer

log = structlog.get_logger(__name__)

CERTIFICATE_LOOK_S: Final = 86_400.0
"""How often the log says that a certificate expires soon."""


class Network:
    """Owns the port, the connections and the certificates of one node."""

    def __init__(self, config: Config, clock: Clock, wall_clock: Callable[[], float]) -> None:
        """Raises TlsRefused."""
        self.bound: PeerBound | None = None  # where the SDCP port is, once it listens
        self._config: Final = config
        self._clock: Final = clock
        self._wall_clock: Final = wall_clock
        self._inside: Final = LoopbackNetwork()
        self._own: Final = frozenset(config.role_uri(role) for role in config.served())
        self._doors: Final = {role: _Door(role) for role in config.served()}
        self._tls: Tls | None = None
        self._client: WireClient | None = None
        self._server: PeerServer | None = None
        self._failures: Final = Failures()
        if config.sdcp is None:
            return
        if config.tls is not None:
            self._tls = Tls(config.tls, must_name=sorted(self._own))
        dialer = WireDialer(self._tls, insecure_loopback=config.sdcp.insecure_loopback)
        self._client = WireClient(dialer, config.peers.calls, clock)
        mounts = [
            Mount(
                prefix=urlsplit(config.role_uri(role)).path, handler=door.handle, body_limit_bytes=door.body_limit_bytes
            )
            for role, door in self._doors.items()
        ]
        cache = [mount for mount in mounts if mount.prefix.endswith("/cache/")]
        self._server = PeerServer(
            PeerApp(self._failures.report, mounts),
            config.sdcp,
            clock,
            self._tls,
            bulk=PeerApp(self._failures.report, cache, partial=True),
        )

    async def start(self, stages: Stages) -> None:
        """Connections first, then the port. Raises PeerListenFailed."""
        if self._client is None or self._server is None:
            return
        await stages.start("peer failures", self._failures.watch)
        await stages.start("peer connections", self._client.run)
        self.bound = await stages.start("sdcp port", self._server.run)
        log.info("sdcp port open", address=f"{self.bound.host}:{self.bound.port}", tls=self._tls is not None)
        if self._tls is not None:
            await stages.start("certificate", self._watch_certificate)

    async def stop_listening(self, stages: Stages) -> None:
        """No request is taken any more; those under way have their time to finish."""
        if self._server is not None and self._config.sdcp is not None:
            await stages.stop("sdcp port", ask=self._server.stop, grace_s=self._config.sdcp.grace_s + 1)

    async def stop(self, stages: Stages) -> None:
        """Once the roles have ended."""
        for part in ("certificate", "peer connections", "peer failures"):
            await stages.stop(part)

    def serve(self, role: RoleName, dispatcher: Dispatcher) -> None:
        """From now on requests reach this role of ours."""
        self._inside.serve(self._config.role_uri(role), dispatcher.handle)
        self._doors[role].dispatcher = dispatcher

    def transport(self, role: RoleName) -> Transport:
        """A transport that speaks for this role of ours."""
        caller = Peer(uri=self._config.role_uri(role), role=role)
        inside = self._inside.transport(caller)
        if self._client is None:
            return inside
        several = self._tls is None or len(self._tls.own.names.uris) > 1
        return _Transport(self._own, inside, self._client.transport(caller, named=several))

    def reload(self) -> str | None:
        """Read the certificates again. None, or why the old ones stay."""
        if self._tls is None or self._server is None or self._client is None:
            return None
        reason = self._tls.reload()
        if reason is None:
            self._server.retire()
            self._client.retire()
        return reason

    def gauges(self) -> Iterator[Gauge]:
        """For a scrape."""
        if self._tls is not None:
            yield Gauge(
                "certificate_expiry_seconds", "Until this node's certificate expires; below zero: it has.", self._left_s
            )
        if self._server is not None and self._client is not None:
            text = "Open connections with other nodes, by who made them."
            yield Gauge("peer_connections", text, self._server.connections, (("made_by", "peer"),))
            yield Gauge("peer_connections", text, self._client.connections, (("made_by", "us"),))

    @property
    def _left_s(self) -> float:
        assert self._tls is not None
        return self._tls.own.expires_s - self._wall_clock()

    async def _watch_certificate(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            if self._left_s <= EXPIRES_SOON_S:
                log.warning("the certificate expires soon; issue another and reload", days=round(self._left_s / 86_400))
            await self._clock.sleep_until(self._clock.now() + CERTIFICATE_LOOK_S)


class _Door:
    """A role as the port knows it."""

    def __init__(self, role: str) -> None:
        self.dispatcher: Dispatcher | None = None
        self._role: Final = role

    async def handle(self, peer: Peer, request: Request) -> Response:
        if self.dispatcher is None:
            return problem_response(Overloaded(f"the {self._role} of this node is not running", retry_after_s=1))
        return await self.dispatcher.handle(peer, request)

    def body_limit_bytes(self, method: str, path: str) -> int:
        return 0 if self.dispatcher is None else self.dispatcher.body_limit_bytes(method, path)


class _Transport:
    """One role's calls: to the roles of this node inside the process, to all others over the wire."""

    def __init__(self, own: frozenset[str], inside: LoopbackTransport, outside: Transport) -> None:
        self._own: Final = own
        self._inside: Final = inside
        self._outside: Final = outside

    async def exchange(self, base_uri: str, request: Request) -> Response:
        """Raises TransportError."""
        return await (self._inside if base_uri in self._own else self._outside).exchange(base_uri, request)


__all__ = ["Network", "TlsRefused"]
