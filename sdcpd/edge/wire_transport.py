"""The Transport on a wire: base URIs to connections, for all roles of a node.

    roles -> WireTransport (one a role) -> WireClient (one a node) -> PeerPool (one a peer and class) -> connections

A peer is a host and port: its roles share connections, and so do ours, which is why each request says in `sdcpd-as` for
which of our base URIs it speaks, when our certificate carries more than one. Whether the peer is the one at the base
URI that is called is asked of its certificate for each request, since one certificate may carry some roles of a host
and not others.

Requests that wait at the peer on purpose (those with `Prefer: wait`, decision 38) have connections of their own, so
that long polls, however many, never stand before a proposal (bug 27). Large bodies go by HTTP/1.1 on connections of
their own, where there is TLS and the peer takes it (h1_client.py). The deadline of an exchange is its caller's
cancel scope; what a connection can find out by itself (no answer to a ping, a reset, GOAWAY) ends it sooner.
"""

import ssl
from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol
from urllib.parse import urlsplit

import trio
from msgspec import Struct

from sdcpd.edge.h1_client import BulkPool
from sdcpd.edge.h2_client import Head
from sdcpd.edge.h2_pool import PeerPool
from sdcpd.edge.identity import AS_FIELD, CertificateNames, certificate_names
from sdcpd.edge.tls import ALPN, BULK_ALPN, Tls
from sdcpd.edge.tls_stream import TlsStream
from sdcpd.edge.transport import Request, Response, TransportError
from sdcpd.edge.wire_settings import PeerClientSettings, is_loopback
from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.roles.ports import Clock, Peer

TEND_S: Final = 0.5
"""How often connections are looked at: the grain of the times in the settings."""
POOLS_LIMIT: Final = 2048
"""Two for each peer. A base URI is a peer's choice; whoever names ever new ones must not fill our memory."""
TARGETS_LIMIT: Final = 4096


class Target(Struct, frozen=True):
    """A base URI taken apart."""

    base_uri: str
    scheme: str
    host: str
    port: int
    authority: str
    path: str


class Dialer(Protocol):
    """Makes streams to peers. Raises TransportError."""

    async def dial(self, target: Target) -> tuple[trio.abc.Stream, CertificateNames | None]: ...
    async def dial_bulk(self, target: Target) -> tuple[TlsStream, CertificateNames] | None: ...
    def admit(self, target: Target, names: CertificateNames | None) -> None: ...


class WireDialer:
    """TLS for `https`; plain TCP for `http`, if the settings allow it and the host is loopback."""

    def __init__(self, tls: Tls | None, *, insecure_loopback: bool) -> None:
        self._tls: Final = tls
        self._insecure_loopback: Final = insecure_loopback

    async def dial(self, target: Target) -> tuple[trio.abc.Stream, CertificateNames | None]:
        """A connected stream, its handshake done."""
        if target.scheme == "http":
            return await self._dial_plain(target), None
        if self._tls is None:
            raise TransportError(f"{target.base_uri} wants TLS, for which this node has no certificate")
        stream = await self._dial_secure(target, self._tls.client)
        if stream.selected_alpn_protocol() != ALPN:
            await trio.aclose_forcefully(stream)
            raise TransportError(f"{target.authority} does not speak HTTP/2")
        return stream, certificate_names(stream.getpeercert())

    async def dial_bulk(self, target: Target) -> tuple[TlsStream, CertificateNames] | None:
        """A stream for HTTP/1.1; None where the peer takes HTTP/2 only."""
        if self._tls is None:
            raise TransportError(f"{target.base_uri} wants TLS, for which this node has no certificate")
        stream = await self._dial_secure(target, self._tls.bulk_client)
        if stream.selected_alpn_protocol() != BULK_ALPN:
            await trio.aclose_forcefully(stream)
            return None
        return stream, certificate_names(stream.getpeercert())

    async def _dial_secure(self, target: Target, context: ssl.SSLContext) -> TlsStream:
        stream = TlsStream(await _connect(target), context, server_hostname=target.host)
        try:
            await stream.do_handshake()
        except trio.BrokenResourceError as error:
            await trio.aclose_forcefully(stream)
            raise TransportError(f"no TLS with {target.authority}: {error.__cause__ or error}") from error
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    def admit(self, target: Target, names: CertificateNames | None) -> None:
        """Is a peer with these names the one at the target's base URI?"""
        if names is None:
            return  # loopback without TLS
        assert self._tls is not None, "there is no certificate without TLS"
        if not self._tls.names_server(names, target.base_uri, target.host):
            raise TransportError(f"the certificate of {target.authority} does not name {target.base_uri}")

    async def _dial_plain(self, target: Target) -> trio.abc.Stream:
        if not self._insecure_loopback or not is_loopback(target.host):
            raise TransportError(
                f"{target.base_uri} is not https: plain HTTP/2 wants insecure_loopback = true and a loopback address"
            )
        return await _connect(target)


