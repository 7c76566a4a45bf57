"""What a pass of this model costs on this machine: seconds against rows, measured at start and kept true by use.

A GPU answers a few rows in the time of one, a CPU takes its time for each, and kernels cost by tiles: which it is
decides whether speculation pays, so it is measured and never assumed. The curve is piecewise linear and never falls. It
starts with what was measured at powers of two, and goes on behind the last of them as between the last two. From then
on it has four points to an octave, and each pass moves the one that is nearest: so steps are found where they are.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

WEIGHT: Final = 0.1
"""Of one observed pass, for the point nearest to its rows."""

STRAY: Final = 4.0
"""A pass this many times slower (or faster) than the curve has met something else; it counts as if it were just so."""

LAST_ROWS: Final = 1024
"""The curve has points up to here, as a pass may have so many rows before anybody measured that."""

PARTS: Final = 4
"""Points of an octave."""


class CostCurve:
    """`points` are measured (rows, seconds > 0), rows doubling. The one-row pass is the first."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        assert points
        self.measured: tuple[tuple[int, float], ...] = tuple(points)
        known = list(points)
        slope = 0.0
        if len(known) > 1:
            slope = max(0.0, (known[-1][1] - known[-2][1]) / (known[-1][0] - known[-2][0]))
        while known[-1][0] < LAST_ROWS:
            rows, seconds = known[-1]
            known.append((2 * rows, seconds + slope * rows))
        self._rows = [known[0][0]]
        self._times = [known[0][1]]
        for (low, low_s), (high, high_s) in pairwise(known):
            parts = min(PARTS, high - low)
            for part in range(1, parts + 1):
                self._rows.append(low + (high - low) * part // parts)
                self._times.append(low_s + (high_s - low_s) * (self._rows[-1] - low) / (high - low))
        self._rise()

    def seconds(self, rows: float) -> float:
        """Of a pass with so many rows; a fraction is what passes have on the average."""
        place = bisect_left(self._rows, rows)
        if place == 0:
            return self._risen[0]
        if place == len(self._rows):
            return self._risen[-1] * rows / self._rows[-1]
        before, after = self._rows[place - 1], self._rows[place]
        low, high = self._risen[place - 1], self._risen[place]
        return low + (high - low) * (rows - before) / (after - before)

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of `rows` rows took so long."""
        off = min(STRAY, max(1 / STRAY, seconds / self.seconds(rows))) - 1.0
        place = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        if place > 0 and rows - self._rows[place - 1] < self._rows[place] - rows:
            place -= 1
        self._times[place] *= 1.0 + WEIGHT * off
        self._rise()

    def full_rows(self, ratio: float) -> int:
        """The first measured row count at which a pass cost more than `ratio` times the one-row pass; the largest
        measured if none did (decision 47)."""
        base = self.measured[0][1]
        return next((rows for rows, seconds in self.measured if seconds > ratio * base), self.measured[-1][0])

    def _rise(self) -> None:
        highest = 0.0
        self._risen: list[float] = []
        for seconds in self._times:
            highest = max(highest, seconds)
            self._risen.append(highest)
