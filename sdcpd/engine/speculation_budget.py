"""Whether speculation pays now, and how much of it: from load, acceptance and the cost of rows (74, 82, 110).

A busy verifier that scores eight proposed tokens for each one it keeps is slower than one that decodes alone, and an
idle one that decodes alone wastes rows that cost nothing. Both follow from the curve (cost_curve.py), the acceptance of
each session (acceptance_estimate.py) and the number of sessions, by row_allotment.py. What is added here is calm:

- m_cap falls at once and rises by one at each review (6.5.1).
- A session leaves drafting only when the best that can be had with it is worse than without by more than
  `down_hysteresis`, and comes back only when it is better by more than `up_hysteresis`, both at `PATIENCE` reviews in a
  row: leaving and coming back cost messages, and a drafter its keys and values.
- Who decodes alone shows nothing of its acceptance. After `PROBE_TOKENS` tokens it tries again, if a text that is easy
  to guess would pay now; each try in vain doubles the wait.

No clock and no session here: who calls says what passes took and what rounds brought.
"""

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from sdcpd.engine.acceptance_estimate import AcceptanceEstimate
from sdcpd.engine.cost_curve import LAST_ROWS, CostCurve
from sdcpd.engine.row_allotment import Rhythm, Tempo, Wish, allot, rate

PATIENCE: Final = 3
"""Reviews in a row that must agree before a session changes between drafting and decoding alone."""

LEAST_TESTED: Final = 8.0
"""Tokens tested, of the session or of all, before anything is concluded from them."""

PROBE_TOKENS: Final = 512
PROBE_TOKENS_LIMIT: Final = 8192
HOPED_ALPHA: Final = 0.8
"""Acceptance of a text that is easy to guess: whether a probe could show anything at all."""

ROUNDS_A_PASS: Final = 8
"""A busy verifier, with more rounds a pass than this, is reviewed after fewer passes."""

ALL_WEIGHT: Final = 0.02
"""Of one round in the estimate over all sessions."""

RHYTHM_WEIGHT: Final = 0.05
FIRST_ALPHA: Final = 0.6
"""Of the first session of all, until its rounds tell."""


class Mode(Enum):
    """What a session does now."""

    DRAFTING = "drafting"
    ALONE = "alone"  # because we said that drafting does not pay
    OTHER = "other"  # it decodes alone for another reason: a ladder's period, the client's wish, no drafter


class Passed(Struct, frozen=True):
    """One pass without prompts. `rows` are all its tokens, `gap_s` the time since the pass before; sessions are counted
    by mode (ALONE and OTHER together), those in the pass and those that are open."""

    rows: int
    seconds: float
    gap_s: float
    drafting: int
    drafting_open: int
    alone: int
    alone_open: int


class Standing(Struct, frozen=True):
    """One open session: what it does, and the m_max of its contract."""

    mode: Mode
    m_max: int


class _Member:
    def __init__(self, weight: float) -> None:
        self.estimate = AcceptanceEstimate(weight)
        self.ceiling: int | None = None
        self.pays = True
        self.doubts = 0  # reviews in a row that spoke against what it does
        self.alone_tokens = 0  # since it decodes alone
        self.probe_tokens = PROBE_TOKENS


