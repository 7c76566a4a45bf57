"""Names of cache objects and the references that carry them (decisions, "The cache beside the protocol" 5.2).

    logs       {base}v1/s/{scope}/l/{session}                            append-only, durable
    records    {base}v1/s/{scope}/d/{session}                            one content at a time, durable (decision 106)
    objects    {base}v1/s/{scope}/o/{session}/{epoch}/{round}/{kind}     written once, short-lived
    blocks     {base}v1/s/{scope}/b/{hex h[k]}                           what its name says

`{scope}` and `{session}` are base64url without padding of 16 octets; an absent scope is `-`. `{epoch}` and `{round}`
are decimal without leading zeros; a block's name is 64 lower-case hexadecimal digits. Every name therefore has one
spelling, and two references name the same thing exactly when their canonical texts are equal. References arrive from
peers: what is not of this form is ill-formed.
"""

import re
from enum import StrEnum
from typing import Final

from msgspec import Struct

from sdcpd.protocol.problems import Forbidden, IllFormed
from sdcpd.protocol.terms import session_from_path_id, session_path_id
from sdcpd.protocol.uris import join, normalize_base_uri

_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,19}")
_BLOCK: Final = re.compile(r"[0-9a-f]{64}")
_NUMBER_LIMIT: Final = 1 << 64
"""CBOR's widest unsigned integer; epochs and rounds are such."""


class ObjectKind(StrEnum):
    """What an object of a round holds (5.2): a token array, draft rows, draft KV."""

    TOKENS = "tokens"
    Q = "q"
    DRAFT = "draft"


class LogName(Struct, frozen=True):
    """A session's commit log."""

    scope: bytes | None
    session: bytes

    @property
    def path(self) -> str:
        """Relative to the cache's base URI."""
        return f"v1/s/{_scope_text(self.scope)}/l/{session_path_id(self.session)}"


class RecordName(Struct, frozen=True):
    """A session's record in the directory of its scope."""

    scope: bytes | None
    session: bytes

    @property
    def path(self) -> str:
        """Relative to the cache's base URI."""
        return f"{directory_path(self.scope)}/{session_path_id(self.session)}"


class ObjectName(Struct, frozen=True):
    """An object that belongs to one round of a session. `round` is the last one whose tokens it knows."""

    scope: bytes | None
    session: bytes
    epoch: int
    round: int
    kind: ObjectKind

    @property
    def path(self) -> str:
        """Relative to the cache's base URI."""
        place = f"{session_path_id(self.session)}/{self.epoch}/{self.round}/{self.kind.value}"
        return f"v1/s/{_scope_text(self.scope)}/o/{place}"


class BlockName(Struct, frozen=True):
    """A block of KV. `name` are the 32 octets that its text has in the chain of its model and scope."""

    scope: bytes | None
    name: bytes

    @property
    def path(self) -> str:
        """Relative to the cache's base URI."""
        return f"{scope_path(self.scope)}/b/{self.name.hex()}"


CacheName = LogName | RecordName | ObjectName | BlockName


class CacheReference(Struct, frozen=True):
    """A name at a cache. `base` is that cache's canonical base URI."""

    base: str
    name: CacheName

    def __str__(self) -> str:
        return join(self.base, self.name.path)


def parse_path(path: str) -> CacheName:
    """Inverse of `path` of a name. Raises IllFormed."""
    match path.split("/"):
        case ["v1", "s", scope, "l", session]:
            return LogName(scope=_scope(scope), session=_session(session))
        case ["v1", "s", scope, "d", session]:
            return RecordName(scope=_scope(scope), session=_session(session))
        case ["v1", "s", scope, "o", session, epoch, round_, kind]:
            return ObjectName(
                scope=_scope(scope),
                session=_session(session),
                epoch=_number(epoch, "epoch"),
                round=_number(round_, "round"),
                kind=_kind(kind),
            )
        case ["v1", "s", scope, "b", name] if _BLOCK.fullmatch(name):
            return BlockName(scope=_scope(scope), name=bytes.fromhex(name))
        case _:
            raise IllFormed(f"{path[:200]!r} names no log, record, object or block of a cache")


