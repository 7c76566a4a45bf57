"""One session at its drafter: its machine, what the source knows of it, and the drafts made for it.

The drafter's task of the session (drafter.py) feeds what was committed, takes a draft, sends it, and tells what came of
it; while the proposal is out, the next one may be prepared (ahead.py). Nothing here talks to anybody.
"""

import structlog
import trio
from msgspec import UNSET, Struct

from sdcpd.drafting.length import Acceptance, LengthChooser, VerifyTime
from sdcpd.drafting.source import MODEL, Draft
from sdcpd.protocol.distributions import profile_of
from sdcpd.protocol.draft_session import DraftSession
from sdcpd.protocol.draft_steps import Settled
from sdcpd.protocol.messages import Proposal
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.ahead import Ahead
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.drafting import Drafting, DraftJob, Lengths, Order
from sdcpd.roles.ports import Clock, Meters
from sdcpd.roles.row_shelf import RowsOut

log = structlog.get_logger("sdcpd.roles.drafter")


class DraftedSession(Struct, frozen=True):
    """One session for `sdcpctl`: lengths and counts, never a token."""

    session: str
    epoch: int
    round: int
    prompt_tokens: int
    committed_tokens: int
    m_cap: int
    outstanding_tokens: int
    verifier: str
    rounds: int
    draft_tokens: int
    accepted_tokens: int


