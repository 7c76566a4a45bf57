"""HTTP/1.1 to one peer, for large bodies: as many connections as there are exchanges at a time (h1_server.py).

An exchange has a connection to itself, from its head to the last octet of its answer, and gives it back; whatever ends
it before closes the connection. An idle one may have been closed by the peer in the meantime, of which we learn when we
use it: then the exchange is made once more, on a new connection. All that is asked this way may be asked twice: reads,
and the creation of what is written once.

The body of an answer is read into memory of its length, no octet of it is copied. A peer that does not take HTTP/1.1
is asked by HTTP/2 from then on.
"""

import io
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import h11
import trio

from sdcpd.edge.h2_client import AnswerLost, Head
from sdcpd.edge.identity import CertificateNames
from sdcpd.edge.tls_stream import PIECE_BYTES, TlsStream
from sdcpd.edge.transport import Response, TransportError
from sdcpd.edge.wire_settings import PeerClientSettings
from sdcpd.roles.ports import Clock

HEAD_BYTES: Final = 16 << 10
AGAIN_S: Final = 300.0
"""A peer that took no HTTP/1.1 may have been replaced by a newer one after so long."""

T = TypeVar("T")
Dial = Callable[[], Awaitable[tuple[TlsStream, CertificateNames] | None]]
"""A new stream to the peer, its handshake done, and the names in its certificate; None: it takes HTTP/2 only."""


class _Connection:
    def __init__(self, stream: TlsStream, names: CertificateNames, now: float) -> None:
        self.stream: Final = stream
        self.names: Final = names
        self.made_at: Final = now
        self.idle_since = now
        self.answering = False  # has the peer said anything to the exchange under way?


