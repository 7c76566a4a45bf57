"""One session as its verifier hosts it: the machine, its KV sequence, and the task that keeps it.

The keeper task owns the session's life: it creates the log, appends records one after the other, settles lost
answers by reading the log, acts on deadlines, and frees the KV at the end. Request tasks only wait on `changes`. The
verify loop scores; it asks `ready_work` and `prefill_left` and reports back through `scored` and `ran_prefill`.
"""

from collections.abc import Callable

import structlog
import trio
from msgspec import UNSET
from msgspec.structs import replace

from sdcpd.engine.scheduler import Prefill
from sdcpd.engine.spans import Row, Span
from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.messages import Proposal, SessionOpen
from sdcpd.protocol.problems import Conflict, IllFormed, Overloaded, Problem
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Append, Begin, Settled, Stopped, Work
from sdcpd.protocol.terms import Rule, session_path_id
from sdcpd.roles.judging import Judging
from sdcpd.roles.outbox import Outbox
from sdcpd.roles.ports import (
    Appended,
    BelowFence,
    Content,
    Engine,
    Missing,
    Ports,
    RandomStream,
    StoreRefused,
    TagMismatch,
    Unreachable,
)
from sdcpd.roles.row_supply import RowSupply
from sdcpd.roles.verifier_meters import count_round
from sdcpd.roles.verifier_settings import VerifierSettings
from sdcpd.roles.waits import Changes, within

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
        engine: Engine,
        sequence: int,
        outbox: Outbox,
        supply: RowSupply,
        draws: RandomStream,
        load: Callable[[], int],
        on_work: Callable[[], None],
    ) -> None:
        """`sequence` has all the positions reserved that the session can need.

        `load` samples the verifier's load in percent; `on_work` wakes the verify loop.
        """
        self.opened = opened
        self.prompt = prompt
        self.machine: Session | None = None
        self.refused: Problem | None = None  # why the open failed
        self.changes = Changes()
        self.started_at = ports.clock.now()
        self.ended_at: float | None = None
        self._instance = instance
        self._settings = settings
        self._ports = ports
        self._engine = engine
        self._sequence: int | None = sequence
        self._kv_tokens = 0  # positions with valid KV
        self._work: Work | None = None
        self._while_judging = trio.CancelScope()
        self._prefilled = False
        self._outbox = outbox
        scope = opened.contract.scope
        self.judging = Judging(opened.session, None if scope is UNSET else scope, ports, engine, supply, draws)
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

    def prefill_left(self) -> Prefill | None:
        """The part of the prompt still to be run, all but its last token, which goes with the first round."""
        end = len(self.prompt) - 1
        if self._sequence is None or self.machine is None or self._kv_tokens >= end:
            return None
        return Prefill(
            key=self.id, sequence=self._sequence, tokens=self.prompt[self._kv_tokens : end], start=self._kv_tokens
        )

    def ready_work(self, load: int) -> Span | None:
        """What could be scored for this session in the next pass, or None."""
        machine = self.machine
        if machine is None or self._sequence is None or not self._prefilled:
            return None
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
        assert work.start == self._kv_tokens, (work.start, self._kv_tokens)
        return Span(sequence=self._sequence, tokens=work.tokens, start=work.start, rows=len(work.tokens))

    def begin(self, proposal: Proposal, begun: Begin) -> None:
        """A proposal's work; scored at the next pass boundary, whether or not its draft rows are in hand."""
        self._work = begun.work
        self.judging.begin(proposal, begun)
        self._on_work()

    def ran_prefill(self, tokens: int) -> None:
        """`tokens` more positions of the prompt have valid KV."""
        self._kv_tokens += tokens
        if self._kv_tokens >= len(self.prompt) - 1:
            self._prefilled = True
            self.changes.notify()

    def take_work(self) -> Work:
        """The work goes into a pass: from here on only its rows, or their being dropped, settle it."""
        work = self._work
        assert work is not None
        self._work = None
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
        elif machine.scored(work.ticket, [row.token for row in rows], load=load):
            self._kv_tokens = machine.prefix.last_position
            near = sum(row.margin < self._settings.near_tie_margin for row in rows)
            if near:
                self._ports.meters.count("near_ties_total", near)
        self.changes.notify()

    # The keeper

    async def keep(self, on_end: Callable[["Hosted"], None]) -> None:
        """Own the session from its admission to its end here; `on_end` is called once its KV is free."""
        try:
            if await self._open():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._outbox.run)
                    nursery.start_soon(self._judge)
                    await self._keep_log()
                    self._while_judging.cancel()
                    self.free_kv()
                    on_end(self)
                    self._outbox.close()
            else:
                self.free_kv()
                on_end(self)
        finally:
            self.free_kv()

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
        if self._sequence is None:
            return
        self._engine.close_sequence(self._sequence)
        self._sequence = None
        self.ended_at = self._ports.clock.now()
        self.changes.notify()

    async def _open(self) -> bool:
        """Create the log (decision 86), then wait for the prompt's KV. False: `refused` says why."""
        tag = await self._create_log()
        if tag is None:
            return False
        self.machine = Session(
            self.opened,
            instance=self._instance,
            prompt=self.prompt,
            vocabulary=self._engine.info.vocabulary,
            limits=self._settings.session_limits(),
            log_tag=tag,
            now=self._ports.clock.now(),
        )
        if len(self.prompt) == 1:
            self._prefilled = True
        self._on_work()
        self._log.info("session opened", prompt_tokens=len(self.prompt), max_new=self.opened.contract.max_new)
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
                        self.refused = Conflict("commit_log: a log with records exists there; name a new one")
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
            if machine.closed or machine.stopped is not None:
                self._log.info(
                    "session ended" if machine.closed else "session lost",
                    state=machine.state.name.lower(),
                    reason=machine.reason or machine.stopped,
                    round=machine.prefix.at.round,
                    committed=machine.prefix.at.committed,
                )
                return
            await self.changes.wait_until(clock, machine.next_deadline())
            machine.expire(clock.now(), self._load())

    async def _append(self, machine: Session, append: Append) -> None:
        """One try to append, and its settlement. Returns with the record settled, or to be tried again, or lost."""
        ports, objects = self._ports, self._ports.objects
        started = ports.clock.now()
        outcome = await within(
            self._settings.append_timeout_s,
            lambda: objects.append(machine.log_ref, append.octets, epoch=append.epoch, if_match=append.if_match),
        )
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
