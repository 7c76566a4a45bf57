"""Which sampling profile is in force for which round of a session (draft 6.6; decisions 11, 18, 50, 51).

A policy replaces the whole profile from its `from_round` on. Several may be pending; of two with the same `from_round`
the later one wins. What was applied is never taken back: a policy for a round that is decided or being verified comes
too late, unless it repeats, member by member, the one that was applied there.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Final

from msgspec import UNSET, UnsetType

from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.distributions import Profile, profile_of
from sdcpd.protocol.messages import Contract, Policy, Sampling, SessionState
from sdcpd.protocol.problems import Conflict, IllFormed, Overloaded
from sdcpd.protocol.terms import Rule

POLICIES_LIMIT: Final = 16
"""Pending policies of a session, and applied ones remembered for the sake of repeats. A router sends one at a time."""


class Profiles:
    """The profiles of one session by the round they begin with."""

    def __init__(self, contract: Contract) -> None:
        self._rule = contract.rule
        self._rounds = [0]  # sorted
        self._profiles = {0: profile_of(contract.sampling)}

    def take_over(self, commits: Sequence[CommitRecord]) -> None:
        """Start from what other verifiers committed (6.9): the profiles that their records name."""
        for commit in commits:
            if commit.ctl is not UNSET and commit.ctl.sampling is not UNSET:
                insort(self._rounds, commit.round)
                self._profiles[commit.round] = profile_of(commit.ctl.sampling)
        self._forget(len(self._rounds))

    def in_force(self, round_: int) -> Profile:
        """The profile of a round that is not yet decided."""
        return self._profiles[self._rounds[bisect_right(self._rounds, round_) - 1]]

    def changed_with(self, round_: int) -> Sampling | UnsetType:
        """For `ctl` of the round's record (decision 85): the profile if this round is the first under another one."""
        profile = self.in_force(round_)
        return UNSET if profile == self.in_force(round_ - 1) else profile.message()

    def accept(self, policy: Policy, *, current: int, state: SessionState) -> None:
        """Take a policy; `current` is the last round that is decided or being verified (decision 50).

        Raises IllFormed (400) for a profile that the rule cannot use, Conflict (409 with `state`) when it is too late,
        Overloaded when too many are pending.
        """
        profile = profile_of(policy.sampling)
        if self._rule == Rule.REPLAYABLE_SAMPLING and profile.seed is None:
            raise IllFormed(
                "sampling.seed: acceptance rule 65281 needs a seed, and a policy replaces the whole profile"
            )
        known = self._profiles.get(policy.from_round) if policy.from_round > 0 else None
        if policy.from_round <= current:
            if known == profile:
                return
            raise Conflict(f"from_round: {policy.from_round} is not above the current round {current}", state=state)
        if known is None:
            self._make_room(current)
            insort(self._rounds, policy.from_round)
        self._profiles[policy.from_round] = profile

    def _make_room(self, current: int) -> None:
        pending = len(self._rounds) - bisect_right(self._rounds, current)
        if pending >= POLICIES_LIMIT:
            raise Overloaded(f"{pending} policies are pending already", retry_after_s=1)
        self._forget(len(self._rounds) - pending)

    def _forget(self, applied: int) -> None:
        """Of the profiles applied so far only the latest are kept."""
        for round_ in self._rounds[:applied][:-POLICIES_LIMIT]:
            self._rounds.remove(round_)
            del self._profiles[round_]
