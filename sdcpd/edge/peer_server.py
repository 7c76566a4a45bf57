"""The SDCP port: our own accept loop, which settles who is calling before any octet of HTTP (design 2.1, bug 28).

    accepted -> handshake -> served -> retired -> closed

- *Handshake*: TLS 1.3 with a client certificate, within a deadline. Few run at once; when one more comes, the oldest
  gives way. Whoever opens connections and says nothing (slow loris) thus pushes out his own, since a peer that speaks
  is done in milliseconds.
- *Served*: by h2_server.py, or by h1_server.py where the peer has chosen HTTP/1.1, which is handed the certificate's
  identity with the stream.
- *Retired*: told that no further request is taken (GOAWAY). What is under way is answered, then the peer closes; if it
  does not, we do, a moment later: closing at once could destroy an answer that is still on its way. This is how idle
  connections end, how all end at a stop (within `grace_s`), and how peers come to use renewed certificates (`retire`).

Without TLS (`insecure_loopback`) there is no handshake and identities are claimed; only loopback addresses are accepted
then, looked at after binding, so that a host name cannot say otherwise.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import structlog
import trio
from msgspec import Struct

from sdcpd.edge.h1_server import BulkConnection
from sdcpd.edge.h2_server import App, PeerConnection
from sdcpd.edge.identity import CertifiedIdentity, ClaimedIdentity, Identity, certificate_names
from sdcpd.edge.tls import ALPN, BULK_ALPN, Tls
from sdcpd.edge.tls_stream import TlsStream
from sdcpd.edge.wire_settings import PeerServerSettings, is_loopback, split_listen
from sdcpd.roles.ports import Clock

log = structlog.get_logger(__name__)

BACKLOG: Final = 128
TEND_S: Final = 0.25
"""How often connections are looked at: the grain of the times below."""
LINES_PER_S: Final = 10
"""In the log, on handshakes that fail."""
ALERT_READS: Final = 16
"""How often we read from a peer that was not let in, until it closes."""
LINGER_S: Final = 1.0
"""How long a retired connection without requests is left to its peer to close."""


class PeerListenFailed(OSError):
    """The address cannot be listened on. The text says why; an operator can mend it."""


class PeerBound(Struct, frozen=True):
    """Where the port is; `port` is real also when port 0 was asked for."""

    host: str
    port: int


class PeerServer:
    """Serves the application until stopped. `run` once. Without `tls` the settings must allow it."""

    def __init__(
        self, app: App, settings: PeerServerSettings, clock: Clock, tls: Tls | None, *, bulk: App | None = None
    ) -> None:
        """`bulk`: what is served over HTTP/1.1; None: nothing.

        Raises ValueError for TLS together with `insecure_loopback`, or neither.
        """
        if settings.insecure_loopback == (tls is not None):
            raise ValueError("the SDCP port wants either TLS files or insecure_loopback = true")
        self._app: Final = app
        self._bulk: Final = bulk
        self._settings: Final = settings
        self._clock: Final = clock
        self._tls: Final = tls
        self._stopping: Final = trio.Event()
        self._handshakes: Final[dict[trio.CancelScope, None]] = {}  # oldest first
        self._connections: Final[dict[PeerConnection | BulkConnection, None]] = {}
        self._retire_all = False
        self._lines = _LineBudget(clock)

    @property
    def connections(self) -> int:
        """Those that are served, retired ones included."""
        return len(self._connections)

    def stop(self) -> None:
        """Stop accepting; running requests have `grace_s` to finish, then `run` returns."""
        self._stopping.set()

    def retire(self) -> None:
        """Have peers make new connections, after a reload of certificates. Nothing under way is lost."""
        self._retire_all = True

    async def run(
        self,
        listeners: Sequence[trio.SocketListener] = (),
        *,
        task_status: trio.TaskStatus[PeerBound] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen and serve; `task_status.started(bound)` once connections are accepted. Cancelling it stops at once.

        `listeners`: already listening, instead of `settings.listen`. Raises PeerListenFailed.
        """
        open_listeners = list(listeners) or await self._listen()
        try:
            bound = self._check(open_listeners)
        except PeerListenFailed:
            _close(open_listeners)
            raise
        async with trio.open_nursery() as guard:
            guard.start_soon(self._tend)
            async with trio.open_nursery() as connections:
                try:
                    async with trio.open_nursery() as accepting:
                        for listener in open_listeners:
                            accepting.start_soon(self._accept, listener, connections)
                        task_status.started(bound)
                        await self._stopping.wait()
                        accepting.cancel_scope.cancel()
                finally:
                    _close(open_listeners)
                for handshake in self._handshakes:
                    handshake.cancel()
                guard.start_soon(self._cut_after_grace, connections.cancel_scope)
            guard.cancel_scope.cancel()

    async def serve_stream(self, stream: trio.abc.Stream, identity: Identity) -> None:
        """Serve HTTP/2 on a stream whose handshake is done, until either side ends it. Closes it."""
        connection = PeerConnection(
            self._app,
            identity,
            stream,
            self._clock,
            streams_limit=self._settings.streams_per_connection,
            stalled_s=self._settings.stalled_peer_timeout_s,
        )
        await self._serve(connection)

    async def serve_bulk(self, stream: trio.abc.Stream, identity: Identity) -> None:
        """The same by HTTP/1.1."""
        assert self._bulk is not None, "nobody is let in for it"
        stalled_s = self._settings.stalled_peer_timeout_s
        await self._serve(BulkConnection(self._bulk, identity, stream, self._clock, stalled_s=stalled_s))

    async def _serve(self, connection: PeerConnection | BulkConnection) -> None:
        self._connections[connection] = None
        try:
            await connection.run()
        finally:
            del self._connections[connection]

    async def _listen(self) -> list[trio.SocketListener]:
        host, port = split_listen(self._settings.listen)
        try:
            listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
        except OSError as error:
            raise PeerListenFailed(f"cannot listen on {self._settings.listen}: {error}") from error
        if port == 0:  # a name with two addresses would take two ports, of which only one can be told
            _close(listeners[1:])
            del listeners[1:]
        return listeners

    def _check(self, listeners: Sequence[trio.SocketListener]) -> PeerBound:
        addresses = [listener.socket.getsockname() for listener in listeners]
        if self._tls is None:
            for address in addresses:
                if not is_loopback(address[0]):
                    raise PeerListenFailed(
                        f"listen = {self._settings.listen!r} means {address[0]}, which is not a loopback address. With "
                        "insecure_loopback = true any caller may claim to be any peer: listen on 127.0.0.1, or use TLS."
                    )
        return PeerBound(host=addresses[0][0], port=addresses[0][1])

    async def _accept(self, listener: trio.SocketListener, connections: trio.Nursery) -> None:
        await trio.serve_listeners(self._serve_socket, [listener], handler_nursery=connections)

    async def _serve_socket(self, stream: trio.SocketStream) -> None:
        """From accepted to closed; serve_listeners closes it in any case."""
        if len(self._connections) >= self._settings.max_connections:
            log.warning("peer connection refused: max_connections are open", max_connections=len(self._connections))
            return
        if self._tls is None:
            await self.serve_stream(stream, ClaimedIdentity({}))
            return
        secure = TlsStream(stream, self._tls.server, server_side=True)
        fault = await self._shake_hands(secure)
        if fault is None:
            identity = CertifiedIdentity(certificate_names(secure.getpeercert()), self._tls.roles)
            serve = self.serve_stream if secure.selected_alpn_protocol() == ALPN else self.serve_bulk
            await serve(secure, identity)
        elif (left_out := self._lines.take()) is not None:
            log.info("peer handshake failed", reason=fault, left_out=left_out)

    async def _shake_hands(self, stream: TlsStream) -> str | None:
        """None, or why it failed."""
        if len(self._handshakes) >= self._settings.max_handshakes:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        with trio.move_on_after(self._settings.handshake_timeout_s) as scope:
            self._handshakes[scope] = None
            try:
                await stream.do_handshake()
                taken = (ALPN,) if self._bulk is None else (ALPN, BULK_ALPN)
                return None if stream.selected_alpn_protocol() in taken else "the peer does not offer HTTP/2"
            except trio.BrokenResourceError as error:
                await _send_alert(stream)
                return f"{error.__cause__ or error}"
            finally:
                self._handshakes.pop(scope, None)
        return "it did not come to an end in time, or gave way to newer ones"

    async def _tend(self) -> None:
        """Retire connections, and close retired ones."""
        while True:
            stopping, now = self._stopping.is_set(), self._clock.now()
            for connection in self._connections:
                connection.tend()
                idle_s = connection.idle_s()
                if connection.retired_at is not None:
                    if min(idle_s, now - connection.retired_at) >= LINGER_S:
                        connection.cut()
                elif stopping or self._retire_all or idle_s >= self._settings.idle_connection_timeout_s:
                    connection.retire()
            self._retire_all = False
            if stopping:
                await self._clock.sleep_until(now + TEND_S)
            else:
                with trio.move_on_after(TEND_S):
                    await self._stopping.wait()

    async def _cut_after_grace(self, connections: trio.CancelScope) -> None:
        await self._clock.sleep_until(self._clock.now() + self._settings.grace_s)
        connections.cancel()


class _LineBudget:
    """Whoever can connect can have lines logged: some each second, and how many were left out."""

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._second = clock.now()
        self._taken = 0

    def take(self) -> int | None:
        """How many lines were left out before this one; None if this one is left out."""
        now = self._clock.now()
        left_out = 0
        if now - self._second >= 1:
            left_out = max(0, self._taken - LINES_PER_S)
            self._second, self._taken = now, 0
        self._taken += 1
        return left_out if self._taken <= LINES_PER_S else None


async def _send_alert(stream: TlsStream) -> None:
    """What OpenSSL has to say about a failed handshake: the peer should learn the reason.

    With TLS 1.3 it has spoken on by then. Closing with that unread would reset the connection, and the alert with it.
    """
    alert, below = stream.unsent(), stream.transport_stream
    assert isinstance(below, trio.SocketStream), "connections are accepted from a socket"
    with trio.move_on_after(LINGER_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await below.send_all(alert)
        await below.send_eof()
        for _ in range(ALERT_READS):
            if not await below.receive_some():
                return


def _close(listeners: Sequence[trio.SocketListener]) -> None:
    for listener in listeners:
        listener.socket.close()
