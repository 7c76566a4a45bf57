"""The operations of the `cache` role over HTTP: logs, directory records, and objects as every node serves them
(object_routes.py; decisions, cache part 5.3; decisions 86, 87, 106, 112). Of a log:

    PUT    If-None-Match: *   create a log, with its first records or none
    PUT    If-Match: tag      the whole log again with records added
    PATCH  If-Match: tag      the added records alone
    GET, DELETE

Every write to a log names its epoch in KVSP-Epoch. Of a directory record, which a router keeps of each session:

    PUT    If-None-Match: *   create it
    PUT    If-Match: tag      replace its whole content
    GET, DELETE
    GET of the directory      its sessions and their tags, page by page (`after`)

Entity tags are strong. Which records a role may write is the cache
role's check; here it is only who may come at all.
"""

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from msgspec import UNSET

from sdcpd.cache.log_requests import LogContent
from sdcpd.cache.refs import CacheName, LogName, RecordName, directory_scope, parse_path
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.cache_messages import CACHE_TYPE, DirectoryAnswer, DirectoryEntry
from sdcpd.edge.http_fields import (
    check_content_digest,
    creates,
    if_match,
    kvsp_epoch,
    list_start,
    require_media_type,
)
from sdcpd.edge.object_routes import ObjectService, object_routes
from sdcpd.edge.routes import Call, Route, done
from sdcpd.edge.transport import Response
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.problems import IllFormed, UnknownResource
from sdcpd.roles.ports import Peer

LOG_TYPE: Final = "application/cbor-seq"


class CacheService(ObjectService, Protocol):
    """What the cache role offers. Methods raise Problem."""

    async def create_log(self, peer: Peer, name: LogName, epoch: int, octets: bytes = b"") -> str: ...
    async def append_log(self, peer: Peer, name: LogName, epoch: int, octets: bytes, if_match: str) -> str: ...
    async def replace_log(self, peer: Peer, name: LogName, epoch: int, octets: bytes, if_match: str) -> str: ...
    async def read_log(self, peer: Peer, name: LogName) -> LogContent: ...
    async def remove_log(self, peer: Peer, name: LogName) -> None: ...
    async def read_record(self, peer: Peer, name: RecordName) -> LogContent: ...
    async def write_record(self, peer: Peer, name: RecordName, octets: bytes, if_match: str | None) -> str: ...
    async def remove_record(self, peer: Peer, name: RecordName) -> None: ...
    async def list_records(
        self, peer: Peer, scope: bytes | None, after: bytes | None
    ) -> tuple[list[tuple[RecordName, str | None]], bool]: ...


async def _put_log(cache: CacheService, call: Call) -> Response:
    name, headers, body = _log_name(call), call.request.headers, call.request.body
    epoch = kvsp_epoch(headers)
    if body:
        require_media_type(headers, LOG_TYPE)
    check_content_digest(headers, body)
    if creates(headers):
        tag = await cache.create_log(call.peer, name, epoch, body)
        return Response(status=201, headers={"etag": tag, "cache-control": "no-store"})
    return done(etag=await cache.replace_log(call.peer, name, epoch, body, if_match(headers)))


async def _append_log(cache: CacheService, call: Call) -> Response:
    name, headers, body = _log_name(call), call.request.headers, call.request.body
    require_media_type(headers, LOG_TYPE)
    check_content_digest(headers, body)
    return done(etag=await cache.append_log(call.peer, name, kvsp_epoch(headers), body, if_match(headers)))


async def _read_log(cache: CacheService, call: Call) -> Response:
    content = await cache.read_log(call.peer, _log_name(call))
    return _content(content.octets, content.tag, LOG_TYPE)


async def _remove_log(cache: CacheService, call: Call) -> Response:
    await cache.remove_log(call.peer, _log_name(call))
    return done()


async def _put_record(cache: CacheService, call: Call) -> Response:
    name, headers, body = _record_name(call), call.request.headers, call.request.body
    require_media_type(headers, CACHE_TYPE)
    check_content_digest(headers, body)
    if creates(headers):
        tag = await cache.write_record(call.peer, name, body, None)
        return Response(status=201, headers={"etag": tag, "cache-control": "no-store"})
    return done(etag=await cache.write_record(call.peer, name, body, if_match(headers)))


async def _read_record(cache: CacheService, call: Call) -> Response:
    content = await cache.read_record(call.peer, _record_name(call))
    return _content(content.octets, content.tag, CACHE_TYPE)


async def _remove_record(cache: CacheService, call: Call) -> Response:
    await cache.remove_record(call.peer, _record_name(call))
    return done()


async def _list_records(cache: CacheService, call: Call) -> Response:
    try:
        scope = directory_scope(call.request.path)
    except IllFormed as error:
        raise UnknownResource(error.detail) from error
    records, more = await cache.list_records(call.peer, scope, list_start(call.request.query))
    entries = (DirectoryEntry(session=name.session, tag=UNSET if tag is None else tag) for name, tag in records)
    body = encode(DirectoryAnswer(records=tuple(entries), more=more))
    return Response(status=200, headers={"content-type": CACHE_TYPE, "cache-control": "no-store"}, body=body)


def _content(octets: bytes, tag: str, media_type: str) -> Response:
    return Response(
        status=200, headers={"etag": tag, "content-type": media_type, "cache-control": "no-store"}, body=octets
    )


def _log_name(call: Call) -> LogName:
    name = _name(call)
    assert isinstance(name, LogName), "the route's pattern says so"
    return name


def _record_name(call: Call) -> RecordName:
    name = _name(call)
    assert isinstance(name, RecordName), "the route's pattern says so"
    return name


def _name(call: Call) -> CacheName:
    try:
        return parse_path(call.request.path)
    except IllFormed as error:
        raise UnknownResource(error.detail) from error


_LOG_PATH: Final = "v1/s/*/l/*"
_RECORD_PATH: Final = "v1/s/*/d/*"
_DIRECTORY_PATH: Final = "v1/s/*/d"
_ROUTER: Final = frozenset({"router"})
_LOG_PEERS: Final = frozenset({"verifier", "router"})
_OPERATOR: Final = frozenset({"operator"})

_Call = Callable[[CacheService, Call], Awaitable[Response]]


def cache_routes(settings: CacheSettings) -> tuple[Route, ...]:
    """The table, with the body limits that the settings give (decision 117)."""
    log_bytes = settings.max_log_bytes + settings.reserved_log_bytes

    def route(operation: str, method: str, path: str, peers: frozenset[str], limit_bytes: int, call: _Call) -> Route:
        return Route(operation, method, path, peers, limit_bytes, call)

    return (
        route("put_log", "PUT", _LOG_PATH, _LOG_PEERS, log_bytes, _put_log),
        route("append_log", "PATCH", _LOG_PATH, _LOG_PEERS, 4 * settings.max_record_bytes, _append_log),
        route("read_log", "GET", _LOG_PATH, _LOG_PEERS, 0, _read_log),
        route("remove_log", "DELETE", _LOG_PATH, _OPERATOR, 0, _remove_log),
        route("put_record", "PUT", _RECORD_PATH, _ROUTER, settings.max_directory_record_bytes, _put_record),
        route("read_record", "GET", _RECORD_PATH, _ROUTER, 0, _read_record),
        route("remove_record", "DELETE", _RECORD_PATH, _ROUTER | _OPERATOR, 0, _remove_record),
        route("list_records", "GET", _DIRECTORY_PATH, _ROUTER, 0, _list_records),
        *object_routes(settings),
    )
