"""The Objects port over a Transport: logs, objects and leases by reference, at caches that the operator named.

A reference is a URI that a peer chose. It is only followed to a cache of the configured list (decision 21), whatever
the reference says; a node's list holds the caches of the drafters whose rows it fetches as well. Answers become the
named outcomes of roles/ports.py as cache_answers.py has it; and besides,

    no response                    Unreachable: it may or may not have been carried out
    404 on an append               TagMismatch: read the log, it says what is true (decision 64)

Bodies of objects go in a coding where that pays (decision 54), given workers to pack and unpack them, but not to the
caches of this process, which `near` names: in gzip when we write, which all know, and in the best of those that both
know when we read. Bodies of blocks go as they are. What may be large and waits for nobody goes by HTTP/1.1 where there
is such (h1_client.py), and what was fetched tells how fast the cache is (cache/bandwidth.py).
Nothing is repeated here, and deadlines are the caller's.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar, assert_never

from msgspec import UNSET

from sdcpd.cache.bandwidth import Bandwidth
from sdcpd.cache.content_coding import CODINGS, GZIP, pack
from sdcpd.cache.refs import (
    BlockName,
    CacheName,
    CacheReference,
    LogName,
    ObjectName,
    RecordName,
    directory_path,
    is_block,
    parse_reference,
)
from sdcpd.edge.block_routes import BLOCK_TYPE
from sdcpd.edge.cache_answers import LEASES, content, leased, listed, looked_up, removed, renewed, replaced, written
from sdcpd.edge.cache_messages import CACHE_TYPE, LEASE_ID, LeaseRenewal, LeaseRequest, LookupAnswer, LookupRequest
from sdcpd.edge.cache_routes import LOG_TYPE
from sdcpd.edge.http_fields import content_digest, prefer_wait, ttl
from sdcpd.edge.object_routes import OBJECT_TYPES
from sdcpd.edge.transport import Request, Response, Transport, TransportError
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.problems import IllFormed
from sdcpd.protocol.terms import session_path_id
from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.roles.ports import (
    FETCH_LIMIT_BYTES,
    Appended,
    AppendOutcome,
    BelowFence,
    Clock,
    Content,
    Done,
    Leased,
    LeaseOutcome,
    Listed,
    ListOutcome,
    Meters,
    Missing,
    ReadOutcome,
    RecordOutcome,
    RemoveOutcome,
    RenewOutcome,
    StoreRefused,
    TagMismatch,
    Unreachable,
    Workers,
)

N = TypeVar("N", LogName, RecordName, ObjectName, BlockName)
O = TypeVar("O", bound="Outcome")  # noqa: E741 - an outcome

Outcome = AppendOutcome | ReadOutcome | RemoveOutcome | RenewOutcome | ListOutcome

REFERENCES_LIMIT: Final = 1024
"""Taken apart once and kept: a session's log is written each round."""

BULK_FROM_BYTES: Final = 256 << 10
"""A smaller body is through before a connection of its own is found."""

_KINDS = {LogName: "a log", RecordName: "a directory record", ObjectName: "an object", BlockName: "a block"}


