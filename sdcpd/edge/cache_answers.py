"""What a cache's answers mean, as the named outcomes of roles/ports.py.

    2xx                            Appended / Content / Leased / Done
    412                            TagMismatch
    409 sdcp-stale-epoch           BelowFence
    404 on a read or a renewal     Missing
    500, 502, 504,
    an answer that cannot be read  Unreachable: it may or may not have been carried out
    anything else                  StoreRefused: nothing was written

Every content is checked against its entity tag, which is the SHA-256 of its identity form.
"""

import hashlib
from collections.abc import Mapping
from typing import Final

from msgspec import UNSET

from sdcpd.cache.content_coding import CODINGS, unpack
from sdcpd.edge.cache_messages import DirectoryAnswer, LeaseAnswer, LookupAnswer
from sdcpd.edge.problem_body import refusal
from sdcpd.edge.transport import Response
from sdcpd.protocol.encoding import decode
from sdcpd.protocol.problems import IllFormed, StaleEpoch, TooLarge
from sdcpd.protocol.uris import join
from sdcpd.roles.ports import (
    Appended,
    AppendOutcome,
    BelowFence,
    Content,
    Done,
    Leased,
    LeaseOutcome,
    Listed,
    ListedRecord,
    ListOutcome,
    Missing,
    ReadOutcome,
    RecordOutcome,
    Refusal,
    RemoveOutcome,
    RenewOutcome,
    StoreRefused,
    TagMismatch,
    Unreachable,
)

LEASES: Final = "leases/"
"""Where a cache's leases lie below its base URI."""

_UNKNOWN_OUTCOME: Final = frozenset({500, 502, 504})


def written(response: Response) -> AppendOutcome:
    """Of a write to a log or of an object."""
    if 200 <= response.status < 300:
        tag = response.headers.get("etag", "")
        return Appended(tag=tag) if _strong(tag) else Unreachable(reason="the answer carries no strong entity tag")
    refused = refusal(response)
    if refused.status == 412:
        return TagMismatch()
    if refused.status == 409 and refused.suffix == StaleEpoch.suffix:
        return BelowFence()
    return _refused(refused)


def content(response: Response, limit_bytes: int | None = None) -> ReadOutcome:
    """Of a read. A content of more than `limit_bytes` is refused with 413, and no more than that is unpacked."""
    if response.status == 404:
        return Missing()
    if response.status != 200:
        return _refused(refusal(response))
    octets, coding = response.body, response.headers.get("content-encoding", "identity").lower()
    try:
        known = next((each for each in CODINGS if each == coding), None)
        if known is not None and limit_bytes is not None:
            octets = unpack(octets, limit_bytes, known)
        elif coding != "identity":
            return Unreachable(reason="the content is in a coding that was not asked for")
        elif limit_bytes is not None and len(octets) > limit_bytes:
            raise TooLarge(f"the content is longer than {limit_bytes} octets")
    except TooLarge as error:
        return StoreRefused(status=413, detail=error.detail)
    except IllFormed as error:
        return Unreachable(reason=error.detail)
    tag = response.headers.get("etag", "")
    if tag != f'"{hashlib.sha256(octets).hexdigest()}"':
        return Unreachable(reason="the content is not what its entity tag says")
    return Content(octets=octets, tag=tag)


def removed(response: Response) -> RemoveOutcome:
    """Of a DELETE. What is not there is gone already."""
    if 200 <= response.status < 300 or response.status == 404:
        return Done()
    return _refused(refusal(response))


def leased(response: Response, base: str, refs: Mapping[str, str]) -> LeaseOutcome:
    """Of `POST leases` at the cache `base`. `refs` are the references that were sent, by their paths."""
    if response.status not in (200, 201):
        return _refused(refusal(response))
    try:
        answer = decode(response.body, LeaseAnswer)
    except IllFormed as error:
        return Unreachable(reason=f"the answer cannot be read: {error.detail}")
    missed = tuple(refs[path] for path in answer.missed if path in refs)
    lease = None if answer.lease is UNSET else join(base, LEASES + answer.lease)
    if lease is None and (not refs or len(missed) != len(refs)):
        return Unreachable(reason="the answer names no lease, and yet does not say that all objects are missed")
    return Leased(lease=lease, missed=missed, ttl_ms=answer.ttl_ms)


def renewed(response: Response, base: str) -> RenewOutcome:
    """Of `PUT leases/{id}`."""
    return Missing() if response.status == 404 else leased(response, base, {})


def replaced(response: Response) -> RecordOutcome:
    """Of a write to a directory record. A replacement of what is not there finds it at another tag."""
    outcome = TagMismatch() if response.status == 404 else written(response)
    return StoreRefused(status=409, detail="a record has no fence") if isinstance(outcome, BelowFence) else outcome


def listed(response: Response) -> ListOutcome:
    """Of `GET` of a directory."""
    if response.status != 200:
        return _refused(refusal(response))
    try:
        answer = decode(response.body, DirectoryAnswer)
    except IllFormed as error:
        return Unreachable(reason=f"the answer cannot be read: {error.detail}")
    if answer.more and not answer.records:
        return Unreachable(reason="the answer says that there is more, and not behind what")
    records = (ListedRecord(one.session, None if one.tag is UNSET else one.tag) for one in answer.records)
    return Listed(records=tuple(records), more=answer.more)


def looked_up(response: Response) -> LookupAnswer | StoreRefused | Unreachable:
    """Of `POST lookup`."""
    if response.status != 200:
        return _refused(refusal(response))
    try:
        return decode(response.body, LookupAnswer)
    except IllFormed as error:
        return Unreachable(reason=f"the answer cannot be read: {error.detail}")


def _refused(refused: Refusal) -> StoreRefused | Unreachable:
    if refused.status in _UNKNOWN_OUTCOME:
        return Unreachable(reason=f"status {refused.status}: {refused.detail}")
    return StoreRefused(status=refused.status, detail=refused.detail)


def _strong(tag: str) -> bool:
    return len(tag) >= 2 and tag.startswith('"') and tag.endswith('"')
