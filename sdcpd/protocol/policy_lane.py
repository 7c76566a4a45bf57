"""The router's side of sampling policies: one session's profile on its way to the verifier (draft 6.6; 18, 50, 51).

A seed of rule 2 is for the verifier alone, since a drafter that knows it knows the draws (decision 18): it stands
neither in the contract nor in assignments, but in a policy for round 1, which must be in force before any drafter is
named. Later changes go out at once for the next round; where that comes too late the verifier says so, and the next try
is for sixteen rounds further on. A newer change replaces one that is still on its way, and is never for an earlier
round than one that may be pending: that one would take its place again.

A router that takes a session up knows from the directory what the session began with, and from its log what has become
of that: the log is believed, or a profile that was replaced long ago would return.
"""

from typing import Final

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from sdcpd.protocol.messages import Policy, Sampling, SessionState
from sdcpd.protocol.placement_values import Outcome, Plan, Refused, SetPolicy, passing, retry_after_s
from sdcpd.protocol.retry_lane import Lane, Outbox
from sdcpd.protocol.terms import Rule

ROUNDS_AHEAD: Final = 16
"""How far ahead of the verifier's round a policy is set that came too late (decision 50)."""


class PolicyLane:
    """`wanted` is the profile that was asked for last, UNSET while the contract's is in force."""

    def __init__(self, plan: Plan, outbox: Outbox) -> None:
        self._plan = plan
        self.lane: Lane[SetPolicy] = Lane(outbox)
        self.wanted: Sampling | UnsetType = plan.policy
        self._first_due = plan.policy is not UNSET
        self._first_round = 1
        self._verifier = plan.verifier
        self._refused = False
        self._changed = False  # somebody asked here for another profile
        self._latest = 0  # the highest from_round that this verifier may have taken a policy for

    def holds_back(self, now: float) -> bool:
        """Whether naming has to wait for the first policy; sends it."""
        if self._first_due and self.lane.action is None:
            self._send(self._first_round, now)
        return self._first_due

    def reopened(self, verifier: str, round_: int, logged: Sampling | UnsetType = UNSET) -> None:
        """Another verifier took the session over after `round_`: it is told the profile before anybody is named (92).
        `logged` is the one that the log names last. Call it before the next naming."""
        self.lane.clear()
        self._verifier = verifier
        if logged is not UNSET and not self._changed:
            self.wanted = logged
        self._first_round, self._latest = round_ + 1, 0
        self._first_due = self.wanted is not UNSET

    def found(self, verifier: str, round_: int, logged: Sampling | UnsetType = UNSET) -> None:
        """The session was found alive at `verifier`. Once a round is decided there it has all that it was told."""
        self.reopened(verifier, round_, logged)
        if round_ > 0 and not self._changed:
            self._first_due = False
            self._latest = round_ + ROUNDS_AHEAD  # it may have been told what the log does not name yet

    @property
    def refused(self) -> bool:
        """The verifier will not have the first policy, and nobody can be named."""
        return self._refused

    def change(self, sampling: Sampling, round_: int, now: float) -> None:
        """Ask for another profile; `round_` is the last one known here. A seed that is not named is kept."""
        if sampling.seed is UNSET:
            sampling = replace(sampling, seed=self._seed())
        self.wanted = sampling
        self._changed = True
        if not self._first_due:
            self._send(round_ + 1, now)

    def recorded(self) -> tuple[Policy, ...]:
        """What the directory keeps for a router that takes the session up (106): the profile that is wanted now."""
        if self.wanted is UNSET:
            return ()
        return (Policy(session=self._plan.session, from_round=1, sampling=self.wanted),)

    def for_drafters(self) -> Sampling | UnsetType:
        """`assignment.sampling`: the current profile if it was updated, without a seed that is not theirs to know."""
        if self.wanted is UNSET or self._plan.contract.rule == Rule.REPLAYABLE_SAMPLING:
            return self.wanted
        return replace(self.wanted, seed=UNSET)

    def outcome(self, outcome: Outcome, now: float) -> bool:
        """How the call ended; True when the policy was taken."""
        action = self.lane.action
        assert action is not None
        if isinstance(outcome, SessionState):
            self.lane.clear()
            if action.message.sampling != self.wanted:  # it changed while this one was on its way
                self._first_due = False
                self._send(outcome.round + 1, now)
                return False
            self._first_due = False
            return True
        if passing(outcome):
            self.lane.wait(now, retry_after_s(outcome))
        elif isinstance(outcome, Refused) and outcome.status == 409 and outcome.state is not None:
            self._send(outcome.state.round + ROUNDS_AHEAD, now)
        else:
            self.lane.clear()
            gone = isinstance(outcome, Refused) and outcome.status in (404, 410)  # other calls say so
            self._refused = self._first_due and not gone
        return False

    def _send(self, from_round: int, now: float) -> None:
        assert self.wanted is not UNSET
        self._latest = from_round = max(from_round, self._latest)
        message = Policy(session=self._plan.session, from_round=from_round, sampling=self.wanted)
        self.lane.send(SetPolicy(verifier=self._verifier, message=message), now)

    def _seed(self) -> int | UnsetType:
        if self.wanted is not UNSET:
            return self.wanted.seed
        sampling = self._plan.contract.sampling
        return UNSET if sampling is UNSET else sampling.seed
