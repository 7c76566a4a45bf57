"""The Objects port over a Transport: logs and objects by reference, at caches that the operator named.

A reference is a URI that a peer chose. It is only followed to a cache of the configured list (decision 21), whatever
the reference says. Answers become the named outcomes of roles/ports.py; which is which:

    2xx                            Appended / Content
    412, and 404 on an append      TagMismatch: read the log, it says what is true (decision 64)
    409 sdcp-stale-epoch           BelowFence
    404 on a read                  Missing
    500, 502, 504, no response,
    an answer that cannot be read  Unreachable: it may or may not have been carried out
    anything else                  StoreRefused: nothing was written

Every content is checked against its entity tag, which is its SHA-256 for logs and objects alike. Nothing is repeated
here, and deadlines are the caller's.
"""

import hashlib
from collections.abc import Iterable
from typing import Final, assert_never

from sdcpd.cache.refs import CacheReference, LogName, ObjectName, parse_reference
from sdcpd.edge.cache_routes import LOG_TYPE, OBJECT_TYPES
from sdcpd.edge.http_fields import content_digest, ttl
from sdcpd.edge.problem_body import refusal
from sdcpd.edge.transport import Request, Response, Transport, TransportError
from sdcpd.protocol.problems import IllFormed, StaleEpoch
from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.roles.ports import (
    Appended,
    AppendOutcome,
    BelowFence,
    Content,
    Meters,
    Missing,
    ReadOutcome,
    Refusal,
    StoreRefused,
    TagMismatch,
    Unreachable,
)

REFERENCES_LIMIT: Final = 1024
"""Taken apart once and kept: a session's log is written each round."""

_UNKNOWN_OUTCOME: Final = frozenset({500, 502, 504})


class ObjectClient:
    """The Objects port. `caches` are the base URIs of the caches that may be asked; ValueError for what is none."""

    def __init__(self, transport: Transport, meters: Meters, caches: Iterable[str]) -> None:
        self._transport = transport
        self._meters = meters
        self._caches = frozenset(normalize_base_uri(base) for base in caches)
        self._references: dict[str, CacheReference] = {}

    async def create_log(self, ref: str, epoch: int, record: bytes = b"") -> AppendOutcome:
        """Begin a log, with a first record or none. TagMismatch: there is one already."""
        where = self._log(ref)
        if isinstance(where, StoreRefused):
            return where
        headers = {"if-none-match": "*", "kvsp-epoch": str(epoch), "content-type": LOG_TYPE}
        return await self._write("create_log", where, "PUT", headers, record)

    async def append(self, ref: str, record: bytes, *, epoch: int, if_match: str) -> AppendOutcome:
        """Add a record to a log that is at the tag `if_match`."""
        where = self._log(ref)
        if isinstance(where, StoreRefused):
            return where
        headers = {"if-match": if_match, "kvsp-epoch": str(epoch), "content-type": LOG_TYPE}
        outcome = await self._write("append_log", where, "PATCH", headers, record)
        if isinstance(outcome, StoreRefused) and outcome.status == 404:
            return TagMismatch()
        return outcome

    async def read_log(self, ref: str) -> ReadOutcome:
        """All records of a log."""
        where = self._log(ref)
        return where if isinstance(where, StoreRefused) else await self._read("read_log", where)

    async def publish(self, ref: str, octets: bytes, *, ttl_ms: int) -> AppendOutcome:
        """Write an object once; done already if it holds the same. TagMismatch: it holds something else."""
        where = self._reference(ref)
        if isinstance(where, StoreRefused):
            return where
        if not isinstance(where.name, ObjectName):
            return StoreRefused(status=400, detail="the reference does not name an object")
        headers = {
            "if-none-match": "*",
            "content-type": OBJECT_TYPES[where.name.kind],
            "content-digest": content_digest(octets),
            "ttl": ttl(ttl_ms),
        }
        return await self._write("publish", where, "PUT", headers, octets)

    async def fetch(self, ref: str) -> ReadOutcome:
        """An object's content."""
        where = self._reference(ref)
        return where if isinstance(where, StoreRefused) else await self._read("fetch", where)

    def _reference(self, ref: str) -> CacheReference | StoreRefused:
        known = self._references.get(ref)
        if known is not None:
            return known
        try:
            where = parse_reference(ref)
        except IllFormed as error:
            return StoreRefused(status=400, detail=error.detail)
        if where.base not in self._caches:
            return StoreRefused(status=403, detail=f"{where.base} is not among the caches that may be asked")
        if len(self._references) >= REFERENCES_LIMIT:
            self._references.clear()
        self._references[ref] = where
        return where

    def _log(self, ref: str) -> CacheReference | StoreRefused:
        where = self._reference(ref)
        if isinstance(where, CacheReference) and not isinstance(where.name, LogName):
            return StoreRefused(status=400, detail="the reference does not name a log")
        return where

    async def _write(
        self, operation: str, where: CacheReference, method: str, headers: dict[str, str], body: bytes
    ) -> AppendOutcome:
        request = Request(method=method, path=where.name.path, headers=headers, body=body)
        response = await self._exchange(where.base, request)
        outcome = response if isinstance(response, Unreachable) else _written(response)
        self._count(operation, outcome)
        return outcome

    async def _read(self, operation: str, where: CacheReference) -> ReadOutcome:
        response = await self._exchange(where.base, Request(method="GET", path=where.name.path))
        outcome = response if isinstance(response, Unreachable) else _content(response)
        self._count(operation, outcome)
        return outcome

    async def _exchange(self, base_uri: str, request: Request) -> Response | Unreachable:
        try:
            return await self._transport.exchange(base_uri, request)
        except TransportError as error:
            return Unreachable(reason=str(error))

    def _count(self, operation: str, outcome: AppendOutcome | ReadOutcome) -> None:
        match outcome:
            case Appended() | Content() | Missing():
                end = "answered"
            case Unreachable():
                end = "unreachable"
            case TagMismatch() | BelowFence() | StoreRefused():
                end = "refused"
            case _:
                assert_never(outcome)
        self._meters.count("peer_calls_total", operation=operation, outcome=end)


def _written(response: Response) -> AppendOutcome:
    if 200 <= response.status < 300:
        tag = response.headers.get("etag", "")
        return Appended(tag=tag) if _strong(tag) else Unreachable(reason="the answer carries no strong entity tag")
    refused = refusal(response)
    if refused.status == 412:
        return TagMismatch()
    if refused.status == 409 and refused.suffix == StaleEpoch.suffix:
        return BelowFence()
    return _refused(refused)


def _content(response: Response) -> ReadOutcome:
    if response.status == 200:
        tag = response.headers.get("etag", "")
        if tag != f'"{hashlib.sha256(response.body).hexdigest()}"':
            return Unreachable(reason="the content is not what its entity tag says")
        return Content(octets=response.body, tag=tag)
    if response.status == 404:
        return Missing()
    return _refused(refusal(response))


def _refused(refused: Refusal) -> StoreRefused | Unreachable:
    if refused.status in _UNKNOWN_OUTCOME:
        return Unreachable(reason=f"status {refused.status}: {refused.detail}")
    return StoreRefused(status=refused.status, detail=refused.detail)


def _strong(tag: str) -> bool:
    return len(tag) >= 2 and tag.startswith('"') and tag.endswith('"')
