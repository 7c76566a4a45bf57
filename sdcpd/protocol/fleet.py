"""The router's view of the instances: who is alive, and whom to prefer (draft 6.1, 6.9; decisions 10, 48, 95, 102).

Theory: an instance is what it last said of itself, for `ttl_ms` from the moment its status was received, on the
router's own monotonic clock. Nothing else counts as a sign of life or death, except a changed `boot` (the process
restarted and forgot its sessions). `now` is always passed in.

A router that stood still cannot tell silence from deafness: the statuses it should have read may be waiting in its
sockets. So the fleet notices when it was last looked at; a gap longer than a third of an instance's ttl gives that
instance a fresh ttl before anybody is judged (95). The router therefore ticks at least every `tick_s`, well under it.

Every choice is a pure function of the reports and `now`: candidates are ordered by a whole-number cost, then by URI,
and before them all stands the home of the conversation, if it may be one now (affinity).
Placements made since an instance's last report count as queued there; without that, everything placed between
two reports would go to the same instance.

What this module refuses to know: sessions (beyond the ids a drafter declines), tasks, and how to reach anybody.
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from sdcpd.protocol.affinity import DEFAULT_AFFINITY, Affinity, weight
from sdcpd.protocol.messages import Status
from sdcpd.protocol.problems import IllFormed, Overloaded
from sdcpd.protocol.terms import InstanceRole

INSTANCES_LIMIT: Final = 1024
"""Most instances known at once: a router's memory must not grow with whatever reports to it."""

LEAST_TTL_MS: Final = 150
"""A shorter ttl would need a tick period finer than an event loop keeps; 20 times under the default of 3,000."""

LONGEST_TTL_MS: Final = 600_000
"""A longer ttl is read as this: an instance that died should not be believed in for more than ten minutes."""

FORGET_AFTER_S: Final = 600.0
"""How long an expired instance stays visible to `sdcpctl instances` before its place is given up."""

UNKNOWN_ACCEPT_MILLI: Final = 500
"""Acceptance assumed of a drafter that reports none yet: between good and bad, so that newcomers get a try."""

_QUEUE_COST: Final = 50  # one queued session weighs as 5 percent of load


class Instance(Struct, frozen=True, kw_only=True):
    """What is known of one instance.

    `received_at` is when its last status came, `expires_at` when that stops counting; `expired` is set by the tick
    that found it so, and choices go by `expires_at` alone. `placed` counts sessions put there since the last report.
    """

    status: Status
    received_at: float
    expires_at: float
    expired: bool = False
    placed: int = 0

    @property
    def uri(self) -> str:
        return self.status.instance

    @property
    def role(self) -> InstanceRole:
        return InstanceRole(self.status.role)

    @property
    def boot(self) -> bytes | None:
        return None if isinstance(self.status.boot, UnsetType) else self.status.boot

    @property
    def ttl_s(self) -> float:
        return _ttl_s(self.status)


class Report(Struct, frozen=True, kw_only=True):
    """What a status changed. `fresh`: unknown or expired before. `rebooted`: another process answers there now."""

    fresh: bool
    rebooted: bool


class DrafterNeed(Struct, frozen=True, kw_only=True):
    """What a session asks of a drafter.

    `drafters` are the permitted model digests, None for any (4.1). `vocabulary` None means the verifier does not
    tell. `avoid` is used only if nobody else is left (6.5.2, decision 82); `excluded` never. Those that draft by one of
    `methods` come before all others, in this order. `prefix` names the conversation (affinity).
    """

    session: bytes
    tokenizer: bytes
    vocabulary: int | None
    drafters: tuple[bytes, ...] | None
    avoid: str | None = None
    excluded: Collection[str] = ()
    methods: tuple[str, ...] = ()
    prefix: bytes | None = None


class VerifierNeed(Struct, frozen=True, kw_only=True):
    """What a session asks of a verifier. `target` None means any model with this tokenizer; `prefix` names the
    conversation (affinity)."""

    tokenizer: bytes
    target: bytes | None
    rule: int
    prefix: bytes | None = None


