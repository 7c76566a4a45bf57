"""The client port's listener: hypercorn's protocol stack (HTTP/1.1, HTTP/2, TLS) behind our own accept loop.

Why our own loop: in hypercorn's, a fault of one connection ends them all. Some faults are the client's to cause, such
as a path that is not ASCII, or data for an HTTP/2 stream that was answered already; here they end that connection.
What else hypercorn leaves to us:

- A client that takes nothing would block its sender for ever, shielded from cancellation: our stream gives up on it.
- Over HTTP/1.1 the stack stops reading while a request is served and more octets wait, and then does not see the
  client leave: the socket is asked for that, once a second.
- Limits on connections, and a stop that is bounded whatever clients do.

`hypercorn.trio.tcp_server.TCPServer` is not public API, hence the pinned version and the tests over real sockets.
"""

import select
import ssl
from collections.abc import Callable
from typing import Any, Final, Protocol

import h2.exceptions
import h11
import hpack
import structlog
import trio
import wsproto.utilities
from hypercorn.config import Config
from hypercorn.events import Closed, Event
from hypercorn.logging import Logger
from hypercorn.protocol.h2 import BufferCompleteError
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import wrap_app
from msgspec import Struct
from priority.priority import PriorityError

from sdcpd.frontend.settings import FrontendSettings, listen_address
from sdcpd.roles.ports import Clock

log = structlog.get_logger(__name__)

CONNECTION_FAULTS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    BufferCompleteError,
    h11.ProtocolError,
    h2.exceptions.H2Error,
    hpack.HPACKError,
    PriorityError,
    wsproto.utilities.ProtocolError,
    trio.BrokenResourceError,
    trio.BusyResourceError,
    trio.ClosedResourceError,
)
"""What hypercorn's stack lets through when a client provokes it ends the connection, not the process. The list is wide
because only foreign code is under it: faults of the application do not come this way, hypercorn keeps and logs them."""

BACKLOG: Final = 128
CLOSING_LIMIT_S: Final = 1.0
"""For the pleasantries at the end of a connection, which cannot be cancelled either."""

LAST_WORD_S: Final = 0.5
"""For what a stop tells the clients whose answers outlast the grace. Those that do not read are cut without it."""

HANDSHAKE_LIMIT_S: Final = 10.0
"""For a TLS handshake, which is some round trips and a millisecond of computing; it holds one of `max_connections`."""

HANG_UP_CHECK_S: Final = 1.0
PEER_CLOSED: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
STREAMS_PER_CONNECTION: Final = 256
"""Above `max_requests` by default, so that one multiplexing client meets the limit that explains itself."""


class ListenFailed(OSError):
    """The address cannot be listened on. The text says why."""


class Bound(Struct, frozen=True):
    """Where the server listens; `port` is real also when port 0 was asked for."""

    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        """For people and clients."""
        scheme = "https" if self.tls else "http"
        return f"{scheme}://[{self.host}]:{self.port}" if ":" in self.host else f"{scheme}://{self.host}:{self.port}"


class Application(Protocol):
    """An ASGI application whose answers can be broken off when the server stops."""

    async def __call__(self, scope: Any, receive: Any, send: Any, /) -> None: ...
    def halt(self) -> None: ...


