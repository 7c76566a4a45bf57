"""hypercorn's HTTP/2 stack as peers need it: one connection, from the first frame to the last.

The stack is taken as it is (hypercorn.trio.tcp_server, hypercorn.protocol.h2: not public API, hence the pinned version
and tests/edge/test_h2_server.py, which says what is used). What is done differently, and why:

- Answering before the body was read cost the connection: hypercorn forgets the stream, and the next DATA for it raised
  KeyError. Here such DATA is counted for flow control and dropped, and the peer is told to stop sending (RST_STREAM
  with NO_ERROR after the whole answer, RFC 9113 section 8.1).
- A request that is not read blocked all others: ten messages fit between connection and application, then the
  connection reads no further. Here an `Inbox` lies between, which never blocks and tells of a peer that has left.
- A stream that its peer reset before it was answered stayed in the tree of streams, until at a thousand of them the
  connection fell. Here it is taken out.
- A stop said GOAWAY only after the last answer, and reset new requests as if they had been carried out. Here GOAWAY is
  said at once, later requests are refused (REFUSED_STREAM: provably not processed), the others finish. h2 cannot send
  anything after its own GOAWAY, so that frame is written without it.
- A request's task that was cancelled while it waited for its turn to send took frames with it that others build on. And
  a small answer was three writes, each a TLS record and a system call. Here whoever sends takes along what others have
  to send, nobody else waits, and a small answer is whole before it is sent.
- Each request stopped an idle timer's task and started another, and after a reset stream none was started. Here the
  server looks at its connections now and then.
- After a thousand requests a connection ended, in mid-answer. Here nothing counts them.
- Windows of 64 KiB, and 100 streams. Limits are below.
- What HTTP/1.1 offers cannot happen: the protocol is HTTP/2 from the first octet, with TLS and without.
- A request that hypercorn trips over (CONNECT, a path that is no ASCII) costs its stream, not its connection.
"""

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import h2.stream
import hpack
import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.logging import Logger
from hypercorn.protocol.events import Body, EndBody, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import BufferCompleteError, H2Protocol
from hypercorn.trio.task_group import TaskGroup, _handle
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app
from hyperframe.frame import GoAwayFrame
from priority.priority import PriorityError

from sdcpd.roles.ports import Clock

log = structlog.get_logger(__name__)

STREAM_WINDOW_BYTES: Final = 1 << 20
"""What a peer may send on one stream before we have taken it: fills 1 Gbit/s over 8 ms."""
CONNECTION_WINDOW_BYTES: Final = 8 << 20
"""The same for all streams of a connection together; also what one peer can make us buffer at most."""
FRAME_BYTES: Final = 64 << 10
"""Each frame of a large body costs a turn of the loop; small messages wait behind one."""
OUTBOX_BYTES: Final = 256 << 10
"""What may wait behind a write under way; who has more to send waits too."""
CLOSE_S: Final = 0.5
"""What a farewell may take."""
HEADER_LIST_BYTES: Final = 16 << 10
"""Ours have a few hundred octets; a path may have 2048."""
DEFAULT_WINDOW_BYTES: Final = 65_535
"""A connection's window until it is opened (RFC 9113 section 6.9.2)."""

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
    h2.exceptions.H2Error,
    hpack.HPACKError,
    PriorityError,
    trio.BrokenResourceError,
    trio.BusyResourceError,
    trio.ClosedResourceError,
)
"""What the stack lets through when a peer provokes it ends that connection, not the process. The list is wide because
only foreign code is under it: faults of the application do not come this way, hypercorn keeps and logs them."""


GONE: Final = "sdcpd.gone"
"""An ASGI extension: see Inbox.read_no_more."""


