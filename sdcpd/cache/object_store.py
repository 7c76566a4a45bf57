"""Short-lived objects in memory: `prompt` and `committed_tokens` arrays, draft rows (decisions, cache part 5.3, 5.4).

An object is written once. Writing the same content again is done already, other content under the same name is
refused: a name means one content for as long as it lives. Nothing is evicted before its time; a full store refuses.
Times are the caller's.

An object lives until its time is over and no lease holds it (leases.py): a lease that outlives that time prolongs the
object's life, and with its end, or its release, the object is gone.
"""

import hashlib
from collections.abc import Sequence

from msgspec import Struct

from sdcpd.cache.leases import Lease, LeaseForeign, LeaseLapsed, Leases, LeasesFull
from sdcpd.cache.settings import CacheSettings


class ObjectContent(Struct, frozen=True):
    """An object's octets and their strong entity tag, quoted as in HTTP: the SHA-256 of the content. `stored`: when."""

    octets: bytes
    tag: str
    stored: float = 0.0


class ObjectStored(Struct, frozen=True):
    """It is there. `created` is false when it was already."""

    tag: str
    created: bool


class ObjectDiffers(Struct, frozen=True):
    """Another content has this name."""


class ObjectFull(Struct, frozen=True):
    """A limit is reached; nothing was stored."""

    detail: str


class ObjectRemoved(Struct, frozen=True):
    """It is gone, or was not there."""


class ObjectHeld(Struct, frozen=True):
    """Somebody else's lease holds it; nothing was removed."""


class ObjectTagMismatch(Struct, frozen=True):
    """It has another tag than the one that was named; nothing was removed."""


class ObjectsLeased(Struct, frozen=True):
    """What of the wanted names was there, and is held by `lease`; None when nothing was. `missed` are the others."""

    lease: Lease | None
    missed: tuple[str, ...]


class ObjectStoreSnapshot(Struct, frozen=True):
    """For operators and checkers. Hits and misses are reads since the start."""

    objects: int
    object_bytes: int
    leases: int
    hits: int = 0
    misses: int = 0


class ObjectFacts(Struct, frozen=True):
    """One object, for operators. `ttl_s`: what is left of its time; a lease may keep it for longer."""

    path: str
    bytes: int
    age_s: float
    ttl_s: float
    leased: bool


class _Entry(Struct):
    content: ObjectContent
    expires: float


