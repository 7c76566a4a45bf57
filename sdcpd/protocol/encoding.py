"""Strict CBOR in, deterministic CBOR out (draft 4.1, 5.2; RFC 8949 4.2.1; decisions 1 to 7).

In: exactly one item of maps with text keys, arrays, integers, octet strings, text, booleans and null. No tags (so no
bignums, dates, references), no duplicate keys, no octets after the item, no nesting or length beyond the limits.
Two readers of the same octets therefore see the same content, which the contract digest relies on.

Out: all keys are text shorter than 24 octets, for which the order of RFC 8949 4.2.1 is by length, then by octets; a
test holds every Struct to that. Keys are put in order here: cbor2's own canonical mode, with which a test compares,
writes the same octets at three times the price.
"""

import io
from typing import Any, Final, NoReturn, TypeVar

import cbor2
import msgspec
from msgspec import Struct

from sdcpd.protocol.messages import Assignment, Contract, SessionOpen
from sdcpd.protocol.problems import BadContract, IllFormed
from sdcpd.protocol.terms import Uint

MEDIA_TYPE: Final = "application/sdcp+cbor"
DEPTH_LIMIT: Final = 16

M = TypeVar("M")


def _refuse_tag(*_: object) -> NoReturn:
    raise ValueError("tags are not allowed")


# The tags that cbor2 resolves by itself; all others reach `tag_hook`. A test walks every tag that cbor2 documents.
_TAGS_REFUSED: Final = dict.fromkeys(
    (*range(64), 64, 65, 100, 256, 258, 260, 261, 1004, 43000, 55799, 55800, 55801), _refuse_tag
)


def encode(message: Struct) -> bytes:
    """Deterministic CBOR of a message; absent (UNSET) members are left out."""
    return cbor2.dumps(_in_order(msgspec.to_builtins(message, builtin_types=(bytes,))))


def encode_tokens(tokens: tuple[int, ...]) -> bytes:
    """The CBOR array of uint that a `prompt` or `committed_tokens` object holds (decision 25)."""
    return cbor2.dumps(list(tokens))


def _in_order(members: dict[str, Any]) -> dict[str, Any]:
    """A map whose keys, and those of maps in it, are in their canonical order. An array holds maps only or none."""
    ordered = {}
    for key in sorted(sorted(members), key=len):
        member = members[key]
        if type(member) is dict:
            member = _in_order(member)
        elif type(member) is tuple and member and type(member[0]) is dict:
            member = [_in_order(entry) for entry in member]
        ordered[key] = member
    return ordered


def decode_tokens(octets: bytes) -> tuple[int, ...]:
    """Inverse of `encode_tokens`. Raises IllFormed."""
    return decode_item(octets, tuple[Uint, ...])


def decode(octets: bytes, kind: type[M]) -> M:
    """Read one message.

    Raises IllFormed (400) for anything that is not one acceptable item or breaks the schema, and BadContract (422)
    for a contract that breaks its own schema (decision 7).
    """
    carries_contract = kind in (SessionOpen, Assignment)
    try:
        item = load(octets)
    except IllFormed as error:
        if carries_contract and (key := _foreign_contract_key(octets)) is not None:
            raise BadContract(f"contract: {key!r:.40} is no key of a contract; all its keys are text") from error
        raise
    if carries_contract and isinstance(item, dict) and "contract" in item:
        try:
            item["contract"] = msgspec.convert(item["contract"], Contract, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise BadContract(f"contract: {error}") from error
    return convert(item, kind)


def decode_item(octets: bytes, kind: type[M]) -> M:
    """Read one item of any type msgspec knows, by the same strict rules. Raises IllFormed."""
    return convert(load(octets), kind)


def convert(item: object, kind: type[M]) -> M:
    """An item that `load` or `load_next` has read, as one of any type msgspec knows. Raises IllFormed."""
    try:
        return msgspec.convert(item, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise IllFormed(f"{_name(kind)}: {error}") from error


def _name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind))


def _foreign_contract_key(octets: bytes) -> object | None:
    """A key of the contract in a message that was refused, or of its sampling profile, that is not text.

    Anywhere else such a key makes the message ill-formed. In a contract it is an unknown key (decision 1), about which
    the draft says which problem is told.
    """
    try:
        item = _decoder(io.BytesIO(octets), strict_keys=False).decode()
    except (cbor2.CBORError, ValueError):
        return None
    contract = item.get("contract") if isinstance(item, dict) else None
    for table in (contract, contract.get("sampling") if isinstance(contract, dict) else None):
        if isinstance(table, dict):
            foreign: list[object] = [key for key in table if not isinstance(key, str)]
            if foreign:
                return foreign[0]
    return None


def load(octets: bytes) -> object:
    """One CBOR item as plain Python values. Raises IllFormed."""
    stream = io.BytesIO(octets)
    item = load_next(stream)
    if stream.tell() != len(octets):
        raise IllFormed(f"{len(octets) - stream.tell()} octets after the CBOR item; send exactly one item")
    return item


def load_next(stream: io.BytesIO) -> object:
    """The next item of a CBOR sequence (RFC 8742), leaving the stream right behind it. Raises IllFormed."""
    start = stream.tell()
    try:
        return _decoder(stream).decode()
    except (cbor2.CBORError, ValueError) as error:
        raise IllFormed(f"no acceptable CBOR item at octet {start}: {error}") from error


def _decoder(stream: io.BytesIO, *, strict_keys: bool = True) -> cbor2.CBORDecoder:
    return cbor2.CBORDecoder(
        stream,
        tag_hook=_refuse_tag,
        semantic_decoders=_TAGS_REFUSED,
        max_depth=DEPTH_LIMIT,
        allow_duplicate_keys=False,
        strict_hashable_types=strict_keys,
    )
