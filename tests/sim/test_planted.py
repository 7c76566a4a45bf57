"""Faults planted in the product on purpose: the simulation finds each of them, so it is known that it can fail.

Each plant is what a careless change might do. It must be found within a few seeds, by the check that is meant for it
(`item` is its number in design 5.5), in runs where the faults that make it matter are on; and the very run that finds
it must be in order without it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
import trio
from msgspec.structs import replace

from sdcpd.cache import journal, log_batch
from sdcpd.protocol import acceptance, digests, escalation, prefix, rounds, session
from sdcpd.protocol.commit_log import FenceRecord, OurRecordAbsent, log_tag, look_for, read_records
from sdcpd.protocol.messages import Output, Proposal, Verdict
from sdcpd.protocol.session import Session
from sdcpd.roles.hosted import Hosted
from tests.sim import report
from tests.sim.options import DrafterPlan, SimOptions
from tests.sim.world import CRASH, NO_PROGRESS, WRONG, run_options

SEEDS = 25
"""Seeds within which a plant must be found."""

Patch = pytest.MonkeyPatch
ROGUES = (DrafterPlan(agrees=0.9, rogue=True), DrafterPlan(agrees=0.6, rogue=True))
HONEST = (DrafterPlan(agrees=0.8, rogue=False), DrafterPlan(agrees=0.4, rogue=False))


def no_fence_check(patch: Patch) -> None:
    """The store takes records below a fence, and the verifier that looks into its log overlooks it."""

    def looks_away(log: bytes, **told: Any) -> Any:
        kept = [raw for entry, raw in read_records(log) if not isinstance(entry, FenceRecord)]
        found = look_for(b"".join(kept), **told)
        return OurRecordAbsent(tag=log_tag([log])) if isinstance(found, OurRecordAbsent) else found

    patch.setattr(log_batch, "_below_fence", lambda records, floor: None)
    patch.setattr(prefix, "look_for", looks_away)


def verdict_before_append(patch: Patch) -> None:
    """A waiting proposal is answered as soon as its round is scored."""
    awaited = Session.awaited

    def early(self: Session, round_: int) -> Verdict | None:
        tip = self.prefix.tip_pending
        record: Any = tip.record if tip is not None else None
        if tip is None or tip.self_decoded or record.round != round_:
            return awaited(self, round_)
        return Verdict(
            session=self.id,
            epoch=self.epoch,
            round=round_,
            accepted=record.ctl.accepted,
            emitted=record.emitted,
            committed=record.committed,
            digest=record.digest,
            action=record.ctl.action,
            m_cap=record.ctl.m_cap,
            low=record.ctl.low,
            load=record.ctl.load,
        )

    patch.setattr(Session, "awaited", early)


def output_before_append(patch: Patch) -> None:
    """Pages hold the tokens of the round that is being appended."""
    output = Session.output

    def early(self: Session, from_: int) -> Output | None:
        tip = self.prefix.tip_pending
        tokens = getattr(tip.record, "emitted", ()) if tip is not None else ()
        if from_ == len(self.prefix.output) and tokens and not self.closed and self.stopped is None:
            return Output(session=self.id, epoch=self.epoch, from_=from_, tokens=tokens, final=False)
        return output(self, from_)

    patch.setattr(Session, "output", early)


def chain_off_by_one(patch: Patch) -> None:
    """The first token of a block is left out of the digest chain, by everybody alike."""
    extend = digests.extend
    patch.setattr(digests, "extend", lambda digest, tokens: extend(digest, tokens[1:] if len(tokens) > 1 else tokens))


def no_limit(patch: Patch) -> None:
    """Proposals over m_cap are scored."""
    patch.setattr(Session, "m_cap", property(lambda self: 64))


def cap_never_lowered(patch: Patch) -> None:
    """`reduce` is said and not done."""
    step = escalation.step

    def keeps(counters: Any, contract: Any, **told: Any) -> Any:
        after = step(counters, contract, **told)
        kept = max(after.counters.limit, counters.limit)
        return replace(after, counters=replace(after.counters, limit=kept))

    patch.setattr(escalation, "step", keeps)


def verdict_made_anew(patch: Patch) -> None:
    """A repeated proposal gets a verdict with today's load instead of the recorded one."""
    verdict = prefix.Prefix.verdict

    def anew(self: prefix.Prefix, session: bytes, round_: int) -> Verdict | None:
        found = verdict(self, session, round_)
        stale = found is not None and round_ < self.at.round
        return replace(found, low=(found.low + 1)) if found is not None and stale else found

    patch.setattr(prefix.Prefix, "verdict", anew)


def epoch_not_checked(patch: Patch) -> None:
    """A proposal of another epoch is taken for one of this."""
    propose = Session.propose

    def lenient(self: Session, peer: str, proposal: Proposal, now: float) -> Any:
        return propose(self, peer, replace(proposal, epoch=self.epoch), now)

    patch.setattr(Session, "propose", lenient)


def base_not_checked(patch: Patch) -> None:
    patch.setattr(Session, "_check_base", lambda self, proposal: None)


def vocabulary_not_checked(patch: Patch) -> None:
    """Tokens outside the vocabulary go into the pass."""
    patch.setattr(session, "check_content", lambda proposal, contract, vocabulary: None)


def one_too_many_accepted(patch: Patch) -> None:
    """The last proposed token is taken on trust."""

    def trusting(proposed: Sequence[int], best: Sequence[int]) -> acceptance.Accepted:
        found = acceptance.accept_equal(proposed, best)
        if found.accepted == len(proposed) - 1:
            return acceptance.Accepted(accepted=len(proposed), additional=best[-1])
        return found

    patch.setattr(rounds, "accept_equal", trusting)


