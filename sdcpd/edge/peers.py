"""Table 1 as a typed client: the Peers port over a Transport, whose caller identity is ours.

A call has three ends. An answer within 2xx that can be read is the answer. Any other status is a Refusal, with whatever
its problem details say. No response is Unreachable; so is an answer within 2xx that cannot be read or speaks of another
session: the peer may well have done what it was asked, and what it said about it is lost.

Nothing is repeated here: whoever calls knows what a repetition means (decisions 36, 49), and sets the deadline.
"""

from typing import TypeVar

from msgspec import Struct

from sdcpd.edge.http_fields import prefer_wait
from sdcpd.edge.problem_body import refusal
from sdcpd.edge.transport import Request, Response, Transport, TransportError
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
from sdcpd.protocol.problems import Problem
from sdcpd.protocol.terms import instance_path_id, session_path_id
from sdcpd.roles.ports import Done, Meters, Refusal, Unreachable

A = TypeVar("A", SessionState, Verdict, Output)


class PeerClient:
    """The Peers port. Base URIs are canonical (protocol/uris.py)."""

    def __init__(self, transport: Transport, meters: Meters) -> None:
        self._transport = transport
        self._meters = meters

    async def open_session(self, verifier: str, message: SessionOpen) -> SessionState | Refusal | Unreachable:
        request = _post("POST", "sessions", message)
        return await self._ask("open_session", verifier, request, SessionState, message.session)

    async def name_drafter(self, verifier: str, message: Assignment) -> SessionState | Refusal | Unreachable:
        request = _post("PUT", f"sessions/{session_path_id(message.session)}/drafter", message)
        return await self._ask("name_drafter", verifier, request, SessionState, message.session)

    async def propose(self, verifier: str, message: Proposal) -> Verdict | Refusal | Unreachable:
        request = _post("POST", "proposals", message)
        return await self._ask("propose", verifier, request, Verdict, message.session)

    async def read_output(
        self, verifier: str, session: bytes, from_: int, wait_s: float
    ) -> Output | Refusal | Unreachable:
        """The server holds the call for `wait_s` (in whole seconds, rounded up; at most its own limit)."""
        request = Request(
            method="GET",
            path=f"sessions/{session_path_id(session)}/output",
            query=f"from={from_}",
            headers={"prefer": prefer_wait(wait_s)},
        )
        return await self._ask("read_output", verifier, request, Output, session)

    async def set_policy(self, verifier: str, message: Policy) -> SessionState | Refusal | Unreachable:
        request = _post("POST", f"sessions/{session_path_id(message.session)}/policy", message)
        return await self._ask("set_policy", verifier, request, SessionState, message.session)

    async def session_state(self, verifier: str, session: bytes) -> SessionState | Refusal | Unreachable:
        request = Request(method="GET", path=f"sessions/{session_path_id(session)}")
        return await self._ask("session_state", verifier, request, SessionState, session)

    async def cancel_session(self, verifier: str, session: bytes) -> Done | Refusal | Unreachable:
        request = Request(method="DELETE", path=f"sessions/{session_path_id(session)}")
        return await self._tell("cancel_session", verifier, request)

    async def assign(self, drafter: str, message: Assignment) -> Done | Refusal | Unreachable:
        return await self._tell("assign", drafter, _post("POST", "assignments", message))

    async def drop_assignment(self, drafter: str, session: bytes) -> Done | Refusal | Unreachable:
        request = Request(method="DELETE", path=f"assignments/{session_path_id(session)}")
        return await self._tell("drop_assignment", drafter, request)

    async def report_status(self, router: str, message: Status) -> Done | Refusal | Unreachable:
        request = _post("PUT", f"instances/{instance_path_id(message.instance)}/status", message)
        return await self._tell("report_status", router, request)

    async def report_event(self, router: str, message: Event) -> Done | Refusal | Unreachable:
        return await self._tell("report_event", router, _post("POST", "events", message))

    async def _ask(
        self, operation: str, base_uri: str, request: Request, kind: type[A], session: bytes
    ) -> A | Refusal | Unreachable:
        """A call whose answer is a message about `session`."""
        response = await self._exchange(base_uri, request)
        outcome: A | Refusal | Unreachable = (
            _read(response, kind, session) if isinstance(response, Response) else response
        )
        self._count(operation, outcome)
        return outcome

    async def _tell(self, operation: str, base_uri: str, request: Request) -> Done | Refusal | Unreachable:
        """A call that is answered by its status alone."""
        response = await self._exchange(base_uri, request)
        outcome = Done() if isinstance(response, Response) else response
        self._count(operation, outcome)
        return outcome

    async def _exchange(self, base_uri: str, request: Request) -> Response | Refusal | Unreachable:
        """The response if it is within 2xx."""
        try:
            response = await self._transport.exchange(base_uri, request)
        except TransportError as error:
            return Unreachable(reason=str(error))
        return response if 200 <= response.status < 300 else refusal(response)

    def _count(self, operation: str, outcome: object) -> None:
        match outcome:
            case Refusal():
                end = "refused"
            case Unreachable():
                end = "unreachable"
            case _:
                end = "answered"
        self._meters.count("peer_calls_total", operation=operation, outcome=end)


def _post(method: str, path: str, message: Struct) -> Request:
    return Request(method=method, path=path, headers={"content-type": MEDIA_TYPE}, body=encode(message))


def _read(response: Response, kind: type[A], session: bytes) -> A | Unreachable:
    try:
        answer = decode(response.body, kind)
    except Problem as problem:
        return Unreachable(reason=f"the answer cannot be read: {problem.detail}")
    if answer.session != session:
        return Unreachable(reason="the answer is about another session")
    return answer
