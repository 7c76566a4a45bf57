"""Problem details out and in (RFC 9457; decisions 34, 36).

Out: `application/problem+json`, type = TYPE_BASE + suffix, the session-state as base64url of its CBOR beside plain
`round`, `committed` and `epoch` for people. In: the suffix alone counts, whatever stands before it; unknown members are
ignored; an answer that is no problem body at all is still a refusal, with its status.
"""

import base64
import binascii
import json
import re
from typing import Final

from sdcpd.edge.transport import Response
from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.messages import SessionState
from sdcpd.protocol.problems import TYPE_BASE, IllFormed, Problem
from sdcpd.roles.ports import Refusal

PROBLEM_TYPE: Final = "application/problem+json"
PROBLEM_LIMIT_BYTES: Final = 64 * 1024
"""A longer body is not looked into: a refusal is a few hundred octets."""
DETAIL_LIMIT_CHARACTERS: Final = 1000

_SUFFIX: Final = re.compile(r"sdcp-[a-z0-9-]+\Z")


def problem_response(problem: Problem) -> Response:
    """A problem as its peer sees it."""
    members: dict[str, object] = {
        "type": "about:blank" if problem.suffix is None else TYPE_BASE + problem.suffix,
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail[:DETAIL_LIMIT_CHARACTERS],
    }
    if problem.state is not None:
        members["session-state"] = base64.urlsafe_b64encode(encode(problem.state)).rstrip(b"=").decode()
        members["round"] = problem.state.round
        members["committed"] = problem.state.committed
        members["epoch"] = problem.state.epoch
    if problem.m_cap is not None:
        members["m_cap"] = problem.m_cap
    headers = {"content-type": PROBLEM_TYPE, "cache-control": "no-store"}
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(problem.retry_after_s)
    return Response(status=problem.status, headers=headers, body=json.dumps(members).encode())


def refusal(response: Response) -> Refusal:
    """What a response outside 2xx says, as far as it can be understood."""
    members = _members(response)
    type_ = members.get("type")
    found = _SUFFIX.search(type_) if isinstance(type_, str) else None
    detail = members.get("detail", members.get("title"))
    return Refusal(
        status=response.status,
        suffix=None if found is None else found.group(),
        detail=detail[:DETAIL_LIMIT_CHARACTERS] if isinstance(detail, str) else f"status {response.status}",
        state=_state(members.get("session-state")),
        retry_after_s=_count(response.headers.get("retry-after", "")),
        m_cap=_m_cap(members.get("m_cap")),
    )


def _members(response: Response) -> dict[str, object]:
    if len(response.body) > PROBLEM_LIMIT_BYTES:
        return {}
    try:
        members = json.loads(response.body)
    except (ValueError, RecursionError):
        return {}
    return members if isinstance(members, dict) else {}


def _state(member: object) -> SessionState | None:
    if not isinstance(member, str):
        return None
    try:
        return decode(base64.urlsafe_b64decode(member + "=" * (-len(member) % 4)), SessionState)
    except (binascii.Error, ValueError, IllFormed):
        return None


def _m_cap(member: object) -> int | None:
    return member if type(member) is int and member >= 1 else None


def _count(text: str) -> int | None:
    """Whole seconds; a date in Retry-After is not read."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else None
