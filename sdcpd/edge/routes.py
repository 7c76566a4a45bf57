"""Who may call what, with which body, and how it is answered, as one table a role (draft Table 1; decisions 28, 33, 37,
45, 112, 117).

A route names one method of a role. Its callers are roles; that a drafter speaks for itself only, or that a record is of
a kind which its writer may write, is the role's own check. The operations of the cache are in cache_routes.py.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct

from sdcpd.edge.http_fields import output_start, require_media_type, wait_s
from sdcpd.edge.transport import Request, Response
from sdcpd.protocol.encoding import MEDIA_TYPE, decode, encode
from sdcpd.protocol.messages import (
    Assignment,
    Event,
    Output,
    Policy,
    Proposal,
    SessionOpen,
    SessionState,
    Status,
    Verdict,
)
from sdcpd.protocol.problems import IllFormed, UnknownResource
from sdcpd.protocol.terms import instance_from_path_id, instance_path_id, session_from_path_id, session_path_id
from sdcpd.roles.ports import Peer

KIB: Final = 1 << 10
MIB: Final = 1 << 20

PROPOSAL_LIMIT_BYTES: Final = 256 * KIB
OPEN_LIMIT_BYTES: Final = 4 * MIB
"""session-open and assignment: both may carry a prompt inline."""
MESSAGE_LIMIT_BYTES: Final = 16 * KIB

M = TypeVar("M", bound=Struct)


class VerifierService(Protocol):
    """What Table 1 and decision 37 ask of a verifier. Methods raise Problem."""

    async def open_session(self, peer: Peer, message: SessionOpen) -> tuple[SessionState, bool]: ...
    async def name_drafter(self, peer: Peer, session: bytes, message: Assignment) -> SessionState: ...
    async def propose(self, peer: Peer, message: Proposal) -> Verdict: ...
    async def read_output(self, peer: Peer, session: bytes, from_: int, wait_s: float) -> Output: ...
    async def set_policy(self, peer: Peer, session: bytes, message: Policy) -> SessionState: ...
    async def session_state(self, peer: Peer, session: bytes) -> SessionState: ...
    async def cancel_session(self, peer: Peer, session: bytes) -> None: ...


class DrafterService(Protocol):
    """What Table 1 and decision 45 ask of a drafter. Methods raise Problem."""

    async def assign(self, peer: Peer, message: Assignment) -> None: ...
    async def drop_assignment(self, peer: Peer, session: bytes) -> None: ...


class RouterService(Protocol):
    """What Table 1 and decision 84 ask of a router. Methods raise Problem."""

    async def report_status(self, peer: Peer, instance: str, message: Status) -> None: ...
    async def report_event(self, peer: Peer, message: Event) -> None: ...
    async def read_output(self, peer: Peer, session: bytes, from_: int, wait_s: float) -> Output: ...


class Call(Struct, frozen=True):
    """A request that found its route and may be made."""

    peer: Peer
    request: Request

    @property
    def segments(self) -> list[str]:
        return self.request.path.split("/")

    def message(self, kind: type[M]) -> M:
        """The body as one message. Raises WrongMediaType, IllFormed, BadContract."""
        require_media_type(self.request.headers, MEDIA_TYPE)
        return decode(self.request.body, kind)

    def session(self) -> bytes:
        """The session of the path's second segment. Raises UnknownResource: no such path was ever handed out."""
        try:
            return session_from_path_id(self.segments[1])
        except ValueError as error:
            raise UnknownResource("the path holds no session id") from error

    def instance(self) -> str:
        """The instance of the path's second segment. Raises UnknownResource."""
        text = self.segments[1]
        try:
            instance = instance_from_path_id(text)
        except ValueError as error:
            raise UnknownResource("the path holds no instance id") from error
        if instance_path_id(instance) != text:  # base64 readers let much pass
            raise UnknownResource("the path holds no instance id")
        return instance


class Route(Struct, frozen=True):
    """One resource and method. `*` in `pattern` stands for one path segment; `call` gets the role's service."""

    operation: str
    method: str
    pattern: str
    callers: frozenset[str]
    body_limit_bytes: int
    call: Callable[[Any, Call], Awaitable[Response]]


