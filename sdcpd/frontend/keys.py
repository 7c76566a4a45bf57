"""API keys: who is calling, known by the SHA-256 of the key alone.

Theory: a key is compared as its digest, with `hmac.compare_digest`, against all keys of the file and to the end, so
that the time tells nothing of which one it resembles or whether it is there. A plain key is forgotten once its digest
is made. A group stands for a tenant: its members share a *scope*, which goes into their sessions' contracts and keeps
what is cached and learned for them apart from other groups (draft 4.1), and it is what traffic classes can be chosen
by. Without a key file there is one caller, without a name, group, scope or limits.
"""

import hashlib
import hmac
from typing import Final

from msgspec import Struct

_SCOPE: Final = b"SDCPD-SCOPE-1\x00"


class Caller(Struct, frozen=True, kw_only=True):
    """On whose behalf a request is served. Limits None: none."""

    name: str | None = None
    group: str | None = None
    max_open_requests: int | None = None
    tokens_per_minute: int | None = None

    @property
    def scope(self) -> bytes | None:
        """16 octets that are the group's own, the same at every router; None without a group."""
        if self.group is None:
            return None
        return hashlib.sha256(_SCOPE + self.group.encode()).digest()[:16]


ANYBODY: Final = Caller()
"""Whoever calls a port without keys."""


class KeyRing:
    """The keys of one file. Never changes; a reload makes another."""

    def __init__(self, callers: dict[bytes, Caller]) -> None:
        """`callers` by SHA-256 of their key."""
        self._callers: Final = tuple(callers.items())

    def find(self, key: str) -> Caller | None:
        """Whose key it is. Looks at all keys, whatever it finds."""
        digest = key_digest(key)
        found: Caller | None = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def __len__(self) -> int:
        return len(self._callers)


def key_digest(key: str) -> bytes:
    """SHA-256 of a key's octets as they stand in the header, which is read as Latin-1."""
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()
