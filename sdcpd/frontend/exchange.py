"""One HTTP exchange over ASGI: the body in, one answer or stream out, and whether the client is still there.

Three traits of the server below us (hypercorn) shape this file. It does not tell the sender that a client has left,
so that is watched for beside the work. An answer sent before the body was read resets the connection, or breaks it for
all streams that share it, so what is unread is read and dropped first, within limits. And a client that takes nothing
blocks the sender, so sending has a deadline.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import trio

from sdcpd.frontend.errors import ApiError

Scope = Mapping[str, Any]
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Work = Callable[[trio.Nursery], Awaitable[None]]

JSON: Final = "application/json"
SECRET_HEADERS: Final = ("authorization", "cookie", "proxy-authorization")
SKIP_FACTOR: Final = 4
"""How many times the body limit is read and dropped before answering 413: enough for honest mistakes to see it."""


class ClientGone(Exception):
    """The client has left, or takes nothing. There is nobody to answer."""


class Exchange:
    """Made for one request, used by its tasks. Sending is for one task at a time."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        request_id: str,
        body_limit: int,
        body_s: float,
        send_s: float,
    ) -> None:
        self.method: Final[str] = scope["method"]
        self.path: Final[str] = scope["path"]
        self.request_id: Final = request_id
        self.status: int | None = None  # of the answer, once it began
        self._added: list[tuple[str, str]] = []
        self._scope: Final = scope
        self._receive: Final = receive
        self._asgi_send: Final = send
        self._body_limit: Final = body_limit
        self._body_s: Final = body_s
        self._send_s: Final = send_s
        self._body_read = False
        self._ending = False  # the last piece is on its way; hypercorn may report its own closing as the client's

    def header(self, name: str) -> str | None:
        """A request header, the first of that name."""
        return header(self._scope, name)

    def add_headers(self, headers: tuple[tuple[str, str], ...]) -> None:
        """Headers of the answer, whichever it will be. No effect once it has begun."""
        self._added += headers

    def shown_headers(self) -> tuple[tuple[str, str], ...]:
        """All request headers but those that are secrets, names in lower case."""
        pairs = ((key.lower().decode("latin-1"), value.decode("latin-1")) for key, value in self._scope["headers"])
        return tuple(pair for pair in pairs if pair[0] not in SECRET_HEADERS)

    async def read_body(self) -> bytes:
        """The whole body. Raises ApiError (408, 413) and ClientGone."""
        body = bytearray()
        with trio.move_on_after(self._body_s):
            while not self._body_read:
                body += await self._receive_body()
                if len(body) > self._body_limit:
                    raise ApiError(413, f"the body is larger than {self._body_limit} bytes", code="body_too_large")
            return bytes(body)
        raise ApiError(408, f"the body did not arrive within {self._body_s:g} s", code="body_timeout")

    async def until_gone(self, work: Work) -> None:
        """Do `work` with a nursery for its helpers, and drop it at once when the client leaves.

        To be called once the body is read. Raises ClientGone, and the ApiError that `work` raised.
        """
        refusal: ApiError | None = None
        gone = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            try:
                await work(nursery)
                gone = False
            except ApiError as error:
                refusal, gone = error, False
            except ClientGone:
                pass
            nursery.cancel_scope.cancel()
        if refusal is not None:
            raise refusal
        if gone:
            raise ClientGone

    async def answer(
        self, status: int, body: bytes, *, content_type: str = JSON, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """A whole answer. Raises ClientGone."""
        await self._skip_body()
        await self._start(status, (("content-type", content_type), ("content-length", str(len(body))), *headers))
        await self._send_last(body)

    async def open_stream(self, *, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Begin an answer with status 200 whose length is not known. The body must be read. Raises ClientGone."""
        assert self._body_read, "answering before the body is read breaks the connection"
        await self._start(200, (("content-type", content_type), ("cache-control", "no-cache"), *headers))

    async def write(self, piece: bytes) -> None:
        """A piece of the stream. Raises ClientGone."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def close_stream(self) -> None:
        """The end of the stream. Raises ClientGone."""
        await self._send_last(b"")

    async def _start(self, status: int, headers: tuple[tuple[str, str], ...]) -> None:
        assert self.status is None, "one answer per request"
        self.status = status
        pairs = (*headers, *self._added, ("x-request-id", self.request_id))
        encoded = [(name.encode("ascii"), value.encode("latin-1")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _send(self, message: dict[str, Any]) -> None:
        with trio.move_on_after(self._send_s) as deadline:
            await self._asgi_send(message)
        if deadline.cancelled_caught:
            raise ClientGone

    async def _send_last(self, piece: bytes) -> None:
        self._ending = True
        await self._send({"type": "http.response.body", "body": piece, "more_body": False})

    async def _receive_body(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._body_read = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def _skip_body(self) -> None:
        """Read and drop what is left of the body, within limits. One that goes on costs its connection."""
        dropped = 0
        with trio.move_on_after(self._body_s):
            while not self._body_read and dropped <= SKIP_FACTOR * self._body_limit:
                dropped += len(await self._receive_body())

    async def _watch(self, scope: trio.CancelScope) -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await self._receive()
        if not self._ending:
            scope.cancel()


def header(scope: Scope, name: str) -> str | None:
    """A request header, the first of that name (lower case)."""
    wanted = name.encode("ascii")
    for key, value in scope["headers"]:
        if key.lower() == wanted:
            text: str = value.decode("latin-1")
            return text
    return None