class WireClient:
    """The connections of a node to its peers. Nothing works before `run` does."""

    def __init__(self, dialer: Dialer, settings: PeerClientSettings, clock: Clock) -> None:
        self._dialer: Final = dialer
        self._settings: Final = settings
        self._clock: Final = clock
        self._pools: Final[dict[tuple[str, str, int, bool], PeerPool]] = {}
        self._bulk_pools: Final[dict[tuple[str, int], BulkPool]] = {}
        self._targets: Final[dict[str, Target]] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the connections until cancelled; requests under way then end in TransportError."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                while True:
                    await self._clock.sleep_until(self._clock.now() + TEND_S)
                    for pool in self._every_pool():
                        pool.tend(self._clock.now())
            finally:  # before the connections end: whoever loses one must not look for another
                self._nursery = None
                for pool in self._every_pool():
                    pool.close()

    def transport(self, caller: Peer, *, named: bool) -> "WireTransport":
        """A transport that speaks for `caller`. `named`: it says so, since the certificate alone would not."""
        return WireTransport(self, caller, named=named)

    def retire(self) -> None:
        """Have new requests make new connections, after a reload of certificates."""
        for pool in self._every_pool():
            pool.retire()

    @property
    def connections(self) -> int:
        """Those that are open, to all peers."""
        return sum(pool.connections for pool in self._every_pool())

    async def exchange(self, base_uri: str, request: Request, speaks_as: str | None) -> Response:
        """As WireTransport.exchange, for the role at `speaks_as`."""
        target = self._target(base_uri)
        head = _head(target, request, speaks_as)
        admit = partial(self._dialer.admit, target)
        if request.bulk and target.scheme == "https":
            bulk_pool = self._bulk_pool(target)
            if bulk_pool.usable:
                response = await bulk_pool.exchange(head, request.body, admit)
                if response is not None:
                    return response
        pool = self._pool(target, waits="prefer" in request.headers)
        return await pool.exchange(head, request.body, request.method == "GET", admit)

    def _target(self, base_uri: str) -> Target:
        target = self._targets.get(base_uri)
        if target is None:
            if len(self._targets) >= TARGETS_LIMIT:
                self._targets.clear()
            target = self._targets[base_uri] = _read_target(base_uri)
        return target

    def _pool(self, target: Target, *, waits: bool) -> PeerPool:
        key = (target.scheme, target.host, target.port, waits)
        pool = self._pools.get(key)
        if pool is None:
            if self._nursery is None:
                raise TransportError("the node stops, or has not started")
            if len(self._pools) >= POOLS_LIMIT:
                self._forget()
            pool = PeerPool(partial(self._dialer.dial, target), self._settings, self._clock, self._nursery)
            self._pools[key] = pool
        return pool

    def _bulk_pool(self, target: Target) -> BulkPool:
        key = (target.host, target.port)
        pool = self._bulk_pools.get(key)
        if pool is None:
            if self._nursery is None:
                raise TransportError("the node stops, or has not started")
            if len(self._bulk_pools) >= POOLS_LIMIT:
                self._forget()
            pool = BulkPool(partial(self._dialer.dial_bulk, target), self._settings, self._clock, self._nursery)
            self._bulk_pools[key] = pool
        return pool

    def _every_pool(self) -> list[PeerPool | BulkPool]:
        return [*self._pools.values(), *self._bulk_pools.values()]

    def _forget(self) -> None:
        for key in [key for key, pool in self._pools.items() if pool.unused]:
            del self._pools[key]
        for place in [place for place, pool in self._bulk_pools.items() if pool.unused]:
            del self._bulk_pools[place]
        if max(len(self._pools), len(self._bulk_pools)) >= POOLS_LIMIT:
            raise TransportError(f"{POOLS_LIMIT} peers have connections already")


class WireTransport:
    """Transport over TLS and HTTP/2. Who is calling is settled by our certificate; see the module's text."""

    def __init__(self, client: WireClient, caller: Peer, *, named: bool) -> None:
        self._client: Final = client
        self._speaks_as: Final = caller.uri if named else None

    async def exchange(self, base_uri: str, request: Request) -> Response:
        """One request. Raises TransportError. Cancelling gives up the answer, not the request."""
        return await self._client.exchange(base_uri, request, self._speaks_as)


async def _connect(target: Target) -> trio.SocketStream:
    try:
        return await trio.open_tcp_stream(target.host, target.port)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host that cannot be a name
        raise TransportError(f"no connection to {target.authority}: {error}") from error


def _read_target(base_uri: str) -> Target:
    try:
        base_uri = normalize_base_uri(base_uri)
    except ValueError as error:
        raise TransportError(str(error)) from error
    parts = urlsplit(base_uri)
    assert parts.hostname is not None, "a base URI has a host"
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Target(base_uri, parts.scheme, parts.hostname, port, parts.netloc, parts.path)


def _head(target: Target, request: Request, speaks_as: str | None) -> Head:
    path = target.path + request.path
    if request.query:
        path = f"{path}?{request.query}"
    head = [
        (b":method", request.method.encode()),
        (b":scheme", target.scheme.encode()),
        (b":authority", target.authority.encode()),
        (b":path", path.encode()),
    ]
    head += _fields(request.headers)
    if request.body:
        head.append((b"content-length", b"%d" % len(request.body)))
    if speaks_as is not None:
        head.append((AS_FIELD.encode(), speaks_as.encode()))
    return head


def _fields(headers: Mapping[str, str]) -> Head:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
