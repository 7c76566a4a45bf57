"""What a looked-up draft is worth before it is verified: how many of its tokens will be accepted (hybrid decoding).

A lookup is free to make and not free to verify: its round is one that a model's draft could have had. The hybrid
(roles/hybrid_drafting.py) therefore asks an estimator first. This one is the rule-based baseline, frequency-based
hybrid decoding: the score that suffix decoding itself gives. An estimator that learns from verdicts has the same two
calls.
"""

from typing import Protocol

from msgspec import Struct


class Features(Struct, frozen=True):
    """What is known of a looked-up draft before its verification: never what the target will say."""

    matched: int
    score: float
    length: int


class Payoff(Protocol):
    """An estimator for one drafter. It sees the features of every draft that was verified, and what came of it."""

    def estimate(self, features: Features) -> float:
        """Tokens that will be accepted, 0 .. length."""

    def observe(self, features: Features, accepted: int) -> None:
        """A draft with these features had its verdict."""


class FrequencyPayoff:
    """Frequencies seen are the chances that come: the score of the draft, cut at its length."""

    def estimate(self, features: Features) -> float:
        return min(features.score, float(features.length))

    def observe(self, features: Features, accepted: int) -> None:
        """Nothing is learned."""
