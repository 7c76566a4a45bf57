"""One HTTP/2 connection from a peer, from the first frame to the last: a thin layer on `h2`, as h2_client.py is.

    open -> retired -> closed

One task reads, and hands out what came. Each request has a task, which only waits: for its body, for the application,
for room to send. One task writes, and takes all that has gathered since its last write; it alone is in the middle of a
write, so that a request can be cancelled at any moment and leaves no half frame behind, on which others would build. A
small answer is put into h2's buffer whole: one write, one TLS record.

What a peer may do, and what becomes of it:

- It resets a request, or leaves: the request's task is cancelled, and its place is free at once.
- It sends a body that nobody reads, or goes on after the answer: counted for flow control and dropped. A request that
  was answered before it ended is told to stop (RST_STREAM with NO_ERROR, RFC 9113 section 8.1).
- It asks after GOAWAY: refused, provably not processed (REFUSED_STREAM). What came before is answered.
- It asks for what is no request of ours (CONNECT, no path): costs the stream. It breaks HTTP/2: costs the connection.
- It takes nothing, or opens no window for an answer: costs the connection after `stalled_s`, the stream after
  ANSWER_TIMEOUT_S.
- It says HTTP/1.1, or wants to upgrade from it: no such thing here, HTTP/2 begins at the first octet. A peer that
  wants HTTP/1.1 says so in the handshake (h1_server.py).
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from typing import Final, Protocol

import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import structlog
import trio

from sdcpd.edge.h2_frames import CLOSE_S, OUTBOX_BYTES, READ_BYTES, UNSENT_LIMIT_BYTES, Frames
from sdcpd.edge.identity import Identity
from sdcpd.edge.transport import Request, Response
from sdcpd.roles.ports import Clock

log = structlog.get_logger(__name__)

CONNECTION_WINDOW_BYTES: Final = 8 << 20
"""What one peer may send before we have taken it, on all streams together."""
HEADER_LIST_BYTES: Final = 16 << 10
"""Ours have a few hundred octets; a path may have 2048."""
ANSWER_TIMEOUT_S: Final = 120.0
"""For an answer to be taken. A peer that opens no window for it holds memory; its stream is reset then."""

Send = Callable[[Response], Awaitable[None]]
"""Takes the answer, and returns when the peer's windows have taken all of it, or never will."""

Head = Sequence[tuple[bytes, bytes]]
CODES: Final = h2.errors.ErrorCodes


class Inbox:
    """What has come of one body and was not read. It never makes the connection wait.

    It stays short, since an application reads whatever comes until it has all or enough, and a connection that reads
    lets it run in between.
    """

    def __init__(self) -> None:
        self.ended = False
        self._pieces: Final[deque[bytes]] = deque()
        self._some: trio.Event | None = None
        self._closed = False

    def put(self, octets: bytes) -> None:
        if not self._closed:
            self._pieces.append(octets)
            self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def close(self) -> None:
        """Drop whatever is there and whatever comes."""
        self._closed = True
        self._pieces.clear()

    async def receive(self) -> tuple[bytes, bool]:
        """The next piece, and whether more is to come. Suspends only if it must: never once `ended`."""
        while not self._pieces and not self.ended:
            self._some = trio.Event()
            await self._some.wait()
        octets = self._pieces.popleft() if self._pieces else b""
        return octets, bool(self._pieces) or not self.ended

    def _wake(self) -> None:
        if self._some is not None:
            self._some.set()


class Incoming(Protocol):
    """A request's body as it comes."""

    @property
    def ended(self) -> bool: ...
    async def receive(self) -> tuple[bytes, bool]: ...


App = Callable[[Identity, Request, Incoming, Send], Awaitable[None]]
"""What answers, once. The request has its whole path and no body. Whatever it raises is our own fault."""


class _Exchange:
    """One request and its answer."""

    __slots__ = ("answered", "bodiless", "inbox", "left", "number", "rest", "scope")

    def __init__(self, number: int, *, bodiless: bool) -> None:
        self.number = number
        self.bodiless = bodiless  # an answer to HEAD: its fields only
        self.inbox = Inbox()
        self.scope = trio.CancelScope()
        self.rest = memoryview(b"")  # of the answer's body, not yet in h2's buffer
        self.answered = False
        self.left = False  # the peer has reset it