class FrontendServer:
    """Serves the application until stopped. `run` once."""

    def __init__(
        self,
        app: Application,
        settings: FrontendSettings,
        clock: Clock,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`tls` gives the context of the next connection; without it the port is plain."""
        self._tls: Final = tls
        self._app: Final = wrap_app(app, settings.max_body_bytes, "asgi")
        self._halt_answers: Final = app.halt
        self._settings: Final = settings
        self._clock: Final = clock
        self._config: Final = _hypercorn_config(settings)
        self._context: Final = WorkerContext(None)
        self._stopping: Final = trio.Event()
        self._connections: Final[set[trio.SocketStream]] = set()

    def stop(self) -> None:
        """Stop accepting; running answers have `grace_s` to finish, the rest are told and `run` returns."""
        self._stopping.set()

    async def run(self, *, task_status: trio.TaskStatus[Bound] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and serve; `task_status.started(bound)` once connections are accepted. Cancelling it stops at once.

        Raises ListenFailed.
        """
        host, port = listen_address(self._settings.listen, allow_non_loopback=True)  # the settings were checked
        try:
            listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
        except OSError as error:
            raise ListenFailed(f"cannot listen on {self._settings.listen}: {error}") from error
        if port == 0:  # a name with two addresses would take two ports, of which only one can be told
            for extra in listeners[1:]:
                await extra.aclose()
            del listeners[1:]
        address = listeners[0].socket.getsockname()
        async with trio.open_nursery() as guard:
            async with trio.open_nursery() as connections:
                try:
                    async with trio.open_nursery() as accepting:
                        for listener in listeners:
                            accepting.start_soon(self._accept, listener, connections)
                        task_status.started(Bound(address[0], address[1], self._tls is not None))
                        await self._stopping.wait()
                        accepting.cancel_scope.cancel()
                finally:
                    for listener in listeners:
                        listener.socket.close()
                    if not self._stopping.is_set():  # cancelled
                        self._cut()
                await self._context.terminated.set()  # idle connections close now, the others after their answer
                guard.start_soon(self._cut_after_grace, connections.cancel_scope)
            guard.cancel_scope.cancel()

    async def _accept(self, listener: trio.SocketListener, connections: trio.Nursery) -> None:
        await trio.serve_listeners(self._serve_connection, [listener], handler_nursery=connections)

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        if len(self._connections) >= self._settings.max_connections:
            log.warning("connection refused: max_connections are open", max_connections=len(self._connections))
            return  # serve_listeners closes it
        self._connections.add(stream)
        try:
            await self._run_protocol(stream)
        except* CONNECTION_FAULTS as group:
            log.warning("connection dropped", faults=sorted({type(fault).__name__ for fault in _leaves(group)}))
        finally:
            self._connections.discard(stream)

    async def _run_protocol(self, stream: trio.SocketStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_peer, stream.socket, nursery.cancel_scope)
            stalled_s = self._settings.stalled_client_timeout_s
            if self._tls is None:
                client = _ClientStream(stream, stalled_s)
            else:
                client = _TlsClientStream(stream, stalled_s, self._tls())
            await _Connection(self._app, self._config, self._context, client).run()
            nursery.cancel_scope.cancel()

    async def _watch_peer(self, socket: trio.socket.SocketType, scope: trio.CancelScope) -> None:
        """End the connection when the peer has closed its side, read or not."""
        poll = select.poll()
        poll.register(socket.fileno(), PEER_CLOSED)
        while True:
            await self._clock.sleep_until(self._clock.now() + HANG_UP_CHECK_S)
            if socket.fileno() < 0 or poll.poll(0):
                socket.close()  # cancelling alone would not reach a shielded send
                scope.cancel()

    async def _cut_after_grace(self, connections: trio.CancelScope) -> None:
        try:
            await self._clock.sleep_until(self._clock.now() + self._settings.grace_s)
            self._halt_answers()
            await self._clock.sleep_until(self._clock.now() + LAST_WORD_S)
        finally:  # also when cancelled: whoever stops us waits no longer
            self._cut()
            connections.cancel()

    def _cut(self) -> None:
        """Close all sockets: hypercorn shields its sends from cancellation, but a closed socket ends them."""
        for stream in self._connections:
            stream.socket.close()


class _Connection(TCPServer):
    """hypercorn's side of one connection, whose sending is not cancelled half-way.

    A request that is cancelled (its client has left) may be in the middle of sending. Over HTTP/2 the octets it has
    taken from the protocol's state would be lost, and with them the connection for all other streams; over HTTP/1.1 a
    connection that is being closed would stay half open.
    """

    def __init__(self, app: Any, config: Config, context: WorkerContext, stream: "_ClientStream") -> None:
        super().__init__(app, config, context, {}, stream)  # type: ignore[arg-type]  # any stream with a socket will do
        self._client: Final = stream

    async def protocol_send(self, event: Event) -> None:
        limit_s = CLOSING_LIMIT_S if isinstance(event, Closed) else self._client.send_limit_s
        with trio.CancelScope(shield=True, deadline=trio.current_time() + limit_s) as bound:
            await super().protocol_send(event)
        if bound.cancelled_caught:
            self._client.socket.close()


class _ClientStream:
    """The stream as hypercorn sees it: a socket's, whose sends end when the client takes nothing."""

    def __init__(self, stream: trio.SocketStream, stalled_s: float) -> None:
        self.socket: Final = stream.socket
        self._stream: trio.abc.Stream = stream
        self._stalled_s: Final = stalled_s
        self.send_limit_s: Final = 2 * stalled_s + 1  # waiting for the sender before, which is bounded, then sending

    async def send_all(self, octets: bytes) -> None:
        with trio.move_on_after(self._stalled_s) as deadline:
            await self._stream.send_all(octets)
        if deadline.cancelled_caught:
            raise trio.BrokenResourceError("the client takes nothing")

    async def receive_some(self, limit: int) -> bytes:
        return bytes(await self._stream.receive_some(limit))

    async def send_eof(self) -> None:
        assert isinstance(self._stream, trio.SocketStream)
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _TlsClientStream(_ClientStream):
    """The same over TLS, with the methods by which hypercorn knows that it is."""

    def __init__(self, stream: trio.SocketStream, stalled_s: float, context: ssl.SSLContext) -> None:
        super().__init__(stream, stalled_s)
        self.transport_stream: Final = stream
        self._secured: Final = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        self._stream = self._secured

    async def do_handshake(self) -> None:
        await self._secured.do_handshake()

    def selected_alpn_protocol(self) -> str | None:
        """What both sides speak; None for clients that name nothing, which speak HTTP/1.1."""
        chosen: str | None = self._secured.selected_alpn_protocol()
        return chosen

    async def send_eof(self) -> None:
        """TLS has no half-closed connections."""

    async def aclose(self) -> None:
        with trio.move_on_after(CLOSING_LIMIT_S):  # a last word that the client may not take
            await self._stream.aclose()


class _Log(Logger):
    """hypercorn's log as ours. Requests are logged by the application, which knows what must not be."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.error_logger = None

    async def access(self, *_args: Any) -> None:
        return

    async def critical(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        log.critical("http server", message=message)

    async def error(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        log.error("http server", message=message)

    async def warning(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        log.warning("http server", message=message)

    async def info(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        log.debug("http server", message=message)

    async def exception(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        log.exception("http server", message=message)


def _hypercorn_config(settings: FrontendSettings) -> Config:
    config = Config()
    config.logger_class = _Log
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    config.keep_alive_timeout = settings.idle_connection_timeout_s
    config.keep_alive_max_requests = 1 << 62  # the default closes a busy connection after 1000, in mid-answer
    config.ssl_handshake_timeout = HANDSHAKE_LIMIT_S
    config.h2_max_concurrent_streams = STREAMS_PER_CONNECTION
    return config


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for item in group.exceptions:
        found.extend(_leaves(item) if isinstance(item, BaseExceptionGroup) else [item])
    return found
