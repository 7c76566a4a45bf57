"""The traffic classes of a router at work: which class a request falls in, and what its session gets of it.

Each class has a guard (drafting/speculation_guard.py); here the guards are told what happens and their decisions are
carried out: a session's placement is told whether to speculate, and what ended is counted under the class's name.
Guards live as long as the class's settings stand: classes that are read again unchanged keep what they know.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import structlog
from msgspec import Struct, UnsetType
from msgspec.structs import replace

from sdcpd.drafting.repetition import LAST_TOKENS, ends_in_a_loop
from sdcpd.drafting.speculation_guard import Mode, Sample, SpeculationGuard, Turned
from sdcpd.drafting.traffic_class import TrafficClass, UnknownClass, choose_class
from sdcpd.protocol.fleet import Fleet
from sdcpd.protocol.ladder import Ladder, named
from sdcpd.protocol.placement import Placement
from sdcpd.protocol.terms import InstanceRole
from sdcpd.roles.generation import GenerationRefused, GenerationRequest
from sdcpd.roles.ports import Meters, RandomStream

log = structlog.get_logger(__name__)


class ClassView(Struct, frozen=True, kw_only=True):
    """One class for `sdcpctl classes`. `ratio` is time per token without speculation over that with it, None until
    both sides have enough sessions; `reason` names the setting that holds speculation off."""

    name: str
    speculation: bool
    reason: str | None
    running: int
    with_sessions: int
    with_ms_per_token: float | None
    without_sessions: int
    without_ms_per_token: float | None
    ratio: float | None
    acceptance: float | None


class Pace:
    """How fast one session's output comes, as its reader sees it: from its first page to its last."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def grew(self, tokens: int, now: float) -> None:
        """The output has `tokens` now."""
        self._last = (tokens, now)
        self._first = self._first or self._last

    @property
    def decoded(self) -> tuple[int, float]:
        """Tokens after the first page, and the seconds that they took."""
        if self._first is None or self._last is None:
            return 0, 0.0
        return self._last[0] - self._first[0], self._last[1] - self._first[1]


class Enrolled:
    """One session in a class. `steady`: it speculated throughout, or never."""

    def __init__(self, guard: SpeculationGuard, mode: Mode) -> None:
        self.guard: Final = guard
        self.mode: Final = mode
        self.speculates = guard.speculates(mode)
        self.steady = True

    @property
    def name(self) -> str:
        return self.guard.rules.name

    @property
    def compared(self) -> bool:
        """Whether it is one of those that never speculate."""
        return self.mode is Mode.COMPARED

    def steer(self, placement: Placement) -> None:
        """Have the placement follow the class."""
        wanted = self.guard.speculates(self.mode)
        if wanted != self.speculates:
            self.speculates, self.steady = wanted, False
        placement.speculates = wanted

    def ladder(self, ladders: Mapping[str, Ladder], otherwise: Ladder) -> Ladder:
        """The class's ladder, or the model's, no longer than the class allows."""
        rules = self.guard.rules
        ladder = otherwise if rules.ladder is None else ladders[rules.ladder]
        return ladder if rules.m_max is None else replace(ladder, m_max=min(ladder.m_max, rules.m_max))


