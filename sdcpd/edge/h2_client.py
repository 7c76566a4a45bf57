"""One HTTP/2 connection to a peer, with many requests on it: a thin layer on `h2`.

    opening -> open -> retired -> lost

Three kinds of task share it. Those that ask put frames into h2's buffer, without waiting, and then wait for their own
answer. One task writes, and takes all that has gathered since its last write; it alone is in the middle of a write, so
that no request can be cancelled there and leave half a frame behind. One task reads, and hands out what came. What ends
either of the two ends the connection, and every request on it.

A request that is cancelled resets its stream, and its place is free at once (bug 27). How a request can fail is told
apart by what is known of it:

    NotProcessed   the peer has not looked at it: never sent, refused, or beyond the last stream of its GOAWAY
    AnswerLost     it may or may not have been carried out

GOAWAY retires the connection: it takes no further request, and those that the peer will still answer wait for that.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import trio

from sdcpd.edge.h2_frames import CLOSE_S, OUTBOX_BYTES, READ_BYTES, UNSENT_LIMIT_BYTES, Frames
from sdcpd.edge.identity import CertificateNames
from sdcpd.edge.transport import Response, TransportError
from sdcpd.edge.wire_settings import PeerClientSettings
from sdcpd.roles.ports import Clock

CONNECTION_WINDOW_BYTES: Final = 16 << 20
"""The same for all streams of a connection. We take everything at once, so it only bounds what is on the way."""
HEADER_LIST_BYTES: Final = h2.connection.H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE
STREAMS_LIMIT: Final = 1000
"""On one connection, when the peer would take more: h2 counts them all for each new one."""
UNSENT_LIMIT: Final = 2000
"""Requests in the buffer of a connection whose peer takes nothing, cancelled ones included."""
STREAM_NUMBERS_LIMIT: Final = (1 << 31) - 1024

Head = Sequence[tuple[bytes, bytes]]


class NotProcessed(TransportError):
    """The peer has not looked at the request: it may be made again, whatever it is."""


class AnswerLost(TransportError):
    """The request may or may not have been carried out."""


class _Exchange:
    """One request and its answer so far. `failure` or `ended` with a status is its end."""

    def __init__(self, number: int, rest: memoryview, limit_bytes: int) -> None:
        self.number = number
        self.rest = rest  # of the request's body, not yet in h2's buffer
        self.sent = False  # has any of it left h2's buffer?
        self.over = trio.Event()
        self.reset = False  # by the peer
        self.failure: TransportError | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.limit_bytes = limit_bytes

    def fail(self, failure: TransportError) -> None:
        if not self.over.is_set():
            self.failure = failure
            self.over.set()

    def response(self) -> Response:
        if self.failure is not None:
            raise self.failure
        assert self.status is not None, "h2 lets no answer end that did not begin"
        return Response(status=self.status, headers=self.headers, body=bytes(self.body))


class ClientConnection:
    """A connection over `stream`, which it closes. `names`: the peer's certificate's, None without TLS."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        names: CertificateNames | None,
        settings: PeerClientSettings,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when a place has become free, or the connection takes requests no more."""
        self.names: Final = names
        self._stream: Final = stream
        self._settings: Final = settings
        self._clock: Final = clock
        self._changed: Final = changed
        self._h2: Final = Frames(client=True)
        self._exchanges: Final[dict[int, _Exchange]] = {}
        self._unsent: Final[list[_Exchange]] = []
        self._outbox_bytes = 0
        self._progress: Final = trio.lowlevel.ParkingLot()  # senders of large bodies, until there may be room
        self._wake = trio.Event()
        self._greeted: Final = trio.Event()
        self._scope: Final = trio.CancelScope()
        self._retired = False
        self._parting = False  # our own GOAWAY is in the buffer
        self._lost: str | None = None
        self._made_at = self._heard_at = self._turned_at = clock.now()  # turned: busy, or idle
        self._ping_at: float | None = None

    @property
    def open(self) -> bool:
        """Does it take requests, now or when one of those under way has ended?"""
        return self._greeted.is_set() and not self._retired and self._lost is None

    @property
    def room(self) -> int:
        """How many more requests it takes now."""
        if not self.open or len(self._unsent) >= UNSENT_LIMIT:
            return 0
        limit = min(self._h2.remote_settings.max_concurrent_streams, STREAMS_LIMIT)
        return limit - len(self._exchanges)

    @property
    def load(self) -> int:
        """Requests under way."""
        return len(self._exchanges)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Live until retired and done, or lost. `started()` once the peer has spoken; TransportError if it does not.

        Waiting for the peer's first frame costs half a round trip once. It brings the limit on streams, and, as TLS
        1.3 has it, whether our certificate was accepted.
        """
        codes = h2.settings.SettingCodes
        self._h2.greet({codes.ENABLE_PUSH: 0, codes.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES}, CONNECTION_WINDOW_BYTES)
        started = False
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    nursery.start_soon(self._write)
                    await self._greeted.wait()
                    task_status.started()
                    started = True
        finally:
            if self._lost is None:
                self._lose("the node stops")
            with trio.move_on_after(CLOSE_S, shield=True), suppress(trio.BrokenResourceError):
                await self._stream.aclose()
            await trio.aclose_forcefully(self._stream)
        if not started:
            raise TransportError(self._lost or "the connection ended")

    async def request(self, head: Head, body: bytes) -> Response:
        """One exchange. The caller has seen `room`. Raises NotProcessed, AnswerLost, TransportError."""
        exchange = self._begin(head, body)
        try:
            while exchange.rest and not exchange.over.is_set():
                if not self._send_some(exchange):
                    await self._progress.park()
            await exchange.over.wait()
        finally:
            self._end(exchange)
        return exchange.response()

    def retire(self) -> None:
        """Take no further request; close when those under way have ended."""
        if not self._retired:
            self._retired = True
            self._changed()
        if not self._exchanges and self._lost is None and not self._parting:
            self._parting = True
            with suppress(h2.exceptions.ProtocolError):  # the peer has broken the connection's state
                self._h2.close_connection()
            self._wake.set()

    def tend(self, now: float) -> None:
        """What time brings: pings, and the end of idle, old and silent connections. Called once in a while."""
        settings = self._settings
        if self._ping_at is not None and self._heard_at < self._ping_at:
            if now - self._ping_at >= settings.ping_timeout_s:
                self._lose("the peer does not answer a ping")
        elif self._exchanges:
            self._ping_at = None
            if now - max(self._heard_at, self._turned_at) >= settings.ping_interval_s and self._lost is None:
                self._ping_at = now
                self._h2.ping(b"sdcpd   ")
                self._wake.set()
            if now - self._made_at >= settings.max_connection_age_s:
                self.retire()
        elif self._retired or now - self._turned_at >= settings.idle_connection_timeout_s:
            self.retire()

    def _begin(self, head: Head, body: bytes) -> _Exchange:
        """Put the request into h2's buffer, all of it if it is small."""
        assert self.room > 0, "the caller looks first"
        number = self._h2.get_next_available_stream_id()
        self._h2.send_headers(number, head, end_stream=not body)
        exchange = _Exchange(number, memoryview(body), self._settings.max_answer_bytes)
        if not self._exchanges:
            self._turned_at = self._clock.now()
        self._exchanges[number] = exchange
        self._unsent.append(exchange)
        if number >= STREAM_NUMBERS_LIMIT:
            self.retire()
        if body:
            self._send_some(exchange)
        self._wake.set()
        return exchange

    def _send_some(self, exchange: _Exchange) -> bool:
        """What of the body can go now; False when that is nothing."""
        moved = 0
        try:
            moved = self._h2.send_some(exchange.number, exchange.rest, OUTBOX_BYTES - self._outbox_bytes)
            exchange.rest = exchange.rest[moved:]
            self._outbox_bytes += moved
        except h2.exceptions.ProtocolError as error:  # reset by the peer, whose reason is being read
            exchange.fail(AnswerLost(f"the peer takes no more of the body: {error}"))
        if moved:
            self._wake.set()
        return moved > 0

    def _end(self, exchange: _Exchange) -> None:
        """The caller has its answer, or has given up: the place is free."""
        del self._exchanges[exchange.number]
        if not self._exchanges:
            self._turned_at = self._clock.now()
        if self._lost is not None:
            return
        if not exchange.reset and (not exchange.over.is_set() or exchange.rest or exchange.failure is not None):
            with suppress(h2.exceptions.ProtocolError):  # the peer was first
                self._h2.reset_stream(exchange.number, h2.errors.ErrorCodes.CANCEL)
            self._wake.set()
        if self._retired:
            self.retire()
        else:
            self._changed()

    def _lose(self, reason: str) -> None:
        """The connection is no more. Idempotent."""
        if self._lost is not None:
            return
        self._lost = reason
        for exchange in self._exchanges.values():
            exchange.fail(AnswerLost(reason) if exchange.sent else NotProcessed(reason))
        self._progress.unpark_all()
        self._scope.cancel()
        self._changed()

    async def _write(self) -> None:
        try:
            while True:
                octets = self._h2.data_to_send()
                if octets:
                    self._mark_sent()
                    await self._stream.send_all(octets)
                    self._progress.unpark_all()
                elif self._parting:
                    self._lose("the connection was closed")
                    return
                else:
                    await self._wake.wait()
                    self._wake = trio.Event()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._lose(f"the connection broke: {error.__cause__ or error}")

    def _mark_sent(self) -> None:
        """From here on nobody can tell how much of what is in the buffer will arrive."""
        full = len(self._unsent) >= UNSENT_LIMIT
        for exchange in self._unsent:
            exchange.sent = True
        self._unsent.clear()
        self._outbox_bytes = 0
        if full:
            self._changed()

    async def _read(self) -> None:
        try:
            while octets := await self._stream.receive_some(READ_BYTES):
                self._heard_at = self._clock.now()
                for event in self._h2.receive_data(octets):
                    self._take(event)
                if self._h2.unsent_bytes:
                    self._wake.set()
                while self._h2.unsent_bytes > UNSENT_LIMIT_BYTES:
                    await self._progress.park()
            self._lose("the peer closed the connection")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._lose(f"the connection broke: {error.__cause__ or error}")
        except h2.exceptions.ProtocolError as error:
            self._lose(f"the peer breaks HTTP/2: {error}")

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived(stream_id=int(number)):
                if number in self._exchanges:
                    _read_head(self._exchanges[number], event.headers or ())
            case h2.events.DataReceived(stream_id=int(number), flow_controlled_length=int(size)):
                self._h2.acknowledge_received_data(size, number)
                if number in self._exchanges:
                    self._add(self._exchanges[number], event.data or b"")
            case h2.events.StreamEnded(stream_id=int(number)):
                self._over(number, None)
            case h2.events.StreamReset(stream_id=int(number)):
                if number in self._exchanges:
                    self._exchanges[number].reset = True
                refused = event.error_code == h2.errors.ErrorCodes.REFUSED_STREAM
                failure = NotProcessed if refused else AnswerLost
                self._over(number, failure(f"the peer reset the request (code {event.error_code})"))
            case h2.events.ConnectionTerminated(last_stream_id=int(last)):
                self._farewell(last, event.error_code)
            case h2.events.RemoteSettingsChanged():
                self._greeted.set()
                self._progress.unpark_all()
                self._changed()
            case h2.events.WindowUpdated():
                self._progress.unpark_all()
            case _:
                pass  # pings, informational answers, trailers, acknowledged settings, unknown frames

    def _add(self, exchange: _Exchange, octets: bytes) -> None:
        if exchange.over.is_set():
            return
        exchange.body += octets
        if len(exchange.body) > exchange.limit_bytes:
            exchange.body.clear()
            exchange.fail(AnswerLost(f"the answer is longer than {exchange.limit_bytes} octets"))

    def _over(self, number: int, failure: TransportError | None) -> None:
        exchange = self._exchanges.get(number)
        if exchange is None:
            return
        if failure is not None:
            exchange.fail(failure)
        exchange.over.set()
        if exchange.rest:
            self._progress.unpark_all()

    def _farewell(self, last: int, code: Any) -> None:
        """GOAWAY: what lies beyond `last` was not looked at, the rest will be answered."""
        for number, exchange in self._exchanges.items():
            if number > last:
                exchange.fail(NotProcessed(f"the peer goes away (code {code})"))
                if exchange.rest:
                    self._progress.unpark_all()
        self.retire()


def _read_head(exchange: _Exchange, head: Sequence[tuple[bytes, bytes]]) -> None:
    for raw_name, raw_value in head:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name == ":status":
            if len(value) != 3 or not value.isdecimal():
                exchange.fail(AnswerLost("the answer has no status"))
            else:
                exchange.status = int(value)
        else:
            exchange.headers[name] = f"{exchange.headers[name]}, {value}" if name in exchange.headers else value