class Inbox:
    """What comes for one request, until its application reads no more.

    It never makes the connection wait. It stays short, since an application reads whatever comes until it has all or
    enough, and a connection that reads lets it run in between.
    """

    def __init__(self) -> None:
        self._messages: Final[deque[Any]] = deque()
        self._some = trio.Event()
        self._gone: Callable[[], None] | None = None
        self._has_left = False

    async def put(self, message: Any) -> None:
        """From the connection."""
        if message["type"] == "http.disconnect":
            self._has_left = True
            if self._gone is not None:
                self._gone()
        if self._gone is None:
            self._messages.append(message)
            self._some.set()

    async def receive(self) -> Any:
        """ASGI's. Suspends only if it must."""
        while not self._messages:
            self._some = trio.Event()
            await self._some.wait()
        return self._messages.popleft()

    def read_no_more(self, gone: Callable[[], None]) -> None:
        """Drop whatever else comes; call `gone` when the peer has left or has the whole answer, now if it has."""
        self._gone = gone
        self._messages.clear()
        if self._has_left:
            gone()


def _no_thread(*_args: Any) -> Any:
    raise AssertionError("an ASGI application has no use for hypercorn's threads")


class PeerTaskGroup(TaskGroup):
    """The tasks of one connection; requests get an Inbox."""

    async def spawn_app(self, app: Any, config: Config, scope: Any, send: Any) -> Any:
        """Start the application for one request; returns where to put its messages."""
        inbox = Inbox()
        scope["extensions"][GONE] = inbox.read_no_more

        async def say(message: Any) -> None:
            if message is None and trio.current_effective_deadline() == -math.inf:
                return  # hypercorn would answer 500: we are cut off, and nobody knows how far the request got
            await send(message)

        assert self._nursery is not None, "it is entered"
        self._nursery.start_soon(_handle, app, config, scope, inbox.receive, say, _no_thread, _no_thread)
        return inbox.put


def _cut(stream: Any) -> None:
    match stream:
        case trio.SSLStream():
            _cut(stream.transport_stream)
        case trio.StapledStream():
            _cut(stream.send_stream)
            _cut(stream.receive_stream)
        case trio.SocketStream():
            stream.socket.close()
        case _:
            stream.close()  # trio's memory streams


