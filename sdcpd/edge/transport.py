"""The seam to the network: one request in, one response out. Everything above it is the same on a wire and without.

A transport belongs to one caller: who that is, is settled before any octet of a message (by the client certificate on
a wire, by construction in one process). An exchange ends in a Response, whatever its status, or in TransportError,
which means that the request may or may not have been carried out.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

import trio
from msgspec import Struct

from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.roles.ports import Peer

REQUESTS_LIMIT: Final = 8192
"""Exchanges under way in one process: long polls of all sessions, several each. One more is answered 503."""


class Request(Struct, frozen=True):
    """`path` is relative to the base URI, still percent-encoded; `query` is what follows `?`.

    Header names are lower-case. `bulk`: its body or its answer may be large, it does not wait at the peer, and asking
    twice is asking once.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = {}
    body: bytes = b""
    bulk: bool = False


class Response(Struct, frozen=True):
    """Header names are lower-case."""

    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""


class TransportError(Exception):
    """No response. The request may or may not have been carried out."""


class Transport(Protocol):
    """Raises TransportError. Cancelling an exchange gives up the answer, not the request."""

    async def exchange(self, base_uri: str, request: Request) -> Response: ...


Handler = Callable[[Peer, Request], Awaitable[Response]]
"""What serves one base URI: a Dispatcher's `handle`."""


class LoopbackNetwork:
    """The base URIs that are served in this process."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._under_way = 0

    def serve(self, base_uri: str, handler: Handler) -> None:
        """From now on requests to this base URI reach `handler`. Raises ValueError for what is no base URI."""
        base_uri = normalize_base_uri(base_uri)
        assert base_uri not in self._handlers, f"{base_uri} is served already"
        self._handlers[base_uri] = handler

    def withdraw(self, base_uri: str) -> None:
        """From now on this base URI is unknown."""
        del self._handlers[normalize_base_uri(base_uri)]

    def transport(self, caller: Peer) -> "LoopbackTransport":
        """A transport that speaks for `caller`."""
        return LoopbackTransport(self, caller)

    async def carry(self, caller: Peer, base_uri: str, request: Request) -> Response:
        handler = self._handlers.get(base_uri)
        if handler is None:
            raise TransportError(f"nothing is served at {base_uri}")
        if self._under_way >= REQUESTS_LIMIT:
            return Response(status=503, headers={"retry-after": "1"})
        self._under_way += 1
        try:
            return await handler(caller, request)
        finally:
            self._under_way -= 1


class LoopbackTransport:
    """Transport within the process: the callee's handler runs in the caller's task.

    As on a wire an exchange always suspends, and a caller that is cancelled takes its handler's
    wait with it, nothing else: handlers only wait for tasks that their role owns.
    """

    def __init__(self, network: LoopbackNetwork, caller: Peer) -> None:
        self._network = network
        self._caller = caller

    async def exchange(self, base_uri: str, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return await self._network.carry(self._caller, base_uri, request)