class Drafted:
    """See the module. Built with the first assignment; `end` when the session's task ends."""

    def __init__(
        self, machine: DraftSession, settings: DrafterSettings, drafting: Drafting, clock: Clock, meters: Meters
    ) -> None:
        self.machine = machine
        self.out = RowsOut()  # the rows of the draft that is out, under rule 2
        self.failures = 0  # outcomes in a row that brought no verdict
        self.rounds = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.interruptible: trio.CancelScope | None = None
        self._settings = settings
        self._drafting = drafting
        self._clock = clock
        self._meters = meters
        self._acceptance = Acceptance(settings.length)
        self._ahead = Ahead(meters, worth=settings.ahead_min_hits)
        self._next: DraftJob | None = None  # made ahead, for just the prefix that came
        self._draft = Draft(tokens=(), matched=0)  # that is out
        self._fed: int | None = None  # output tokens the source has; None before its context is open
        self._rewinds = 0  # the machine's count when the context was opened

    def interrupt(self) -> None:
        """Cut the task's call, draft or wait short; it then asks the machine again."""
        if self.interruptible is not None:
            self.interruptible.cancel()

    def log(self) -> structlog.typing.FilteringBoundLogger:
        machine = self.machine
        bound: structlog.typing.FilteringBoundLogger = log.bind(
            session=session_path_id(machine.session), epoch=machine.epoch, round=machine.round
        )
        return bound

    async def feed(self) -> None:
        """Bring the source's context to what the machine holds."""
        machine = self.machine
        while self._fed is None or self._rewinds != machine.rewinds:
            self._rewinds = machine.rewinds
            tokens = machine.tokens_from(0)
            scope = None if machine.contract.scope is UNSET else machine.contract.scope
            await self._drafting.open(machine.session, machine.prompt + tokens, scope)
            self._fed = len(tokens)
        new = machine.tokens_from(self._fed)
        if new:
            self._drafting.extend(machine.session, new)
            self._fed += len(new)

    async def draft(self, chooser: LengthChooser, verify: VerifyTime, *, publishes: bool) -> Draft | None:
        """The draft of the next round, without tokens when there is nothing to say. None: the machine moved meanwhile,
        ask it again."""
        machine, clock = self.machine, self._clock
        digest = machine.digest
        began = clock.now()
        job, self._next = self._next, None
        if job is None or job.cancelled:
            job = self._begin(Lengths(chooser, self._acceptance, verify, publishes=publishes))
        if job is None:
            return Draft(tokens=(), matched=0)
        if not job.finished:
            with trio.CancelScope() as self.interruptible:
                await job.result()
            self.interruptible = None
        if job.cancelled or not job.finished or machine.stopped is not None or machine.digest != digest:
            job.cancel()
            return None
        took_s = clock.now() - began
        self._meters.observe("draft_seconds", took_s)
        self._draft = draft = await job.result()
        if draft.tokens:
            per_token_s = took_s / len(draft.tokens) if draft.matched != MODEL else job.token_s
            if per_token_s is not None:
                chooser.drafted(draft.matched, len(draft.tokens), per_token_s * len(draft.tokens))
        return draft

    def _begin(self, lengths: Lengths) -> DraftJob | None:
        machine = self.machine
        room = self._settings.session_tokens - len(machine.prompt) - machine.committed
        return self._drafting.begin(self._order((), min(machine.limit, room), lengths)) if room >= 1 else None

    def draft_ahead(self, sent: Proposal, chooser: LengthChooser, verify: VerifyTime, *, publishes: bool) -> None:
        """`sent` goes out: begin the next round's draft, for the case that all of it is accepted (decision 59)."""
        machine, contract = self.machine, self.machine.contract
        committed = sent.base + len(sent.tokens) + 1
        remaining = contract.max_new - committed
        limit = min(contract.m_max, machine.m_cap, max(1, remaining - 1))
        limit = min(limit, self._settings.session_tokens - len(machine.prompt) - committed)
        if not (self._settings.draft_ahead and self._drafting.slow):
            return
        if remaining < 1 or limit < 1 or sent.tokens[-1] in contract.stop or not self._ahead.due():
            return
        lengths = Lengths(chooser, self._acceptance, verify, publishes=publishes)
        self._ahead.begun(self._drafting.begin(self._order(sent.tokens, limit, lengths)), sent)

    def decided(self) -> None:
        """The proposal that was out is out no more: the draft made ahead is the next one, or is given up."""
        self._next = self._ahead.take(self.machine.digest)

    def _order(self, assumed: tuple[int, ...], limit: int, lengths: Lengths) -> Order:
        machine, contract = self.machine, self.machine.contract
        return Order(
            session=machine.session,
            assumed=assumed,
            ahead=bool(assumed),
            limit=limit,
            place=machine.committed + len(assumed),
            rule=contract.rule,
            profile=profile_of(contract.sampling if machine.sampling is UNSET else machine.sampling),
            stop=contract.stop,
            lengths=lengths,
        )

    def settled(self, settled: Settled, verify: VerifyTime, round_s: float | None) -> None:
        """One of our proposals has its verdict. `round_s` is None unless it was sent once."""
        draft = self._draft
        self._acceptance.observe(draft.matched, proposed=settled.proposed, accepted=settled.accepted)
        self._drafting.settled(draft, settled.accepted)
        source = "model" if draft.matched == MODEL else "lookup"
        self._meters.count("drafts_settled_total", source=source)
        self._meters.count("drafted_tokens_total", settled.proposed, source=source)
        self._meters.count("drafted_tokens_accepted_total", settled.accepted, source=source)
        if round_s is not None and self.rounds > 0:  # the first round may have waited for the prompt's prefill
            verify.observe(settled.proposed, round_s)
        self.rounds += 1
        self.draft_tokens += settled.proposed
        self.accepted_tokens += settled.accepted
        self.log().debug("round settled", proposed=settled.proposed, accepted=settled.accepted, matched=draft.matched)

    def end(self) -> None:
        """The session is drafted no more."""
        self._ahead.drop()
        if self._next is not None:
            self._next.cancel()
        self._drafting.close(self.machine.session)

    def describe(self) -> DraftedSession:
        machine = self.machine
        return DraftedSession(
            session=session_path_id(machine.session),
            epoch=machine.epoch,
            round=machine.round,
            prompt_tokens=len(machine.prompt),
            committed_tokens=machine.committed,
            m_cap=machine.m_cap,
            outstanding_tokens=len(machine.outstanding.tokens) if machine.outstanding is not None else 0,
            verifier=machine.verifier,
            rounds=self.rounds,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
        )
