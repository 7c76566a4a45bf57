"""Low rounds, the fallback ladder and m_cap (draft 6.5; decisions 74 to 80).

One pure step: counters in, counters and action out. The session keeps the result apart until the round's record is
durable, so a round that is never committed never moves a counter. Load is sampled once a round by the caller and used
both for skipping self_decode and in the verdict (decision 78), so that a log can be replayed.

    c      consecutive low rounds, cleared when it reaches R = low_rounds and the ladder is consulted
    g      consecutive rounds that are not low; at R it rewinds j
    j      next entry of the fallback list
    limit  what m_cap is before the ceiling: halved by reduce, +1 after a round that is not low
    ceiling  what the verifier's load left of it at the last round (decision 74); an assignment lifts it (42)
"""

from msgspec import UNSET, Struct

from sdcpd.protocol.messages import Contract
from sdcpd.protocol.terms import M_MAX_LIMIT, Action, LadderAction

RESTORE_LOAD_LIMIT = 80
"""Highest load, in percent, at which m_cap is restored by one a round (decision 74)."""


class Counters(Struct, frozen=True):
    """The ladder's state of one session, as `ctl` of a commit record keeps it; the last two are not resumed (42)."""

    c: int = 0
    g: int = 0
    j: int = 0
    limit: int = 1
    ceiling: int = M_MAX_LIMIT

    @property
    def m_cap(self) -> int:
        """As the last verdict or assignment said it: what proposals are held to (decision 57)."""
        return min(self.limit, self.ceiling)


class Escalated(Struct, frozen=True):
    """What step 9 of 6.3 decides for one round. `low` of the verdict is `counters.c` (decision 75)."""

    counters: Counters
    action: Action


def assigned(counters: Counters, contract: Contract, m_init: int) -> Counters:
    """A different drafter, or an assignment in any state but drafting: m_cap = min(m_init, m_max) (decision 42)."""
    return Counters(c=counters.c, g=counters.g, j=counters.j, limit=min(m_init, contract.m_max))


def is_low(contract: Contract, accepted: int, proposed: int) -> bool:
    """6.5.2: 100 * a < low_ratio * M, or a = 0 when low_ratio is zero or absent."""
    if contract.low_ratio is UNSET or contract.low_ratio == 0:
        return accepted == 0
    return 100 * accepted < contract.low_ratio * proposed


def step(
    counters: Counters,
    contract: Contract,
    *,
    accepted: int,
    proposed: int,
    load: int,
    finished: bool,
    ceiling: int = M_MAX_LIMIT,
) -> Escalated:
    """One round of M = `proposed` tokens of which a = `accepted` were accepted, at verifier load `load` percent.

    `ceiling` >= 1 is what that load leaves of m_cap.

    When the round finishes generation the counters move but the ladder is not consulted (decision 76).
    """
    limit = counters.limit
    if is_low(contract, accepted, proposed):
        c, g, j = counters.c + 1, 0, counters.j
    else:
        c, g = 0, counters.g + 1
        j = 0 if g >= contract.low_rounds else counters.j
        if load <= RESTORE_LOAD_LIMIT:
            limit = min(limit + 1, contract.m_max)
    if finished:
        return Escalated(counters=Counters(c=c, g=g, j=j, limit=limit, ceiling=ceiling), action=Action.FINISH)
    if c < contract.low_rounds:
        return Escalated(counters=Counters(c=c, g=g, j=j, limit=limit, ceiling=ceiling), action=Action.CONTINUE)
    action, j = _next_entry(contract, j, load)
    if action is Action.REDUCE:
        limit = max(1, counters.m_cap // 2)  # of the m_cap that the drafter knows (6.5.2)
    return Escalated(counters=Counters(c=0, g=g, j=j, limit=limit, ceiling=ceiling), action=action)


def _next_entry(contract: Contract, j: int, load: int) -> tuple[Action, int]:
    """Apply the ladder from entry j: the action, and j past every entry applied or skipped. None left: fail."""
    while j < len(contract.fallback):
        entry = contract.fallback[j]
        j += 1
        if entry is LadderAction.SELF_DECODE and not may_self_decode(contract, load):
            continue
        return Action(entry), j
    return Action.FAIL, j


def may_self_decode(contract: Contract, load: int) -> bool:
    """self_decode is permitted only with self_load in the contract and a load that does not exceed it (6.5.2)."""
    return contract.self_load is not UNSET and load <= contract.self_load
