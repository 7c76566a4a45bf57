"""The objects of a node, served to peers: written once, short-lived, held by leases (cache part 5.3, 5.4; 112).

Every node serves its own objects at `/cache/`; the role `cache` serves logs as well (cache.py). All is in memory and
bookkeeping, so that handlers answer at once, but for two things: a body is expanded and packed by a worker, and a read
may wait for an object that is still to be written, which hides the upload of draft rows behind their proposal.

Who may do what (decision 112): objects are written by whoever makes their kind, and read and leased by routers,
verifiers and drafters. A lease is its taker's own. Removing an object that somebody else holds is refused, to its
writer and to operators alike: no lease lasts longer than `max_lease_ttl_s` unless its taker is alive and renews it.
Purging a scope, all of it, is the operators', and refused while somebody still needs what is there, unless it is
forced.
"""

from collections.abc import Sequence
from typing import ClassVar, Final, assert_never

import trio
from msgspec import Struct

from sdcpd.cache.content_coding import Coding, pack, unpack
from sdcpd.cache.leases import Lease, LeaseForeign, LeaseLapsed, LeasesFull
from sdcpd.cache.object_store import (
    ObjectContent,
    ObjectDiffers,
    ObjectFacts,
    ObjectFull,
    ObjectHeld,
    ObjectRemoved,
    ObjectsLeased,
    ObjectStore,
    ObjectStored,
    ObjectTagMismatch,
    object_tag,
)
from sdcpd.cache.refs import ObjectKind, ObjectName, scope_path
from sdcpd.cache.settings import CacheSettings
from sdcpd.protocol.problems import (
    Forbidden,
    IllFormed,
    NoRoom,
    Overloaded,
    PreconditionFailed,
    Problem,
    TooLarge,
    UnknownResource,
)
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.block_cache import BlockCache
from sdcpd.roles.ports import Peer, Ports
from sdcpd.roles.waits import Changes

RETRY_AFTER_S: Final = 1
LEASE_ID_BYTES: Final = 16
CODED_AT_ONCE: Final = 4
"""Bodies being packed or unpacked. A small one may become one of the largest size until it is stored or refused."""

INLINE_BYTES: Final = 256 << 10
"""A digest of so much takes less time than handing it to a worker may."""

OBJECT_READERS: Final = frozenset({"verifier", "router", "drafter"})
OBJECT_WRITERS: Final = {
    ObjectKind.TOKENS: frozenset({"router"}),
    ObjectKind.Q: frozenset({"drafter"}),
    ObjectKind.DRAFT: frozenset({"drafter"}),
}


class ObjectLeased(Problem):
    """Somebody else's lease holds the object (cache part 5.3: Delete)."""

    status: ClassVar[int] = 423
    title: ClassVar[str] = "Leased"


class ObjectCacheSnapshot(Struct, frozen=True, kw_only=True):
    """For operators and checkers."""

    objects: int
    object_bytes: int
    object_hits: int
    object_misses: int
    leases: int
    waiting_object_reads: int


class ScopePurged(Struct, frozen=True, kw_only=True):
    """How much of a scope is gone."""

    objects: int = 0
    blocks: int = 0
    logs: int = 0
    records: int = 0


class LeaseGranted(Struct, frozen=True):
    """A lease as it stands. `id` is None, and `ttl_ms` 0, when none of the wanted objects was there."""

    id: str | None
    ttl_ms: int
    missed: tuple[ObjectName, ...] = ()


class _Awaited:
    """An object that reads wait for."""

    def __init__(self) -> None:
        self.created = Changes()
        self.readers = 0


