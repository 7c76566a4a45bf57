"""Problem details out and in (RFC 9457, RFC 9290; decisions 34, 36).

Out: `application/problem+json`, type = TYPE_BASE + suffix, the session-state as base64url of its CBOR beside plain
`round`, `committed` and `epoch` for people. Who names the CBOR form in Accept, and prefers it, gets the same members in
it, placed as RFC 9290 (appendix on RFC 7807) has it: title and detail at the top, all others under the key 7807, type
and status there as 0 and 1.

In: JSON, which is all that we ask for. The suffix alone counts, whatever stands before it; unknown members are ignored;
an answer that is no problem body at all is still a refusal, with its status.
"""

import base64
import binascii
import json
import re
from typing import Final

import cbor2

from sdcpd.edge.transport import Response
from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.messages import SessionState
from sdcpd.protocol.problems import TYPE_BASE, IllFormed, Problem
from sdcpd.roles.ports import Refusal

PROBLEM_TYPE: Final = "application/problem+json"
CONCISE_TYPE: Final = "application/concise-problem-details+cbor"
PROBLEM_LIMIT_BYTES: Final = 64 * 1024
"""A longer body is not looked into: a refusal is a few hundred octets."""
DETAIL_LIMIT_CHARACTERS: Final = 1000

_SUFFIX: Final = re.compile(r"sdcp-[a-z0-9-]+\Z")
_TITLE, _DETAIL, _TUNNEL, _TUNNEL_TYPE, _TUNNEL_STATUS = -1, -2, 7807, 0, 1  # keys of RFC 9290
_WEIGHT: Final = re.compile(r"\s*q\s*=\s*(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)\s*", re.IGNORECASE)


def problem_response(problem: Problem, accept: str = "") -> Response:
    """A problem as its peer sees it. `accept` is the request's field of that name."""
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
    concise = _asks_for_concise(accept)
    headers = {"content-type": CONCISE_TYPE if concise else PROBLEM_TYPE, "cache-control": "no-store"}
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(problem.retry_after_s)
    body = _concise(members) if concise else json.dumps(members).encode()
    return Response(status=problem.status, headers=headers, body=body)


def _concise(members: dict[str, object]) -> bytes:
    tunnel: dict[int | str, object] = {_TUNNEL_TYPE: members["type"], _TUNNEL_STATUS: members["status"]}
    tunnel |= {name: value for name, value in members.items() if name not in ("type", "status", "title", "detail")}
    return cbor2.dumps({_TITLE: members["title"], _DETAIL: members["detail"], _TUNNEL: tunnel}, canonical=True)


def _asks_for_concise(accept: str) -> bool:
    """Is the CBOR form named, and wanted more than the JSON form? A wildcard does not ask for it."""
    if CONCISE_TYPE not in accept.lower():  # nearly always
        return False
    weights: dict[str, float] = {}
    for entry in accept.split(","):
        media_type, *parameters = entry.split(";")
        found = [match for match in map(_WEIGHT.fullmatch, parameters) if match is not None]
        weights[media_type.strip().lower()] = float(found[0].group(1)) if found else 1.0
    return weights.get(CONCISE_TYPE, 0.0) > weights.get(PROBLEM_TYPE, 0.0)


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
