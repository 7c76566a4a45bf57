"""Which drafter one session may be given next (draft 6.1, 6.9; decisions 10, 44, 82, 102).

On top of the fleet's order, in which the home of the conversation comes first (its draft KV is there), stands what this
session went through: a drafter that refused or declined it is excluded for good (the session only grows), one that was
silent or full rests, and each further rest is twice as long, so that a broken drafter does not interrupt self-decoding
every few seconds.
"""

from collections.abc import Collection
from typing import Final

from msgspec import UnsetType

from sdcpd.protocol.fleet import DrafterNeed, Fleet, Instance
from sdcpd.protocol.placement_values import Outcome, Patience, Plan, passing, retry_after_s

LONGEST_REST_S: Final = 300.0
"""Rests double up to this."""

LEAST_REST_S: Final = 1.0
"""However soon a full drafter asks to be asked again: each try interrupts whoever decodes meanwhile."""


class DrafterChoice:
    """The session's own knowledge of drafters. `exclude` is for good, `rest` for a while, `pause` for all of them."""

    def __init__(self, plan: Plan, fleet: Fleet, patience: Patience) -> None:
        self._plan = plan
        self._fleet = fleet
        self._tries = patience.tries
        self._rest_s = patience.drafter_rest_s
        self._excluded: set[str] = set()  # only asked, never iterated; no larger than the fleet
        self._rests: dict[str, tuple[float, float]] = {}  # drafter: (until, length of its last rest)
        self._paused_until = 0.0
        self._pause_s = 0.0
        self._prefix = fleet.affinity.prefix(plan.prompt)

    def exclude(self, drafter: str) -> None:
        self._excluded.add(drafter)

    def rest(self, drafter: str, now: float) -> None:
        """Let a drafter alone that was silent."""
        last = self._rests.get(drafter, (0.0, 0.0))[1]
        length = min(max(self._rest_s, 2 * last), LONGEST_REST_S)
        self._rests[drafter] = (now + length, length)

    def rest_for(self, drafter: str, rest_s: float, now: float) -> None:
        """Let a drafter alone for as long as it asked."""
        last = self._rests.get(drafter, (0.0, 0.0))[1]
        self._rests[drafter] = (now + min(max(rest_s, LEAST_REST_S), LONGEST_REST_S), last)

    def judged(self, drafter: str, outcome: Outcome, tries: int, now: float) -> str | None:
        """What it means that an assignment was not accepted: why somebody else is to be named, or None: try it again
        (44). One that may not or cannot is excluded, one that is full or silent rests."""
        asked_s = retry_after_s(outcome)
        if not passing(outcome):
            self.exclude(drafter)
            return "drafter_refused"
        if asked_s is not None:
            self.rest_for(drafter, asked_s, now)
            return "drafter_overloaded"
        if tries < self._tries:
            return None
        self.rest(drafter, now)
        return "drafter_unreachable"

    def pause(self, now: float) -> None:
        """Choose nobody for a while: the fault was not the drafter's and would meet the next one as well."""
        self._pause_s = min(max(self._rest_s, 2 * self._pause_s), LONGEST_REST_S)
        self._paused_until = now + self._pause_s

    def candidate(self, now: float, *, avoid: str | None, dropping: Collection[str]) -> Instance | None:
        """The drafter to name now, None for nobody. `avoid` only for want of another, none that is being dropped."""
        if now < self._paused_until:
            return None
        contract = self._plan.contract
        resting = [drafter for drafter, (until, _) in self._rests.items() if until > now]
        need = DrafterNeed(
            session=self._plan.session,
            tokenizer=contract.tokenizer,
            vocabulary=self._plan.vocabulary,
            drafters=None if isinstance(contract.drafters, UnsetType) else contract.drafters,
            avoid=avoid,
            excluded={*self._excluded, *resting, *dropping},
            methods=self._plan.methods,
            prefix=self._prefix,
        )
        return self._fleet.choose_drafter(need, now)

    def trouble(self, drafter: str, boot: bytes | None, now: float) -> str | None:
        """Why the session cannot stay with `drafter`, known as process `boot` when it was named; None if it can."""
        one = self._fleet.get(drafter)
        if one is None or not self._fleet.alive(drafter, now):
            return "drafter_expired"
        if boot is not None and one.boot != boot:
            return "drafter_restarted"
        if not isinstance(one.status.declined, UnsetType) and self._plan.session in one.status.declined:
            self.exclude(drafter)
            return "drafter_declined"
        return None
