"""What the SDCP port answers with: the dispatchers of a node's roles, on one port.

A request's path begins with the path of a role's base URI (`/verifier/`), which chooses the role; the connection's
identity and the field `sdcpd-as` say who is calling (identity.py). The body is collected under the cap of its route:
what goes beyond is not read, and the dispatcher, shown the one octet too many, refuses in its own order (no such
resource, no such method, not for this role, too large). All refusals are problem details.

The task of a request only waits (style rule 9): when its peer leaves, by a reset stream or a lost connection, it is
cancelled (h2_server.py), and with it the handler's wait, nothing else.

An exception of a handler is our own fault. The dispatcher has logged it; the peer is told 500 and no more; and it goes
to `on_failure`, by which the node takes it to the role's nursery and ends (style rule 7). `Failures` is one way.
"""

import io
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import trio
from msgspec import Struct

from sdcpd.edge.h2_server import Incoming, Send
from sdcpd.edge.identity import AS_FIELD, Identity
from sdcpd.edge.problem_body import problem_response
from sdcpd.edge.transport import REQUESTS_LIMIT, Handler, Request, Response
from sdcpd.protocol.problems import Overloaded, Problem, UnknownResource

BODIES_LIMIT_BYTES: Final = 256 << 20
"""Bodies of all requests under way together; one that would go beyond is answered 503."""
BODY_TIMEOUT_S: Final = 60.0
"""For a whole body. The largest objects arrive in less over 1 Gbit/s; who dribbles holds memory."""


class RequestTimeout(Problem):
    """The body did not arrive in time."""

    status: ClassVar[int] = 408
    title: ClassVar[str] = "Request timeout"


class Misdirected(Problem):
    """Over HTTP/1.1 the cache is served, nothing else. Not 404, which tells of a lost session or log."""

    status: ClassVar[int] = 421
    title: ClassVar[str] = "Misdirected request"


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
    """The application of the SDCP port. Roles can be added and taken away while it serves."""

    def __init__(
        self, on_failure: Callable[[Exception], None], mounts: Sequence[Mount] = (), *, partial: bool = False
    ) -> None:
        """`partial`: the mounts are not all that this node serves on the port."""
        self._on_failure: Final = on_failure
        self._partial: Final = partial
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

    async def __call__(self, identity: Identity, head: Request, inbox: Incoming, send: Send) -> None:
        """Answer one request, whose body is taken from `inbox`."""
        body = _Body()
        self._under_way += 1
        try:
            try:
                response = await self._answer(identity, head, inbox, body)
            except Problem as problem:
                response = problem_response(problem, head.headers.get("accept", ""))
            await send(response)
        finally:
            self._under_way -= 1
            self._bodies_bytes -= body.size

    async def _answer(self, identity: Identity, head: Request, inbox: Incoming, body: "_Body") -> Response:
        """Raises Problem."""
        mount = self._mount(head.path)
        peer = identity.caller(head.headers.get(AS_FIELD))
        path = head.path[len(mount.prefix) :]
        await self._collect(inbox, mount.body_limit_bytes(head.method, path), body)
        try:
            return await mount.handler(peer, Request(head.method, path, head.query, head.headers, body.octets()))
        except Exception as error:
            self._on_failure(error)
            raise ServerFault("this node has failed") from error

    def _mount(self, path: str) -> Mount:
        """The role that is asked. Raises Problem."""
        if self._under_way > REQUESTS_LIMIT:
            raise Overloaded("too many requests are under way", retry_after_s=1)
        for prefix, mount in self._mounts.items():
            if path.startswith(prefix):
                return mount
        if self._partial:
            raise Misdirected("over HTTP/1.1 only the cache is served; ask by HTTP/2")
        raise UnknownResource("no such resource")

    async def _collect(self, inbox: Incoming, limit_bytes: int, body: "_Body") -> None:
        """The body, in its time. Raises Problem."""
        if inbox.ended:  # as a rule: a small body comes with its head, and needs no deadline
            await self._take(inbox, limit_bytes, body)
            return
        with trio.move_on_after(BODY_TIMEOUT_S):
            await self._take(inbox, limit_bytes, body)
            return
        raise RequestTimeout(f"the body has not arrived within {BODY_TIMEOUT_S:.0f} s")

    async def _take(self, inbox: Incoming, limit_bytes: int, body: "_Body") -> None:
        """Up to the first octet beyond the limit. Raises Problem."""
        while True:
            octets, more = await inbox.receive()
            piece = octets[: limit_bytes + 1 - body.size]
            if piece:
                body.add(piece)
                self._bodies_bytes += len(piece)
            if not more or body.size > limit_bytes:
                return
            if self._bodies_bytes > BODIES_LIMIT_BYTES:
                raise Overloaded("too many bodies are under way", retry_after_s=1)


class _Body:
    """What has come of one body. Each octet of a large one is copied once, into the memory where it stays."""

    def __init__(self) -> None:
        self.size = 0
        self._first = b""
        self._whole: io.BytesIO | None = None

    def add(self, piece: bytes) -> None:
        if not self.size:
            self._first = piece
        else:
            if self._whole is None:
                self._whole = io.BytesIO()
                self._whole.write(self._first)
                self._first = b""
            self._whole.write(piece)
        self.size += len(piece)

    def octets(self) -> bytes:
        """`io.BytesIO` hands its memory out, not a copy of it."""
        return self._first if self._whole is None else self._whole.getvalue()
