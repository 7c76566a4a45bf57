"""How likely a proposed token is to be accepted, from rounds of one session: alpha of draft 6.2.

A round of M tokens of which a were accepted tested a + 1 tokens, or M if all passed: the rejected one ends it, and what
stands behind it was never judged. So alpha is accepted over tested, both fading by `weight` a round, drawn towards what
is known of all sessions while the session's own rounds are few.
"""

from typing import Final

DRAW: Final = 2.0
"""Tests that what is known of all sessions counts for."""


class AcceptanceEstimate:
    """`tested` fades like the rest: it is the number of tests that the estimate rests on now."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._accepted = 0.0
        self.tested = 0.0

    def judged(self, accepted: int, proposed: int) -> None:
        """One round."""
        self._accepted = (1.0 - self._weight) * self._accepted + accepted
        self.tested = (1.0 - self._weight) * self.tested + min(accepted + 1, proposed)

    def alpha(self, prior: float) -> float:
        """In [0, 1]."""
        return (self._accepted + DRAW * prior) / (self.tested + DRAW)

    def forget(self, kept: float) -> None:
        """What was seen counts only `kept` times as much: things may have changed."""
        self._accepted *= kept
        self.tested *= kept
