"""Faults planted in the product on purpose: the simulation finds each of them, so it is known that it can fail.

Each plant is what a careless change might do. It must be found within a few seeds, by the check that is meant for it
(`item` is its number in design 5.5), in runs where the faults that make it matter are on; and the very run that finds
it must be in order without it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
import trio
from msgspec.structs import replace

from sdcpd.cache import journal, log_batch
from sdcpd.engine.spans import Weighed
from sdcpd.protocol import (
    acceptance,
    digests,
    draft_rows,
    draws,
    escalation,
    log_history,
    prefix,
    rounds,
    session,
    takeover,
)
from sdcpd.protocol.commit_log import (
    CommitRecord,
    FenceRecord,
    OurRecordAbsent,
    log_tag,
    look_for,
    read_records,
    write_record,
)
from sdcpd.protocol.draft_rows import CheckedRow, DraftRow, ids_of, values_of
from sdcpd.protocol.draws import RoundDraws
from sdcpd.protocol.encoding import encode_tokens
from sdcpd.protocol.failover import Failover, Stage
from sdcpd.protocol.log_history import History, read_history
from sdcpd.protocol.messages import Output, Proposal, SessionOpen, Verdict
from sdcpd.protocol.named_drafter import NamedDrafter
from sdcpd.protocol.opening import Opening, Overtaken
from sdcpd.protocol.placement_values import Publish, Refused, Stored
from sdcpd.protocol.policy_lane import PolicyLane
from sdcpd.protocol.sampling import Profiles
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Begin, Work
from sdcpd.protocol.takeover import Takeover
from sdcpd.roles import adoption, judging, resume
from sdcpd.roles import router as router_module
from sdcpd.roles.hosted import Hosted
from sdcpd.roles.judging import Judging
from sdcpd.roles.row_shelf import RowShelf
from sdcpd.roles.session_task import SessionTask
from tests.sim import report
from tests.sim.options import DrafterPlan, Rows, SimOptions
from tests.sim.world import CRASH, NO_PROGRESS, WRONG, run_options

SEEDS = 25
"""Seeds within which a plant must be found."""

Patch = pytest.MonkeyPatch
ROGUES = (DrafterPlan(agrees=0.9, rogue=True), DrafterPlan(agrees=0.6, rogue=True))
ROWS = (DrafterPlan(agrees=0.5, rogue=False), DrafterPlan(agrees=0.3, rogue=False, rows=Rows.BY_REFERENCE))
BY_REFERENCE = (DrafterPlan(agrees=0.6, rogue=False, rows=Rows.BY_REFERENCE),)
FALSE_ROWS = (DrafterPlan(agrees=0.5, rogue=True), DrafterPlan(agrees=0.3, rogue=True))
SEEDED: Mapping[str, Any] = {"rule": 2, "temperature_milli": 1000, "top_k": 0, "top_p_milli": 1000, "seed": 7}
UNSEEDED: Mapping[str, Any] = {**SEEDED, "seed": None}
REPLAYED: Mapping[str, Any] = {**SEEDED, "rule": 65281}
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
    patch.setattr(session, "check_base", lambda proposal, at, state: None)


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


# Failover and restart


def taken_at_its_word(message: SessionOpen, prompt: tuple[int, ...], tokens: tuple[int, ...], log: bytes) -> Takeover:
    """A resume as a verifier would take it that believes the router: the log as it would have to be for it."""
    assert not isinstance(message.resume, msgspec.UnsetType)
    entries = read_records(log)
    kept = [raw for one, raw in entries if not isinstance(one, CommitRecord) or one.round <= message.resume.round]
    if not any(isinstance(one, FenceRecord) and one.epoch == message.epoch for one, _ in entries):
        kept.append(write_record(FenceRecord(epoch=message.epoch)))
    taken = takeover.take_over(message, prompt, tokens, b"".join(kept))
    return replace(taken, history=replace(taken.history, tag=log_tag([log]), records=len(entries)))


def fence_not_awaited(patch: Patch) -> None:
    """The session is opened elsewhere while its fence is only meant to be written."""

    def early(self: Failover, epoch: int, history: History | None, now: float) -> None:
        self._history = history or read_history(b"", self._plan.contract, self._plan.prompt)
        self._epoch, self.stage = epoch, Stage.PUBLISHING
        octets = encode_tokens(self._history.tokens)
        self.lane.postpone(Publish(ref=self._tokens_ref(self._history), octets=octets), now + 0.5)

    patch.setattr(Failover, "_fence", early)
    patch.setattr(resume, "take_over", taken_at_its_word)


def stale_resume_believed(patch: Patch) -> None:
    """The session is resumed a round before the last, and neither digest nor log is compared with that."""
    look = Failover._look

    def stale(self: Failover, octets: bytes, now: float) -> Any:
        found, history = look(self, octets, now), self._history
        if self.stage is Stage.PUBLISHING and history is not None and history.round > 1:
            *before, last = history.commits
            tokens = history.tokens[: -len(last.emitted)]
            self._history = replace(history, commits=tuple(before), tokens=tokens, digest=before[-1].digest)
            self.lane.send(Publish(ref=self._tokens_ref(self._history), octets=encode_tokens(tokens)), now)
        return found

    patch.setattr(Failover, "_look", stale)
    patch.setattr(resume, "take_over", taken_at_its_word)


def epoch_not_raised(patch: Patch) -> None:
    """The fence names the epoch that is in use."""

    def same(self: Failover, now: float) -> Any:
        return self._fence(
            max(self._history.epoch if self._history is not None else 0, self._epoch), self._history, now
        )

    patch.setattr(Failover, "_fence_next", same)


def two_routers_open(patch: Patch) -> None:
    """Any fence counts as one's own, and nobody looks whose the directory record is."""
    look, recorded = Failover._look, Opening._recorded

    def mistakes(self: Failover, octets: bytes, now: float) -> Any:
        fences = [one for one, _ in read_records(octets) if isinstance(one, FenceRecord)]
        if fences and isinstance(fences[-1].by, str):
            self._author = fences[-1].by
        return look(self, octets, now)

    def careless(self: Opening, outcome: Any, now: float) -> Any:
        taken = isinstance(outcome, Refused) and outcome.status == 412
        return recorded(self, Stored(self.tag or "") if taken else outcome, now)

    patch.setattr(Failover, "_look", mistakes)
    patch.setattr(Opening, "_recorded", careless)


