"""The verifier's random values: seeded by HMAC, or from a source that is passed in (draft 6.4; decisions 18, 69, 115).

Under rule 2 a value belongs to (session, round, position, purpose): a repeated round draws the same ones, and no other
session can shift them. Positions are one-based as in p[1..M+1]; the additional token of a round that accepted a tokens
uses position a+1. A self-decoded round proposes nothing, so its token is the additional one at position 1.

Under rule 65281 a value belongs to the output index alone, so that the text does not depend on where rounds begin.

Nothing here draws from anywhere by itself: without a seed the caller hands in its own uniform source. It must not be
the one that a drafter uses.
"""

import hashlib
import hmac
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from msgspec import Struct

SEED_LIMIT: Final = 1 << 64
"""First seed that eight octets cannot hold (decision 18). CBOR's widest unsigned integer is below it."""

_VERIFY: Final = b"SDCP-VERIFY-1\x00"
_REPLAY: Final = b"SDCPD-REPLAY-1\x00"
_CHOICE: Final = b"SDCPD-CHOICE-1\x00"


class Purpose(IntEnum):
    """What a value is drawn for (6.4)."""

    ACCEPTANCE = 0
    ADDITIONAL = 1


class RoundDraws(Struct, frozen=True):
    """The values of one round, each in [0, 1).

    `tests[i-1]` decides on the proposed position i; `tokens[i-1]` draws the additional token if it stands at position
    i. All are made before any is looked at, so how many are used tells nothing of them.
    """

    tests: tuple[float, ...]
    tokens: tuple[float, ...]


def seeded_draw(seed: int, session: bytes, round_: int, i: int, purpose: Purpose) -> float:
    """The value of 6.4 for position `i` >= 1 of a round."""
    assert i >= 1, "positions are one-based (decision 69)"
    return _unit(seed, _VERIFY + session + uint32(round_) + uint32(i) + bytes([purpose]))


def replay_draw(seed: int, k: int) -> float:
    """u(k) of rule 65281 for the 1-based output index `k` (decision 115)."""
    assert k >= 1, "output indices are one-based here"
    return _unit(seed, _REPLAY + uint32(k))


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request with several: choice 0 has the request's own (decision 115)."""
    if choice == 0:
        return seed % SEED_LIMIT
    octets = _CHOICE + (seed % SEED_LIMIT).to_bytes(8, "big") + uint32(choice)
    return int.from_bytes(hashlib.sha256(octets).digest()[:8], "big")


def seeded_round(seed: int, session: bytes, round_: int, proposed: int) -> RoundDraws:
    """The values of a round under rule 2 with a seed; `proposed` is M, 0 for a self-decoded round."""
    return RoundDraws(
        tests=tuple(seeded_draw(seed, session, round_, i, Purpose.ACCEPTANCE) for i in range(1, proposed + 1)),
        tokens=tuple(seeded_draw(seed, session, round_, i, Purpose.ADDITIONAL) for i in range(1, proposed + 2)),
    )


def unseeded_round(uniform: Callable[[], float], proposed: int) -> RoundDraws:
    """The same without a seed: `uniform` is a cryptographically secure source of values in [0, 1)."""
    return RoundDraws(
        tests=tuple(uniform() for _ in range(proposed)), tokens=tuple(uniform() for _ in range(proposed + 1))
    )


def replayed_round(seed: int, committed: int, proposed: int) -> RoundDraws:
    """The values of a round under rule 65281 on top of `committed` output tokens: one a row, no tests."""
    return RoundDraws(tests=(), tokens=tuple(replay_draw(seed, committed + place) for place in range(1, proposed + 2)))


def uint32(number: int) -> bytes:
    """uint32() of the draft: four octets in network byte order (4.2)."""
    return number.to_bytes(4, "big")


def _unit(seed: int, message: bytes) -> float:
    """The first 53 bits of HMAC-SHA-256 keyed with the seed's eight octets, divided by 2^53."""
    assert 0 <= seed < SEED_LIMIT
    digest = hmac.digest(seed.to_bytes(8, "big"), message, "sha256")
    return (int.from_bytes(digest[:7], "big") >> 3) / (1 << 53)
