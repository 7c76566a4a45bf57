"""Traffic classes: which requests are alike, and how they are to be speculated for (`[[class]]`).

Acceptance is a matter of the workload: what pays for edits of code costs for free talk. A class names a workload by
what a request shows from outside, never by its text, and sets what the request's sessions get. The first class that
matches takes the request; a request that none takes is served as without classes. All conditions of a match must hold,
and an empty match takes everything.

Why not one switch for all: guardrails (speculation_guard.py) must not let one workload's collapse end another's gain.
"""

from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct

from sdcpd.drafting.settings import Method
from sdcpd.protocol.terms import M_MAX_LIMIT

Text = Annotated[str, Meta(min_length=1, max_length=512)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]

CLASSES_LIMIT: Final = 64
"""Most classes: each is a label of several metrics, and all are looked at for each request."""


class UnknownClass(Exception):
    """The request asks for a class that there is not, or that is another key group's. The text is for the client."""


class RequestFacts(Struct, frozen=True, kw_only=True):
    """What a request shows of itself. `headers` have lower-case names; `metadata` and `user` are the request's fields
    of these names; `group` is the key group of its API key; `asked` names a class outright."""

    model: str = ""
    temperature_milli: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    user: str | None = None
    group: str | None = None
    asked: str | None = None


class Match(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[class.match]`: conditions that must all hold.

    `temperature` is a range with both ends in it; `header` and `metadata` are tables of names and exact values.
    """

    model: Text | None = None
    header: dict[Text, Text] = {}
    metadata: dict[Text, Text] = {}
    user: Text | None = None
    group: Text | None = None
    temperature: tuple[Temperature, Temperature] | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and self.temperature[0] > self.temperature[1]:
            low, high = self.temperature
            raise ValueError(f"temperature: {low} to {high} holds nothing; write the lower end first")
        for name in self.header:
            if name != name.lower():
                raise ValueError(f"header: write {name!r} in lower case, as headers are compared")

    def takes(self, facts: RequestFacts) -> bool:
        """Whether a request meets all conditions."""
        if self.model not in (None, facts.model) or self.group not in (None, facts.group):
            return False
        if self.user not in (None, facts.user):
            return False
        if self.temperature is not None:
            low, high = self.temperature
            if not low * 1000 <= facts.temperature_milli <= high * 1000:
                return False
        return self.header.items() <= set(facts.headers) and self.metadata.items() <= set(facts.metadata)

    def covers(self, other: "Match") -> bool:
        """Whether each request that `other` takes is taken by this."""
        for mine, its in ((self.model, other.model), (self.user, other.user), (self.group, other.group)):
            if mine is not None and mine != its:
                return False
        if self.temperature is not None:
            low, high = other.temperature or (0.0, 2.0)
            if not (self.temperature[0] <= low and high <= self.temperature[1]):
                return False
        return self.header.items() <= other.header.items() and self.metadata.items() <= other.metadata.items()


class Band(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculation is turned off beyond `off`, and on again within `on`; between the two it stays as it is."""

    off: Annotated[float, Meta(ge=0.0)]
    on: Annotated[float, Meta(ge=0.0)]


class TrafficClass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[class]]`.

    `ladder`       `[ladder.NAME]` of its sessions; without it the model's
    `methods`      drafters of these methods are preferred, in this order; others are used for want of them
    `m_max`        upper bound on a proposal's length, if lower than the ladder's
    `target_ms_per_token`  the aim of a session; those slower are counted. Speculation goes off when its sessions miss
                   the aim and those without it are faster
    `compare_share` share of the sessions that run without speculation, to be compared with the others
    `probe_share`  share of the sessions that speculate although it is off: without them nobody would see it pay again
    `window_sessions`  latest sessions that the means below are over; `min_sessions` must have ended before any counts
    `acceptance`   accepted of the proposed tokens: off below, on above
    `ms_per_token` decode time by tokens: off above, on below
    `kv_usage`     share of KV pages in use at the fullest verifier: off above, on below; running sessions follow
    `repeated`     share of sessions whose text ended in a loop: off above, on below
    """

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
    match: Match = Match()
    ladder: str | None = None
    methods: Annotated[tuple[Method, ...], Meta(max_length=8)] = ()
    m_max: Annotated[int, Meta(ge=1, le=M_MAX_LIMIT)] | None = None
    target_ms_per_token: Annotated[float, Meta(gt=0)] | None = None
    compare_share: Share = 0.0
    probe_share: Share = 0.1
    window_sessions: Annotated[int, Meta(ge=1, le=1024)] = 32
    min_sessions: Annotated[int, Meta(ge=1, le=1024)] = 8
    acceptance: Band | None = None
    ms_per_token: Band | None = None
    kv_usage: Band | None = None
    repeated: Band | None = None

    def __post_init__(self) -> None:
        if self.min_sessions > self.window_sessions:
            raise ValueError(f"min_sessions: {self.min_sessions} never fit a window_sessions of {self.window_sessions}")
        if self.acceptance is not None and self.acceptance.on < self.acceptance.off:
            raise ValueError("acceptance: on must not lie below off, else it would be turned on and off for ever")
        for name in ("ms_per_token", "kv_usage", "repeated"):
            band: Band | None = getattr(self, name)
            if band is not None and band.on > band.off:
                raise ValueError(f"{name}: on must not lie above off, else it would be turned on and off for ever")
        if self.compare_share + self.probe_share > 1:
            raise ValueError("compare_share and probe_share are shares of the same sessions; together at most 1")


def choose_class(classes: Sequence[TrafficClass], facts: RequestFacts) -> TrafficClass | None:
    """The class of a request: the one it asks for, else the first that matches. Raises UnknownClass.

    A class that is kept to a key group cannot be asked for by others; its other conditions are for those who do not
    ask.
    """
    if facts.asked is None:
        return next((one for one in classes if one.match.takes(facts)), None)
    for one in classes:
        if one.name == facts.asked and one.match.group in (None, facts.group):
            return one
    raise UnknownClass(f"there is no class {facts.asked[:64]!r} for this key")


def hidden_classes(classes: Sequence[TrafficClass]) -> list[tuple[int, int]]:
    """Classes that no request reaches by matching, and the earlier one that takes all of theirs: (index, index)."""
    found = []
    for index, one in enumerate(classes):
        for before in range(index):
            if classes[before].match.covers(one.match):
                found.append((index, before))
                break
    return found