def session_taken_up_twice(patch: Patch) -> None:
    """A router that starts claims the sessions as well that it has begun since."""
    claim = adoption.claim_sessions

    async def all_of_them(ports: Any, **told: Any) -> None:
        await claim(ports, **(told | {"known": lambda session: False}))

    patch.setattr(router_module, "claim_sessions", all_of_them)


def incarnation_not_raised(patch: Patch) -> None:
    patch.setattr(adoption, "replace", lambda record, incarnation, **told: replace(record, **told))


def older_seq_accepted(patch: Patch) -> None:
    """A router of an earlier life names drafters beside the one that took its session up."""
    patch.setattr(NamedDrafter, "_check_seq", lambda self, assignment, state: None)


def lost_still_answers(patch: Patch) -> None:
    """A verifier that met the fence goes on to serve the output that it has."""
    output = Session.output

    def lingering(self: Session, from_: int) -> Output | None:
        stopped, self.stopped = self.stopped, None
        try:
            return output(self, from_)
        finally:
            self.stopped = stopped

    patch.setattr(Session, "output", lingering)


def adopted_at_the_first_epoch(patch: Patch) -> None:
    """A router that restarted believes for a while that nothing had happened to its sessions."""

    def begin(self: SessionTask, now: float) -> Any:
        return self.placement.start(now) if self._adopted is None else self.placement.adopt(1, self._adopted.tag, now)

    patch.setattr(SessionTask, "_begin", begin)


def closed_log_resumed(patch: Patch) -> None:
    patch.setattr(log_history, "_ending", lambda seen, contract, tokens: None)


def counters_forgotten(patch: Patch) -> None:
    """The ladder starts anew at each verifier."""
    patch.setattr(takeover, "_counters", lambda history, contract: escalation.Counters(limit=contract.m_max))


