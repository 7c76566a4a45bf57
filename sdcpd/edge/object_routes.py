"""The operations on objects over HTTP, as every node serves them (decisions, cache part 5.3; decisions 54, 112, 117).

    PUT          If-None-Match: *    create (TTL, Content-Digest, Content-Encoding: gzip, zstd or none, KVSP-Class)
    GET, HEAD    Prefer: wait=N      read, waiting for an object that is still to be written; If-None-Match, Range,
                                     Accept-Encoding. The answer says where it was (KVSP-Tier) and for how long (Age)
    DELETE       If-Match or none    forget; 423 while somebody else's lease holds it
    POST leases, PUT and DELETE leases/{id}
    DELETE s/{scope}                 purge, by operators; 423 while a lease holds something, unless `?force=1`

Entity tags, ranges and limits are of the identity form, whatever coding it travels in; that one tag stands for both
is our own agreement with our own readers, who verify it against what they have unpacked. A range of a coded form is
never sent. Which kinds a role may write is the role's check; here it is only who may come at all.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from msgspec import UNSET

from sdcpd.cache.content_coding import Coding
from sdcpd.cache.object_store import ObjectContent, ObjectStored
from sdcpd.cache.refs import BlockName, ObjectKind, ObjectName, parse_path, scope_of
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.block_routes import BlockService, block_routes, inquiry_routes
from sdcpd.edge.cache_batch import batch_route
from sdcpd.edge.cache_messages import CACHE_TYPE, LeaseAnswer, LeaseRenewal, LeaseRequest, PurgeAnswer
from sdcpd.edge.http_fields import (
    accepted_coding,
    byte_range,
    check_digest,
    coding_of,
    creates,
    forced,
    if_match_if_any,
    is_known,
    require_class,
    require_media_type,
    ttl_s,
    wait_s,
)
from sdcpd.edge.routes import MESSAGE_LIMIT_BYTES, Call, Route, done
from sdcpd.edge.transport import Response
from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.problems import Forbidden, IllFormed, NotSupported, UnknownResource
from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.roles.block_cache import is_block_lease
from sdcpd.roles.object_cache import LeaseGranted, ScopePurged
from sdcpd.roles.ports import Peer

MEMORY_TIER: Final = "host"
TOKENS_TYPE: Final = "application/cbor"
ROWS_TYPE: Final = "application/octet-stream"

OBJECT_TYPES: Final = {
    ObjectKind.TOKENS: TOKENS_TYPE,  # decision 25
    ObjectKind.Q: ROWS_TYPE,
    ObjectKind.DRAFT: ROWS_TYPE,
}


class ObjectService(BlockService, Protocol):
    """What every node offers of its objects. Methods raise Problem."""

    def age_s(self, content: ObjectContent) -> float: ...
    async def create_object(
        self,
        peer: Peer,
        name: ObjectName,
        octets: bytes,
        ttl_s: float | None = None,
        *,
        coding: Coding | None = None,
        tag: str | None = None,
    ) -> ObjectStored: ...
    async def read_object(self, peer: Peer, name: ObjectName, wait_s: float = 0.0) -> ObjectContent: ...
    async def packed(self, content: ObjectContent, coding: Coding) -> bytes | None: ...
    async def remove_object(self, peer: Peer, name: ObjectName, if_match: str | None = None) -> None: ...
    async def has_object(self, peer: Peer, name: ObjectName) -> bool: ...
    async def purge(self, peer: Peer, scope: bytes | None, *, force: bool) -> ScopePurged: ...
    async def lease_objects(self, peer: Peer, names: Sequence[ObjectName], ttl_ms: int) -> LeaseGranted: ...
    async def renew_lease(self, peer: Peer, lease_id: str, ttl_ms: int) -> LeaseGranted: ...
    async def release_lease(self, peer: Peer, lease_id: str) -> None: ...


async def _create_object(cache: ObjectService, call: Call) -> Response:
    name, headers, body = _object_name(call), call.request.headers, call.request.body
    require_media_type(headers, OBJECT_TYPES[name.kind])
    if not creates(headers):
        raise IllFormed("an object is written once: If-None-Match: * is required")
    require_class(headers, "object")
    if "kvsp-pin" in headers or headers.get("kvsp-tier", MEMORY_TIER) != MEMORY_TIER:
        raise NotSupported(f"objects live in memory (KVSP-Tier: {MEMORY_TIER}), unpinned, and are held by leases")
    coding = coding_of(headers)
    tag = await cache.tag_of(body)
    check_digest(headers, bytes.fromhex(tag.strip('"')))
    stored = await cache.create_object(call.peer, name, body, ttl_s(headers), coding=coding, tag=tag)
    if not stored.created:
        return done(etag=stored.tag)
    return Response(status=201, headers={"etag": stored.tag, "cache-control": "no-store"})


async def _read_object(cache: ObjectService, call: Call) -> Response:
    """GET and HEAD. The conditions in the order of RFC 9110 13.2.2: If-None-Match, then Range."""
    name, request = _object_name(call), call.request
    content = await cache.read_object(call.peer, name, wait_s(request.headers, otherwise=0.0))
    fields = {"etag": content.tag, "cache-control": "no-store"}
    if is_known(request.headers, content.tag):
        return Response(status=304, headers=fields)
    length = len(content.octets)
    fields |= {"kvsp-tier": MEMORY_TIER, "age": str(int(cache.age_s(content)))}
    fields |= {"content-type": OBJECT_TYPES[name.kind], "accept-ranges": "bytes", "vary": "accept-encoding"}
    if request.method == "HEAD":
        return Response(status=200, headers=fields | {"content-length": str(length)})
    wanted = byte_range(request.headers, content.tag, length)
    if wanted is not None and not wanted:
        return Response(status=416, headers={"cache-control": "no-store", "content-range": f"bytes */{length}"})
    if wanted is not None:
        fields["content-range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{length}"
        return Response(status=206, headers=fields, body=content.octets[wanted.start : wanted.stop])
    coding = accepted_coding(request.headers)
    packed = None if coding is None else await cache.packed(content, coding)
    if coding is None or packed is None:
        return Response(status=200, headers=fields, body=content.octets)
    return Response(status=200, headers=fields | {"content-encoding": coding}, body=packed)


async def _remove_object(cache: ObjectService, call: Call) -> Response:
    await cache.remove_object(call.peer, _object_name(call), if_match_if_any(call.request.headers))
    return done()


async def _purge(cache: ObjectService, call: Call) -> Response:
    try:
        scope = scope_of(call.request.path)
    except IllFormed as error:
        raise UnknownResource(error.detail) from error
    gone = await cache.purge(call.peer, scope, force=forced(call.request.query))
    answer = PurgeAnswer(objects=gone.objects, blocks=gone.blocks, logs=gone.logs, records=gone.records)
    return Response(status=200, headers={"content-type": CACHE_TYPE, "cache-control": "no-store"}, body=encode(answer))


async def _lease(cache: ObjectService, call: Call) -> Response:
    require_media_type(call.request.headers, CACHE_TYPE)
    asked = decode(call.request.body, LeaseRequest)
    if asked.owner is not UNSET:
        _require_caller(call.peer, asked.owner)
    names = [_leased_name(path) for path in asked.objects]
    blocks = [name for name in names if isinstance(name, BlockName)]
    if blocks:
        return _lease_blocks(cache, call.peer, names, blocks, asked.ttl_ms)
    objects = [name for name in names if isinstance(name, ObjectName)]
    granted = await cache.lease_objects(call.peer, objects, asked.ttl_ms)
    if granted.id is None:
        return _granted(granted)
    return _granted(granted, 201, location=f"leases/{granted.id}")


async def _renew_lease(cache: ObjectService, call: Call) -> Response:
    require_media_type(call.request.headers, CACHE_TYPE)
    asked = decode(call.request.body, LeaseRenewal)
    lease_id = call.segments[1]
    if is_block_lease(lease_id):
        return _granted(LeaseGranted(lease_id, cache.blocks.renew_lease(call.peer, lease_id, asked.ttl_ms)))
    return _granted(await cache.renew_lease(call.peer, lease_id, asked.ttl_ms))


async def _release_lease(cache: ObjectService, call: Call) -> Response:
    if is_block_lease(call.segments[1]):
        cache.blocks.release_lease(call.peer, call.segments[1])
    else:
        await cache.release_lease(call.peer, call.segments[1])
    return done()


def _granted(granted: LeaseGranted, status: int = 200, **headers: str) -> Response:
    answer = LeaseAnswer(
        lease=UNSET if granted.id is None else granted.id,
        ttl_ms=granted.ttl_ms,
        missed=tuple(name.path for name in granted.missed),
    )
    fields = {"content-type": CACHE_TYPE, "cache-control": "no-store"} | headers
    return Response(status=status, headers=fields, body=encode(answer))


def _require_caller(peer: Peer, owner: str) -> None:
    try:
        owner = normalize_base_uri(owner)
    except ValueError as error:
        raise IllFormed(f"owner: {error}") from error
    if owner != peer.uri:
        raise Forbidden(f"owner: a peer leases in its own name, {peer.uri}")


def _leased_name(path: str) -> ObjectName | BlockName:
    name = parse_path(path)
    if not isinstance(name, ObjectName | BlockName):
        raise IllFormed(f"objects: {path!r} is no object and no block; logs and records need no lease")
    return name


def _lease_blocks(
    cache: ObjectService, peer: Peer, names: Sequence[ObjectName | BlockName], blocks: list[BlockName], ttl_ms: int
) -> Response:
    if len(blocks) != len(names):
        raise IllFormed("objects: one lease names objects, or blocks of one model")
    found = cache.blocks.lease_blocks(peer, blocks, ttl_ms)
    answer = LeaseAnswer(
        lease=UNSET if found.lease is None else found.lease,
        ttl_ms=found.ttl_ms,
        missed=tuple(name.path for name in dict.fromkeys(blocks) if name.name not in found.held),
    )
    fields = {"content-type": CACHE_TYPE, "cache-control": "no-store"}
    if found.lease is None:
        return Response(status=200, headers=fields, body=encode(answer))
    return Response(status=201, headers=fields | {"location": f"leases/{found.lease}"}, body=encode(answer))


def _object_name(call: Call) -> ObjectName:
    try:
        name = parse_path(call.request.path)
    except IllFormed as error:
        raise UnknownResource(error.detail) from error
    assert isinstance(name, ObjectName), "the route's pattern says so"
    return name


def _media_type(path: str) -> str:
    """Of what a batch puts there; what is wrong with the path is said by whoever serves it."""
    try:
        name = parse_path(path)
    except IllFormed:
        return ROWS_TYPE
    return OBJECT_TYPES[name.kind] if isinstance(name, ObjectName) else ROWS_TYPE


_OBJECT_PATH: Final = "v1/s/*/o/*/*/*/*"
_PEERS: Final = frozenset({"verifier", "router", "drafter"})
_OPERATOR: Final = frozenset({"operator"})

_Call = Callable[[ObjectService, Call], Awaitable[Response]]


def object_routes(settings: CacheSettings) -> tuple[Route, ...]:
    """The table, with the body limits that the settings give (decision 117)."""

    def route(operation: str, method: str, path: str, limit_bytes: int, call: _Call) -> Route:
        return Route(operation, method, path, _PEERS, limit_bytes, call)

    things: tuple[Route, ...] = (
        route("create_object", "PUT", _OBJECT_PATH, settings.max_object_bytes, _create_object),
        route("read_object", "GET", _OBJECT_PATH, 0, _read_object),
        route("head_object", "HEAD", _OBJECT_PATH, 0, _read_object),
    )
    things += block_routes(settings)
    return (
        *things,
        *inquiry_routes(),
        batch_route(things, _media_type, _PEERS),
        Route("remove_object", "DELETE", _OBJECT_PATH, _PEERS | _OPERATOR, 0, _remove_object),
        Route("purge", "DELETE", "v1/s/*", _OPERATOR, 0, _purge),
        route("lease", "POST", "leases", MESSAGE_LIMIT_BYTES, _lease),
        route("renew_lease", "PUT", "leases/*", MESSAGE_LIMIT_BYTES, _renew_lease),
        route("release_lease", "DELETE", "leases/*", 0, _release_lease),
    )