def _ttl_s(status: Status) -> float:
    return min(status.ttl_ms, LONGEST_TTL_MS) / 1000


class Fleet:
    """All instances that reported to this router. `limit` bounds their number."""

    def __init__(self, limit: int = INSTANCES_LIMIT, affinity: Affinity = DEFAULT_AFFINITY) -> None:
        self.affinity = affinity
        self._limit = limit
        self._instances: dict[str, Instance] = {}
        self._looked_at: float | None = None

    @property
    def tick_s(self) -> float:
        """How often `tick` must be called at least: a sixth of the shortest live ttl, 0.5 s without one."""
        return min((one.ttl_s / 6 for one in self._instances.values() if not one.expired), default=0.5)

    def report(self, status: Status, now: float) -> Report:
        """Take a status (6.1). Raises IllFormed for a ttl below 150 ms and Overloaded when no place is left."""
        self._look(now)
        if status.ttl_ms < LEAST_TTL_MS:
            raise IllFormed(f"status.ttl_ms is {status.ttl_ms}; send at least {LEAST_TTL_MS}")
        known = self._instances.get(status.instance)
        if known is None:
            self._make_room(now)
        one = Instance(status=status, received_at=now, expires_at=now + _ttl_s(status))
        self._instances[status.instance] = one
        return Report(
            fresh=known is None or known.expired or known.role != one.role,
            rebooted=known is not None and known.boot != one.boot and known.boot is not None,
        )

    def tick(self, now: float) -> tuple[Instance, ...]:
        """Judge: the instances found expired by this call, each reported once, in order of URI."""
        self._look(now)
        found = [one for one in self._instances.values() if not one.expired and one.expires_at <= now]
        for one in found:
            self._instances[one.uri] = msgspec.structs.replace(one, expired=True)
        for uri in [one.uri for one in self._instances.values() if one.expires_at + FORGET_AFTER_S <= now]:
            del self._instances[uri]
        return tuple(sorted(found, key=lambda one: one.uri))

    def get(self, uri: str) -> Instance | None:
        """What is known of an instance, dead or alive."""
        return self._instances.get(uri)

    def alive(self, uri: str, now: float) -> bool:
        """Whether the instance's status still counts."""
        self._look(now)
        one = self._instances.get(uri)
        return one is not None and self._lives(one, now)

    def instances(self) -> tuple[Instance, ...]:
        """All known instances in order of URI, expired ones included."""
        return tuple(self._instances[uri] for uri in sorted(self._instances))

    def placed(self, uri: str) -> None:
        """Note that a session was put at `uri`; counts as queued there until the next report."""
        one = self._instances.get(uri)
        if one is not None:
            self._instances[uri] = msgspec.structs.replace(one, placed=one.placed + 1)

    def verifiers(self, need: VerifierNeed, now: float) -> tuple[Instance, ...]:
        """Live verifiers that can serve `need`, best first: the conversation's home, then by load and queue."""
        self._look(now)
        fit = [one for one in self._instances.values() if self._lives(one, now) and _can_verify(one, need)]
        home = self._home(need.prefix, {one.uri: _busyness(one) for one in fit})
        return tuple(sorted(fit, key=lambda one: (one.uri != home, _busyness(one), one.uri)))

    def known_verifiers(self, need: VerifierNeed) -> tuple[Instance, ...]:
        """Verifiers that serve `need`, or did when last heard of, in order of URI. To tell of, not to place at."""
        return tuple(one for one in self.instances() if _can_verify(one, need))

    def choose_drafter(self, need: DrafterNeed, now: float) -> Instance | None:
        """The drafter to prefer for a session, None if no live permitted one is left.

        Never one that is expired, excluded, of another tokenizer or vocabulary, not permitted, or that declined the
        session (102); `need.avoid` only for want of another.
        """
        self._look(now)
        fit = [one for one in self._instances.values() if self._lives(one, now) and _can_draft(one, need)]
        _, rank = min(((one.uri == need.avoid, _method_rank(one, need)) for one in fit), default=(False, 0))
        fit = [one for one in fit if _method_rank(one, need) == rank]
        best = min((_lacking(one) for one in fit if one.status.accept_milli is not UNSET), default=0)
        home = self._home(
            need.prefix,
            # Nobody loses conversations for want of a figure: all would move when the first of two drafters has one.
            {one.uri: _busyness(one) + (best if one.status.accept_milli is UNSET else _lacking(one)) for one in fit},
        )
        return min(
            fit, key=lambda one: (one.uri == need.avoid, one.uri != home, _drafter_cost(one), one.uri), default=None
        )

    def _home(self, prefix: bytes | None, costs: Mapping[str, int]) -> str | None:
        """Of these instances the one at which a conversation is at home, as far as their load lets it be."""
        if prefix is None or not costs:
            return None
        least = min(costs.values())
        may = [
            uri
            for uri, cost in costs.items()
            if self.affinity.may_stay(load=self._instances[uri].status.load, cost=cost, least=least)
        ]
        return max(may, key=lambda uri: weight(prefix, uri), default=None)

    def _lives(self, one: Instance, now: float) -> bool:
        return not one.expired and now < one.expires_at

    def _look(self, now: float) -> None:
        """Decision 95: after a gap, give a fresh ttl to whoever was alive when we last looked."""
        before, self._looked_at = self._looked_at, now
        if before is None:
            return
        assert now >= before, "the router's clock is monotonic"
        for one in self._instances.values():
            if not one.expired and before < one.expires_at and now - before > one.ttl_s / 3:
                self._instances[one.uri] = msgspec.structs.replace(one, expires_at=now + one.ttl_s)

    def _make_room(self, now: float) -> None:
        if len(self._instances) < self._limit:
            return
        dead = [one for one in self._instances.values() if not self._lives(one, now)]
        if not dead:
            raise Overloaded(f"this router knows its limit of {self._limit} instances", retry_after_s=5)
        del self._instances[min(dead, key=lambda one: (one.expires_at, one.uri)).uri]