def answer(message: Struct, status: int = 200, **headers: str) -> Response:
    """A message as a response; nothing SDCP answers may be kept by a cache on the way (decision 38)."""
    fields = {"content-type": MEDIA_TYPE, "cache-control": "no-store"} | headers
    return Response(status=status, headers=fields, body=encode(message))


def done(**headers: str) -> Response:
    """204."""
    return Response(status=204, headers={"cache-control": "no-store"} | headers)


async def _open_session(verifier: VerifierService, call: Call) -> Response:
    message = call.message(SessionOpen)
    state, created = await verifier.open_session(call.peer, message)
    if not created:
        return answer(state)
    return answer(state, 201, location=f"sessions/{session_path_id(message.session)}")


async def _name_drafter(verifier: VerifierService, call: Call) -> Response:
    session, message = call.session(), call.message(Assignment)
    _same_session(session, message.session)
    return answer(await verifier.name_drafter(call.peer, session, message))


async def _propose(verifier: VerifierService, call: Call) -> Response:
    return answer(await verifier.propose(call.peer, call.message(Proposal)))


async def _read_output(service: VerifierService | RouterService, call: Call) -> Response:
    start, wait = output_start(call.request.query), wait_s(call.request.headers)
    return answer(await service.read_output(call.peer, call.session(), start, wait))


async def _set_policy(verifier: VerifierService, call: Call) -> Response:
    session, message = call.session(), call.message(Policy)
    _same_session(session, message.session)
    return answer(await verifier.set_policy(call.peer, session, message))


async def _session_state(verifier: VerifierService, call: Call) -> Response:
    return answer(await verifier.session_state(call.peer, call.session()))


async def _cancel_session(verifier: VerifierService, call: Call) -> Response:
    await verifier.cancel_session(call.peer, call.session())
    return done()


async def _assign(drafter: DrafterService, call: Call) -> Response:
    await drafter.assign(call.peer, call.message(Assignment))
    return done()


async def _drop_assignment(drafter: DrafterService, call: Call) -> Response:
    await drafter.drop_assignment(call.peer, call.session())
    return done()


async def _report_status(router: RouterService, call: Call) -> Response:
    await router.report_status(call.peer, call.instance(), call.message(Status))
    return done()


async def _report_event(router: RouterService, call: Call) -> Response:
    await router.report_event(call.peer, call.message(Event))
    return done()


def _same_session(path: bytes, body: bytes) -> None:
    if path != body:
        raise IllFormed("session: the path names another one than the body")


_ROUTER: Final = frozenset({"router"})
_DRAFTER: Final = frozenset({"drafter"})
_VERIFIER: Final = frozenset({"verifier"})

VERIFIER_ROUTES: Final = (
    Route("open_session", "POST", "sessions", _ROUTER, OPEN_LIMIT_BYTES, _open_session),
    Route("name_drafter", "PUT", "sessions/*/drafter", _ROUTER, OPEN_LIMIT_BYTES, _name_drafter),
    Route("propose", "POST", "proposals", _DRAFTER, PROPOSAL_LIMIT_BYTES, _propose),
    Route("read_output", "GET", "sessions/*/output", _ROUTER | {"client"}, 0, _read_output),
    Route("set_policy", "POST", "sessions/*/policy", _ROUTER, MESSAGE_LIMIT_BYTES, _set_policy),
    Route("session_state", "GET", "sessions/*", _ROUTER, 0, _session_state),
    Route("cancel_session", "DELETE", "sessions/*", _ROUTER, 0, _cancel_session),
)
DRAFTER_ROUTES: Final = (
    Route("assign", "POST", "assignments", _ROUTER, OPEN_LIMIT_BYTES, _assign),
    Route("drop_assignment", "DELETE", "assignments/*", _ROUTER, 0, _drop_assignment),
)
ROUTER_ROUTES: Final = (
    Route("report_status", "PUT", "instances/*/status", _DRAFTER | _VERIFIER, MESSAGE_LIMIT_BYTES, _report_status),
    Route("report_event", "POST", "events", _VERIFIER, MESSAGE_LIMIT_BYTES, _report_event),
    Route("read_output", "GET", "sessions/*/output", _ROUTER | {"client"}, 0, _read_output),
)
