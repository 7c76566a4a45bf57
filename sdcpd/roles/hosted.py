"""One session as its verifier hosts it: the machine, its KV sequence, and the task that keeps it.

The keeper task owns the session's life: it creates the log, appends records one after the other, settles lost
answers by reading the log, acts on deadlines, and frees the KV at the end. Request tasks only wait on `changes`. The
verify loop scores; it asks `ready_work` and `prefill_left` and reports back through `scored` and `ran_prefill`. Between
passes the session may be preempted (roles/kv_room.py): its KV goes, and what it knows is left to be run again.
"""

from collections.abc import Callable

import structlog
import trio
from msgspec import UNSET
from msgspec.structs import replace

from sdcpd.engine.scheduler import Prefill
from sdcpd.engine.spans import Row, Span
from sdcpd.protocol.commit_log import CommitRecord, fenced_above
from sdcpd.protocol.messages import Proposal, SessionOpen
from sdcpd.protocol.problems import Conflict, IllFormed, Overloaded, Problem, StaleEpoch
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Append, Begin, Settled, Stopped, Work
from sdcpd.protocol.takeover import Takeover
from sdcpd.protocol.terms import Rule, session_path_id
from sdcpd.roles.judging import Judging
from sdcpd.roles.outbox import Outbox
from sdcpd.roles.ports import (
    Appended,
    BelowFence,
    Content,
    Missing,
    Ports,
    RandomStream,
    StoreRefused,
    TagMismatch,
    Unreachable,
)
from sdcpd.roles.row_supply import RowSupply
from sdcpd.roles.session_kv import SessionKv
from sdcpd.roles.told_rows import runnable, telling, told
from sdcpd.roles.verifier_meters import count_round
from sdcpd.roles.verifier_settings import VerifierSettings
from sdcpd.roles.waits import Alarm, Changes, within

CREATE_TRIES = 3


