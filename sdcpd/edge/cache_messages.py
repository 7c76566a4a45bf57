"""The bodies of the cache's own operations, as CBOR maps (decisions, cache part 5.3). Ours, not the draft's.

Read as strictly as the draft's messages (protocol/encoding.py), and open as they are: unknown keys are ignored.
"""

import re
from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from sdcpd.protocol.messages import Message
from sdcpd.protocol.terms import BaseUri, Hash32, ScopeId, SessionId, Uint

CACHE_TYPE: Final = "application/cbor"

Path = Annotated[str, Meta(min_length=1, max_length=256)]
"""A name relative to the cache's base URI."""


LEASE_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""An id becomes part of a path: nothing that could leave it."""


class LeaseRequest(Message, frozen=True, kw_only=True):
    """Body of `POST leases`. `owner`, where it is there, is the caller: nobody leases in another's name."""

    objects: tuple[Path, ...]
    ttl_ms: Uint
    owner: BaseUri | UnsetType = UNSET


class LeaseRenewal(Message, frozen=True, kw_only=True):
    """Body of `PUT leases/{id}`. `ttl_ms` counts from its receipt."""

    ttl_ms: Uint


class LookupRequest(Message, frozen=True, kw_only=True):
    """Body of `POST lookup`. `root` says of which model the caller speaks; the text is given by the names of its blocks
    or by its tokens. `lease_ms`: hold what is found for so long, in the same step."""

    scope: ScopeId | UnsetType = UNSET
    root: Hash32
    hashes: tuple[Hash32, ...] | UnsetType = UNSET
    tokens: tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...] | UnsetType = UNSET
    lease_ms: Uint | UnsetType = UNSET


class LookupAnswer(Message, frozen=True, kw_only=True):
    """The run that is here, from the first block on: the fastest tier of each. `lease` holds the first `leased`."""

    tiers: tuple[str, ...]
    lease: Annotated[str, Meta(pattern=f"^{LEASE_ID.pattern}$")] | UnsetType = UNSET
    leased: Uint = 0
    ttl_ms: Uint = 0


class ObjectFigures(Message, frozen=True, kw_only=True):
    """Objects, which live in host memory. Hits and misses are reads since the start."""

    objects: Uint
    bytes: Uint
    hits: Uint
    misses: Uint
    leases: Uint


class TierFigures(Message, frozen=True, kw_only=True):
    """One tier of the blocks of the model that the role `model` runs. Hits and misses are blocks a session wanted."""

    model: str
    tier: str
    blocks: Uint
    bytes: Uint
    capacity_bytes: Uint
    hits: Uint
    misses: Uint
    evictions: Uint
    promotions: Uint
    demotions: Uint
    damaged: Uint
    failed_writes: Uint


class CacheStats(Message, frozen=True, kw_only=True):
    """Answer of `GET stats`. `cache_mbps`: as in the node's status."""

    objects: ObjectFigures
    blocks: tuple[TierFigures, ...]
    cache_mbps: Uint


class PurgeAnswer(Message, frozen=True, kw_only=True):
    """What is gone of a scope."""

    objects: Uint
    blocks: Uint
    logs: Uint
    records: Uint


class BatchItem(Message, frozen=True, kw_only=True):
    """One operation of a batch. `octets` and `ttl_ms` belong to `put`."""

    op: Literal["get", "put", "exists"]
    name: Path
    octets: bytes | UnsetType = UNSET
    ttl_ms: Uint | UnsetType = UNSET


class BatchRequest(Message, frozen=True, kw_only=True):
    """Body of `POST batch`."""

    items: tuple[BatchItem, ...]


class BatchResult(Message, frozen=True, kw_only=True):
    """How the item at the same place ended, as the status it would have had alone. `octets`: of a `get`."""

    status: Uint
    tag: str | UnsetType = UNSET
    octets: bytes | UnsetType = UNSET
    detail: str | UnsetType = UNSET


class BatchAnswer(Message, frozen=True, kw_only=True):
    """As many results as there were items."""

    results: tuple[BatchResult, ...]


class DirectoryEntry(Message, frozen=True, kw_only=True):
    """A directory record as it is listed. A damaged one has no tag: it can only be removed."""

    session: SessionId
    tag: str | UnsetType = UNSET


class DirectoryAnswer(Message, frozen=True, kw_only=True):
    """A page of a directory; where there is `more`, it begins behind the last session of this one."""

    records: tuple[DirectoryEntry, ...]
    more: bool


class LeaseAnswer(Message, frozen=True, kw_only=True):
    """A lease as it stands. `lease` is its id, absent when none of the objects was there; `ttl_ms` is what is left.
    `missed` are those that were not there; all others are held."""

    lease: Annotated[str, Meta(pattern=f"^{LEASE_ID.pattern}$")] | UnsetType = UNSET
    ttl_ms: Uint
    missed: tuple[Path, ...] = ()
