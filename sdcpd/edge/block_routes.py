"""The operations on KV blocks over HTTP, on every node that runs a model (decisions, cache part 5.3; decision 112).

    PUT          If-None-Match: *    store a block (Content-Digest, KVSP-Class: block, KVSP-Pin)
    GET, HEAD                        read it; If-None-Match, Range; the answer has KVSP-Tier and Age
    POST lookup                      the longest run of a text's blocks that is here, and a lease on it
    GET stats                        what this cache holds and has been asked

A block's content follows from its name: two writers make one object, and the second is done already (204). The body is
the block's file (cache/block_file.py), never in a content coding: numbers of a model do not shrink. Prefetch,
placement, migration and events are not offered: 404.
"""

from typing import Final, Protocol

from msgspec import UNSET

from sdcpd.cache.block_index import Pin
from sdcpd.cache.refs import BlockName, parse_path
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.cache_messages import (
    CACHE_TYPE,
    CacheStats,
    LookupAnswer,
    LookupRequest,
    ObjectFigures,
    TierFigures,
)
from sdcpd.edge.http_fields import (
    byte_range,
    check_digest,
    coding_of,
    creates,
    is_known,
    require_class,
    require_media_type,
)
from sdcpd.edge.routes import OPEN_LIMIT_BYTES, Call, Route, done
from sdcpd.edge.transport import Response
from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.problems import IllFormed, NotSupported, UnknownResource
from sdcpd.roles.block_cache import BLOCK_ASKERS, BLOCK_READERS, BlockCache
from sdcpd.roles.object_cache import ObjectCacheSnapshot

BLOCK_TYPE: Final = "application/octet-stream"
BLOCK_PATH: Final = "v1/s/*/b/*"


class BlockService(Protocol):
    """What every node offers of its blocks. Methods raise Problem."""

    @property
    def blocks(self) -> BlockCache: ...
    @property
    def cache_mbps(self) -> int: ...
    def snapshot(self) -> ObjectCacheSnapshot: ...
    async def tag_of(self, octets: bytes) -> str: ...


async def _read_block(cache: BlockService, call: Call) -> Response:
    """GET and HEAD. The conditions in the order of RFC 9110 13.2.2: If-None-Match, then Range."""
    request = call.request
    content = await cache.blocks.read_block(call.peer, _block_name(call))
    fields = {"etag": content.tag, "cache-control": "no-store"}
    if is_known(request.headers, content.tag):
        return Response(status=304, headers=fields)
    length = len(content.octets)
    fields |= {"content-type": BLOCK_TYPE, "accept-ranges": "bytes"}
    fields |= {"kvsp-tier": content.tier.value, "age": str(int(content.age_s))}
    if request.method == "HEAD":
        return Response(status=200, headers=fields | {"content-length": str(length)})
    wanted = byte_range(request.headers, content.tag, length)
    if wanted is None:
        return Response(status=200, headers=fields, body=content.octets)
    if not wanted:
        return Response(status=416, headers={"cache-control": "no-store", "content-range": f"bytes */{length}"})
    fields["content-range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{length}"
    return Response(status=206, headers=fields, body=content.octets[wanted.start : wanted.stop])


async def _put_block(cache: BlockService, call: Call) -> Response:
    name, headers, body = _block_name(call), call.request.headers, call.request.body
    require_media_type(headers, BLOCK_TYPE)
    if not creates(headers):
        raise IllFormed("a block is written once: If-None-Match: * is required")
    require_class(headers, "block")
    if coding_of(headers) is not None:
        raise IllFormed("Content-Encoding: a block is sent as it is")
    if headers.get("kvsp-tier") == "device":
        raise NotSupported("KVSP-Tier: a block that is sent is kept in host memory or on disk until it is used")
    tag = await cache.tag_of(body)
    check_digest(headers, bytes.fromhex(tag.strip('"')))
    if not await cache.blocks.create_block(call.peer, name, body, _pin(headers.get("kvsp-pin"))):
        return done()
    return Response(status=201, headers={"etag": tag, "cache-control": "no-store"})


async def _look_up(cache: BlockService, call: Call) -> Response:
    require_media_type(call.request.headers, CACHE_TYPE)
    asked = decode(call.request.body, LookupRequest)
    if (asked.hashes is UNSET) == (asked.tokens is UNSET):
        raise IllFormed("a lookup gives either hashes or tokens")
    found = cache.blocks.look_up(
        call.peer,
        None if asked.scope is UNSET else asked.scope,
        asked.root,
        names=() if asked.hashes is UNSET else asked.hashes,
        tokens=None if asked.tokens is UNSET else asked.tokens,
        lease_ms=0 if asked.lease_ms is UNSET else asked.lease_ms,
    )
    answer = LookupAnswer(
        tiers=tuple(tier.value for tier in found.tiers),
        lease=UNSET if found.lease is None else found.lease,
        leased=found.leased,
        ttl_ms=found.ttl_ms,
    )
    return Response(status=200, headers={"content-type": CACHE_TYPE, "cache-control": "no-store"}, body=encode(answer))


async def _stats(cache: BlockService, _: Call) -> Response:
    answer = cache_stats(cache)
    return Response(status=200, headers={"content-type": CACHE_TYPE, "cache-control": "no-store"}, body=encode(answer))


def cache_stats(cache: BlockService) -> CacheStats:
    """What this node's cache holds and has been asked since its start."""
    objects = cache.snapshot()
    return CacheStats(
        objects=ObjectFigures(
            objects=objects.objects,
            bytes=objects.object_bytes,
            hits=objects.object_hits,
            misses=objects.object_misses,
            leases=objects.leases,
        ),
        blocks=tuple(
            TierFigures(
                model=role,
                tier=tier.tier.value,
                blocks=tier.blocks,
                bytes=tier.bytes,
                capacity_bytes=tier.capacity_bytes,
                hits=tier.hits,
                misses=tier.misses,
                evictions=tier.evictions,
                promotions=tier.promotions,
                demotions=tier.demotions,
                damaged=tier.damaged,
                failed_writes=tier.failed_writes,
            )
            for role, tiers in cache.blocks.figures().items()
            for tier in tiers
        ),
        cache_mbps=cache.cache_mbps,
    )


def _pin(wish: str | None) -> Pin | None:
    try:
        return None if wish is None else Pin(wish.strip().lower())
    except ValueError as error:
        raise IllFormed("KVSP-Pin is none, soft or hard") from error


def _block_name(call: Call) -> BlockName:
    try:
        name = parse_path(call.request.path)
    except IllFormed as error:
        raise UnknownResource(error.detail) from error
    assert isinstance(name, BlockName), "the route's pattern says so"
    return name


def block_routes(settings: CacheSettings) -> tuple[Route, ...]:
    """Blocks alone, which a batch may name too."""
    return (
        Route("create_block", "PUT", BLOCK_PATH, BLOCK_READERS, settings.max_object_bytes, _put_block),
        Route("read_block", "GET", BLOCK_PATH, BLOCK_READERS, 0, _read_block),
        Route("head_block", "HEAD", BLOCK_PATH, BLOCK_READERS, 0, _read_block),
    )


def inquiry_routes() -> tuple[Route, ...]:
    """Questions about the whole cache."""
    return (
        Route("lookup", "POST", "lookup", BLOCK_ASKERS, OPEN_LIMIT_BYTES, _look_up),
        Route("stats", "GET", "stats", BLOCK_ASKERS | {"operator"}, 0, _stats),
    )
