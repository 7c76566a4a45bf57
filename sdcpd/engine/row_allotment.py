"""How many proposed tokens of each session are worth their rows in the passes to come (draft 6.2, 6.5.1).

Theory. N sessions share passes; each has one row whatever happens, and answers one token for it. Position i of a
proposal adds alpha^i tokens on the average, and a row. All sessions together bring tokens / time of their pass, so a
row is worth having if it adds more to the tokens than to the time, relative to what both are. Rows are therefore handed
out by falling worth, over all sessions, and the best of all totals is taken. (Each total is looked at, as curves have
steps: what one more row does not pay for, eight more may.)

Not every session is in every pass: while one drafts, the others go on. `Rhythm` has what was seen of that. With a share
s of the sessions in a pass of time T and a gap g before the next one, all have had their turn after (T + g) / s.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from sdcpd.engine.cost_curve import CostCurve

LEAST_GAIN: Final = 0.01
"""Tokens that a row adds on the average, below which nobody asks for it."""


TOTALS_LIMIT: Final = 256
"""So many totals are looked at, evenly spread where there are more rows: it is done between two passes."""

FREE: Final = 1.001
"""Passes whose times differ by less than this cost the same."""


class Rhythm(Struct, frozen=True):
    """How passes follow each other: the share of sessions in each, in (0, 1], and the time between two."""

    share: float = 1.0
    gap_s: float = 0.0

    def turn_s(self, curve: CostCurve, rows: float) -> float:
        """Until `rows` rows, those of all sessions, have been in a pass."""
        return (curve.seconds(rows * self.share) + self.gap_s) / self.share


class Tempo(Struct, frozen=True):
    """The rhythm with drafters, and that of a verifier that decodes alone."""

    drafting: Rhythm = Rhythm()
    alone: Rhythm = Rhythm()


class Wish(Struct, frozen=True):
    """One session's: its acceptance probability, and the most tokens that it could propose (0: it cannot)."""

    alpha: float
    limit: int


def rate(wishes: Sequence[Wish], lengths: Sequence[int], others: int, curve: CostCurve, tempo: Tempo) -> float:
    """Tokens a second if each session proposes so many tokens and `others` decode alone beside them."""
    count = len(wishes) + others
    tokens = count + sum(gain(wish.alpha, length) for wish, length in zip(wishes, lengths, strict=True))
    rhythm = tempo.drafting if any(lengths) else tempo.alone
    return tokens / rhythm.turn_s(curve, count + sum(lengths))


def gain(alpha: float, length: int) -> float:
    """Tokens that a proposal of `length` tokens adds: alpha + alpha^2 + ..."""
    if alpha >= 1.0:
        return float(length)
    return float(alpha * (1.0 - alpha**length) / (1.0 - alpha))


def allot(wishes: Sequence[Wish], others: int, curve: CostCurve, drafting: Rhythm) -> list[int]:
    """Tokens that each session may propose for the best rate that drafting can have; all that they may, where that
    costs nothing more."""
    rows: list[tuple[float, int, int]] = []
    for number, wish in enumerate(wishes):
        worth = wish.alpha
        for place in range(wish.limit):
            if worth < LEAST_GAIN:
                break
            rows.append((-worth, place, number))
            worth *= wish.alpha
    rows.sort()
    count = len(wishes) + others
    tokens = float(count)
    best, best_rate = 0, tokens / drafting.turn_s(curve, count)
    stride = 1 + len(rows) // TOTALS_LIMIT
    for total, (worth, _, _) in enumerate(rows, 1):
        tokens -= worth
        if total % stride == 0 or total == len(rows):
            reached = tokens / drafting.turn_s(curve, count + total)
            if reached > best_rate:
                best, best_rate = total, reached
    limits = [wish.limit for wish in wishes]
    if curve.seconds(count + sum(limits)) <= FREE * curve.seconds(count + best):
        return limits
    lengths = [0] * len(wishes)
    for _, _, number in rows[:best]:
        lengths[number] += 1
    return lengths
