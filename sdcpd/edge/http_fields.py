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

from sdcpd.cache.content_coding import CODINGS, GZIP, Coding
from sdcpd.protocol.problems import IllFormed, NotSupported, PreconditionFailed, Problem, WrongMediaType
from sdcpd.protocol.terms import session_from_path_id

OUTPUT_WAIT_S: Final = 20.0
"""How long a long poll is held; `Prefer: wait=N` lowers it (decision 38). Below common proxy timeouts."""

_STRONG_TAG: Final = re.compile(r'"[\x21\x23-\x7e]*"')
_NUMBER: Final = re.compile(r"[0-9]{1,20}")
_WAIT: Final = re.compile(r"\s*wait\s*=\s*\"?([0-9]{1,9})\"?\s*(;.*)?", re.IGNORECASE)
_DIGEST: Final = re.compile(r"\s*sha-256\s*=\s*:([A-Za-z0-9+/=]*):\s*", re.IGNORECASE)
_RANGE: Final = re.compile(r"\s*bytes\s*=\s*([0-9]{0,18})-([0-9]{0,18})\s*", re.IGNORECASE)
_NO_WEIGHT: Final = re.compile(r"\s*q\s*=\s*0(\.0{0,3})?\s*")
_UINT_LIMIT: Final = 1 << 64


class ContentDigestMismatch(Problem):
    """Content-Digest (RFC 9530) does not agree with the content."""

    status: ClassVar[int] = 422
    title: ClassVar[str] = "Content digest does not agree"


class UnknownCoding(Problem):
    """The body is in a content coding that is not read here."""

    status: ClassVar[int] = 415
    title: ClassVar[str] = "Unknown content coding"


def require_media_type(headers: Mapping[str, str], wanted: str) -> None:
    """Content-Type is `wanted`, whatever its parameters. Raises WrongMediaType."""
    found = headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != wanted:
        raise WrongMediaType(f"content-type is {found[:100]!r}, not {wanted}")


def wait_s(headers: Mapping[str, str], otherwise: float = OUTPUT_WAIT_S) -> float:
    """How long a request may wait: what `Prefer: wait=N` says, at most 20 s; `otherwise` where it says nothing."""
    for preference in headers.get("prefer", "").split(","):
        match = _WAIT.fullmatch(preference)
        if match is not None:
            return min(float(match.group(1)), OUTPUT_WAIT_S)
    return otherwise


def prefer_wait(seconds: float) -> str:
    """Value of Prefer for a wait of at least `seconds`."""
    return f"wait={math.ceil(max(0.0, seconds))}"


def output_start(query: str) -> int:
    """`from` of an output request; absent means 0 (decision 39). Raises IllFormed."""
    found = _query_field(query, "from")
    return 0 if found is None else _number(found, "from")


def list_start(query: str) -> bytes | None:
    """`after` of a directory's page: the session behind which it begins; absent means the first. Raises IllFormed."""
    found = _query_field(query, "after")
    try:
        return None if found is None else session_from_path_id(found)
    except ValueError as error:
        raise IllFormed("after: not the base64url form of a session id") from error


def _query_field(query: str, name: str) -> str | None:
    try:
        fields = parse_qsl(query, keep_blank_values=True, max_num_fields=64)
    except ValueError as error:
        raise IllFormed("the query cannot be read") from error
    found = [value for key, value in fields if key == name]
    if len(found) > 1:
        raise IllFormed(f"{name}: given more than once")
    return found[0] if found else None


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


def if_match_if_any(headers: Mapping[str, str]) -> str | None:
    """As `if_match`; None where there is no such field."""
    return if_match(headers) if "if-match" in headers else None


def forced(query: str) -> bool:
    """Does the query say `force=1`? Raises IllFormed for anything else that it says of it."""
    found = _query_field(query, "force")
    if found not in (None, "0", "1"):
        raise IllFormed("force: 1, or nothing")
    return found == "1"


def require_class(headers: Mapping[str, str], wanted: str) -> None:
    """Wishes of a writer (cache part 5.3: Create, Placement). What is not honoured is refused.

    Raises IllFormed for another class than what the name says, NotSupported for more than one replica.
    """
    found = headers.get("kvsp-class", wanted).strip().lower()
    if found != wanted:
        raise IllFormed(f"KVSP-Class is {found[:40]!r}, but the name is of class {wanted}")
    if headers.get("kvsp-replicas", "1").strip() != "1":
        raise NotSupported("KVSP-Replicas: a cache keeps one copy of a thing, and makes none elsewhere")


def is_known(headers: Mapping[str, str], tag: str) -> bool:
    """Does If-None-Match of a read say that the caller has the content with this tag? Weak tags count (RFC 9110)."""
    condition = headers.get("if-none-match", "").strip()
    return condition == "*" or tag in (one.strip().removeprefix("W/") for one in condition.split(","))


def byte_range(headers: Mapping[str, str], tag: str, length: int) -> range | None:
    """The octets that Range asks for: an empty range where there are none (416), None for the whole (RFC 9110 14.2).

    Several ranges at once, another unit, what cannot be read, and a range of another content (If-Range) get the whole.
    """
    if headers.get("if-range", tag).strip() != tag:
        return None
    match = _RANGE.fullmatch(headers.get("range", ""))
    if match is None:
        return None
    first, last = match.groups()
    if not first:
        return None if not last else range(max(0, length - int(last)), length)
    if last and int(last) < int(first):
        return None
    return range(min(int(first), length), min(int(last) + 1, length) if last else length)


def accepted_coding(headers: Mapping[str, str]) -> Coding | None:
    """The best coding that Accept-Encoding names, or anything does, and not with a weight of 0."""
    weights = {}
    for member in headers.get("accept-encoding", "").lower().split(","):
        coding, _, parameter = member.partition(";")
        weights[coding.strip()] = not _NO_WEIGHT.fullmatch(parameter)
    named = (coding for coding in CODINGS if weights.get(coding, False))
    return next(named, GZIP if weights.get("*", False) and GZIP not in weights else None)


def coding_of(headers: Mapping[str, str]) -> Coding | None:
    """The coding that the body is in. Raises UnknownCoding for any other than those known here and none."""
    found = headers.get("content-encoding", "").strip().lower().removeprefix("x-")
    if found in ("", "identity"):
        return None
    for coding in CODINGS:
        if found == coding:
            return coding
    raise UnknownCoding(f"content-encoding is {found[:100]!r}; the body may be in {' or '.join(CODINGS)}, or in none")


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
    if "content-digest" in headers:
        check_digest(headers, hashlib.sha256(body).digest())


def check_digest(headers: Mapping[str, str], digest: bytes) -> None:
    """The same, where the body's SHA-256 is known."""
    for member in headers.get("content-digest", "").split(","):
        match = _DIGEST.fullmatch(member)
        if match is None:
            continue
        try:
            given = base64.b64decode(match.group(1), validate=True)
        except binascii.Error as error:
            raise IllFormed("Content-Digest is not base64") from error
        if given != digest:
            raise ContentDigestMismatch("the content is not what its SHA-256 says")


def _number(text: str, what: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) >= _UINT_LIMIT:
        raise IllFormed(f"{what}: not a number below 2^64")
    return int(text)