class ObjectCache:
    """The objects of a node."""

    def __init__(self, settings: CacheSettings, ports: Ports) -> None:
        self._settings = settings
        self._ports = ports
        self._objects = ObjectStore(settings)
        self.blocks: Final = BlockCache(ports)
        self._lease_ids = ports.randomness.stream("leases")
        self._coding = trio.Semaphore(CODED_AT_ONCE)
        self._awaited: dict[str, _Awaited] = {}
        """By path, while somebody waits for it."""
        self._waiting_object_reads = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Give back what has expired, until cancelled. Requests are answered whether or not this runs."""
        clock = self._ports.clock
        task_status.started()
        while True:
            await clock.sleep_until(clock.now() + self._settings.maintenance_interval_s)
            self._objects.expire(clock.now())

    @property
    def cache_mbps(self) -> int:
        """How fast this node has fetched from others of late, in 10^6 bits a second."""
        return self._ports.bandwidth.mbps

    def snapshot(self) -> ObjectCacheSnapshot:
        objects = self._objects.snapshot()
        return ObjectCacheSnapshot(
            objects=objects.objects,
            object_bytes=objects.object_bytes,
            object_hits=objects.hits,
            object_misses=objects.misses,
            leases=objects.leases,
            waiting_object_reads=self._waiting_object_reads,
        )

    def age_s(self, content: ObjectContent) -> float:
        """How long ago an object was stored."""
        return self._ports.clock.now() - content.stored

    async def tag_of(self, octets: bytes) -> str:
        """The entity tag of an object with this content, made by a worker where it takes long."""
        if len(octets) <= INLINE_BYTES:
            return object_tag(octets)
        return await self._ports.workers.run(object_tag, octets)

    async def create_object(
        self,
        peer: Peer,
        name: ObjectName,
        octets: bytes,
        ttl_s: float | None = None,
        *,
        coding: Coding | None = None,
        tag: str | None = None,
    ) -> ObjectStored:
        """Store an object once, for `ttl_s`. `coding`: what the octets are in; the object is what they hold.

        `tag`: `tag_of` the octets as they came, where the caller has it.
        """
        allow(peer, OBJECT_WRITERS[name.kind], f"write objects of kind {name.kind.value}")
        limit_bytes = self._settings.max_object_bytes
        if len(octets) > limit_bytes:
            raise TooLarge(f"an object may hold {limit_bytes} octets")
        if coding is not None:
            async with self._coding:
                octets = await self._ports.workers.run(unpack, octets, limit_bytes, coding)
        if coding is not None or tag is None:
            tag = await self.tag_of(octets)
        match self._objects.create(name.path, octets, self._ports.clock.now(), ttl_s, tag=tag):
            case ObjectStored() as stored:
                awaited = self._awaited.get(name.path)
                if awaited is not None:
                    awaited.created.notify()
                return stored
            case ObjectDiffers():
                raise PreconditionFailed("another content has this name")
            case ObjectFull(detail=detail):
                raise NoRoom(detail, retry_after_s=RETRY_AFTER_S)

    async def read_object(self, peer: Peer, name: ObjectName, wait_s: float = 0.0) -> ObjectContent:
        """An object's content, once it is there, `wait_s` later at most. A miss is ordinary (404)."""
        allow(peer, OBJECT_READERS, "read objects")
        content = self._objects.read(name.path, self._ports.clock.now())
        if content is None and wait_s > 0:
            content = await self._await_object(name.path, wait_s)
        if content is None:
            raise UnknownResource("no such object")
        return content

    async def packed(self, content: ObjectContent, coding: Coding) -> bytes | None:
        """The content in this coding; None where that does not pay."""
        async with self._coding:
            return await self._ports.workers.run(pack, content.octets, coding)

    async def remove_object(self, peer: Peer, name: ObjectName, if_match: str | None = None) -> None:
        """Forget an object before its time, if it has this tag. One that is not there is removed already."""
        allow(peer, OBJECT_WRITERS[name.kind] | {"operator"}, f"remove objects of kind {name.kind.value}")
        match self._objects.remove(name.path, peer.uri, self._ports.clock.now(), if_match):
            case ObjectRemoved():
                return
            case ObjectTagMismatch():
                raise PreconditionFailed("the object has another tag")
            case ObjectHeld():
                raise ObjectLeased("another peer's lease holds this object", retry_after_s=RETRY_AFTER_S)

    async def has_object(self, peer: Peer, name: ObjectName) -> bool:
        """Is it there now?"""
        allow(peer, OBJECT_READERS, "read objects")
        return self._objects.has(name.path, self._ports.clock.now())

    async def purge(self, peer: Peer, scope: bytes | None, *, force: bool) -> ScopePurged:
        """Forget all of a scope. Unless forced, not while a lease holds something there."""
        allow(peer, frozenset({"operator"}), "purge scopes")
        return self.purge_scope(scope, force=force)

    def purge_scope(self, scope: bytes | None, *, force: bool) -> ScopePurged:
        """As `purge`, for whoever may. Raises ObjectLeased."""
        place = scope_path(scope) + "/"
        held = self._objects.held_below(place, self._ports.clock.now())
        held += self.blocks.held_in(scope)
        if held and not force:
            raise ObjectLeased(f"leases hold {held} things of this scope; wait for their end, or force it")
        return ScopePurged(objects=self._objects.purge(place), blocks=self.blocks.purge(scope))

    def object_facts(self, place: str = "") -> list[ObjectFacts]:
        """All objects below this path, for operators."""
        return self._objects.facts(self._ports.clock.now(), place)

    # Leases

    async def lease_objects(self, peer: Peer, names: Sequence[ObjectName], ttl_ms: int) -> LeaseGranted:
        """Hold those of the objects that are there, for `ttl_ms` or `max_lease_ttl_s`, whichever is less."""
        allow(peer, OBJECT_READERS, "lease objects")
        if not names:
            raise IllFormed("objects: a lease names one at least")
        if len(names) > self._settings.max_lease_objects:
            raise TooLarge(f"objects: a lease may name {self._settings.max_lease_objects}; take several leases")
        lease_id = session_path_id(self._lease_ids.octets(LEASE_ID_BYTES))
        now, paths = self._ports.clock.now(), [name.path for name in names]
        match self._objects.lease(lease_id, peer.uri, paths, now, ttl_ms / 1000):
            case ObjectsLeased(lease=lease, missed=missed):
                by_path = dict(zip(paths, names, strict=True))
                missed_names = tuple(by_path[path] for path in missed)
                return LeaseGranted(None, 0, missed_names) if lease is None else _granted(lease, now, missed_names)
            case LeasesFull(detail=detail):
                raise Overloaded(detail, retry_after_s=RETRY_AFTER_S)

    async def renew_lease(self, peer: Peer, lease_id: str, ttl_ms: int) -> LeaseGranted:
        """Hold on for `ttl_ms` from now. One that has ended is not there (404): its objects may be gone."""
        allow(peer, OBJECT_READERS, "lease objects")
        now = self._ports.clock.now()
        match self._objects.renew(lease_id, peer.uri, now, ttl_ms / 1000):
            case Lease() as lease:
                return _granted(lease, now, ())
            case LeaseLapsed():
                raise UnknownResource("no such lease, or not any more; lease the objects anew")
            case LeaseForeign():
                raise Forbidden("the lease is another peer's")

    async def release_lease(self, peer: Peer, lease_id: str) -> None:
        """End a lease. One that is not there is released already."""
        allow(peer, OBJECT_READERS, "lease objects")
        match self._objects.release(lease_id, peer.uri, self._ports.clock.now()):
            case None:
                return
            case LeaseForeign():
                raise Forbidden("the lease is another peer's")
            case other:
                assert_never(other)

    async def _await_object(self, path: str, wait_s: float) -> ObjectContent | None:
        if self._waiting_object_reads >= self._settings.max_waiting_object_reads:
            raise Overloaded("too many reads wait for objects", retry_after_s=RETRY_AFTER_S)
        clock = self._ports.clock
        until = clock.now() + wait_s
        awaited = self._awaited.setdefault(path, _Awaited())
        awaited.readers += 1
        self._waiting_object_reads += 1
        try:
            while True:
                await awaited.created.wait_until(clock, until)
                now = clock.now()
                content = self._objects.read(path, now)
                if content is not None or now >= until:
                    return content
        finally:
            self._waiting_object_reads -= 1
            awaited.readers -= 1
            if not awaited.readers:
                del self._awaited[path]


def allow(peer: Peer, roles: frozenset[str], what: str) -> None:
    """Raises Forbidden for a peer of another role."""
    if peer.role not in roles:
        raise Forbidden(f"role {peer.role} may not {what}")


def _granted(lease: Lease, now: float, missed: tuple[ObjectName, ...]) -> LeaseGranted:
    return LeaseGranted(id=lease.id, ttl_ms=int(1000 * (lease.until - now)), missed=missed)