def own_record_is_anothers(patch: Patch) -> None:
    """A directory record at another tag than the last one told is another router's."""
    recorded = Opening._recorded

    def hasty(self: Opening, outcome: Any, now: float) -> Any:
        if isinstance(outcome, Refused) and outcome.status == 412:
            self._lane.clear()
            return Overtaken()
        return recorded(self, outcome, now)

    patch.setattr(Opening, "_recorded", hasty)


def claims_given_up(patch: Patch) -> None:
    """A session whose record cannot be had at once is left alone."""
    claim = adoption._claim

    async def impatient(*told: Any) -> Any:
        with trio.move_on_after(1.0):
            return await claim(*told)
        return None

    patch.setattr(adoption, "_claim", impatient)


# Sampling


def drawn_again_on_a_retry(patch: Patch) -> None:
    """Rule 2: a round that is judged another time, at another verifier or for a proposal that comes again, has other
    draws."""
    seeded = draws.seeded_round
    judged: Counter[tuple[bytes, int]] = Counter()

    def again(seed: int, session: bytes, round_: int, proposed: int) -> RoundDraws:
        judged[session, round_] += 1
        return seeded((seed + judged[session, round_] - 1) % (1 << 64), session, round_, proposed)

    patch.setattr(judging, "seeded_round", again)


def residual_is_target(patch: Patch) -> None:
    """The additional token of a rejected draft is drawn from p: the draft is counted twice."""
    patch.setattr(acceptance, "residual", lambda masses, row: masses)


def drawn_before_the_rows(patch: Patch) -> None:
    """The values of a round are drawn as soon as its proposal is taken."""
    begin, weighed = Judging.begin, Judging._weighed

    def early(self: Judging, proposal: Proposal, begun: Begin) -> None:
        begin(self, proposal, begun)
        self.early = self._draws(begun.work) if begun.work.rule == 2 else None  # type: ignore[attr-defined]

    def late(self: Judging, work: Work, rows: Any) -> Weighed:
        drawn, self._draws = self._draws, lambda work: self.early  # type: ignore[method-assign,attr-defined]
        try:
            return weighed(self, work, rows)
        finally:
            self._draws = drawn  # type: ignore[method-assign]

    patch.setattr(Judging, "begin", early)
    patch.setattr(Judging, "_weighed", late)


def policy_a_round_early(patch: Patch) -> None:
    in_force = Profiles.in_force
    patch.setattr(Profiles, "in_force", lambda self, round_: in_force(self, round_ + 1))


def policy_lost_in_a_failover(patch: Patch) -> None:
    """The next verifier goes back to the contract's profile, and the router tells it no other."""
    patch.setattr(Profiles, "take_over", lambda self, commits: None)
    patch.setattr(PolicyLane, "reopened", lambda self, verifier, round_, logged: setattr(self, "_verifier", verifier))


def seed_told_to_drafters(patch: Patch) -> None:
    patch.setattr(PolicyLane, "for_drafters", lambda self: self.wanted)


def drafting_before_the_seed(patch: Patch) -> None:
    """A drafter is named while the seed is still on its way to the verifier."""
    holds_back = PolicyLane.holds_back

    def hasty(self: PolicyLane, now: float) -> bool:
        holds_back(self, now)
        return False

    patch.setattr(PolicyLane, "holds_back", hasty)


def draws_by_round(patch: Patch) -> None:
    """Rule 65281 counts from the beginning of each round: the text depends on where rounds begin."""
    replayed = draws.replayed_round
    patch.setattr(judging, "replayed_round", lambda seed, committed, proposed: replayed(seed, 0, proposed))


def rows_not_checked(patch: Patch) -> None:
    """What a drafter says of its rows is believed."""

    def believing(row: DraftRow, token: int, position: int) -> CheckedRow:
        values = values_of(row)
        return CheckedRow(row=row, chosen=values[ids_of(row).index(token)], total=sum(values))

    patch.setattr(draft_rows, "_checked", believing)


def rows_not_held(patch: Patch) -> None:
    """The lease on written rows is let go as soon as it was taken."""
    before = RowShelf.before

    async def careless(self: RowShelf, out: Any, verifier: str, proposal: Proposal) -> int:
        written = await before(self, out, verifier, proposal)
        if out.lease is not None:
            await self._ports.objects.release(out.lease)
            out.lease = None
        return written

    patch.setattr(RowShelf, "before", careless)


