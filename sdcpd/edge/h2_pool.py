"""The connections to one peer for one class of requests: found, opened, and opened again.

A request takes the connection with the fewest under way. When none has a place, one more is opened, up to a limit, and
the request waits in line, of bounded length. When a connection cannot be made, all that wait for it are told, and the
next attempt is a while away, longer each time up to a limit: whoever asks in between waits for that attempt. So a dead
peer costs one attempt a second, and a restarted one is found within a second, whatever goes on above.

A request is made again here in two cases only (decision 36 leaves all others to the roles): when the peer has provably
not looked at it, and when it is a GET, which changes nothing.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from sdcpd.edge.h2_client import AnswerLost, ClientConnection, Head, NotProcessed
from sdcpd.edge.identity import CertificateNames
from sdcpd.edge.transport import Response, TransportError
from sdcpd.edge.wire_settings import PeerClientSettings
from sdcpd.roles.ports import Clock

ATTEMPTS: Final = 3
"""Of one request. The second meets a fresh connection; a peer that is being restarted may take that from it too."""
FIRST_BACKOFF_S: Final = 0.05
LAST_BACKOFF_S: Final = 1.0

Dial = Callable[[], Awaitable[tuple[trio.abc.Stream, CertificateNames | None]]]
"""A new stream to the peer, its handshake done, and the names in its certificate. Raises TransportError."""


class PeerPool:
    """Its connections are tasks of `nursery`."""

    def __init__(self, dial: Dial, settings: PeerClientSettings, clock: Clock, nursery: trio.Nursery) -> None:
        self._dial: Final = dial
        self._settings: Final = settings
        self._clock: Final = clock
        self._nursery: Final = nursery
        self._connections: Final[dict[ClientConnection, None]] = {}
        self._waiting: Final = trio.lowlevel.ParkingLot()
        self._connecting = False
        self._attempts_failed = 0
        self._failure = ""
        self._backoff_s = 0.0
        self._not_before = clock.now()
        self._closed = False

    @property
    def unused(self) -> bool:
        """May it be forgotten?"""
        return not (self._connections or self._connecting or self._waiting)

    @property
    def connections(self) -> int:
        """Those that are open, retired ones included."""
        return len(self._connections)

    async def exchange(
        self, head: Head, body: bytes, repeatable: bool, admit: Callable[[CertificateNames | None], None]
    ) -> Response:
        """One request. `admit` looks at the peer's names and raises TransportError. Raises TransportError."""
        attempt = 1
        while True:
            connection = await self._connection()
            try:
                admit(connection.names)
            except TransportError:
                self._look_again()  # the place stays free
                raise
            try:
                return await connection.request(head, body)
            except NotProcessed:
                if attempt >= ATTEMPTS:
                    raise
            except AnswerLost:
                if attempt >= ATTEMPTS or not repeatable:
                    raise
            attempt += 1

    def close(self) -> None:
        """The nursery is going: nothing is asked any more."""
        self._closed = True
        self._waiting.unpark_all()

    def retire(self) -> None:
        """Have new requests make new connections. Those under way end where they are."""
        for connection in list(self._connections):
            connection.retire()

    def tend(self, now: float) -> None:
        """What time brings to its connections. Called once in a while."""
        for connection in list(self._connections):
            connection.tend(now)

    async def _connection(self) -> ClientConnection:
        """One with a place, which the caller must take before it suspends. Raises TransportError."""
        while True:
            if self._closed:
                raise TransportError("the node stops")
            found = [connection for connection in self._connections if connection.room > 0]
            if found:
                return min(found, key=_load)
            if not self._connecting and self._open() < self._settings.max_connections:
                self._connecting = True
                self._nursery.start_soon(self._connect)
            if len(self._waiting) >= self._settings.max_waiting:
                raise TransportError(f"{len(self._waiting)} requests wait for this peer already")
            failed = self._attempts_failed
            await self._waiting.park()
            if self._attempts_failed != failed and not self._open():
                raise TransportError(self._failure)

    def _open(self) -> int:
        return sum(connection.open for connection in self._connections)

    def _look_again(self) -> None:
        """A place has become free, or a connection has gone: as many as can go on, or all."""
        if self._waiting:
            room = sum(connection.room for connection in self._connections)
            self._waiting.unpark(count=room if room > 0 else len(self._waiting))

    async def _connect(self) -> None:
        """One attempt, when its time has come."""
        try:
            await self._clock.sleep_until(self._not_before)
            with trio.fail_after(self._settings.connect_timeout_s):
                stream, names = await self._dial()
                connection = ClientConnection(stream, names, self._settings, self._clock, self._look_again)
                await self._nursery.start(self._run, connection)
        except TransportError as error:
            self._fail(str(error))
        except trio.TooSlowError:
            self._fail(f"no connection within {self._settings.connect_timeout_s:g} s")
        else:
            self._backoff_s = 0.0
        finally:
            self._connecting = False
            self._waiting.unpark_all()

    def _fail(self, reason: str) -> None:
        self._attempts_failed += 1
        self._failure = reason
        self._backoff_s = min(max(2 * self._backoff_s, FIRST_BACKOFF_S), LAST_BACKOFF_S)
        self._not_before = self._clock.now() + self._backoff_s

    async def _run(self, connection: ClientConnection, *, task_status: trio.TaskStatus[None]) -> None:
        self._connections[connection] = None
        try:
            await connection.run(task_status=task_status)
        finally:
            del self._connections[connection]
            self._look_again()


def _load(connection: ClientConnection) -> int:
    return connection.load