class ObjectClient:
    """The Objects port. `caches` are the base URIs of the caches that may be asked; ValueError for what is none.

    `near` are those of them that are served in this process. `workers` pack, unpack and check bodies, which takes some
    milliseconds for each MiB; without them, bodies go as they are.
    """

    def __init__(
        self,
        transport: Transport,
        meters: Meters,
        caches: Iterable[str],
        *,
        near: Iterable[str] = (),
        workers: Workers | None = None,
        clock: Clock | None = None,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        """`bandwidth` is told, by the `clock`, of what was fetched from other nodes."""
        self._transport = transport
        self._meters = meters
        self._caches = frozenset(normalize_base_uri(base) for base in caches)
        self._near = frozenset(normalize_base_uri(base) for base in near)
        self._workers = workers
        self._clock = clock
        self._bandwidth = bandwidth
        self._references: dict[str, CacheReference] = {}

    async def create_log(self, ref: str, epoch: int, record: bytes = b"") -> AppendOutcome:
        """Begin a log, with a first record or none. TagMismatch: there is one already."""
        where = self._named(ref, LogName)
        if isinstance(where, StoreRefused):
            return where
        headers = {"if-none-match": "*", "kvsp-epoch": str(epoch), "content-type": LOG_TYPE}
        return await self._ask("create_log", where, "PUT", written, headers, record)

    async def append(self, ref: str, record: bytes, *, epoch: int, if_match: str) -> AppendOutcome:
        """Add a record to a log that is at the tag `if_match`."""
        where = self._named(ref, LogName)
        if isinstance(where, StoreRefused):
            return where
        headers = {"if-match": if_match, "kvsp-epoch": str(epoch), "content-type": LOG_TYPE}
        outcome = await self._ask("append_log", where, "PATCH", written, headers, record)
        if isinstance(outcome, StoreRefused) and outcome.status == 404:
            return TagMismatch()
        return outcome

    async def read_log(self, ref: str) -> ReadOutcome:
        """All records of a log."""
        where = self._named(ref, LogName)
        return where if isinstance(where, StoreRefused) else await self._ask("read_log", where, "GET", content)

    # Objects

    async def publish(self, ref: str, octets: bytes, *, ttl_ms: int) -> AppendOutcome:
        """Write an object once; done already if it holds the same. TagMismatch: it holds something else.

        Or a block, which has no time to live: `ttl_ms` is then of no meaning.
        """
        if is_block(ref):
            return await self._publish_block(ref, octets)
        where = self._named(ref, ObjectName)
        if isinstance(where, StoreRefused):
            return where
        base, name = where
        headers = {"if-none-match": "*", "content-type": OBJECT_TYPES[name.kind], "ttl": ttl(ttl_ms)}
        if self._workers is not None and base not in self._near:
            packed = await self._workers.run(pack, octets)
            if packed is not None:
                octets = packed
                headers["content-encoding"] = GZIP
        headers["content-digest"] = content_digest(octets)
        return await self._ask("publish", where, "PUT", written, headers, octets)

    async def fetch(
        self, ref: str, wait_s: float = 0.0, *, limit_bytes: int = FETCH_LIMIT_BYTES, also: str | None = None
    ) -> ReadOutcome:
        """An object's content, once it is there, `wait_s` later at most (a cache waits 20 s at most).

        One of more than `limit_bytes` is refused with 413, and no more than that is unpacked. `also`: a cache that may
        be asked this once, such as the one on the node of a drafter whose certificate we have seen. Or a block, which
        is there or not.
        """
        where: tuple[str, ObjectName] | tuple[str, BlockName] | StoreRefused
        where = self._named(ref, BlockName, also) if is_block(ref) else self._named(ref, ObjectName, also)
        if isinstance(where, StoreRefused):
            return where
        base, name = where
        waits = wait_s > 0 and isinstance(name, ObjectName)
        headers = {"prefer": prefer_wait(wait_s)} if waits else {}
        if self._workers is not None and base not in self._near and isinstance(name, ObjectName):
            headers["accept-encoding"] = ", ".join(CODINGS)
        begun = 0.0 if self._clock is None else self._clock.now()
        response = await self._exchange(base, Request("GET", name.path, headers=headers, bulk=not waits))
        if isinstance(response, Unreachable):
            return self._counted("fetch", response)
        if self._bandwidth is not None and self._clock is not None and base not in self._near and not waits:
            self._bandwidth.moved(len(response.body), self._clock.now() - begun)
        if self._workers is None:
            return self._counted("fetch", content(response, limit_bytes))
        return self._counted("fetch", await self._workers.run(content, response, limit_bytes))

    async def _publish_block(self, ref: str, octets: bytes) -> AppendOutcome:
        where = self._named(ref, BlockName)
        if isinstance(where, StoreRefused):
            return where
        tag = content_digest(octets) if self._workers is None else await self._workers.run(content_digest, octets)
        headers = {"if-none-match": "*", "content-type": BLOCK_TYPE, "content-digest": tag, "kvsp-class": "block"}
        return await self._ask("publish", where, "PUT", _block_written, headers, octets)

    async def look_up(
        self, base: str, scope: bytes | None, root: bytes, hashes: Sequence[bytes], *, lease_ms: int = 0
    ) -> LookupAnswer | StoreRefused | Unreachable:
        """The longest run of these blocks that the cache `base` has, held for `lease_ms` if that is not 0."""
        allowed = self._cache(base)
        if isinstance(allowed, StoreRefused):
            return allowed
        asked = LookupRequest(
            scope=UNSET if scope is None else scope, root=root, hashes=tuple(hashes), lease_ms=lease_ms
        )
        request = Request("POST", "lookup", headers={"content-type": CACHE_TYPE}, body=encode(asked))
        response = await self._exchange(allowed, request)
        return looked_up(response) if isinstance(response, Response) else response

    async def remove(self, ref: str) -> RemoveOutcome:
        """Forget an object before its time. StoreRefused with 423: somebody else's lease holds it."""
        where = self._named(ref, ObjectName)
        return where if isinstance(where, StoreRefused) else await self._ask("remove", where, "DELETE", removed)

    # Leases

    async def lease(self, base: str, refs: Sequence[str], ttl_ms: int) -> LeaseOutcome:
        """Hold those of the objects that are there: until the lease ends they are not removed and do not expire.

        All are objects of the cache `base`. The cache may cut `ttl_ms` (to 60 s by default).
        """
        allowed = self._cache(base)
        if isinstance(allowed, StoreRefused):
            return allowed
        refs_of: dict[str, str] = {}
        for ref in refs:
            where = self._named(ref, ObjectName)
            if isinstance(where, StoreRefused):
                return where
            if where[0] != allowed:
                return StoreRefused(status=400, detail=f"{ref} is not at {allowed}; lease it where it is")
            refs_of[where[1].path] = ref
        body = encode(LeaseRequest(objects=tuple(refs_of), ttl_ms=ttl_ms))
        request = Request(method="POST", path="leases", headers={"content-type": CACHE_TYPE}, body=body)
        response = await self._exchange(allowed, request)
        outcome = leased(response, allowed, refs_of) if isinstance(response, Response) else response
        return self._counted("lease", outcome)

    async def renew(self, lease: str, ttl_ms: int) -> RenewOutcome:
        """Hold on for `ttl_ms` from now; a lease is never made shorter. `lease` is its URI."""
        where = self._lease(lease)
        if isinstance(where, StoreRefused):
            return where
        base, path = where
        body = encode(LeaseRenewal(ttl_ms=ttl_ms))
        request = Request(method="PUT", path=path, headers={"content-type": CACHE_TYPE}, body=body)
        response = await self._exchange(base, request)
        outcome = renewed(response, base) if isinstance(response, Response) else response
        return self._counted("renew_lease", outcome)

    async def release(self, lease: str) -> RemoveOutcome:
        """End a lease; what only it kept alive is gone then. `lease` is its URI."""
        where = self._lease(lease)
        if isinstance(where, StoreRefused):
            return where
        base, path = where
        response = await self._exchange(base, Request(method="DELETE", path=path))
        return self._counted("release_lease", removed(response) if isinstance(response, Response) else response)

    # The directory

    async def read_record(self, ref: str) -> ReadOutcome:
        """A session's directory record."""
        where = self._named(ref, RecordName)
        return where if isinstance(where, StoreRefused) else await self._ask("read_record", where, "GET", content)

    async def write_record(self, ref: str, octets: bytes, if_match: str | None) -> RecordOutcome:
        """Make this the whole content of a record that is at the tag `if_match`, or that is not there (None).

        A record that holds it already is Appended: a lost answer is settled by asking again.
        """
        where = self._named(ref, RecordName)
        if isinstance(where, StoreRefused):
            return where
        headers = {"if-none-match": "*"} if if_match is None else {"if-match": if_match}
        headers |= {"content-type": CACHE_TYPE, "content-digest": content_digest(octets)}
        return await self._ask("write_record", where, "PUT", replaced, headers, octets)

    async def remove_record(self, ref: str) -> RemoveOutcome:
        """Forget a session's directory record."""
        where = self._named(ref, RecordName)
        return where if isinstance(where, StoreRefused) else await self._ask("remove_record", where, "DELETE", removed)

    async def list_records(self, base: str, scope: bytes | None, after: bytes | None = None) -> ListOutcome:
        """Sessions with a record at the cache `base`, a page of them, from behind the session `after` on."""
        allowed = self._cache(base)
        if isinstance(allowed, StoreRefused):
            return allowed
        query = "" if after is None else f"after={session_path_id(after)}"
        response = await self._exchange(allowed, Request(method="GET", path=directory_path(scope), query=query))
        return self._counted("list_records", listed(response) if isinstance(response, Response) else response)

    # Inside

    def _cache(self, base: str) -> str | StoreRefused:
        try:
            base = normalize_base_uri(base)
        except ValueError as error:
            return StoreRefused(status=400, detail=str(error))
        if base not in self._caches:
            return StoreRefused(status=403, detail=f"{base} is not among the caches that may be asked")
        return base

    def _named(self, ref: str, kind: type[N], also: str | None = None) -> tuple[str, N] | StoreRefused:
        """The cache and the name of a reference, which must be of this kind."""
        where = self._references.get(ref)
        if where is None:
            try:
                where = parse_reference(ref)
            except IllFormed as error:
                return StoreRefused(status=400, detail=error.detail)
            if where.base == also and isinstance(where.name, kind):
                return where.base, where.name
            base = self._cache(where.base)
            if isinstance(base, StoreRefused):
                return base
            if len(self._references) >= REFERENCES_LIMIT:
                self._references.clear()
            self._references[ref] = where
        if not isinstance(where.name, kind):
            return StoreRefused(status=400, detail=f"the reference does not name {_KINDS[kind]}")
        return where.base, where.name

    def _lease(self, lease: str) -> tuple[str, str] | StoreRefused:
        """The cache and the path of a lease."""
        base, separator, lease_id = lease.rpartition("/" + LEASES)
        if not separator or not LEASE_ID.fullmatch(lease_id):
            return StoreRefused(status=400, detail="this is no lease's URI")
        allowed = self._cache(base + "/")
        return allowed if isinstance(allowed, StoreRefused) else (allowed, LEASES + lease_id)

    async def _ask(
        self,
        operation: str,
        where: tuple[str, CacheName],
        method: str,
        read: Callable[[Response], O],
        headers: dict[str, str] | None = None,
        body: bytes = b"",
    ) -> O | Unreachable:
        """One request for a named thing, and what its answer means."""
        base, name = where
        bulk = isinstance(name, ObjectName | BlockName) and len(body) >= BULK_FROM_BYTES
        request = Request(method=method, path=name.path, headers=headers or {}, body=body, bulk=bulk)
        response = await self._exchange(base, request)
        return self._counted(operation, read(response) if isinstance(response, Response) else response)

    async def _exchange(self, base_uri: str, request: Request) -> Response | Unreachable:
        try:
            return await self._transport.exchange(base_uri, request)
        except TransportError as error:
            return Unreachable(reason=str(error))

    def _counted(self, operation: str, outcome: O) -> O:
        end: str
        match outcome:
            case Appended() | Content() | Missing() | Leased() | Listed() | Done():
                end = "answered"
            case Unreachable():
                end = "unreachable"
            case TagMismatch() | BelowFence() | StoreRefused():
                end = "refused"
            case _:
                assert_never(outcome)
        self._meters.count("peer_calls_total", operation=operation, outcome=end)
        return outcome


def _block_written(response: Response) -> AppendOutcome:
    """A block that was there already has no tag in its answer: its name says what it holds."""
    return Appended(tag="") if response.status == 204 else written(response)
