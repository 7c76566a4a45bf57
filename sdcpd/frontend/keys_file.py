"""The file of API keys, in TOML, which nobody but its owner may read:

    [[keys]]
    name = "ann"                      # told in logs; the key never is
    key = "sk-..."                    # or sha256 = "…", 64 hexadecimal digits of `printf %s KEY | sha256sum`
    group = "research"                # whose members share a scope; without it the name is the group
    max_open_requests = 8             # both limits are optional
    tokens_per_minute = 20000

It is read at start and on SIGHUP; one that is wrong is refused as a whole, with the entry and the remedy.
"""

import re
import stat
import tomllib
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from sdcpd.frontend.keys import Caller, KeyRing, key_digest

READABLE_BY_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
FILE_LIMIT_BYTES: Final = 1024 * 1024
"""Some thousands of keys; each costs a comparison with every request."""

DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
LEAST_KEY_CHARS: Final = 16
"""A shorter one could be guessed by trying."""

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Limit = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class KeysRefused(ValueError):
    """The file cannot be used. The text says why and what to do, and holds no key."""


class _Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    key: str | None = None
    sha256: str | None = None
    group: Name | None = None
    max_open_requests: Limit | None = None
    tokens_per_minute: Limit | None = None


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: tuple[_Entry, ...]


def read_keys(path: Path) -> KeyRing:
    """Blocks. Raises KeysRefused."""
    place = f"frontend.keys = {path}"
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            octets = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise KeysRefused(f"{place} cannot be read: {error.strerror}") from error
    if mode & READABLE_BY_OTHERS:
        raise KeysRefused(f"{place} has mode {mode:04o}, so others may read the keys: chmod 600 {path}")
    if len(octets) > FILE_LIMIT_BYTES:
        raise KeysRefused(f"{place} is larger than {FILE_LIMIT_BYTES} bytes")
    try:
        read = msgspec.convert(tomllib.loads(octets.decode()), _File)
    except UnicodeDecodeError as error:
        raise KeysRefused(f"{place} is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise KeysRefused(f"{place} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise KeysRefused(f"{place}: {error}") from error
    return _ring(read.keys, place)


def _ring(entries: tuple[_Entry, ...], place: str) -> KeyRing:
    if not entries:
        raise KeysRefused(f"{place} holds no [[keys]]; add one, or leave the setting out")
    callers: dict[bytes, Caller] = {}
    names: set[str] = set()
    for index, entry in enumerate(entries):
        where = f"{place}: keys[{index}] ({entry.name})"
        digest = _digest(entry, where)
        if digest in callers:
            raise KeysRefused(f"{where}: the key is there twice; a key is one caller's")
        if entry.name in names:
            raise KeysRefused(f"{where}: the name is there twice; limits are counted by name")
        names.add(entry.name)
        callers[digest] = Caller(
            name=entry.name,
            group=entry.group or entry.name,
            max_open_requests=entry.max_open_requests,
            tokens_per_minute=entry.tokens_per_minute,
        )
    return KeyRing(callers)


def _digest(entry: _Entry, where: str) -> bytes:
    if (entry.key is None) == (entry.sha256 is None):
        raise KeysRefused(f"{where}: give either key or sha256")
    if entry.sha256 is not None:
        if not DIGEST.fullmatch(entry.sha256):
            raise KeysRefused(f"{where}: sha256 must be 64 hexadecimal digits: printf %s KEY | sha256sum")
        return bytes.fromhex(entry.sha256)
    assert entry.key is not None
    if len(entry.key) < LEAST_KEY_CHARS or not entry.key.isascii() or not entry.key.isprintable() or " " in entry.key:
        raise KeysRefused(f"{where}: a key has {LEAST_KEY_CHARS} printable ASCII characters or more, and no spaces")
    return key_digest(entry.key)
