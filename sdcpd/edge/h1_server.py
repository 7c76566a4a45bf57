"""HTTP/1.1 from a peer, for large bodies: one request after the other on a connection of its own.

In Python each octet of an HTTP/2 body costs several copies, and a turn of the loop for each frame and window; a body of
HTTP/1.1 goes from memory into TLS, and out of it into memory, as it is (protocol/README.md has the figures). So a peer
that has chosen it at the handshake (ALPN `http/1.1`) may read and write the node's cache by it, under the same
certificates and through the same dispatch. Heads are read and written by h11; bodies pass it by.

What a peer may do, and what becomes of it:

- It sends a body without its length (chunked): 411. A head that is none, or too long: 400 or 431. Then it is closed.
- It sends more than the application wants: answered, and closed, since what is left would be read as a request.
- It takes nothing of an answer, or dribbles: costs the connection, after `stalled_s` or the body's own time.
- It leaves while it is being answered: noticed when the answer is written. Nothing that waits long is asked this way.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import h11
import structlog
import trio

from sdcpd.edge.h2_frames import CLOSE_S
from sdcpd.edge.h2_server import App, DateField
from sdcpd.edge.identity import Identity
from sdcpd.edge.tls_stream import PIECE_BYTES
from sdcpd.edge.transport import Request, Response
from sdcpd.roles.ports import Clock

log = structlog.get_logger(__name__)

HEAD_BYTES: Final = 16 << 10
"""As over HTTP/2: ours have a few hundred octets."""
FIRST_READ_BYTES: Final = 16 << 10
"""While a head is awaited."""

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Refused(Exception):
    """What came is no request of ours; the answer's status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Body:
    """A request's body as the application takes it: read from the stream only when it is wanted."""

    def __init__(self, stream: trio.abc.Stream, begun: bytes, length: int, *, wants_continue: bool) -> None:
        self._stream: Final = stream
        self._begun = begun
        self._left = length
        self._wants_continue = wants_continue

    @property
    def ended(self) -> bool:
        """Has all of it come?"""
        return self._left <= len(self._begun)

    @property
    def taken(self) -> bool:
        """Has all of it been received?"""
        return not self._left

    async def receive(self) -> tuple[bytes, bool]:
        """The next piece, and whether more is to come. Raises BrokenResourceError when the peer leaves before."""
        octets, self._begun = self._begun, b""
        if not octets and self._left:
            if self._wants_continue:
                self._wants_continue = False
                await self._stream.send_all(CONTINUE)
            octets = bytes(await self._stream.receive_some(min(self._left, PIECE_BYTES)))  # bytes already, no copy
            if not octets:
                raise trio.BrokenResourceError("the peer left in the middle of a body")
        self._left -= len(octets)
        return octets, self._left > 0


