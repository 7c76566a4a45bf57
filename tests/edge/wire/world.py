"""Nodes on a wire: over memory streams in virtual time, and over sockets with real certificates."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio.testing import memory_stream_pair

from sdcpd.edge.identity import CertificateNames, CertifiedIdentity, Identity
from sdcpd.edge.peer_app import Mount, PeerApp
from sdcpd.edge.peer_server import PeerBound, PeerServer
from sdcpd.edge.tls import Tls
from sdcpd.edge.transport import Handler, Request, Response, TransportError
from sdcpd.edge.wire_settings import PeerClientSettings, PeerServerSettings
from sdcpd.edge.wire_transport import Target, WireClient, WireDialer, WireTransport
from sdcpd.roles.ports import Peer
from tests.edge.wire.pki import Authority
from tests.support.ports import TrioClock

DRAFTER = Peer(uri="https://d.example/drafter/", role="drafter")
ROUTER = Peer(uri="https://r.example/router/", role="router")
MEMORY_BASE = "https://v.example/verifier/"
LIMIT_BYTES = 16 << 20


async def echo(peer: Peer, request: Request) -> Response:
    """The body back, with who was seen to call."""
    return Response(200, {"caller": f"{peer.role} {peer.uri}"}, request.body)


def polls_wait(wait_s: float = 20.0) -> Handler:
    """As `echo`; requests with Prefer take `wait_s`."""

    async def handle(peer: Peer, request: Request) -> Response:
        if "prefer" in request.headers:
            await trio.sleep(wait_s)
        return await echo(peer, request)

    return handle


GET = Request("GET", "thing")
POLL = Request("GET", "thing", headers={"prefer": "wait=20"})
POST = Request("POST", "things", body=b"x" * 300)


def app_of(handlers: Mapping[str, Handler], limit_bytes: int = LIMIT_BYTES) -> tuple[PeerApp, list[Exception]]:
    failures: list[Exception] = []
    mounts = [Mount(f"/{role}/", handler, lambda method, path: limit_bytes) for role, handler in handlers.items()]
    return PeerApp(failures.append, mounts), failures


class MemoryNetwork:
    """A dialer to one server, whose certificate check has been. `streams` are the clients' ends."""

    def __init__(self, server: PeerServer, identity: Identity, nursery: trio.Nursery) -> None:
        self.streams: list[Any] = []
        self.refuse = False
        self.names: CertificateNames | None = None
        self._server = server
        self._identity = identity
        self._nursery = nursery

    async def dial(self, target: Target) -> tuple[trio.abc.Stream, CertificateNames | None]:
        await trio.lowlevel.checkpoint()
        if self.refuse:
            raise TransportError("refused")
        ours, theirs = memory_stream_pair()
        self.streams.append(ours)
        self._nursery.start_soon(self._server.serve_stream, theirs, self._identity)
        return ours, self.names

    async def dial_bulk(self, target: Target) -> None:
        """There is no TLS here, in which HTTP/1.1 is chosen."""
        await trio.lowlevel.checkpoint()

    def admit(self, target: Target, names: CertificateNames | None) -> None:
        return


class MemoryWorld:
    """One server that serves `verifier`, one client that calls it as DRAFTER."""

    def __init__(
        self, app: PeerApp, failures: list[Exception], server: PeerServer, network: MemoryNetwork, client: WireClient
    ) -> None:
        self.app = app
        self.failures = failures
        self.server = server
        self.network = network
        self.client = client
        self.transport = client.transport(DRAFTER, named=False)

    async def ask(self, request: Request) -> Response:
        return await self.transport.exchange(MEMORY_BASE, request)


@asynccontextmanager
async def memory_world(
    handler: Handler = echo,
    *,
    limit_bytes: int = LIMIT_BYTES,
    server: Mapping[str, Any] | None = None,
    client: Mapping[str, Any] | None = None,
) -> AsyncIterator[MemoryWorld]:
    """All in one task tree; with the autojump clock it must be over within an hour."""
    app, failures = app_of({"verifier": handler}, limit_bytes)
    settings = PeerServerSettings(insecure_loopback=True, **(server or {}))
    peer_server = PeerServer(app, settings, TrioClock(), None)
    identity = CertifiedIdentity(CertificateNames(uris=(DRAFTER.uri,)), {})
    with trio.fail_after(3600):
        async with trio.open_nursery() as nursery:
            network = MemoryNetwork(peer_server, identity, nursery)
            wire = WireClient(network, PeerClientSettings(**(client or {})), TrioClock())
            await nursery.start(wire.run)
            yield MemoryWorld(app, failures, peer_server, network, wire)
            nursery.cancel_scope.cancel()


class Served:
    """A server on a real port, with a certificate."""

    def __init__(self, server: PeerServer, app: PeerApp, failures: list[Exception], bound: PeerBound, tls: Tls) -> None:
        self.server = server
        self.app = app
        self.failures = failures
        self.bound = bound
        self.tls = tls
        self.scope = trio.CancelScope()
        self.returned = trio.Event()

    def base(self, role: str = "verifier") -> str:
        return f"https://127.0.0.1:{self.bound.port}/{role}/"


class TlsWorld:
    """Servers and clients of one authority."""

    def __init__(self, authority: Authority, nursery: trio.Nursery) -> None:
        self.authority = authority
        self.nursery = nursery

    async def serve(
        self,
        handlers: Mapping[str, Handler] | None = None,
        *,
        port: int = 0,
        app: PeerApp | None = None,
        limit_bytes: int = LIMIT_BYTES,
        bulk: bool = True,
        **settings: Any,
    ) -> Served:
        """`bulk`: the same over HTTP/1.1, for those that ask for it."""
        handlers = handlers if handlers is not None else {"verifier": echo}
        made, failures = app_of(handlers, limit_bytes)
        listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        names = [f"https://127.0.0.1:{port}/{role}/" for role in handlers]
        tls = Tls(self.authority.issue(*names, "127.0.0.1"))  # the address is for tools that know of no base URIs
        served_app = app or made
        server = PeerServer(
            served_app, PeerServerSettings(**settings), TrioClock(), tls, bulk=served_app if bulk else None
        )
        served = Served(server, app or made, failures, PeerBound(host="127.0.0.1", port=port), tls)

        async def run(task_status: trio.TaskStatus[PeerBound]) -> None:
            with served.scope:
                await server.run(listeners, task_status=task_status)
            served.returned.set()

        await self.nursery.start(run)
        return served

    async def client(self, *names: str, authority: Authority | None = None, **settings: Any) -> WireClient:
        tls = Tls((authority or self.authority).issue(*names))
        client = WireClient(WireDialer(tls, insecure_loopback=False), PeerClientSettings(**settings), TrioClock())
        await self.nursery.start(client.run)
        return client

    async def calls(self, caller: Peer = DRAFTER, **settings: Any) -> WireTransport:
        """A transport of a node with this role alone."""
        return (await self.client(caller.uri, **settings)).transport(caller, named=False)


@asynccontextmanager
async def tls_world(authority: Authority, limit_s: float = 30) -> AsyncIterator[TlsWorld]:
    with trio.fail_after(limit_s):
        async with trio.open_nursery() as nursery:
            yield TlsWorld(authority, nursery)
            nursery.cancel_scope.cancel()
