"""What an operator may ask and do of this node's cache, behind the admin socket (admin.py).

| request | answer |
|---|---|
| GET /cache | as `GET stats` of a peer: objects, each tier of each model's blocks, `cache_mbps` |
| GET /cache/list (`?scope=SCOPE`) | {entries: [{name, kind, ...}], left_out}: objects and blocks |
| GET /cache/entry?name=NAME | one of these |
| POST /cache/pin?name=NAME&level=LEVEL | the entry as it is then; `none`, `soft` or `hard`; blocks only |
| POST /cache/evict?name=NAME | {evicted}: from all tiers, unless somebody holds it |
| POST /cache/purge?scope=SCOPE (`&force=1`) | {objects, blocks, logs, records}: what is gone of a tenant |

NAME is a block's in hexadecimal, or an unambiguous beginning of it, or an object's path. SCOPE is base64url as in
paths, `-` for what has none.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from sdcpd.cache.block_index import ALL, BlockFacts, Pin, ScopeFilter
from sdcpd.cache.object_store import ObjectFacts
from sdcpd.cache.refs import ObjectName, parse_path, scope_of, scope_path
from sdcpd.edge.block_routes import cache_stats
from sdcpd.protocol.problems import IllFormed, Problem
from sdcpd.roles.object_cache import ObjectCache
from sdcpd.roles.ports import Peer

LISTED_LIMIT: Final = 10_000
"""Entries of one answer, some two megabytes; a large disk may hold a hundred times as many blocks."""
SHORT_NAME: Final = 4
"""Digits of a block's name below which nobody can mean one."""

OPERATOR: Final = Peer(uri="https://operator.invalid/operator/", role="operator")
"""Whoever may open the socket."""

Answer = tuple[int, dict[str, Any]]


class CacheAdmin:
    """`cache` gives the node's cache, None while none runs here."""

    def __init__(self, cache: Callable[[], ObjectCache | None]) -> None:
        self._cache = cache

    def answer(self, what: str, query: str) -> Answer:
        """A GET of /cache/WHAT."""
        cache = self._cache()
        if cache is None:
            return _NO_CACHE
        fields = _fields(query)
        try:
            match what:
                case "":
                    return 200, msgspec.to_builtins(cache_stats(cache))
                case "list":
                    return _listed(_entries(cache, fields.get("scope")))
                case "entry":
                    return _found(cache, fields.get("name", ""))
                case _:
                    return 404, {"detail": f"no resource /cache/{what}; there are /cache, /cache/list, /cache/entry"}
        except Problem as problem:
            return problem.status, {"detail": problem.detail}

    async def command(self, what: str, query: str) -> Answer:
        """A POST to /cache/WHAT."""
        cache = self._cache()
        if cache is None:
            return _NO_CACHE
        fields = _fields(query)
        try:
            match what:
                case "pin":
                    return _pin(cache, fields.get("name", ""), fields.get("level", ""))
                case "evict":
                    return await _evict(cache, fields.get("name", ""))
                case "purge":
                    force = fields.get("force") == "1"
                    gone = await cache.purge(OPERATOR, _scope(fields.get("scope", "")), force=force)
                    return 200, msgspec.to_builtins(gone)
                case _:
                    return 404, {"detail": f"no command /cache/{what}; there are pin, evict, purge"}
        except Problem as problem:
            return problem.status, {"detail": problem.detail}


_NO_CACHE: Final[Answer] = (409, {"detail": "no cache runs on this node yet"})


def _fields(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}


def _scope(text: str) -> bytes | None:
    """Raises IllFormed."""
    try:
        return scope_of(f"v1/s/{text}")
    except IllFormed as error:
        raise IllFormed(f"scope: {text[:40]!r} is no scope; 22 characters of base64url, or - for none") from error


def _entries(cache: ObjectCache, scope: str | None) -> Iterator[dict[str, Any]]:
    wanted: ScopeFilter = ALL if scope is None else _scope(scope)
    place = "" if wanted is ALL else scope_path(wanted) + "/"
    yield from (_object(facts) for facts in cache.object_facts(place))
    yield from (_block(model, facts) for model, facts in cache.blocks.entries(wanted))


def _listed(entries: Iterator[dict[str, Any]]) -> Answer:
    shown: list[dict[str, Any]] = []
    left_out = 0
    for entry in entries:
        if len(shown) < LISTED_LIMIT:
            shown.append(entry)
        else:
            left_out += 1
    return 200, {"entries": shown, "left_out": left_out}


def _found(cache: ObjectCache, name: str) -> Answer:
    """The one entry of this name, or of which this is the beginning."""
    if "/" in name:
        found = [_object(facts) for facts in cache.object_facts(name) if facts.path == name]
    elif len(name) >= SHORT_NAME:
        blocks = cache.blocks.entries()
        found = [_block(model, facts) for model, facts in blocks if facts.name.hex().startswith(name)]
    else:
        return 400, {"detail": f"give {SHORT_NAME} digits of a block's name at least, or an object's path"}
    if not found:
        return 404, {"detail": f"nothing here is named {name}; `sdcpctl cache ls` lists what there is"}
    if len(found) > 1:
        return 409, {"detail": f"{name} is the beginning of {len(found)} names; give more of it"}
    return 200, found[0]


def _pin(cache: ObjectCache, name: str, level: str) -> Answer:
    if level not in set(Pin):
        return 400, {"detail": f"level: {level!r} is none of none, soft, hard"}
    status, entry = _found(cache, name)
    if status != 200:
        return status, entry
    if entry["kind"] != "block":
        return 409, {"detail": "objects are held by leases, and cannot be pinned"}
    refused = cache.blocks.pin(bytes.fromhex(entry["name"]), Pin(level))
    return _found(cache, entry["name"]) if refused is None else (409, {"detail": refused.detail})


async def _evict(cache: ObjectCache, name: str) -> Answer:
    status, entry = _found(cache, name)
    if status != 200:
        return status, entry
    if entry["kind"] == "block":
        refused = cache.blocks.evict(bytes.fromhex(entry["name"]))
        if refused is not None:
            return 409, {"detail": refused.detail}
    else:
        of_object = parse_path(name)
        assert isinstance(of_object, ObjectName), "the store names what it has"
        await cache.remove_object(OPERATOR, of_object)
    return 200, {"evicted": entry["name"]}


def _object(facts: ObjectFacts) -> dict[str, Any]:
    return {
        "name": facts.path,
        "kind": "object",
        "tiers": ["host"],
        "bytes": facts.bytes,
        "age_s": facts.age_s,
        "ttl_s": facts.ttl_s,
        "leases": int(facts.leased),
    }


def _block(model: str, facts: BlockFacts) -> dict[str, Any]:
    return {
        "name": facts.name.hex(),
        "kind": "block",
        "model": model,
        "scope": scope_path(facts.scope).rpartition("/")[2],
        "tiers": [tier.value for tier in facts.tiers],
        "bytes": facts.bytes,
        "tokens": facts.tokens,
        "uses": facts.uses,
        "age_s": facts.age_s,
        "leases": facts.leases,
        "pin": facts.pin.value,
    }
