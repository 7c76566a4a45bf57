"""Short-lived objects in memory: `prompt` and `committed_tokens` arrays, draft rows (decisions, cache part 5.3, 5.4).

An object is written once. Writing the same content again is done already, other content under the same name is
refused: a name means one content for as long as it lives. Nothing is evicted before its time; a full store refuses.
Times are the caller's.
"""

import hashlib

from msgspec import Struct

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


class ObjectStoreSnapshot(Struct, frozen=True):
    """For operators and checkers."""

    objects: int
    object_bytes: int


class _Entry(Struct):
    content: ObjectContent
    expires: float


class ObjectStore:
    """Objects by name (the path of an ObjectName). Never blocks."""

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._entries: dict[str, _Entry] = {}
        self._bytes = 0

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

    def remove(self, name: str) -> None:
        """Forget an object; done already when there is none."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._bytes -= len(entry.content.octets)

    def expire(self, now: float) -> None:
        """Give back what has outlived its time."""
        for name in [name for name, entry in self._entries.items() if entry.expires <= now]:
            self.remove(name)

    def snapshot(self) -> ObjectStoreSnapshot:
        return ObjectStoreSnapshot(objects=len(self._entries), object_bytes=self._bytes)

    def _live(self, name: str, now: float) -> _Entry | None:
        entry = self._entries.get(name)
        if entry is not None and entry.expires <= now:
            self.remove(name)
            return None
        return entry


def object_tag(octets: bytes) -> str:
    """Strong entity tag of an object's content."""
    return f'"{hashlib.sha256(octets).hexdigest()}"'
