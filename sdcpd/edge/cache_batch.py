"""`POST batch`: many small operations in one message (decisions, cache part 5.3).

Each item is carried out as the request that it stands for, by the same handlers and checks, in order, and ends as that
request would have; no item knows of another. An answer carries what fits a message: a `get` beyond that ends in 413,
and is to be asked for alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import UNSET

from sdcpd.edge.cache_messages import CACHE_TYPE, BatchAnswer, BatchItem, BatchRequest, BatchResult
from sdcpd.edge.http_fields import require_media_type, ttl
from sdcpd.edge.routes import OPEN_LIMIT_BYTES, Call, Route
from sdcpd.edge.transport import Request, Response
from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.problems import Problem, TooLarge, UnknownResource
from sdcpd.roles.ports import Peer

BATCH_LIMIT_BYTES: Final = OPEN_LIMIT_BYTES
"""Of a batch, and of the contents in its answer: as the largest messages of the protocol (decision 117)."""
ITEMS_LIMIT: Final = 256

_METHODS: Final = {"get": "GET", "put": "PUT", "exists": "HEAD"}


def batch_route(routes: Sequence[Route], media_type: Callable[[str], str], callers: frozenset[str]) -> Route:
    """The route of batches whose items these routes serve. `media_type`: of a thing that is put at a path."""

    async def batch(cache: Any, call: Call) -> Response:
        require_media_type(call.request.headers, CACHE_TYPE)
        asked = decode(call.request.body, BatchRequest)
        if len(asked.items) > ITEMS_LIMIT:
            raise TooLarge(f"items: a batch may have {ITEMS_LIMIT}")
        room = BATCH_LIMIT_BYTES
        results: list[BatchResult] = []
        for item in asked.items:
            result = await _carry_out(cache, call.peer, routes, _request(item, media_type), room)
            room -= 0 if result.octets is UNSET else len(result.octets)
            results.append(result)
        body = encode(BatchAnswer(results=tuple(results)))
        return Response(status=200, headers={"content-type": CACHE_TYPE, "cache-control": "no-store"}, body=body)

    return Route("batch", "POST", "batch", callers, BATCH_LIMIT_BYTES, batch)


def _request(item: BatchItem, media_type: Callable[[str], str]) -> Request:
    """What the item stands for."""
    method = _METHODS[item.op]
    if method != "PUT":
        return Request(method, item.name)
    headers = {"content-type": media_type(item.name), "if-none-match": "*"}
    if item.ttl_ms is not UNSET:
        headers["ttl"] = ttl(item.ttl_ms)
    return Request(method, item.name, headers=headers, body=b"" if item.octets is UNSET else item.octets)


async def _carry_out(cache: Any, peer: Peer, routes: Sequence[Route], request: Request, room: int) -> BatchResult:
    try:
        response = await _route(routes, request).call(cache, Call(peer=peer, request=request))
        if len(response.body) > room:
            raise TooLarge("the answer of a batch has no room for it; ask for it alone")
    except Problem as problem:
        return BatchResult(status=problem.status, detail=problem.detail)
    tag = response.headers.get("etag", UNSET)
    return BatchResult(status=response.status, tag=tag, octets=response.body if request.method == "GET" else UNSET)


def _route(routes: Sequence[Route], request: Request) -> Route:
    """Raises UnknownResource: there is no such thing, or it is none for batches."""
    segments = request.path.split("/")
    for route in routes:
        shape = route.pattern.split("/")
        if route.method != request.method or len(shape) != len(segments):
            continue
        if all(want in (have, "*") for want, have in zip(shape, segments, strict=True)):
            return route
    raise UnknownResource("a batch is of objects and blocks")
