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
    """An object's octets and their strong entity tag, quoted as in HTTP: the SHA-256 of the content."""

    octets: bytes
    tag: str


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


class ObjectsLeased(Struct, frozen=True):
    """What of the wanted names was there, and is held by `lease`; None when nothing was. `missed` are the others."""

    lease: Lease | None
    missed: tuple[str, ...]


class ObjectStoreSnapshot(Struct, frozen=True):
    """For operators and checkers."""

    objects: int
    object_bytes: int
    leases: int


class _Entry(Struct):
    content: ObjectContent
    expires: float


class ObjectStore:
    """Objects by name (the path of an ObjectName). Never blocks."""

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._entries: dict[str, _Entry] = {}
        self._bytes = 0
        self._leases = Leases(settings)

    def create(
        self, name: str, octets: bytes, now: float, ttl_s: float | None = None
    ) -> ObjectStored | ObjectDiffers | ObjectFull:
        """Store an object for `ttl_s` (the default life when None). Repeating it prolongs its life, never shortens."""
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
        content = ObjectContent(octets=octets, tag=object_tag(octets))
        self._entries[name] = _Entry(content=content, expires=expires)
        self._bytes += len(octets)
        return ObjectStored(tag=content.tag, created=True)

    def read(self, name: str, now: float) -> ObjectContent | None:
        """The object, or None: an ordinary miss."""
        entry = self._live(name, now)
        return None if entry is None else entry.content

    def remove(self, name: str, owner: str, now: float) -> ObjectRemoved | ObjectHeld:
        """Forget an object in the name of `owner`; done already when there is none."""
        if self._live(name, now) is not None:
            if self._leases.hold_against(owner, name, now):
                return ObjectHeld()
            self._drop(name)
        return ObjectRemoved()

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
        return ObjectStoreSnapshot(objects=len(self._entries), object_bytes=self._bytes, leases=len(self._leases))

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
