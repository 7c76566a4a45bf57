"""The draft's basic terms as types: identifiers, digests, actions, rules and states (draft 4.1, 5.1, 5.2).

Everything here is a plain value. Constraints that CDDL states (`.size`, `uint`) are written into the
types, so that a message that decodes at all is already within them.
"""

import base64
import binascii
from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta

Uint = Annotated[int, Meta(ge=0)]
"""CDDL `uint`. CBOR carries at most 64 bits; anything wider is a bignum, which the decoder refuses."""

SessionId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Hash32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
ScopeId = Annotated[bytes, Meta(min_length=16, max_length=16)]
CacheRef = Annotated[str, Meta(min_length=1, max_length=2048)]
"""URI of an MLC object. The length cap is ours: every reference is kept for as long as its session lives."""

BaseUri = Annotated[str, Meta(min_length=1, max_length=1024)]
Percent = Annotated[int, Meta(ge=0, le=100)]

TOKEN_LIMIT: Final = 1 << 32
"""First token id that `uint32()` of the digest chain (4.2) can no longer hold (decision 22)."""

LOGPROBS_LIMIT: Final = 20
"""Alternatives beside each token's own log-probability, at most (decision 114): as many as clients may ask for."""

M_MAX_LIMIT: Final = 64
"""Largest `m_max` that the contract's CDDL admits (4.1)."""


class Action(IntEnum):
    """Escalation actions (4.1, 6.5.2). An unknown value is read as `FAIL` (5.2)."""

    CONTINUE = 0
    REDUCE = 1
    SWITCH = 2
    SELF_DECODE = 3
    FINISH = 4
    FAIL = 5

    @classmethod
    def _missing_(cls, value: object) -> "Action":  # noqa: ARG003 - the hook has this signature
        return cls.FAIL


class LadderAction(IntEnum):
    """The actions a `fallback` list may contain (4.1). An unknown one is a contract error (decision 20)."""

    REDUCE = 1
    SWITCH = 2
    SELF_DECODE = 3
    FAIL = 5


class Rule(IntEnum):
    """Registered acceptance rules (6.4) and our private one (decision 115)."""

    GREEDY = 1
    SPECULATIVE_SAMPLING = 2
    REPLAYABLE_SAMPLING = 65281


class State(IntEnum):
    """Values of `session-state.state`, which the draft leaves open (decision 40)."""

    DRAFTING = 0
    WAITING = 2
    SELF_DECODING = 3
    FINISHED = 4
    FAILED = 5


class InstanceRole(IntEnum):
    """Values of `status.role` (5.2)."""

    DRAFTER = 1
    VERIFIER = 2


def session_path_id(session: bytes) -> str:
    """The `{id}` of session paths: base64url without padding of the session identifier (5.1)."""
    return base64.urlsafe_b64encode(session).rstrip(b"=").decode("ascii")


def session_from_path_id(text: str) -> bytes:
    """Inverse of `session_path_id`. Raises ValueError unless `text` is the canonical form of 16 octets."""
    try:
        octets = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"session id {text!r} is not base64url") from error
    if len(octets) != 16 or session_path_id(octets) != text:
        raise ValueError(f"session id {text!r} is not the base64url form of 16 octets")
    return octets


def instance_path_id(instance: str) -> str:
    """The `{id}` of instance paths: base64url without padding of the base URI's UTF-8 octets (decision 31)."""
    return base64.urlsafe_b64encode(instance.encode()).rstrip(b"=").decode("ascii")


def instance_from_path_id(text: str) -> str:
    """Inverse of `instance_path_id`. Raises ValueError when `text` is not that form of a URI."""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"instance id {text!r} is not base64url of UTF-8") from error
