"""The ASGI skin over the dispatchers of a node's roles, on one port.

A request's path begins with the path of a role's base URI (`/verifier/`), which chooses the role; the connection's
identity and the field `sdcpd-as` say who is calling (identity.py). The body is collected under the cap of its route:
what goes beyond is not read, and the dispatcher, shown the one octet too many, refuses in its own order (no such
resource, no such method, not for this role, too large). All refusals are problem details.

The task of a request only waits (style rule 9): when its peer leaves, by a reset stream or a lost connection, it is
cancelled, and with it the handler's wait, nothing else.

An exception of a handler is our own fault. The dispatcher has logged it; the peer is told 500 and no more; and it goes
to `on_failure`, by which the node takes it to the role's nursery and ends (style rule 7). `Failures` is one way.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final

import trio
from msgspec import Struct

from sdcpd.edge.h2_server import GONE
from sdcpd.edge.identity import AS_FIELD
from sdcpd.edge.problem_body import problem_response
from sdcpd.edge.transport import REQUESTS_LIMIT, Handler, Request, Response
from sdcpd.protocol.problems import Overloaded, Problem, UnknownResource

BODIES_LIMIT_BYTES: Final = 256 << 20
"""Bodies of all requests under way together; one that would go beyond is answered 503."""
BODY_TIMEOUT_S: Final = 60.0
"""For a whole body. The largest objects arrive in less over 1 Gbit/s; who dribbles holds memory."""
ANSWER_TIMEOUT_S: Final = 120.0
"""For an answer to be taken. A peer that opens no window for it holds memory; its stream is reset then."""
IDENTITY: Final = "identity"
"""Key of the connection's Identity in the state that the server hands in."""

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class RequestTimeout(Problem):
    """The body did not arrive in time."""

    status: ClassVar[int] = 408
    title: ClassVar[str] = "Request timeout"


class ServerFault(Problem):
    """Our own fault, of which the peer learns nothing more."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"


class Mount(Struct, frozen=True):
    """A role on this port. `prefix` is the path of its base URI; `body_limit_bytes` is the dispatcher's."""

    prefix: str
    handler: Handler
    body_limit_bytes: Callable[[str, str], int]


class Failures:
    """Takes the first exception of a handler from a request's task to a task that the node owns."""

    def __init__(self) -> None:
        self._first: Exception | None = None
        self._some: Final = trio.Event()

    def report(self, error: Exception) -> None:
        """`on_failure` of a PeerApp."""
        if self._first is None:
            self._first = error
            self._some.set()

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Raises the first exception that is reported, in the nursery that runs this."""
        task_status.started()
        await self._some.wait()
        assert self._first is not None
        raise self._first


class PeerApp:
    """The ASGI application of the SDCP port. Roles can be added and taken away while it serves."""

    def __init__(self, on_failure: Callable[[Exception], None], mounts: Sequence[Mount] = ()) -> None:
        self._on_failure: Final = on_failure
        self._mounts: Final[dict[str, Mount]] = {}
        self._under_way = 0
        self._bodies_bytes = 0
        for mount in mounts:
            self.serve(mount)

    def serve(self, mount: Mount) -> None:
        """From now on requests below this prefix reach its handler."""
        assert mount.prefix.startswith("/"), mount.prefix
        assert mount.prefix.endswith("/"), mount.prefix
        assert mount.prefix not in self._mounts, f"{mount.prefix} is served already"
        self._mounts[mount.prefix] = mount

    def withdraw(self, prefix: str) -> None:
        """From now on nothing is served below this prefix."""
        del self._mounts[prefix]

    @property
    def under_way(self) -> int:
        """Requests that are being read, handled or answered."""
        return self._under_way

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return  # a WebSocket request; the server refuses it
        body = _Body()
        self._under_way += 1
        try:
            with trio.CancelScope() as wait:
                await self._serve(scope, receive, send, body, wait)
        finally:
            self._under_way -= 1
            self._bodies_bytes -= body.size

    async def _serve(self, scope: Any, receive: Receive, send: Send, body: "_Body", wait: trio.CancelScope) -> None:
        """One request, to the last octet of its answer. Its peer's leaving cancels `wait`."""
        try:
            mount, request = self._open(scope)
            peer = scope["state"][IDENTITY].caller(request.headers.get(AS_FIELD))
            if not await self._collect(receive, mount.body_limit_bytes(request.method, request.path), body):
                return  # the peer has left already
        except Problem as problem:
            scope["extensions"][GONE](wait.cancel)
            await _answer(send, problem_response(problem))
            return
        scope["extensions"][GONE](wait.cancel)
        try:
            asked = Request(request.method, request.path, request.query, request.headers, body.octets())
            response = await mount.handler(peer, asked)
        except Exception as error:
            self._on_failure(error)
            await _answer(send, problem_response(ServerFault("this node has failed")))
            raise
        await _answer(send, response)

    def _open(self, scope: Any) -> tuple[Mount, Request]:
        """The role that is asked, and the request without its body. Raises Problem."""
        if self._under_way > REQUESTS_LIMIT:
            raise Overloaded("too many requests are under way", retry_after_s=1)
        path = scope["raw_path"].decode("ascii")
        for prefix, mount in self._mounts.items():
            if path.startswith(prefix):
                request = Request(
                    method=scope["method"],
                    path=path[len(prefix) :],
                    query=scope["query_string"].decode("latin-1"),
                    headers=_fields(scope["headers"]),
                )
                return mount, request
        raise UnknownResource("no such resource")

    async def _collect(self, receive: Receive, limit_bytes: int, body: "_Body") -> bool:
        """Take the body up to the first octet beyond the limit; False when the peer left. Raises Problem."""
        with trio.move_on_after(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                piece: bytes = message["body"][: limit_bytes + 1 - body.size]
                if piece:
                    body.pieces.append(piece)
                    body.size += len(piece)
                    self._bodies_bytes += len(piece)
                if not message["more_body"] or body.size > limit_bytes:
                    return True
                if self._bodies_bytes > BODIES_LIMIT_BYTES:
                    raise Overloaded("too many bodies are under way", retry_after_s=1)
        raise RequestTimeout(f"the body has not arrived within {BODY_TIMEOUT_S:.0f} s")


class _Body:
    """What has come of one body."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0

    def octets(self) -> bytes:
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


async def _answer(send: Send, response: Response) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in response.headers.items()]
    if response.status not in (204, 304) and "content-length" not in response.headers:  # HEAD says it without a body
        headers.append((b"content-length", b"%d" % len(response.body)))
    with trio.move_on_after(ANSWER_TIMEOUT_S):
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": False})


def _fields(pairs: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Header fields by lower-case name; a repeated field is one list (RFC 9110 section 5.3)."""
    fields: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields
