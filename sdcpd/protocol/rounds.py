"""One round: when two proposals of it are the same, and what it commits (draft 6.3 steps 3, 7 to 9).

Nothing is moved here: `decide` makes the record that the session hands out for appending.
"""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from sdcpd.protocol import digests, escalation
from sdcpd.protocol.acceptance import Accepted, accept_equal, cut
from sdcpd.protocol.commit_log import CommitRecord, Control, write_record
from sdcpd.protocol.messages import Contract, Proposal, Sampling
from sdcpd.protocol.session_values import Pending, Point
from sdcpd.protocol.terms import Action, Rule


def decide(
    point: Point,
    contract: Contract,
    *,
    epoch: int,
    scored: Sequence[int],
    best: Sequence[int],
    proposed: int | None,
    load: int,
    sampling: Sampling | UnsetType = UNSET,
    logprobs: Sequence[bytes] = (),
) -> Pending:
    """The round after `point`.

    `scored` holds the proposed tokens that were scored. `best` is what the target says to them: under rules 1 and 65281
    its own token at each of their rows and at the one after; under rule 2 the a tokens that passed their tests, then
    the additional one. `proposed` is M, or None for a self-decoded round, which leaves c, g, j and m_cap alone (80).
    `sampling` is the profile if it changed with this round. `logprobs` has an entry for each of `best`, or none (114).
    """
    if contract.rule == Rule.SPECULATIVE_SAMPLING:
        outcome = Accepted(accepted=len(best) - 1, additional=best[-1])
        assert tuple(best[:-1]) == tuple(scored[: outcome.accepted])
    else:
        outcome = accept_equal(scored, best)
    block = cut(
        (*scored[: outcome.accepted], outcome.additional),
        stop=contract.stop,
        remaining=contract.max_new - point.committed,
    )
    assert block.emitted, "a round commits at least one token"
    if proposed is None:
        counters = point.counters
        action = Action.FINISH if block.finished else Action.CONTINUE
    else:
        step = escalation.step(
            point.counters,
            contract,
            accepted=outcome.accepted,
            proposed=proposed,
            load=load,
            finished=block.finished,
        )
        counters, action = step.counters, step.action
    control = Control(
        c=counters.c,
        g=counters.g,
        j=counters.j,
        accepted=UNSET if proposed is None else outcome.accepted,
        action=action,
        m_cap=UNSET if proposed is None else min(counters.limit, contract.m_max),
        low=counters.c,
        load=load,
        sampling=sampling,
    )
    after = Point(
        round=point.round + 1,
        committed=point.committed + len(block.emitted),
        digest=digests.extend(point.digest, block.emitted),
        counters=counters,
    )
    record = CommitRecord(
        epoch=epoch,
        round=after.round,
        emitted=block.emitted,
        committed=after.committed,
        digest=after.digest,
        ctl=control,
    )
    kept = tuple(logprobs[: len(block.emitted)])
    return Pending(record, write_record(record), after, action, self_decoded=proposed is None, logprobs=kept)


def same_proposal(one: Proposal, other: Proposal) -> bool:
    """Identical for idempotency: all that the verdict depends on; status and draft_kv may differ (decision 46)."""
    return (
        one.epoch == other.epoch
        and one.round == other.round
        and one.base == other.base
        and one.base_digest == other.base_digest
        and one.tokens == other.tokens
        and one.q_rows == other.q_rows
        and one.q == other.q
    )