class Traffic:
    """All classes of one router. Raises LadderError for a class that names a ladder that is not there."""

    def __init__(
        self, classes: Sequence[TrafficClass], ladders: Mapping[str, Ladder], meters: Meters, draws: RandomStream
    ) -> None:
        self._meters = meters
        self._draws = draws
        self._guards: tuple[SpeculationGuard, ...] = ()
        self._ladders: dict[str, Ladder] = {}
        self.take(classes, ladders)

    def take(self, classes: Sequence[TrafficClass], ladders: Mapping[str, Ladder]) -> None:
        """From now on these: new sessions fall in them, running ones stay in theirs. Raises LadderError."""
        self._ladders, self._guards = (
            {
                one.ladder: named(ladders, one.ladder, f"class.{one.name}.ladder")
                for one in classes
                if one.ladder is not None
            },
            tuple(
                next((guard for guard in self._guards if guard.rules == one), None) or SpeculationGuard(one)
                for one in classes
            ),
        )

    def enrol(self, request: GenerationRequest) -> Enrolled | None:
        """The class of a new session. Raises GenerationRefused for one that is asked for in vain."""
        facts = replace(
            request.facts,
            model=request.model,
            temperature_milli=request.temperature_milli,
            group=request.group,
            asked=request.traffic_class,
        )
        try:
            chosen = choose_class([guard.rules for guard in self._guards], facts)
        except UnknownClass as unknown:
            raise GenerationRefused("invalid", f"{unknown}", param="speculation.class") from unknown
        if chosen is None:
            return None
        guard = next(guard for guard in self._guards if guard.rules is chosen)
        return Enrolled(guard, guard.admit(self._draws.uniform()))

    def take_up(self, name: str) -> Enrolled | None:
        """The class of a session that another life of this router began. It is no sample: its start was not seen."""
        guard = next((guard for guard in self._guards if guard.rules.name == name), None)
        if guard is None:
            return None
        enrolled = Enrolled(guard, Mode.FOLLOWING)
        enrolled.steady = False
        return enrolled

    def ladder(self, enrolled: Enrolled | None, otherwise: Ladder) -> Ladder:
        """By which a new session escalates; `otherwise` is its model's."""
        return otherwise if enrolled is None else enrolled.ladder(self._ladders, otherwise)

    def look(self, fleet: Fleet, now: float) -> None:
        """The fleet was looked at: tell the guards how full the verifiers are."""
        usage = [
            one.status.kv_milli / 1000
            for one in fleet.instances()
            if one.role is InstanceRole.VERIFIER
            and fleet.alive(one.uri, now)
            and not isinstance(one.status.kv_milli, UnsetType)
        ]
        for guard in self._guards:
            self._note(guard, guard.pressure(max(usage, default=0.0)))

    def ended(self, enrolled: Enrolled, placement: Placement, pace: Pace) -> None:
        """A session of a class ended. One that was cancelled, changed within, or met no drafter is no sample."""
        tokens, seconds = pace.decoded
        speculated = enrolled.speculates
        name, speculation = enrolled.name, "on" if speculated else "off"
        stats = None if placement.ending is None else placement.ending.stats
        drafted = stats is not None and stats.drafts > 0
        if not enrolled.steady or tokens == 0 or stats is None or drafted != speculated:
            self._meters.count("class_sessions_total", traffic_class=name, speculation="mixed")
            return
        length = len(placement.output)
        sample = Sample(
            mode=enrolled.mode,
            speculated=speculated,
            tokens=tokens,
            decode_ms=1000 * seconds,
            drafted=stats.draft_tokens,
            accepted=stats.accepted_tokens,
            looped=ends_in_a_loop(placement.output.tokens(max(0, length - LAST_TOKENS), length)),
        )
        self._meters.count("class_sessions_total", traffic_class=name, speculation=speculation)
        self._meters.count("class_tokens_total", tokens, traffic_class=name, speculation=speculation)
        self._meters.count("class_decode_seconds_total", seconds, traffic_class=name, speculation=speculation)
        self._meters.count(
            "class_looped_sessions_total", int(sample.looped), traffic_class=name, speculation=speculation
        )
        target = enrolled.guard.rules.target_ms_per_token
        if target is not None and sample.decode_ms > target * tokens:
            self._meters.count("class_target_missed_total", traffic_class=name, speculation=speculation)
        self._note(enrolled.guard, enrolled.guard.ended(sample))

    def views(self, running: Mapping[str, int]) -> tuple[ClassView, ...]:
        """All classes in their order; `running` has the sessions in care by class."""
        return tuple(
            ClassView(
                name=guard.rules.name,
                speculation=guard.on,
                reason=guard.reason,
                running=running.get(guard.rules.name, 0),
                with_sessions=guard.with_.sessions,
                with_ms_per_token=guard.with_.ms_per_token,
                without_sessions=guard.without.sessions,
                without_ms_per_token=guard.without.ms_per_token,
                ratio=guard.ratio,
                acceptance=guard.acceptance,
            )
            for guard in self._guards
        )

    def _note(self, guard: SpeculationGuard, turned: Turned | None) -> None:
        if turned is None:
            return
        to = "on" if turned.on else "off"
        name = guard.rules.name
        self._meters.count("class_turns_total", traffic_class=name, to=to, reason=turned.reason)
        log.warning("speculation turned", traffic_class=name, to=to, reason=turned.reason)
