"""Is speculation to be on for a class of traffic? A machine over the sessions that ended, with hysteresis.

    ON  -> OFF   a mean over the latest speculating sessions is beyond its `off`, or too many KV pages are in use
    OFF -> ON    all means over the latest probes lie within their `on`; after KV pressure: as soon as it is within `on`

Two things can hold speculation off, and each is judged by itself: what its sessions showed (the *evidence*), and the
pressure on KV memory, which is seen without them. With either, new sessions run without a drafter and running ones are
moved to 110; a share of new ones, the *probes*, still speculates when the evidence was against it, since acceptance
cannot be seen otherwise. Whenever evidence turns it, the window begins anew: what was seen before led to the decision
and must not undo it.

A share is *compared*: without speculation whatever the state. The ratio of its time per token to that of the others is
the gain of the class, measured on the same traffic at the same time.

Refuses to know sessions, tasks and clocks: what ended is told, and each new session brings a number drawn in [0, 1).
"""

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Final

from msgspec import Struct

from sdcpd.drafting.traffic_class import TrafficClass

BETTER: Final = 0.95
"""Probes that miss the aim turn speculation on again only when they beat plain sessions by so much."""


class Mode(Enum):
    """How one session of the class runs. FOLLOWING goes on and off with the class."""

    FOLLOWING = "following"
    COMPARED = "compared"
    PROBE = "probe"


class Sample(Struct, frozen=True, kw_only=True):
    """One session that ended. `speculated`: throughout, or (False) never; what changed within is no sample.

    `tokens` in `decode_ms` after the first; `drafted` tokens were proposed, `accepted` of them taken; `looped`: its
    text ended in a loop.
    """

    mode: Mode
    speculated: bool
    tokens: int
    decode_ms: float
    drafted: int = 0
    accepted: int = 0
    looped: bool = False


class Turned(Struct, frozen=True, kw_only=True):
    """Speculation was turned on or off. `reason` is the name of the setting that decided it."""

    on: bool
    reason: str


class Tally(Struct, kw_only=True):
    """Sessions of one side of a comparison."""

    sessions: int = 0
    tokens: int = 0
    decode_ms: float = 0.0

    @property
    def ms_per_token(self) -> float | None:
        return self.decode_ms / self.tokens if self.tokens else None


class SpeculationGuard:
    """One class. `on` and `reason` are what stands now; `with_` and `without` the two sides of the comparison."""

    def __init__(self, rules: TrafficClass) -> None:
        self.rules = rules
        self.with_ = Tally()
        self.without = Tally()
        self._held_off: str | None = None  # by the evidence: which
        self._pressed = False
        self._seen: deque[Sample] = deque(maxlen=rules.window_sessions)  # speculating
        self._plain: deque[Sample] = deque(maxlen=rules.window_sessions)

    @property
    def on(self) -> bool:
        return self._held_off is None and not self._pressed

    @property
    def reason(self) -> str | None:
        """Why it is off."""
        return "kv_usage" if self._pressed else self._held_off

    @property
    def ratio(self) -> float | None:
        """Time per token without speculation over that with it, once both sides have `min_sessions`."""
        if min(self.with_.sessions, self.without.sessions) < self.rules.min_sessions:
            return None
        with_, without = self.with_.ms_per_token, self.without.ms_per_token
        return without / with_ if with_ and without else None

    @property
    def acceptance(self) -> float | None:
        """Of the latest speculating sessions."""
        drafted = sum(one.drafted for one in self._seen)
        return sum(one.accepted for one in self._seen) / drafted if drafted else None

    def admit(self, draw: float) -> Mode:
        """The mode of a new session that wants speculation; `draw` in [0, 1)."""
        if draw < self.rules.compare_share:
            return Mode.COMPARED
        if self._held_off is not None and draw >= 1 - self.rules.probe_share:
            return Mode.PROBE
        return Mode.FOLLOWING

    def speculates(self, mode: Mode) -> bool:
        """Whether a session of this mode is to speculate now."""
        match mode:
            case Mode.COMPARED:
                return False
            case Mode.PROBE:
                return not self._pressed
            case Mode.FOLLOWING:
                return self.on

    def pressure(self, kv_usage: float) -> Turned | None:
        """The share of KV pages in use at the fullest verifier."""
        band = self.rules.kv_usage
        if band is None:
            return None
        was, before = self.on, self.reason
        if kv_usage > band.off:
            self._pressed = True
        elif kv_usage <= band.on:
            self._pressed = False
        if self.on == was:
            return None
        return Turned(on=self.on, reason="kv_usage" if before is None else before)

    def ended(self, sample: Sample) -> Turned | None:
        """A session of the class ended."""
        if sample.tokens <= 0:
            return None
        (self._seen if sample.speculated else self._plain).append(sample)
        if sample.mode is not Mode.PROBE and (sample.speculated or sample.mode is Mode.COMPARED):
            side = self.with_ if sample.speculated else self.without
            side.sessions += 1
            side.tokens += sample.tokens
            side.decode_ms += sample.decode_ms
        return self._judged() if sample.speculated else None

    def _judged(self) -> Turned | None:
        if len(self._seen) < self.rules.min_sessions:
            return None
        verdicts = list(self._verdicts())
        if self._held_off is None:
            beyond = next((name for name, off, _ in verdicts if off), None)
            return None if beyond is None else self._turn(beyond, beyond)
        return self._turn(None, self._held_off) if all(within for _, _, within in verdicts) else None

    def _turn(self, held_off: str | None, reason: str) -> Turned | None:
        was = self.on
        self._held_off = held_off
        self._seen.clear()
        return None if self.on == was else Turned(on=self.on, reason=reason)

    def _verdicts(self) -> Iterator[tuple[str, bool, bool]]:
        """Of each setting in force: its name, whether the mean is beyond `off`, whether it is within `on`."""
        rules, seen = self.rules, self._seen
        pace = sum(one.decode_ms for one in seen) / sum(one.tokens for one in seen)
        acceptance = self.acceptance
        if rules.acceptance is not None and acceptance is not None:
            yield "acceptance", acceptance < rules.acceptance.off, acceptance >= rules.acceptance.on
        if rules.ms_per_token is not None:
            yield "ms_per_token", pace > rules.ms_per_token.off, pace <= rules.ms_per_token.on
        if rules.repeated is not None:
            looped = sum(one.looped for one in seen) / len(seen)
            yield "repeated", looped > rules.repeated.off, looped <= rules.repeated.on
        if rules.target_ms_per_token is not None:
            misses = pace > rules.target_ms_per_token
            plain = self._plain_pace()
            faster = plain is not None and plain < pace
            gains = plain is None or pace <= BETTER * plain
            yield "target_ms_per_token", misses and faster, not misses or gains

    def _plain_pace(self) -> float | None:
        if len(self._plain) < self.rules.min_sessions:
            return None
        return sum(one.decode_ms for one in self._plain) / sum(one.tokens for one in self._plain)