class Plant(msgspec.Struct, frozen=True):
    """`faults` are switched on besides; `clients` is what all of them ask for; `kinds` are the ways in which it may
    show."""

    do: Callable[[Patch], None]
    faults: Mapping[str, float] = {}
    drafters: tuple[DrafterPlan, ...] = HONEST
    clients: Mapping[str, Any] = {}
    shape: Mapping[str, Any] = {}
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
    Plant(fence_not_awaited, {"verifier_crash": 0.3}, item="4:"),
    Plant(stale_resume_believed, {"verifier_crash": 0.3, "foreign_fence": 0.2}, item="2:"),
    Plant(epoch_not_raised, {"foreign_fence": 0.3}, item="4:"),
    Plant(
        two_routers_open,
        {"router_doubled": 0.5, "verifier_crash": 0.5},
        shape={"verifiers": 2, "ttl_ms": 20000, "pass_s": 0.2},
        item="4:",
    ),
    Plant(session_taken_up_twice, {"router_crash": 0.3, "cache_crash": 0.3}, kinds=(WRONG, NO_PROGRESS, CRASH)),
    Plant(incarnation_not_raised, {"router_crash": 0.3}, item="4: routers"),
    Plant(older_seq_accepted, {"router_doubled": 0.3}, item="4: seq"),
    Plant(lost_still_answers, {"foreign_fence": 0.5}, item="4:"),
    Plant(adopted_at_the_first_epoch, {"foreign_fence": 0.4, "router_crash": 0.3}, item="6:"),
    Plant(closed_log_resumed, {"verifier_crash": 0.3, "router_crash": 0.2}, kinds=(WRONG, NO_PROGRESS, CRASH)),
    Plant(counters_forgotten, {"foreign_fence": 0.5}, item="9:"),
    Plant(own_record_is_anothers, {"answer_lost": 0.1, "verifier_crash": 0.3}, kinds=(NO_PROGRESS,)),
    Plant(drawn_again_on_a_retry, {"verifier_crash": 0.4, "append_unanswered": 0.1}, ROWS, SEEDED, item="10"),
    Plant(residual_is_target, {}, ROWS, SEEDED, item="10"),
    Plant(drawn_before_the_rows, {}, BY_REFERENCE, UNSEEDED, item="8:"),
    Plant(policy_a_round_early, {}, ROWS, SEEDED, item="50:"),
    Plant(policy_lost_in_a_failover, {"verifier_crash": 0.4}, ROWS, SEEDED),
    Plant(seed_told_to_drafters, {}, ROWS, SEEDED, item="8:"),
    Plant(drafting_before_the_seed, {"slow_links": 0.2}, ROWS, SEEDED, item="50:"),
    Plant(draws_by_round, {}, ROWS, REPLAYED, item="10"),
    Plant(rows_not_checked, {"rows_false": 0.3}, FALSE_ROWS, SEEDED, kinds=(WRONG, CRASH)),
    Plant(rows_not_held, {}, BY_REFERENCE, UNSEEDED, item="11:"),
    Plant(claims_given_up, {"router_crash": 0.3, "cache_crash": 0.3}, kinds=(NO_PROGRESS,)),
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.do.__name__)
def test_a_planted_fault_is_found(plant: Plant) -> None:
    said = []
    for seed in range(1000, 1000 + SEEDS):
        options = SimOptions.from_seed(seed)
        options = replace(options, faults={**options.faults, **plant.faults}, drafters=plant.drafters)
        options = replace(options, **plant.shape)
        options = replace(options, clients=tuple(replace(client, **plant.clients) for client in options.clients))
        with pytest.MonkeyPatch.context() as patch:
            plant.do(patch)
            outcome = run_options(options)
        if outcome.kind in plant.kinds and plant.item in outcome.text:
            without = run_options(options)
            assert without.kind == 0, report.failure(without)
            return
        said.append(f"{seed}: {outcome.kind} {outcome.text[:200]}")
    raise AssertionError("\n".join(("not found:", *said)))