class PeerConnection:
    """A connection over a stream whose handshake is done, and which it closes. `identity`: who is calling."""

    def __init__(
        self,
        app: App,
        identity: Identity,
        stream: trio.abc.Stream,
        clock: Clock,
        *,
        streams_limit: int,
        stalled_s: float,
    ) -> None:
        self._app: Final = app
        self._identity: Final = identity
        self._stream: Final = stream
        self._clock: Final = clock
        self._streams_limit: Final = streams_limit
        self._stalled_s: Final = stalled_s
        self._h2: Final = Frames(client=False)
        self._exchanges: Final[dict[int, _Exchange]] = {}
        self._outbox_bytes = 0
        self._progress: Final = trio.lowlevel.ParkingLot()  # senders of large bodies, until there may be room
        self._wake = trio.Event()
        self._scope: Final = trio.CancelScope()
        self._ending = False  # nothing more is read; what is in the buffer goes out
        self._idle_since = clock.now()
        self._writing_since: float | None = None
        self._date = DateField(clock)
        self.retired_at: float | None = None

    @property
    def requests(self) -> int:
        """Those under way."""
        return len(self._exchanges)

    def idle_s(self) -> float:
        """For how long no request has been under way."""
        return 0.0 if self._exchanges else self._clock.now() - self._idle_since

    async def run(self) -> None:
        """Serve until either side closes."""
        codes = h2.settings.SettingCodes
        self._h2.greet(
            {codes.MAX_CONCURRENT_STREAMS: self._streams_limit, codes.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES},
            CONNECTION_WINDOW_BYTES,
        )
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    async with trio.open_nursery() as requests:
                        await self._read(requests)
                        requests.cancel_scope.cancel()
                    self._ending = True
                    self._wake.set()
        finally:
            with trio.move_on_after(CLOSE_S, shield=True), suppress(trio.BrokenResourceError):
                await self._stream.aclose()
            await trio.aclose_forcefully(self._stream)

    def retire(self) -> None:
        """Take no further request; the peer, told so, will close when it has its answers."""
        if self.retired_at is None:
            self.retired_at = self._clock.now()
            self._h2.say_goaway()
            self._wake.set()

    def tend(self) -> None:
        """Drop a peer that takes nothing. Called once in a while."""
        if self._writing_since is not None and self._clock.now() - self._writing_since >= self._stalled_s:
            self.cut()

    def cut(self) -> None:
        """End it now, whatever is under way."""
        self._scope.cancel()

    async def _write(self) -> None:
        try:
            while True:
                octets = self._h2.data_to_send()
                if octets:
                    self._outbox_bytes = 0
                    self._writing_since = self._clock.now()
                    await self._stream.send_all(octets)
                    self._writing_since = None
                    self._progress.unpark_all()
                elif self._ending:
                    return
                else:
                    self._wake = trio.Event()
                    await self._wake.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.cut()

    async def _read(self, requests: trio.Nursery) -> None:
        """Until the peer has left or breaks the protocol."""
        try:
            while octets := await self._stream.receive_some(READ_BYTES):
                for event in self._h2.receive_data(octets):
                    self._take(event, requests)
                if self._h2.unsent_bytes:
                    self._wake.set()
                while self._h2.unsent_bytes > UNSENT_LIMIT_BYTES:
                    await self._progress.park()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except h2.exceptions.H2Error as error:  # h2 has put a GOAWAY with the code into its buffer
            log.warning("peer connection dropped", fault=str(error))

    def _take(self, event: h2.events.Event, requests: trio.Nursery) -> None:
        match event:
            case h2.events.RequestReceived(stream_id=int(number)):
                self._begin(number, event.headers or (), requests)
            case h2.events.DataReceived(stream_id=int(number), flow_controlled_length=int(size)):
                self._h2.acknowledge_received_data(size, number)
                if number in self._exchanges:
                    self._exchanges[number].inbox.put(event.data or b"")
            case h2.events.StreamEnded(stream_id=int(number)):
                if number in self._exchanges:
                    self._exchanges[number].inbox.end()
            case h2.events.StreamReset(stream_id=int(number)):
                if number in self._exchanges:
                    self._exchanges[number].left = True
                    self._exchanges[number].scope.cancel()
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                self._progress.unpark_all()
            case _:
                pass  # pings, GOAWAY (it closes when it has its answers), trailers, priorities, unknown frames

    def _begin(self, number: int, head: Head, requests: trio.Nursery) -> None:
        if self.retired_at is not None:
            self._reset(number, CODES.REFUSED_STREAM)
            return
        request = _read_head(head)
        if request is None:
            self._reset(number, CODES.PROTOCOL_ERROR)
            return
        exchange = self._exchanges[number] = _Exchange(number, bodiless=request.method == "HEAD")
        requests.start_soon(self._serve, exchange, request)

    async def _serve(self, exchange: _Exchange, request: Request) -> None:
        """One request, to the last octet of its answer. Its peer's leaving cancels the scope."""
        try:
            with exchange.scope:
                await self._app(self._identity, request, exchange.inbox, partial(self._answer, exchange))
        finally:
            del self._exchanges[exchange.number]
            self._idle_since = self._clock.now()
            if exchange.left:
                pass
            elif not exchange.answered:
                self._reset(exchange.number, CODES.INTERNAL_ERROR)
            elif not exchange.inbox.ended:  # more of the request is of no use
                self._reset(exchange.number, CODES.NO_ERROR)

    async def _answer(self, exchange: _Exchange, response: Response) -> None:
        """Suspends only for an answer that is too large for the windows or the outbox."""
        exchange.inbox.close()
        self._send_head(exchange, response)
        if exchange.rest:
            with trio.move_on_after(ANSWER_TIMEOUT_S):
                while exchange.rest:
                    await self._progress.park()
                    self._send_some(exchange)
        exchange.answered = not exchange.rest

    def _send_head(self, exchange: _Exchange, response: Response) -> None:
        """The whole answer if it is small and the windows are open."""
        fields = [(b":status", b"%d" % response.status)]
        fields += [(name.encode(), value.encode("latin-1")) for name, value in response.headers.items()]
        if response.status not in (204, 304) and "content-length" not in response.headers:  # HEAD says its own
            fields.append((b"content-length", b"%d" % len(response.body)))
        fields.append((b"date", self._date.text()))
        body = b"" if exchange.bodiless else response.body  # a refusal has one whatever the method
        with suppress(h2.exceptions.ProtocolError):  # the peer has reset the stream: we are about to hear of it
            self._h2.send_headers(exchange.number, fields, end_stream=not body)
        exchange.rest = memoryview(body)
        self._send_some(exchange)

    def _send_some(self, exchange: _Exchange) -> None:
        """What of the body can go now."""
        try:
            moved = self._h2.send_some(exchange.number, exchange.rest, OUTBOX_BYTES - self._outbox_bytes)
            exchange.rest = exchange.rest[moved:]
            self._outbox_bytes += moved
        except h2.exceptions.ProtocolError:  # as above
            exchange.rest = memoryview(b"")
        self._wake.set()

    def _reset(self, number: int, error: h2.errors.ErrorCodes) -> None:
        with suppress(h2.exceptions.ProtocolError):  # the peer was first, or the connection is broken
            self._h2.reset_stream(number, error)
        self._wake.set()


class DateField:
    """The field Date, which every answer of a server with a clock has (RFC 9110 section 6.6.1), made once a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._until = clock.now()
        self._text = b""

    def text(self) -> bytes:
        now = self._clock.now()
        if now >= self._until:
            self._text, self._until = formatdate(usegmt=True).encode(), now + 1
        return self._text


def _read_head(head: Head) -> Request | None:
    """The request without its body; None for what is none of ours. h2 has seen to the rules of HTTP."""
    method = path = ""
    fields: dict[str, str] = {}
    for raw_name, raw_value in head:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        match name:
            case ":method":
                method = value
            case ":path":
                path = value
            case ":scheme" | ":authority":
                pass  # one server, whatever it is called
            case _:  # a repeated field is one list (RFC 9110 section 5.3)
                fields[name] = f"{fields[name]}, {value}" if name in fields else value
    if method == "CONNECT" or not path or not path.isascii():
        return None
    path, _, query = path.partition("?")
    return Request(method=method, path=path, query=query, headers=fields)
