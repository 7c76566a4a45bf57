"""The few header and query fields that SDCP and the cache use, read strictly, written in one form.

What a peer must name and names wrongly is ill-formed (400). Preferences that cannot be read are ignored, as RFC 7240
has it.
"""

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Mapping
from typing import ClassVar, Final
from urllib.parse import parse_qsl

from sdcpd.protocol.problems import IllFormed, PreconditionFailed, Problem, WrongMediaType

OUTPUT_WAIT_S: Final = 20.0
"""How long a long poll is held; `Prefer: wait=N` lowers it (decision 38). Below common proxy timeouts."""

_STRONG_TAG: Final = re.compile(r'"[\x21\x23-\x7e]*"')
_NUMBER: Final = re.compile(r"[0-9]{1,20}")
_WAIT: Final = re.compile(r"\s*wait\s*=\s*\"?([0-9]{1,9})\"?\s*(;.*)?", re.IGNORECASE)
_DIGEST: Final = re.compile(r"\s*sha-256\s*=\s*:([A-Za-z0-9+/=]*):\s*", re.IGNORECASE)
_UINT_LIMIT: Final = 1 << 64


class ContentDigestMismatch(Problem):
    """Content-Digest (RFC 9530) does not agree with the content."""

    status: ClassVar[int] = 422
    title: ClassVar[str] = "Content digest does not agree"


def require_media_type(headers: Mapping[str, str], wanted: str) -> None:
    """Content-Type is `wanted`, whatever its parameters. Raises WrongMediaType."""
    found = headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != wanted:
        raise WrongMediaType(f"content-type is {found[:100]!r}, not {wanted}")


def wait_s(headers: Mapping[str, str]) -> float:
    """How long a long poll may wait: 20 s, less if `Prefer: wait=N` says so."""
    for preference in headers.get("prefer", "").split(","):
        match = _WAIT.fullmatch(preference)
        if match is not None:
            return min(float(match.group(1)), OUTPUT_WAIT_S)
    return OUTPUT_WAIT_S


def prefer_wait(seconds: float) -> str:
    """Value of Prefer for a wait of at least `seconds`."""
    return f"wait={math.ceil(max(0.0, seconds))}"


def output_start(query: str) -> int:
    """`from` of an output request; absent means 0 (decision 39). Raises IllFormed."""
    try:
        fields = parse_qsl(query, keep_blank_values=True, max_num_fields=64)
    except ValueError as error:
        raise IllFormed("the query cannot be read") from error
    found = [value for key, value in fields if key == "from"]
    return _number(found[0], "from") if len(found) == 1 else _absent_or_twice(found)


def _absent_or_twice(found: list[str]) -> int:
    if found:
        raise IllFormed("from: given more than once")
    return 0


def kvsp_epoch(headers: Mapping[str, str]) -> int:
    """KVSP-Epoch, which every write to a log carries. Raises IllFormed."""
    if "kvsp-epoch" not in headers:
        raise IllFormed("KVSP-Epoch is missing")
    return _number(headers["kvsp-epoch"], "KVSP-Epoch")


def creates(headers: Mapping[str, str]) -> bool:
    """Does the request say `If-None-Match: *`, and nothing against it? Raises IllFormed."""
    condition = headers.get("if-none-match")
    if condition is None:
        return False
    if condition.strip() != "*" or "if-match" in headers:
        raise IllFormed("If-None-Match must be * and must stand alone")
    return True


def if_match(headers: Mapping[str, str]) -> str:
    """The one strong entity tag of If-Match. Raises IllFormed; PreconditionFailed for a weak one (never a match)."""
    tag = headers.get("if-match", "").strip()
    if tag.startswith("W/"):
        raise PreconditionFailed("a weak entity tag never matches")
    if not _STRONG_TAG.fullmatch(tag):
        raise IllFormed("If-Match must name one strong entity tag")
    return tag


def ttl_s(headers: Mapping[str, str]) -> float | None:
    """TTL in whole seconds, or None. Raises IllFormed."""
    return float(_number(headers["ttl"], "TTL")) if "ttl" in headers else None


def ttl(milliseconds: int) -> str:
    """Value of TTL for a life of at least this long."""
    return str(math.ceil(milliseconds / 1000))


def content_digest(body: bytes) -> str:
    """Value of Content-Digest."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def check_content_digest(headers: Mapping[str, str], body: bytes) -> None:
    """Raises ContentDigestMismatch when a SHA-256 is given and is not the body's. Other algorithms are ignored."""
    for member in headers.get("content-digest", "").split(","):
        match = _DIGEST.fullmatch(member)
        if match is None:
            continue
        try:
            given = base64.b64decode(match.group(1), validate=True)
        except binascii.Error as error:
            raise IllFormed("Content-Digest is not base64") from error
        if given != hashlib.sha256(body).digest():
            raise ContentDigestMismatch("the content is not what its SHA-256 says")


def _number(text: str, what: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) >= _UINT_LIMIT:
        raise IllFormed(f"{what}: not a number below 2^64")
    return int(text)