class BulkPool:
    """The connections to one peer. Closing them is the work of `nursery`."""

    def __init__(self, dial: Dial, settings: PeerClientSettings, clock: Clock, nursery: trio.Nursery) -> None:
        self._dial: Final = dial
        self._settings: Final = settings
        self._clock: Final = clock
        self._nursery: Final = nursery
        self._idle: Final[list[_Connection]] = []
        self._places: Final = trio.Semaphore(settings.max_connections)
        self._generation = 0
        self._busy = 0
        self._h2_only_until = clock.now()
        self._closed = False

    @property
    def usable(self) -> bool:
        """Does the peer take HTTP/1.1, as far as we know?"""
        return self._clock.now() >= self._h2_only_until

    @property
    def unused(self) -> bool:
        """May it be forgotten?"""
        return not (self._idle or self._busy)

    @property
    def connections(self) -> int:
        return len(self._idle) + self._busy

    async def exchange(
        self, head: Head, body: bytes, admit: Callable[[CertificateNames | None], None]
    ) -> Response | None:
        """One request; None: the peer takes HTTP/2 only. Raises TransportError."""
        if self._places.statistics().tasks_waiting >= self._settings.max_waiting:
            raise TransportError(f"{self._settings.max_waiting} requests wait for this peer already")
        async with self._places:
            while True:
                if self._closed:
                    raise TransportError("the node stops")
                used = bool(self._idle)
                connection = self._idle.pop() if used else await self._open()
                if connection is None:
                    return None
                try:
                    return await self._ask(connection, head, body, admit)
                except AnswerLost:
                    if not used or connection.answering:
                        raise

    def close(self) -> None:
        """The nursery is going: nothing is asked any more."""
        self._closed = True
        self.retire()

    def retire(self) -> None:
        """Have new requests make new connections. Those under way end where they are."""
        self._generation += 1
        self._drop(self._idle[:])

    def tend(self, now: float) -> None:
        """Close those that are idle for long, or old. Called once in a while."""
        settings = self._settings
        self._drop(
            [
                each
                for each in self._idle
                if now - each.idle_since >= settings.idle_connection_timeout_s
                or now - each.made_at >= settings.max_connection_age_s
            ]
        )

    def _drop(self, connections: list[_Connection]) -> None:
        for each in connections:
            self._idle.remove(each)
            self._nursery.start_soon(trio.aclose_forcefully, each.stream)

    async def _open(self) -> _Connection | None:
        with trio.move_on_after(self._settings.connect_timeout_s):
            found = await self._dial()
            if found is None:
                self._h2_only_until = self._clock.now() + AGAIN_S
                return None
            return _Connection(*found, self._clock.now())
        raise TransportError(f"no connection within {self._settings.connect_timeout_s:g} s")

    async def _ask(
        self, connection: _Connection, head: Head, body: bytes, admit: Callable[[CertificateNames | None], None]
    ) -> Response:
        """Whatever does not end well ends the connection."""
        generation, keep = self._generation, False
        self._busy += 1
        try:
            admit(connection.names)
            connection.answering = False
            response, keep = await self._converse(connection, head, body)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise AnswerLost(f"the connection broke: {error.__cause__ or error}") from error
        except h11.RemoteProtocolError as error:
            raise AnswerLost(f"the peer breaks HTTP/1.1: {error}") from error
        finally:
            self._busy -= 1
            if keep and generation == self._generation:
                connection.idle_since = self._clock.now()
                self._idle.append(connection)
            else:
                await trio.aclose_forcefully(connection.stream)
        return response

    async def _converse(self, connection: _Connection, head: Head, body: bytes) -> tuple[Response, bool]:
        """The answer, and whether the connection can be used again."""
        await self._say(connection, head, body)
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        method = dict(head)[b":method"]
        parser.send(h11.Request(method=method, target=b"/", headers=[(b"host", b"peer")]))
        event = await self._answer_head(connection, parser)
        fields = _fields(event)
        length = 0 if method == b"HEAD" or event.status_code in (204, 304) else _length(fields)
        if length > self._settings.max_answer_bytes:
            raise AnswerLost(f"the answer is longer than {self._settings.max_answer_bytes} octets")
        begun, _ = parser.trailing_data
        octets = await self._answer_body(connection, begun, length)
        keep = len(begun) <= length and "close" not in fields.get("connection", "").lower()
        return Response(status=event.status_code, headers=fields, body=octets), keep

    async def _say(self, connection: _Connection, head: Head, body: bytes) -> None:
        """The request. A peer that wants no more of it says why before it closes."""
        try:
            octets = _written(head)
            if len(body) <= PIECE_BYTES:
                await self._in_time(connection.stream.send_all(octets + body))
                return
            await self._in_time(connection.stream.send_all(octets))
            rest = memoryview(body)
            while rest:
                await self._in_time(connection.stream.send_all(rest[:PIECE_BYTES]))
                rest = rest[PIECE_BYTES:]
        except trio.BrokenResourceError:
            return  # whoever reads will find an answer, or say why there is none

    async def _answer_head(self, connection: _Connection, parser: h11.Connection) -> h11.Response:
        while True:
            event = parser.next_event()
            if isinstance(event, h11.Response):
                return event
            if isinstance(event, h11.InformationalResponse):
                continue
            octets = await self._in_time(connection.stream.receive_some(HEAD_BYTES))
            if not octets:
                raise AnswerLost("the peer closed the connection")
            connection.answering = True
            parser.receive_data(octets)

    async def _answer_body(self, connection: _Connection, begun: bytes, length: int) -> bytes:
        if len(begun) >= length:
            return begun[:length]
        whole = io.BytesIO(bytes(length))  # hands its memory out, not a copy of it
        with whole.getbuffer() as room:
            room[: len(begun)] = begun
            have = len(begun)
            while have < length:
                size = await self._in_time(connection.stream.receive_into(room[have : have + PIECE_BYTES]))
                if not size:
                    raise AnswerLost("the peer closed the connection in the middle of an answer")
                have += size
        return whole.getvalue()

    async def _in_time(self, waits: Awaitable[T]) -> T:
        """A peer that owes us something and is silent for as long as a ping may take has gone."""
        settings = self._settings
        with trio.move_on_after(settings.ping_interval_s + settings.ping_timeout_s):
            return await waits
        raise AnswerLost("the peer neither takes nor says anything")


def _written(head: Head) -> bytes:
    """The head of a request that is given as for HTTP/2."""
    pseudo = dict(head[:4])
    lines = [b"%s %s HTTP/1.1" % (pseudo[b":method"], pseudo[b":path"]), b"host: " + pseudo[b":authority"]]
    lines += [b"%s: %s" % (name, value) for name, value in head[4:]]
    return b"\r\n".join((*lines, b"", b""))


def _fields(event: h11.Response) -> dict[str, str]:
    fields: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


def _length(fields: dict[str, str]) -> int:
    if "transfer-encoding" in fields or "content-length" not in fields:
        raise AnswerLost("the answer does not say how long it is")
    return int(fields["content-length"])