class Hosted:
    """A session from the moment its open was admitted. `machine` exists once the log does."""

    def __init__(
        self,
        opened: SessionOpen,
        prompt: tuple[int, ...],
        *,
        instance: str,
        settings: VerifierSettings,
        ports: Ports,
        kv: SessionKv,
        vocabulary: int,
        outbox: Outbox,
        supply: RowSupply,
        draws: RandomStream,
        load: Callable[[], int],
        on_work: Callable[[], None],
        taken: Takeover | None = None,
    ) -> None:
        """`kv` gets its pages from the verifier's KvRoom; `vocabulary` is the engine's; `taken` where it is resumed
        (6.9).

        `load` samples the verifier's load in percent; `on_work` wakes the verify loop.
        """
        self.opened = opened
        self.prompt = prompt
        self.machine: Session | None = None
        self.refused: Problem | None = None  # why the open failed
        self.changes = Changes()
        self._alarm = Alarm(ports.clock, self.changes.notify)
        self.started_at = ports.clock.now()
        self.ended_at: float | None = None
        self._instance = instance
        self._settings = settings
        self._ports = ports
        self.kv = kv
        self._vocabulary = vocabulary
        self._taken = taken
        self._context = prompt + (taken.history.tokens if taken is not None else ())  # its KV is computed first
        self._work: Work | None = None
        self._scored_in = -1  # the sequence that the work under way was run in
        self._while_judging = trio.CancelScope()
        self._prefilled = False
        self._outbox = outbox
        self._outbox.on_stale = self._doubt
        self._doubted = False
        self._life = trio.CancelScope()
        scope = opened.contract.scope
        self.judging = Judging(opened.session, None if scope is UNSET else scope, ports, kv.engine, supply, draws)
        self._store_failed_at: float | None = None
        self._load = load
        self._on_work = on_work
        self._log = structlog.get_logger(__name__).bind(session=session_path_id(opened.session), epoch=opened.epoch)

    # For the verify loop

    @property
    def id(self) -> bytes:
        return self.opened.session

    @property
    def open(self) -> bool:
        """The prompt's KV is there: the open can be answered."""
        return self._prefilled

    @property
    def wanted_tokens(self) -> int:
        """Positions to be reserved before anything is run: all that is known, and the longest round."""
        contract = self.opened.contract
        known = len(self._context) if self.machine is None else self.machine.prefix.last_position + 1
        return min(known + contract.m_max, len(self.prompt) + contract.max_new)

    def preempt(self) -> None:
        """Give the pages to an older session. Between passes, when no work of this one is being scored."""
        self._ports.meters.count("num_preemptions_total")
        self._log.info("preempted", kv_tokens=self.kv.valid_tokens)
        self.kv.drop()
        self._count_waits()

    def prefill_left(self) -> Prefill | None:
        """What is known and has no valid KV yet, all but the last token, which goes with the next round."""
        machine, kv = self.machine, self.kv
        if kv.closed or machine is None or not kv.reserved_tokens:
            return None
        end = machine.prefix.last_position
        if kv.valid_tokens >= end:
            return None
        if machine.logprobs is not None:
            end = runnable(machine.prefix, kv.valid_tokens, end)
        tokens = machine.prefix.known[kv.valid_tokens : end]
        return Prefill(key=self.id, sequence=kv.sequence, tokens=tokens, start=kv.valid_tokens)

    def ready_work(self, load: int) -> Span | None:
        """What could be scored for this session in the next pass, or None."""
        machine, kv = self.machine, self.kv
        if machine is None or kv.closed or not self._prefilled:
            return None
        if kv.valid_tokens < machine.prefix.last_position:
            return None  # preempted: its KV comes first
        if self._work is not None and not machine.wants(self._work.ticket):
            self._work = None
        if self._work is None:
            before = machine.state
            self._work = machine.self_work(load, self._ports.clock.now())
            if self._work is None:
                if machine.state is not before:
                    self.changes.notify()  # a period ended here, and the keeper waits: it has an event to send
                return None
        work = self._work
        assert work.start == kv.valid_tokens, (work.start, kv.valid_tokens)
        rows, logprobs = len(work.tokens), machine.logprobs
        return Span(sequence=kv.sequence, tokens=work.tokens, start=work.start, rows=rows, logprobs=logprobs)

    def begin(self, proposal: Proposal, begun: Begin) -> None:
        """A proposal's work; scored at the next pass boundary, whether or not its draft rows are in hand."""
        self._work = begun.work
        self.judging.begin(proposal, begun)
        self._on_work()

    def telling(self, span: Span) -> Span:
        """The span of a prefill that goes into a pass now, with what its rows are to tell (114)."""
        machine = self.machine
        assert machine is not None
        return span if machine.logprobs is None else telling(machine.prefix, span, machine.logprobs)

    def ran_prefill(self, tokens: int, rows: tuple[Row, ...]) -> None:
        """`tokens` more positions of what is known have valid KV; `rows` are those that `telling` asked for."""
        self.kv.valid_tokens += tokens
        if rows:
            assert self.machine is not None
            told(self.machine.prefix, rows)
        self._count_waits()
        if self.kv.valid_tokens >= len(self._context) - 1 and not self._prefilled:
            self._prefilled = True
            self.changes.notify()

    def _count_waits(self) -> None:
        """Waits for others do not run while the KV is not there (82), whether for want of pages or of passes."""
        machine, now = self.machine, self._ports.clock.now()
        if machine is None:
            return
        if self.kv.valid_tokens < machine.prefix.last_position:
            machine.deadlines.hold(now)
        elif machine.deadlines.go_on(now):
            self.changes.notify()

    def take_work(self) -> Work:
        """The work goes into a pass: from here on only its rows, or their being dropped, settle it."""
        work = self._work
        assert work is not None
        self._work = None
        self._scored_in = self.kv.sequence
        return work

    def judged(self, work: Work, span: Span) -> Span:
        """The span of work that goes into a pass now, with how its rows are to be judged."""
        judge = self.judging.judge(work)
        return span if judge is None else replace(span, judge=judge)

    def scored(self, work: Work, rows: tuple[Row, ...], load: int) -> None:
        """Rows of `work`; none while its target rows wait on the shelf for draft rows.

        KV stays valid up to the accepted part; the rest is overwritten by the next pass.
        """
        machine = self.machine
        assert machine is not None
        if not rows:
            self.judging.shelved(work)
            return
        if not all(row.finite for row in rows):
            if machine.score_failed(work.ticket, "the model produced non-finite logits"):
                self._log.error("non-finite logits", round=work.round)
        elif machine.scored(work.ticket, [row.token for row in rows], load=load, logprobs=_entries(rows)):
            if not self.kv.closed and self.kv.sequence == self._scored_in:  # else it was preempted meanwhile
                self.kv.valid_tokens = machine.prefix.last_position
            near = sum(row.margin < self._settings.near_tie_margin for row in rows)
            if near:
                self._ports.meters.count("near_ties_total", near)
        self.changes.notify()

    # The keeper

    async def keep(self, on_end: Callable[["Hosted"], None]) -> None:
        """Own the session from its admission to its end here; `on_end` is called once its KV is free."""
        try:
            with self._life:
                await self._keep(on_end)
        finally:
            self.free_kv()

    async def _keep(self, on_end: Callable[["Hosted"], None]) -> None:
        if await self._open():
            async with trio.open_nursery() as nursery, trio.open_nursery() as deadlines:
                nursery.start_soon(self._outbox.run)
                nursery.start_soon(self._judge)
                deadlines.start_soon(self._alarm.run)
                await self._keep_log()
                self._while_judging.cancel()
                self.free_kv()
                on_end(self)
                self._outbox.close()
                deadlines.cancel_scope.cancel()
        else:
            self.free_kv()
            on_end(self)

    def displace(self) -> None:
        """The session goes on here at a higher epoch: drop this one (decision 29), at once, as the log is fenced."""
        reason = "it was opened here at a higher epoch"
        if self.machine is None:
            self.refused = StaleEpoch(f"the session was lost while opening: {reason}")
        elif not self.machine.closed:
            self.machine.lost(reason)
        self._log.warning("session displaced", reason=reason)
        self._life.cancel()
        self.free_kv()
        self.changes.notify()

    def _doubt(self) -> None:
        """The router is at another epoch (an event was refused for it): the log will say whether we are fenced."""
        self._doubted = True
        self.changes.notify()

    async def _judge(self) -> None:
        """Under rule 2: obtain draft rows that do not come along with their proposals."""
        assert self.machine is not None
        if self.opened.contract.rule == Rule.SPECULATIVE_SAMPLING:
            with self._while_judging:
                await self.judging.run(
                    self.machine,
                    scored=lambda work, rows: self.scored(work, rows, self._load()),
                    refused=self.changes.notify,
                )

    def free_kv(self) -> None:
        """Give the KV back and wake everybody; synchronous, so that it is also right while being cancelled."""
        if self.kv.closed:
            return
        self.kv.close()
        self.ended_at = self._ports.clock.now()
        self.changes.notify()
        self._on_work()  # somebody may have waited for the pages

    async def _open(self) -> bool:
        """Create the log (decision 86), unless the session is resumed from one. False: `refused` says why."""
        tag = await self._create_log() if self._taken is None else self._taken.history.tag
        if tag is None:
            return False
        self.machine = Session(
            self.opened,
            instance=self._instance,
            prompt=self.prompt,
            vocabulary=self._vocabulary,
            limits=self._settings.session_limits(),
            log_tag=tag,
            now=self._ports.clock.now(),
            taken=self._taken,
        )
        if len(self._context) == 1:
            self._prefilled = True
        self._count_waits()
        self._on_work()
        self._log.info(
            "session opened",
            prompt_tokens=len(self.prompt),
            committed_tokens=len(self._context) - len(self.prompt),
            max_new=self.opened.contract.max_new,
        )
        self.changes.notify()
        return True

    async def _create_log(self) -> str | None:
        ref, objects = self.opened.commit_log, self._ports.objects
        why = "the commit log could not be created"
        for _ in range(CREATE_TRIES):
            outcome = await within(self._settings.append_timeout_s, lambda: objects.create_log(ref, self.opened.epoch))
            match outcome:
                case Appended(tag=tag):
                    return tag
                case StoreRefused(detail=detail):
                    why = detail
                case TagMismatch() | Unreachable() | BelowFence():
                    content = await within(self._settings.append_timeout_s, lambda: objects.read_log(ref))
                    if isinstance(content, Content) and content.octets == b"":
                        return content.tag  # a lost answer to our own create: an empty log is ours (decision 64)
                    if isinstance(content, Content):
                        self.refused = _taken_log(content.octets, self.opened.epoch)
                        self.changes.notify()
                        return None
            await self._ports.clock.sleep_until(self._ports.clock.now() + self._settings.append_retry_s)
        self._log.warning("session refused: no commit log", detail=why)
        self.refused = Overloaded(f"commit_log: {why}", retry_after_s=1)
        self.changes.notify()
        return None

    async def _keep_log(self) -> None:
        machine = self.machine
        assert machine is not None
        clock = self._ports.clock
        while True:
            self._outbox.put(machine.take_events())
            self._on_work()  # a settled append or a deadline may have made self-decoding work ready
            append = machine.to_append()
            if append is not None:
                await self._append(machine, append)
                continue
            if self._doubted:
                await self._look_for_fence(machine)
                continue
            if machine.closed or machine.stopped is not None:
                self._log.info(
                    "session ended" if machine.closed else "session lost",
                    state=machine.state.name.lower(),
                    reason=machine.stopped or machine.reason,
                    round=machine.prefix.at.round,
                    committed=machine.prefix.at.committed,
                )
                return
            self._alarm.set(machine.next_deadline())
            await self.changes.wait()
            due, now = machine.next_deadline(), clock.now()
            if due is not None and due <= now:
                machine.expire(now, self._load())

    async def _append(self, machine: Session, append: Append) -> None:
        """One try to append, and its settlement. Returns with the record settled, or to be tried again, or lost."""
        ports, objects = self._ports, self._ports.objects
        started = ports.clock.now()
        outcome = await within(
            self._settings.append_timeout_s,
            lambda: objects.append(machine.log_ref, append.octets, epoch=append.epoch, if_match=append.if_match),
        )
        if machine.stopped is not None:
            return  # displaced while the answer was on its way
        match outcome:
            case Appended(tag=tag):
                ports.meters.observe("commit_append_seconds", ports.clock.now() - started)
                self._settled(machine.appended(tag, ports.clock.now()))
            case BelowFence():
                self._stopped(machine.lost("fenced"))
            case StoreRefused(status=status, detail=detail) if status < 500:
                self._stopped(machine.lost(f"the store refuses the log for good: {detail}"))
            case StoreRefused(detail=detail):
                await self._wait_for_store(machine, detail)
            case TagMismatch() | Unreachable():
                await self._look(machine)

    async def _look(self, machine: Session) -> None:
        """The append's answer was lost, or the tag did not match: the log decides (decision 64)."""
        ports, objects = self._ports, self._ports.objects
        content = await within(self._settings.append_timeout_s, lambda: objects.read_log(machine.log_ref))
        if machine.stopped is not None:
            return
        match content:
            case Content(octets=octets):
                try:
                    found = machine.append_unknown(octets, ports.clock.now())
                except IllFormed as error:
                    self._log.error("commit log is damaged", detail=error.detail)
                    self._stopped(machine.lost("the log is damaged: store fault"))
                    return
                match found:
                    case Settled():
                        self._settled(found)
                    case Stopped():
                        self._stopped(found)
                    case Append():
                        pass  # unchanged: the same octets go out again with the tag just read
            case Missing():
                self._stopped(machine.lost("the log is gone from its store: store fault"))
            case StoreRefused(status=status, detail=detail) if status < 500:
                self._stopped(machine.lost(f"the store refuses the log for good: {detail}"))
            case StoreRefused(detail=detail) | Unreachable(reason=detail):
                await self._wait_for_store(machine, detail)

    async def _look_for_fence(self, machine: Session) -> None:
        """Nothing is to be appended, and somebody says that our epoch is over: a higher fence makes it so (65).

        Whatever else stands in the log, or a store that does not answer, is for the next append to settle.
        """
        self._doubted = False
        objects = self._ports.objects
        content = await within(self._settings.append_timeout_s, lambda: objects.read_log(machine.log_ref))
        if isinstance(content, Content) and machine.stopped is None and fenced_above(content.octets, machine.epoch):
            self._stopped(machine.lost("fenced"))

    async def _wait_for_store(self, machine: Session, detail: str) -> None:
        """The store takes no record now (full, gone): nothing is released meanwhile, and the wait has an end.

        Said once, not at each try. A session that nobody wants any more is not kept for its `end` record.
        """
        now = self._ports.clock.now()
        if self._store_failed_at is None:
            self._store_failed_at = now
            self._log.warning("the commit log cannot be written; the session waits", detail=detail)
        limit_s = self._settings.abandoned_append_s if machine.ending else self._settings.append_give_up_s
        if now - self._store_failed_at >= limit_s:
            self._stopped(machine.lost("the commit log could not be written for too long"))
            return
        await self._ports.clock.sleep_until(now + self._settings.append_retry_s)

    def _stopped(self, stopped: Stopped) -> None:
        self._log.error("stopped serving the session", reason=stopped.reason)
        if stopped.reason.startswith("fenced"):
            self._ports.meters.count("fenced_appends_total")
        self.changes.notify()

    def _settled(self, settled: Settled) -> None:
        if self._store_failed_at is not None:
            self._log.info("the commit log is written again")
            self._store_failed_at = None
        count_round(settled, self._ports.meters)
        record = settled.record
        if isinstance(record, CommitRecord):
            self._log.debug("round", round=record.round, emitted=len(record.emitted), committed=record.committed)
        self.changes.notify()


def _entries(rows: tuple[Row, ...]) -> list[bytes]:
    """Log-probabilities of the rows' tokens, where they were asked for (114)."""
    return [row.logprobs for row in rows if row.logprobs is not None]


def _taken_log(octets: bytes, epoch: int) -> Problem:
    """Why a session cannot be opened over a log that somebody else has written: fenced before it began, or not ours."""
    try:
        fenced = fenced_above(octets, epoch)
    except IllFormed:
        fenced = False  # damaged: what it said is not known
    if fenced:
        return StaleEpoch("the log is fenced above this epoch")
    return Conflict("commit_log: a log with records exists there; name a new one")