class SpeculationBudget:
    """All sessions of one verifier, by whatever names them."""

    def __init__(
        self,
        curve: CostCurve,
        *,
        ema_alpha: float = 0.1,
        update_interval: int = 8,
        down_hysteresis: float = 0.01,
        up_hysteresis: float = 0.03,
    ) -> None:
        self.curve = curve
        self.tempo = Tempo()
        self._weight = ema_alpha
        self._interval = update_interval
        self._passes = self._rounds = 0  # since the last review
        self._down = down_hysteresis
        self._up = up_hysteresis
        self._all = AcceptanceEstimate(ALL_WEIGHT)
        self._members: dict[Hashable, _Member] = {}

    def passed(self, one: Passed) -> None:
        """A pass is over: what it says of costs and of the rhythm."""
        self._passes += 1
        self.curve.observe(one.rows, one.seconds)
        drafting, alone = self.tempo.drafting, self.tempo.alone
        if one.drafting:
            drafting = _moved(drafting, one, one.drafting / one.drafting_open, pure=not one.alone_open)
        if one.alone:
            alone = _moved(alone, one, one.alone / one.alone_open, pure=not one.drafting_open)
        self.tempo = Tempo(drafting, alone)

    def judged(self, key: Hashable, accepted: int, proposed: int) -> None:
        """A round of a session under review: a and M."""
        self._rounds += 1
        self._all.judged(accepted, proposed)
        self._member(key).estimate.judged(accepted, proposed)

    def decoded_alone(self, key: Hashable) -> None:
        """The session made one more token by itself."""
        self._member(key).alone_tokens += 1

    def ceiling(self, key: Hashable) -> int | None:
        """What the load leaves of its m_cap; None before its first review."""
        member = self._members.get(key)
        return None if member is None else member.ceiling

    def pays(self, key: Hashable) -> bool:
        """Whether it should draft."""
        member = self._members.get(key)
        return member is None or member.pays

    @property
    def due(self) -> bool:
        """Whether enough has happened for another review."""
        return self._passes >= self._interval or self._rounds >= ROUNDS_A_PASS * self._interval

    def review(self, open_: Mapping[Hashable, Standing]) -> None:
        """Look at all sessions that are open; those that are not any more are forgotten."""
        self._passes = self._rounds = 0
        self._members = {key: self._member(key) for key in open_}
        keys = [key for key, one in open_.items() if one.mode is not Mode.OTHER]
        if not keys:
            return
        others, prior = len(open_) - len(keys), self._all.alpha(FIRST_ALPHA)
        most = max(1, LAST_ROWS // len(open_))
        wishes = [Wish(self._members[key].estimate.alpha(prior), min(most, open_[key].m_max)) for key in keys]
        lengths = allot(wishes, others, self.curve, self.tempo.drafting)
        self._leave(open_, keys, wishes, lengths, others)
        self._come_back(open_, keys, wishes, lengths, others)
        self._probe(open_, keys, wishes, others)
        for key, length in zip(keys, lengths, strict=True):
            member, wanted = self._members[key], max(1, length)
            before = member.ceiling
            member.ceiling = wanted if before is None else min(wanted, before + 1)

    def _leave(
        self,
        open_: Mapping[Hashable, Standing],
        keys: Sequence[Hashable],
        wishes: Sequence[Wish],
        lengths: Sequence[int],
        others: int,
    ) -> None:
        """Who drafts and had better not: those whose rows do not pay, or all, where drafting itself does not."""
        drafts = [open_[key].mode is Mode.DRAFTING for key in keys]
        idle = [one and not length for one, length in zip(drafts, lengths, strict=True)]
        now = [max(1, length) if one else 0 for one, length in zip(drafts, lengths, strict=True)]
        without = [0 if one else length for one, length in zip(idle, now, strict=True)]
        rates = self._rate(wishes, without, others), self._rate(wishes, [0] * len(keys), others)
        if rates[1] > (1.0 + self._down) * rates[0]:
            idle = drafts
        loses = max(rates) > (1.0 + self._down) * self._rate(wishes, now, others)
        for key, one in zip(keys, idle, strict=True):
            member = self._members[key]
            if open_[key].mode is not Mode.DRAFTING:
                continue
            if not (one and loses and max(member.estimate.tested, self._all.tested) >= LEAST_TESTED):
                member.doubts, member.pays = 0, True
                continue
            member.doubts += 1
            if member.doubts >= PATIENCE and member.pays:
                member.pays, member.doubts, member.alone_tokens = False, 0, 0

    def _come_back(
        self,
        open_: Mapping[Hashable, Standing],
        keys: Sequence[Hashable],
        wishes: Sequence[Wish],
        lengths: Sequence[int],
        others: int,
    ) -> None:
        """Who decodes alone and could gain by drafting."""
        modes = [open_[key].mode for key in keys]
        wanted = [mode is Mode.ALONE and length > 0 for mode, length in zip(modes, lengths, strict=True)]
        without = [max(1, length) if mode is Mode.DRAFTING else 0 for mode, length in zip(modes, lengths, strict=True)]
        together = [length if one else now for one, length, now in zip(wanted, lengths, without, strict=True)]
        gains = self._rate(wishes, together, others) > (1.0 + self._up) * self._rate(wishes, without, others)
        for key, one in zip(keys, wanted, strict=True):
            member = self._members[key]
            if open_[key].mode is not Mode.ALONE:
                continue
            member.doubts = member.doubts + 1 if one and gains else 0
            if member.doubts >= PATIENCE and not member.pays:
                member.pays, member.doubts = True, 0
                member.probe_tokens = PROBE_TOKENS

    def _probe(
        self, open_: Mapping[Hashable, Standing], keys: Sequence[Hashable], wishes: Sequence[Wish], others: int
    ) -> None:
        """Of those that have been alone for long, the one that has been so for longest tries again."""
        due = [
            (self._members[key].alone_tokens, place)
            for place, key in enumerate(keys)
            if open_[key].mode is Mode.ALONE
            and not self._members[key].pays
            and self._members[key].alone_tokens >= self._members[key].probe_tokens
        ]
        if not due:
            return
        member = self._members[keys[max(due, key=lambda one: (one[0], -one[1]))[1]]]
        member.alone_tokens = 0
        hoped = [replace(wish, alpha=max(wish.alpha, HOPED_ALPHA)) for wish in wishes]
        lengths = allot(hoped, others, self.curve, self.tempo.drafting)
        if self._rate(hoped, lengths, others) > (1.0 + self._up) * self._rate(hoped, [0] * len(hoped), others):
            member.pays, member.doubts = True, 0
            member.probe_tokens = min(2 * member.probe_tokens, PROBE_TOKENS_LIMIT)
            member.estimate.forget(0.25)

    def _rate(self, wishes: Sequence[Wish], lengths: Sequence[int], others: int) -> float:
        return rate(wishes, lengths, others, self.curve, self.tempo)

    def _member(self, key: Hashable) -> _Member:
        found = self._members.get(key)
        if found is None:
            found = self._members[key] = _Member(self._weight)
        return found


def _moved(rhythm: Rhythm, one: Passed, share: float, *, pure: bool) -> Rhythm:
    """A little towards what one pass showed. Its gap says something only where all sessions do the same, and counts for
    one more or less pass at most: after the last session the verifier waits for the next, for hours if need be."""
    off_s = max(-one.seconds, min(one.seconds, one.gap_s - rhythm.gap_s)) if pure else 0.0
    return Rhythm(rhythm.share + RHYTHM_WEIGHT * (share - rhythm.share), rhythm.gap_s + RHYTHM_WEIGHT * off_s)
