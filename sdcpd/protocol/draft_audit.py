"""Does a drafter sample from the rows it shows? An audit by their entropy (decision 67).

Under rule 2 a drafter that reports a tiny q for the token it chose has it accepted, and steers the text. One row shows
nothing. But over many, the mean of -ln q(x) of an honest drafter is the mean entropy of its rows, and its variance is
theirs: z is how many standard deviations apart the two are. A row without entropy (one-hot) says nothing and is left
out, so an honest copying drafter has no z at all.

Old rows fade, lest a long honest past covers what comes after it.
"""

import math
from typing import Final

from msgspec import Struct

from sdcpd.protocol.draft_rows import CheckedRow, values_of

ALARM_Z: Final = 6.0
"""Two in a billion for an honest drafter at one look; it is looked at after every proposal."""
ROWS_REQUIRED: Final = 64
"""Before so many rows z is far from normal, and an honest drafter could meet the alarm."""
VARIANCE_REQUIRED: Final = 1e-9
"""A row of equal values has none but by rounding, and its rounding would count as proof."""
ROWS_REMEMBERED: Final = 4096.0
"""Rows after which the past counts half."""


class Moments(Struct, frozen=True):
    """Of one row: -ln q(x), and the mean (entropy) and variance of -ln q under q, in nats."""

    surprise: float
    entropy: float
    variance: float


def moments(checked: CheckedRow) -> Moments | None:
    """None for a row without entropy."""
    chances = [value / checked.total for value in values_of(checked.row) if value > 0.0]
    if len(chances) < 2:
        return None
    logs = [-math.log(chance) for chance in chances]
    entropy = math.fsum(chance * log for chance, log in zip(chances, logs, strict=True))
    variance = math.fsum(chance * (log - entropy) ** 2 for chance, log in zip(chances, logs, strict=True))
    return Moments(surprise=-math.log(checked.chosen / checked.total), entropy=entropy, variance=variance)


class DraftAudit:
    """The account of one drafter. `rows` counts all rows looked at."""

    def __init__(self) -> None:
        self.rows = 0
        self._weight = 0.0
        self._excess = 0.0
        self._variance = 0.0

    def observe(self, row: Moments) -> None:
        """One proposed token and its row."""
        if row.variance < VARIANCE_REQUIRED:
            return
        self.rows += 1
        self._weight += 1.0
        self._excess += row.surprise - row.entropy
        self._variance += row.variance
        if self._weight >= ROWS_REMEMBERED:
            self._weight, self._excess, self._variance = self._weight / 2, self._excess / 2, self._variance / 2

    @property
    def z(self) -> float | None:
        """Standard deviations between what was seen and what the rows promise; None before there is enough."""
        if self._weight < ROWS_REQUIRED:
            return None
        return self._excess / math.sqrt(self._variance)

    @property
    def alarming(self) -> bool:
        z = self.z
        return z is not None and abs(z) > ALARM_Z
