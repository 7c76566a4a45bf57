"""Target distributions of one row, as integer masses (draft 4.1; decisions 13 to 17, 68, 70).

Theory. A sum of floats depends on the order of its terms, and a kernel chooses that order. Then a draw near a border
would depend on the batch it was made in. So a row is turned into integers once, mass = floor(2^44 * e^((l - max) / T)),
and every sum and every comparison after that is exact: the best token has mass 2^44, and what is below 2^-44 of it has
none. p(x) is mass(x) divided by the row's total; no normalised row is ever made.

Truncation walks tokens by falling logit, equal ones by rising id: that is the order of falling probability, and it does
not depend on the rounding of an exponential.

This is the reference, on lists. engine/target_rows.py does the same on tensors.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from msgspec import UNSET, Struct, UnsetType

from sdcpd.protocol.messages import ContractSampling, Sampling

SCALE: Final = 1 << 44
VOCABULARY_LIMIT: Final = 1 << 19
"""Rows below this many tokens have totals below 2^63."""


class Profile(Struct, frozen=True):
    """A sampling profile with nothing left out (decision 11): temperature 1, no top-k, no top-p, no seed."""

    temperature_milli: int = 1000
    top_k: int = 0  # 0 is off (decision 14)
    top_p_milli: int = 1000  # 1000 is off
    seed: int | None = None

    def message(self) -> Sampling:
        """The profile as a message, every member written out."""
        return Sampling(
            temperature_milli=self.temperature_milli,
            top_k=self.top_k,
            top_p_milli=self.top_p_milli,
            seed=UNSET if self.seed is None else self.seed,
        )


def profile_of(sampling: Sampling | ContractSampling | UnsetType) -> Profile:
    """The profile that a message states; missing members take the defaults of decision 11."""
    if sampling is UNSET:
        return Profile()
    return Profile(
        temperature_milli=1000 if sampling.temperature_milli is UNSET else sampling.temperature_milli,
        top_k=0 if sampling.top_k is UNSET else sampling.top_k,
        top_p_milli=1000 if sampling.top_p_milli is UNSET else sampling.top_p_milli,
        seed=None if sampling.seed is UNSET else sampling.seed,
    )


def target_masses(logits: Sequence[float], profile: Profile) -> list[int]:
    """Masses of one row of V finite logits (some may be -Inf) after temperature, top-k and top-p, in that order (4.1).

    Temperature 0 leaves the argmax alone, ties to the smallest id (decision 13).
    """
    assert len(logits) < VOCABULARY_LIMIT
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = logits[order[0]]
    if profile.temperature_milli == 0:
        kept = order[:1]
        masses = [SCALE] * len(logits)
    else:
        temperature = profile.temperature_milli / 1000
        masses = [int(math.exp((logit - best) / temperature) * SCALE) for logit in logits]
        kept = order[: profile.top_k] if profile.top_k else order
        kept = _up_to(kept, masses, profile.top_p_milli)
    row = [0] * len(logits)
    for token in kept:
        row[token] = masses[token]
    return row


def _up_to(order: list[int], masses: Sequence[int], top_p_milli: int) -> list[int]:
    """Top-p over what top-k left: up to and including the token that reaches the threshold (decision 16)."""
    if top_p_milli >= 1000:
        return order
    cumulative = list(accumulate(1000 * masses[token] for token in order))
    return order[: bisect_left(cumulative, top_p_milli * (cumulative[-1] // 1000)) + 1]


def draw(masses: Sequence[int], u: float) -> int:
    """Inverse CDF in increasing token id: the first token whose cumulative mass exceeds `u` times the total (70).

    `u` in [0, 1). A token without mass is never drawn; where rounding carries `u` times the total up to the total, the
    last token with mass is.
    """
    cumulative = list(accumulate(masses))
    total = cumulative[-1]
    assert total > 0, "a row without mass has no token"
    return bisect_right(cumulative, min(int(u * float(total)), total - 1))