def scope_path(scope: bytes | None) -> str:
    """All of a scope, relative to the cache's base URI."""
    return f"v1/s/{_scope_text(scope)}"


def scope_of(path: str) -> bytes | None:
    """Inverse of `scope_path`. Raises IllFormed."""
    match path.split("/"):
        case ["v1", "s", scope]:
            return _scope(scope)
        case _:
            raise IllFormed(f"{path[:200]!r} names no scope of a cache")


def directory_path(scope: bytes | None) -> str:
    """The directory of a scope, relative to the cache's base URI."""
    return f"v1/s/{_scope_text(scope)}/d"


def directory_scope(path: str) -> bytes | None:
    """Inverse of `directory_path`. Raises IllFormed."""
    match path.split("/"):
        case ["v1", "s", scope, "d"]:
            return _scope(scope)
        case _:
            raise IllFormed(f"{path[:200]!r} names no directory of a cache")


def is_record(path: str) -> bool:
    """Is this path, of a log or a record, that of a record? Scopes and sessions have no slash in them."""
    return "/d/" in path


def is_block(text: str) -> bool:
    """Does a reference name a block, if it names anything?"""
    return text.rpartition("/")[0].endswith("/b")


def parse_reference(text: str) -> CacheReference:
    """Read a cache-ref. The base is brought to its canonical form; the name must be in it. Raises IllFormed."""
    base, separator, rest = text.rpartition("/v1/s/")
    if not separator:
        raise IllFormed(f"cache reference {text[:200]!r} has no /v1/s/ in it")
    try:
        canonical = normalize_base_uri(base + "/")
    except ValueError as error:
        raise IllFormed(f"cache reference: {error}") from error
    return CacheReference(base=canonical, name=parse_path("v1/s/" + rest))


def log_reference(base: str, scope: bytes | None, session: bytes) -> str:
    """cache-ref of a session's commit log at the cache with this canonical base URI."""
    return str(CacheReference(base=base, name=LogName(scope=scope, session=session)))


def record_reference(base: str, scope: bytes | None, session: bytes) -> str:
    """cache-ref of a session's directory record at the cache with this canonical base URI."""
    return str(CacheReference(base=base, name=RecordName(scope=scope, session=session)))


def object_reference(base: str, scope: bytes | None, session: bytes, epoch: int, round_: int, kind: ObjectKind) -> str:
    """cache-ref of an object of a round at the cache with this canonical base URI."""
    name = ObjectName(scope=scope, session=session, epoch=epoch, round=round_, kind=kind)
    return str(CacheReference(base=base, name=name))


def block_reference(base: str, scope: bytes | None, name: bytes) -> str:
    """cache-ref of a block at the cache with this canonical base URI."""
    return str(CacheReference(base=base, name=BlockName(scope=scope, name=name)))


def require_scope(reference: CacheReference, scope: bytes | None) -> None:
    """A session's references stay within its contract's scope (decision 21). Raises Forbidden."""
    if reference.name.scope != scope:
        raise Forbidden("the cache reference names another scope than the contract")


def _scope_text(scope: bytes | None) -> str:
    return "-" if scope is None else session_path_id(scope)


def _scope(text: str) -> bytes | None:
    return None if text == "-" else _sixteen_octets(text, "scope")


def _session(text: str) -> bytes:
    return _sixteen_octets(text, "session")


def _sixteen_octets(text: str, what: str) -> bytes:
    try:
        return session_from_path_id(text)
    except ValueError as error:
        raise IllFormed(f"{what} in a cache name is not the base64url form of 16 octets") from error


def _number(text: str, what: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) >= _NUMBER_LIMIT:
        raise IllFormed(f"{what} in a cache name is not a decimal number below 2^64 without leading zeros")
    return int(text)


def _kind(text: str) -> ObjectKind:
    try:
        return ObjectKind(text)
    except ValueError as error:
        raise IllFormed(f"cache objects are of kind tokens, q or draft, not {text[:40]!r}") from error
