"""The operations of the `cache` role over HTTP: logs, and objects as every node serves them (object_routes.py;
decisions, cache part 5.3; decisions 86, 87, 112).

    PUT    If-None-Match: *   create a log, with its first records or none
    PUT    If-Match: tag      the whole log again with records added
    PATCH  If-Match: tag      the added records alone
    GET, DELETE

Every write to a log names its epoch in KVSP-Epoch. Entity tags are strong. Which records a role may write is the cache
role's check; here it is only who may come at all.
"""

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from sdcpd.cache.log_requests import LogContent
from sdcpd.cache.refs import LogName, parse_path
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.http_fields import check_content_digest, creates, if_match, kvsp_epoch, require_media_type
from sdcpd.edge.object_routes import ObjectService, object_routes
from sdcpd.edge.routes import Call, Route, done
from sdcpd.edge.transport import Response
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


def _content(octets: bytes, tag: str, media_type: str) -> Response:
    return Response(
        status=200, headers={"etag": tag, "content-type": media_type, "cache-control": "no-store"}, body=octets
    )


def _log_name(call: Call) -> LogName:
    try:
        name = parse_path(call.request.path)
    except IllFormed as error:
        raise UnknownResource(error.detail) from error
    assert isinstance(name, LogName), "the route's pattern says so"
    return name


_LOG_PATH: Final = "v1/s/*/l/*"
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
        *object_routes(settings),
    )