class BulkConnection:
    """A connection over a stream whose handshake is done, and which it closes. `identity`: who is calling."""

    def __init__(
        self, app: App, identity: Identity, stream: trio.abc.Stream, clock: Clock, *, stalled_s: float
    ) -> None:
        self._app: Final = app
        self._identity: Final = identity
        self._stream: Final = stream
        self._clock: Final = clock
        self._stalled_s: Final = stalled_s
        self._date: Final = DateField(clock)
        self._scope: Final = trio.CancelScope()
        self._waiting: trio.CancelScope | None = None  # for a request
        self._idle_since = clock.now()
        self._writing_since: float | None = None
        self._over = b""  # of the next request, come with the last
        self.requests = 0
        self.retired_at: float | None = None

    def idle_s(self) -> float:
        """For how long no request has been under way."""
        return 0.0 if self.requests else self._clock.now() - self._idle_since

    async def run(self) -> None:
        """Serve until either side closes."""
        try:
            with self._scope:
                while await self._exchange():
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the peer has gone
        finally:
            with trio.move_on_after(CLOSE_S, shield=True), suppress(trio.BrokenResourceError):
                await self._stream.aclose()
            await trio.aclose_forcefully(self._stream)

    def retire(self) -> None:
        """Take no further request."""
        if self.retired_at is None:
            self.retired_at = self._clock.now()
            if self._waiting is not None:
                self._waiting.cancel()

    def tend(self) -> None:
        """Drop a peer that takes nothing. Called once in a while."""
        if self._writing_since is not None and self._clock.now() - self._writing_since >= self._stalled_s:
            self.cut()

    def cut(self) -> None:
        """End it now, whatever is under way."""
        self._scope.cancel()

    async def _exchange(self) -> bool:
        """One request and its answer; False when it was the last."""
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        try:
            head = await self._head(parser)
            if head is None:
                return False
            request, length = _read_head(head)
        except _Refused as refused:
            await self._send(_written(refused.status, (), 0, self._date.text(), last=True), b"")
            return False
        begun = bytes(parser.trailing_data[0])
        self._over = begun[length:]
        body = Body(self._stream, begun[:length], length, wants_continue=parser.they_are_waiting_for_100_continue)
        self.requests = 1
        try:
            return await self._serve(request, body)
        finally:
            self.requests = 0
            self._idle_since = self._clock.now()

    async def _serve(self, request: Request, body: Body) -> bool:
        answered = False

        async def answer(response: Response) -> None:
            nonlocal answered
            last = self.retired_at is not None or not body.taken
            octets = b"" if request.method == "HEAD" else response.body
            fields = [*response.headers.items()]
            says_none = response.status in (204, 304) or "content-length" in response.headers  # HEAD says its own
            length = None if says_none else len(response.body)
            await self._send(_written(response.status, fields, length, self._date.text(), last=last), octets)
            answered = not last

        await self._app(self._identity, request, body, answer)
        if not body.taken:  # closing with octets unread would reset the connection, and the answer with it
            with trio.move_on_after(CLOSE_S):
                while not body.taken:
                    await body.receive()
        return answered

    async def _head(self, parser: h11.Connection) -> h11.Request | None:
        """The next request; None when the peer, or we, want no more."""
        octets, self._over = self._over, b""
        while True:
            try:
                if octets:
                    parser.receive_data(octets)
                event = parser.next_event()
            except h11.RemoteProtocolError as error:
                log.warning("bulk connection dropped", fault=str(error))
                raise _Refused(error.error_status_hint) from error
            if isinstance(event, h11.Request):
                return event
            if self.retired_at is not None:
                return None
            octets = b""
            with trio.CancelScope() as self._waiting:
                octets = bytes(await self._stream.receive_some(FIRST_READ_BYTES))
            self._waiting = None
            if not octets:
                return None

    async def _send(self, head: bytes, body: bytes) -> None:
        """A small answer in one record; of a large one no copy is made as a whole."""
        self._writing_since = self._clock.now()
        try:
            begun = PIECE_BYTES - len(head)
            await self._stream.send_all(head + body[:begun] if body else head)
            rest = memoryview(body)[begun:]
            while rest:
                self._writing_since = self._clock.now()
                await self._stream.send_all(rest[:PIECE_BYTES])
                rest = rest[PIECE_BYTES:]
        finally:
            self._writing_since = None


def _read_head(event: h11.Request) -> tuple[Request, int]:
    """The request without its body, and how long that is. Raises _Refused."""
    fields: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    if "transfer-encoding" in fields:
        raise _Refused(411)
    target = event.target.decode("latin-1")
    if not target.startswith("/") or not target.isascii():
        raise _Refused(400)
    path, _, query = target.partition("?")
    for hop in ("host", "connection", "expect", "keep-alive"):  # of this connection, not of the message
        fields.pop(hop, None)
    request = Request(method=event.method.decode("ascii"), path=path, query=query, headers=fields)
    return request, int(fields.get("content-length", "0"))


def _written(status: int, fields: Sequence[tuple[str, str]], length: int | None, date: bytes, *, last: bool) -> bytes:
    """An answer's head."""
    lines = [b"HTTP/1.1 %d %s" % (status, _REASONS.get(status, b""))]
    lines += [f"{name}: {value}".encode("latin-1") for name, value in fields]
    if length is not None:
        lines.append(b"content-length: %d" % length)
    lines.append(b"date: " + date)
    if last:
        lines.append(b"connection: close")
    return b"\r\n".join((*lines, b"", b""))


_REASONS: Final = {200: b"OK", 201: b"Created", 204: b"No Content", 206: b"Partial Content", 304: b"Not Modified"}
"""For people; nobody else reads them."""