def stop_ignored(patch: Patch) -> None:
    """A stop token ends the answer only as the last of a block."""
    cut = acceptance.cut

    def late(tokens: Sequence[int], *, stop: Sequence[int], remaining: int) -> acceptance.Cut:
        found = cut(tokens, stop=(), remaining=remaining)
        return acceptance.Cut(emitted=found.emitted, finished=found.finished or found.emitted[-1] in stop)

    patch.setattr(rounds, "cut", late)


def one_token_too_many(patch: Patch) -> None:
    """max_new is off by one."""
    cut = acceptance.cut
    patch.setattr(rounds, "cut", lambda tokens, *, stop, remaining: cut(tokens, stop=stop, remaining=remaining + 1))


def low_not_cleared(patch: Patch) -> None:
    """c goes on counting after an escalation."""
    step = escalation.step

    def keeps(counters: Any, contract: Any, **told: Any) -> Any:
        after = step(counters, contract, **told)
        if after.action in (1, 2, 3):
            return replace(after, counters=replace(after.counters, c=counters.c + 1))
        return after

    patch.setattr(escalation, "step", keeps)


def rejected_kv_kept(patch: Patch) -> None:
    """The KV of rejected tokens counts as valid."""
    scored = Hosted.scored

    def keeps(self: Any, work: Any, rows: Any, load: int) -> None:
        scored(self, work, rows, load)
        self._kv_tokens = max(self._kv_tokens, work.start + len(work.tokens))

    patch.setattr(Hosted, "scored", keeps)


def cancel_keeps_kv(patch: Patch) -> None:
    """A cancelled session never gives its pages back."""
    free = Hosted.free_kv

    def leaks(self: Hosted) -> None:
        machine = self.machine
        if machine is None or machine.reason != "cancelled":
            free(self)

    patch.setattr(Hosted, "free_kv", leaks)


def lost_answer_is_failure(patch: Patch) -> None:
    """An append without an answer is sent again without a look into the log for our own record."""

    def never_there(log: bytes, **told: Any) -> OurRecordAbsent:
        return OurRecordAbsent(tag=log_tag([log]))

    patch.setattr(prefix, "look_for", never_there)


def journal_not_synced(patch: Patch) -> None:
    """Appends are acknowledged before they are on the disk."""
    init = journal.Journal.__init__

    def lazy(self: journal.Journal, files: Any, *, sync: bool, file: Any) -> None:
        init(self, files, sync=False, file=file)

    patch.setattr(journal.Journal, "__init__", lazy)


def lost_answer_waited_for(patch: Patch) -> None:
    """Nobody looks what became of an append without an answer."""

    async def waits(self: Hosted, machine: Session) -> None:
        await trio.sleep_forever()

    patch.setattr(Hosted, "_look", waits)


class Plant(msgspec.Struct, frozen=True):
    """`faults` are switched on besides; `kinds` are the ways in which it may show."""

    do: Callable[[Patch], None]
    faults: Mapping[str, float] = {}
    drafters: tuple[DrafterPlan, ...] = HONEST
    kinds: tuple[int, ...] = (WRONG,)
    item: str = ""


PLANTS = (
    Plant(no_fence_check, {"foreign_fence": 0.5}, item="4:"),
    Plant(verdict_before_append, {"sync_slow": 0.3}, item="3:"),
    Plant(output_before_append, {"sync_slow": 0.3}, item="3:"),
    Plant(chain_off_by_one, item="2:"),
    Plant(no_limit, {"over_m_cap": 0.4}, ROGUES, item="7"),
    Plant(cap_never_lowered, item="9"),
    Plant(verdict_made_anew, {"request_repeated": 0.3, "answer_lost": 0.05}, item="5:"),
    Plant(epoch_not_checked, {"wrong_epoch": 0.3}, ROGUES),
    Plant(base_not_checked, {"stale_base": 0.3, "wrong_digest": 0.3}, ROGUES),
    Plant(vocabulary_not_checked, {"outside_vocabulary": 0.3}, ROGUES, kinds=(WRONG, CRASH)),
    Plant(one_too_many_accepted, item="10:"),
    Plant(stop_ignored),
    Plant(one_token_too_many),
    Plant(low_not_cleared, item="7/9"),
    Plant(rejected_kv_kept, kinds=(WRONG, CRASH)),
    Plant(cancel_keeps_kv, kinds=(NO_PROGRESS, CRASH)),
    Plant(lost_answer_is_failure, {"append_unanswered": 0.1}, item="2:"),
    Plant(journal_not_synced, {"cache_crash": 0.3}, item="1:"),
    Plant(lost_answer_waited_for, {"append_unanswered": 0.1}, kinds=(NO_PROGRESS,)),
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.do.__name__)
def test_a_planted_fault_is_found(plant: Plant) -> None:
    said = []
    for seed in range(1000, 1000 + SEEDS):
        options = SimOptions.from_seed(seed)
        options = replace(options, faults={**options.faults, **plant.faults}, drafters=plant.drafters)
        with pytest.MonkeyPatch.context() as patch:
            plant.do(patch)
            outcome = run_options(options)
        if outcome.kind in plant.kinds and plant.item in outcome.text:
            without = run_options(options)
            assert without.kind == 0, report.failure(without)
            return
        said.append(f"{seed}: {outcome.kind} {outcome.text[:200]}")
    raise AssertionError("\n".join(("not found:", *said)))