class ObjectStore:
    """Objects by name (the path of an ObjectName). Never blocks."""

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._entries: dict[str, _Entry] = {}
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._leases = Leases(settings)

    def create(
        self, name: str, octets: bytes, now: float, ttl_s: float | None = None, *, tag: str | None = None
    ) -> ObjectStored | ObjectDiffers | ObjectFull:
        """Store an object for `ttl_s` (the default life when None). Repeating it prolongs its life, never shortens.

        `tag`: the `object_tag` of the octets, where the caller has it; making it takes a millisecond for each MiB.
        """
        settings = self._settings
        expires = now + min(settings.default_object_ttl_s if ttl_s is None else ttl_s, settings.max_object_ttl_s)
        entry = self._live(name, now)
        if entry is not None:
            if entry.content.octets != octets:
                return ObjectDiffers()
            entry.expires = max(entry.expires, expires)
            return ObjectStored(tag=entry.content.tag, created=False)
        if len(octets) > settings.max_object_bytes:
            return ObjectFull(f"an object may hold {settings.max_object_bytes} octets")
        if len(self._entries) >= settings.max_objects or self._bytes + len(octets) > settings.object_memory_bytes:
            self.expire(now)
        if len(self._entries) >= settings.max_objects:
            return ObjectFull(f"the store keeps {settings.max_objects} objects at most")
        if self._bytes + len(octets) > settings.object_memory_bytes:
            return ObjectFull(f"the store keeps {settings.object_memory_bytes} octets of objects at most")
        content = ObjectContent(octets=octets, tag=object_tag(octets) if tag is None else tag, stored=now)
        self._entries[name] = _Entry(content=content, expires=expires)
        self._bytes += len(octets)
        return ObjectStored(tag=content.tag, created=True)

    def read(self, name: str, now: float) -> ObjectContent | None:
        """The object, or None: an ordinary miss."""
        entry = self._live(name, now)
        self._hits += entry is not None
        self._misses += entry is None
        return None if entry is None else entry.content

    def has(self, name: str, now: float) -> bool:
        """Is it there? Not counted as a read."""
        return self._live(name, now) is not None

    def remove(
        self, name: str, owner: str, now: float, if_match: str | None = None
    ) -> ObjectRemoved | ObjectHeld | ObjectTagMismatch:
        """Forget an object in the name of `owner`, if it has this tag; done already when there is none."""
        entry = self._live(name, now)
        if entry is not None:
            if if_match is not None and if_match != entry.content.tag:
                return ObjectTagMismatch()
            if self._leases.hold_against(owner, name, now):
                return ObjectHeld()
            self._drop(name)
        return ObjectRemoved()

    def held_below(self, place: str, now: float) -> int:
        """Objects below this path that a lease holds."""
        return sum(self._leases.hold(name, now) for name in self._entries if name.startswith(place))

    def purge(self, place: str) -> int:
        """Forget all objects below this path, whoever holds them; how many."""
        gone = [name for name in self._entries if name.startswith(place)]
        for name in gone:
            self._drop(name)
        return len(gone)

    def facts(self, now: float, place: str = "") -> list[ObjectFacts]:
        """All objects below this path."""
        return [
            ObjectFacts(
                path=name,
                bytes=len(entry.content.octets),
                age_s=now - entry.content.stored,
                ttl_s=max(0.0, entry.expires - now),
                leased=self._leases.hold(name, now),
            )
            for name, entry in self._entries.items()
            if name.startswith(place)
        ]

    def lease(
        self, lease_id: str, owner: str, names: Sequence[str], now: float, ttl_s: float
    ) -> ObjectsLeased | LeasesFull:
        """Hold those of the names that are there, for `ttl_s` (cut to the limit). A name given twice counts once."""
        wanted = dict.fromkeys(names)
        found = tuple(name for name in wanted if self._live(name, now) is not None)
        missed = tuple(name for name in wanted if name not in self._entries)
        if not found:
            return ObjectsLeased(lease=None, missed=missed)
        taken = self._leases.take(Lease(id=lease_id, owner=owner, names=found, until=self._end(now, ttl_s)), now)
        return taken if isinstance(taken, LeasesFull) else ObjectsLeased(lease=taken, missed=missed)

    def renew(self, lease_id: str, owner: str, now: float, ttl_s: float) -> Lease | LeaseLapsed | LeaseForeign:
        """Hold on for `ttl_s` from now (cut to the limit), or as long as before if that is longer."""
        return self._leases.renew(lease_id, owner, self._end(now, ttl_s), now)

    def release(self, lease_id: str, owner: str, now: float) -> LeaseForeign | None:
        """End a lease; what it alone kept alive is gone at once. Done already when there is none."""
        held = self._leases.release(lease_id, owner)
        if isinstance(held, LeaseForeign):
            return held
        for name in held:
            self._live(name, now)
        return None

    def expire(self, now: float) -> None:
        """Give back what has outlived its time."""
        self._leases.expire(now)
        for name in list(self._entries):
            self._live(name, now)

    def snapshot(self) -> ObjectStoreSnapshot:
        return ObjectStoreSnapshot(
            objects=len(self._entries),
            object_bytes=self._bytes,
            leases=len(self._leases),
            hits=self._hits,
            misses=self._misses,
        )

    def _end(self, now: float, ttl_s: float) -> float:
        return now + min(ttl_s, self._settings.max_lease_ttl_s)

    def _live(self, name: str, now: float) -> _Entry | None:
        entry = self._entries.get(name)
        if entry is not None and entry.expires <= now and not self._leases.hold(name, now):
            self._drop(name)
            return None
        return entry

    def _drop(self, name: str) -> None:
        self._bytes -= len(self._entries.pop(name).content.octets)
        self._leases.forget(name)


def object_tag(octets: bytes) -> str:
    """Strong entity tag of an object's content."""
    return f'"{hashlib.sha256(octets).hexdigest()}"'