class PeerProtocol(H2Protocol):
    """The frames of one connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = h2.settings.SettingCodes
        self.connection.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                settings.MAX_CONCURRENT_STREAMS: self.config.h2_max_concurrent_streams,
                settings.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES,
                settings.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                settings.MAX_FRAME_SIZE: FRAME_BYTES,
            },
        )
        self.connection.config.validate_outbound_headers = False  # they are our own
        self.connection.max_inbound_frame_size = FRAME_BYTES
        self.connection.decoder.max_header_list_size = HEADER_LIST_BYTES
        self.retired = False
        self._heads: Final[dict[int, tuple[Response, bytearray]]] = {}  # answers begun, nothing of them sent yet

    @property
    def busy(self) -> bool:
        """Is anything being asked or answered?"""
        return bool(self.streams) or bool(self.stream_buffers)

    async def initiate(self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None) -> None:
        """Say our settings and open the connection's window."""
        await super().initiate(headers, settings)
        self.connection.increment_flow_control_window(CONNECTION_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
        await self._flush()

    async def retire(self) -> None:
        """Take no further request. What was received is answered."""
        if self.retired or self.closed:
            return
        self.retired = True
        frame = GoAwayFrame(0, last_stream_id=self.connection.highest_inbound_stream_id)
        await self.send(RawData(data=frame.serialize()))

    async def stream_send(self, event: StreamEvent) -> None:
        """An answer's parts, from the application. A small answer waits until it is whole."""
        number = event.stream_id
        match event:
            case Response():
                self._heads[number] = (event, bytearray())
            case Body() if number in self._heads and len(self._heads[number][1]) + len(event.data) <= FRAME_BYTES:
                self._heads[number][1].extend(event.data)
            case EndBody() if number in self._heads and self._fits(number):
                await self._send_whole(number)
            case Body() | EndBody() if number in self._heads:
                head, body = self._heads.pop(number)
                await super().stream_send(head)
                if body:
                    await super().stream_send(Body(stream_id=number, data=bytes(body)))
                await super().stream_send(event)
            case StreamClosed():
                self._heads.pop(number, None)
                await super().stream_send(event)
            case _:
                await super().stream_send(event)

    def _fits(self, number: int) -> bool:
        """Can the rest of this answer go out in one frame, now?"""
        size = len(self._heads[number][1])
        try:
            window = self.connection.local_flow_control_window(number)
        except h2.exceptions.ProtocolError:  # the peer has reset the stream: what is sent will be dropped
            return True
        return size <= min(window, self.connection.max_outbound_frame_size)

    async def _send_whole(self, number: int) -> None:
        head, body = self._heads.pop(number)
        status = (b":status", b"%d" % head.status_code)
        try:
            self.connection.send_headers(
                number, [status, *head.headers, *self.config.response_headers("h2")], end_stream=not body
            )
            if body:
                self.connection.send_data(number, bytes(body), end_stream=True)
        except h2.exceptions.ProtocolError:
            pass  # the peer has left
        if self.stream_buffers.pop(number, None) is not None:
            self.priority.remove_stream(number)
        await self._flush()

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            match event:
                case h2.events.RequestReceived(stream_id=int(number)):
                    if self._refused(event):
                        codes = h2.errors.ErrorCodes
                        self._reset(number, codes.REFUSED_STREAM if self.retired else codes.PROTOCOL_ERROR)
                    else:
                        await self._create_stream(event)
                case h2.events.DataReceived(
                    stream_id=int(number), data=bytes(octets), flow_controlled_length=int(size)
                ):
                    stream = self.streams.get(number)
                    if stream is not None:
                        await stream.handle(Body(stream_id=number, data=octets))
                    self.connection.acknowledge_received_data(size, number)
                case h2.events.StreamEnded(stream_id=int(number)):
                    if number in self.streams:
                        await self.streams[number].handle(EndBody(stream_id=number))
                case h2.events.PriorityUpdated():
                    pass  # deprecated (RFC 9113 section 5.3.2), and a way to fill or tangle hypercorn's tree
                case _:
                    await super()._handle_events([event])
        await self._flush()

    def _refused(self, request: h2.events.RequestReceived) -> bool:
        fields = dict(request.headers or ())
        path = bytes(fields.get(b":path", b""))
        return self.retired or bytes(fields.get(b":method", b"")) == b"CONNECT" or not path.isascii() or not path

    async def _close_stream(self, stream_id: int) -> None:
        await super()._close_stream(stream_id)
        stream, buffer = self.connection.streams.get(stream_id), self.stream_buffers.get(stream_id)
        if buffer is not None and not buffer.complete and not self.closed and stream is not None and not stream.closed:
            self._reset(stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)  # the application gave up in mid-answer
            await self._flush()
        if buffer is not None and (stream is None or stream.closed):
            await buffer.close()
            self.priority.unblock(stream_id)  # for the sending task, which then forgets it
            await self.has_data.set()
        await self._stop_request(stream_id)

    async def _send_data(self, stream_id: int) -> None:
        await super()._send_data(stream_id)
        if stream_id not in self.stream_buffers and stream_id not in self.streams:
            await self._stop_request(stream_id)

    async def _stop_request(self, number: int) -> None:
        """When all was answered, more of the request is of no use."""
        stream = self.connection.streams.get(number)
        if stream is not None and stream.state_machine.state is h2.stream.StreamState.HALF_CLOSED_LOCAL:
            self._reset(number, h2.errors.ErrorCodes.NO_ERROR)
            if not self.closed:
                await self._flush()

    def _reset(self, number: int, error: h2.errors.ErrorCodes) -> None:
        with suppress(h2.exceptions.ProtocolError):  # the peer was first
            self.connection.reset_stream(number, error)


class PeerConnection(TCPServer):
    """One connection, over a stream whose handshake is done and which it closes.

    `state` reaches the application as `scope["state"]`: it says who is calling. A peer that takes none of its answers
    for `stalled_s` is taken for gone.
    """

    def __init__(
        self,
        app: Any,
        config: Config,
        context: WorkerContext,
        state: Any,
        stream: trio.abc.Stream,
        clock: Clock,
        stalled_s: float,
    ) -> None:
        super().__init__(app, config, context, state, stream)  # type: ignore[arg-type]  # any stream will do
        self._clock: Final = clock
        self._stalled_s: Final = stalled_s
        self._frames: PeerProtocol | None = None
        self._outbox = bytearray()
        self._sending = False
        self._sent: Final = trio.lowlevel.ParkingLot()
        self._requests_seen = 0
        self._idle_since = clock.now()
        self.retired_at: float | None = None

    async def run(self) -> None:
        """Serve until either side closes. As TCPServer.run after its handshake. Faults: CONNECTION_FAULTS."""
        try:
            async with PeerTaskGroup() as task_group:
                self._task_group = task_group
                self._frames = PeerProtocol(
                    self.app,
                    self.config,
                    self.context,
                    task_group,
                    ConnectionState(self.state),
                    True,
                    None,
                    None,
                    self.protocol_send,
                )
                self.protocol = self._frames  # type: ignore[assignment]  # without the wrapper that chooses HTTP/1.1
                await self._frames.initiate()
                await self._read_data()
        finally:
            await self._close()

    def idle_s(self) -> float:
        """For how long no request is known to have been under way; asked again and again."""
        now = self._clock.now()
        if self._frames is not None and (self._frames.busy or self._frames.keep_alive_requests != self._requests_seen):
            self._requests_seen = self._frames.keep_alive_requests
            self._idle_since = now
        return now - self._idle_since

    async def protocol_send(self, event: Event) -> None:
        """As TCPServer's; what can go out together does."""
        match event:
            case RawData(data=octets):
                self._outbox += octets
                if not self._sending:
                    await self._send_outbox()
                elif len(self._outbox) > OUTBOX_BYTES:
                    await self._sent.park()
            case Updated():
                pass  # idle or not: `idle_s` looks by itself
            case _:
                await super().protocol_send(event)

    async def _send_outbox(self) -> None:
        """Send all that is there, and what comes meanwhile. A cancelled request must not take others' frames along."""
        self._sending = True
        try:
            while self._outbox:
                octets, self._outbox = self._outbox, bytearray()
                with trio.CancelScope(shield=True, relative_deadline=self._stalled_s) as deadline:
                    await self.stream.send_all(octets)
                if deadline.cancelled_caught:
                    self.cut()
                    await self.protocol.handle(Closed())
                self._sent.unpark_all()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._outbox.clear()
            await self.protocol.handle(Closed())
        finally:
            self._sending = False
            self._sent.unpark_all()

    async def retire(self) -> None:
        """Take no further request; the peer, told so, will close when it has its answers."""
        if self.retired_at is None and self._frames is not None:
            self.retired_at = self._clock.now()
            await self._frames.retire()

    async def _close(self) -> None:
        """As TCPServer's, and within bounds: a peer that takes nothing does not take our farewell either."""
        with trio.move_on_after(CLOSE_S):
            await super()._close()
        self.cut()

    def cut(self) -> None:
        """Close what is below, now. It ends sends as well, which are shielded from cancellation."""
        _cut(self.stream)


class _Log(Logger):
    """hypercorn's log as ours. Requests are counted by the dispatcher, which knows what must not be logged."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.error_logger = None

    async def access(self, *_args: Any) -> None:
        return

    async def exception(self, message: str, *_args: Any, **_kwargs: Any) -> None:
        log.exception("peer server", message=message)


def hypercorn_config(streams_per_connection: int) -> Config:
    """What of hypercorn's configuration has a say here."""
    config = Config()
    config.logger_class = _Log
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    config.h2_max_concurrent_streams = streams_per_connection
    return config


def wrap_peer_app(app: Any) -> Any:
    """An ASGI application as hypercorn's stack calls it."""
    return wrap_app(app, 0, "asgi")


__all__ = [
    "CONNECTION_FAULTS",
    "GONE",
    "PeerConnection",
    "WorkerContext",
    "hypercorn_config",
    "wrap_peer_app",
]