def _busyness(one: Instance) -> int:
    """Load in thousandths plus the weight of what queues, reported or just placed."""
    return one.status.load * 10 + (one.status.queue + one.placed) * _QUEUE_COST


def _drafter_cost(one: Instance) -> int:
    """Low is good: busyness plus what recent acceptance lacks to 1, both in thousandths (6.1)."""
    return _busyness(one) + _lacking(one)


def _lacking(one: Instance) -> int:
    accept = one.status.accept_milli
    return 1000 - (UNKNOWN_ACCEPT_MILLI if isinstance(accept, UnsetType) else accept)


def _method_rank(one: Instance, need: DrafterNeed) -> int:
    """Place of the drafter's method among those preferred; behind them all for another or one it does not tell."""
    method = one.status.method
    return need.methods.index(method) if method in need.methods else len(need.methods)


def _can_verify(one: Instance, need: VerifierNeed) -> bool:
    """Whether `one` names the model, the tokenizer and the rule. A verifier that names no model cannot be put into a
    contract; one that lists no rules is taken to know the draft's two (decision 12)."""
    status = one.status
    if one.role is not InstanceRole.VERIFIER or isinstance(status.model, UnsetType):
        return False
    known_rules = (1, 2) if isinstance(status.rules, UnsetType) else status.rules
    return (
        status.tokenizer == need.tokenizer
        and (need.target is None or status.model == need.target)
        and need.rule in known_rules
    )


def _can_draft(one: Instance, need: DrafterNeed) -> bool:
    """Filters of 6.1. A drafter that does not report our extension keys is let through where only it can know (it
    refuses an assignment it cannot serve, decision 9), but an unnamed model is not a permitted one."""
    status = one.status
    if one.role is not InstanceRole.DRAFTER or one.uri in need.excluded:
        return False
    if not isinstance(status.declined, UnsetType) and need.session in status.declined:
        return False
    if need.drafters is not None and status.model not in need.drafters:
        return False
    if not isinstance(status.tokenizer, UnsetType) and status.tokenizer != need.tokenizer:
        return False
    return isinstance(status.vocabulary, UnsetType) or need.vocabulary is None or status.vocabulary == need.vocabulary
