"""The verifier's machine for one session: draft 6.3 steps 1 to 9, self-decoding, and the end (6.5, 6.7, 6.8).

States (terms.State):

    WAITING        no drafter may propose; after open, after switch, after a self-decoding period
    DRAFTING       one drafter is named; it may propose the next round
    SELF_DECODING  the verifier makes rounds of one token by itself, by the ladder or by order (decision 110)
    FINISHED       stop token or max_new
    FAILED         ladder exhausted, cancelled, non-finite logits, or waited too long

Two facts lie across the states. *In flight*: one piece of work is being scored. *Pending* (protocol/prefix.py): records
were handed out for appending and are not known to be durable; at most one for a proposal, at most `appends_ahead`
while self-decoding. Durable before visible: `scored` commits nothing; only `appended` moves prefix, output, counters
and verdict, together.

Beside the states: a session is *stopped* when this verifier lost it (fenced, or its log contradicts us). It is then
neither finished nor failed, it lives elsewhere, and everything is refused (decision 65).

The machine knows no task, clock, tensor or HTTP. `now` and `load` are arguments; events for the router are taken by the
role. It trusts its caller for three things: an authenticated `peer`, the right rows, and truly durable appends.
"""

from collections.abc import Sequence

from msgspec import UNSET

from sdcpd.protocol import escalation
from sdcpd.protocol.commit_log import (
    EndRecord,
    FencedOff,
    ForeignWriter,
    LogShrank,
    OurRecordAbsent,
    OurRecordStands,
    write_record,
)
from sdcpd.protocol.deadlines import Deadlines
from sdcpd.protocol.draft_rows import VALUE_BYTES
from sdcpd.protocol.events import Events
from sdcpd.protocol.log_history import LADDER_EXHAUSTED
from sdcpd.protocol.messages import Assignment, Event, Output, Policy, Proposal, SessionOpen, SessionState, Verdict
from sdcpd.protocol.named_drafter import NamedDrafter
from sdcpd.protocol.output import page
from sdcpd.protocol.problems import BadProposal, SessionClosed, StaleEpoch
from sdcpd.protocol.proposal_checks import check_base, check_content, check_limit, known_round, scoreable
from sdcpd.protocol.round_counts import RoundCounts
from sdcpd.protocol.rounds import decide
from sdcpd.protocol.sampling import Profiles
from sdcpd.protocol.self_decoding import Period
from sdcpd.protocol.session_values import (
    Append,
    Begin,
    Busy,
    Join,
    Pending,
    Replay,
    SessionLimits,
    Settled,
    Stopped,
    Work,
)
from sdcpd.protocol.takeover import Takeover, starting_prefix
from sdcpd.protocol.terms import Action, State


class Session:
    """One session at its verifier. See the module's text for the states."""

    def __init__(
        self,
        opened: SessionOpen,
        *,
        instance: str,
        prompt: tuple[int, ...],
        vocabulary: int,
        limits: SessionLimits,
        log_tag: str = "",
        now: float,
        taken: Takeover | None = None,
    ) -> None:
        """`prompt` is what `opened.prompt` holds or refers to; `log_tag` is the tag of the log just created (86).

        `taken` instead of it: the session goes on where another verifier left it (6.9), in state WAITING (40).
        """
        assert prompt, "the verifier refuses an empty prompt before it makes a session"
        self.id = opened.session
        self.epoch = opened.epoch
        self.contract = opened.contract
        self.log_ref = opened.commit_log
        self.router = opened.router if opened.router is not UNSET else None
        self.logprobs = opened.logprobs if opened.logprobs is not UNSET else None  # likeliest tokens to tell of (114)
        self.state = State.WAITING
        self.stopped: str | None = None
        self.reason: str | None = None
        self.named = NamedDrafter()
        self.counts = RoundCounts(opened.contract.m_max)
        self.profiles = Profiles(opened.contract)
        if taken is not None:
            self.profiles.take_over(taken.history.commits)
        self.prefix = starting_prefix(opened, prompt, log_tag, taken)
        self._instance = instance
        self._vocabulary = vocabulary
        self._limits = limits
        self._in_flight: Work | None = None
        self._proposal: Proposal | None = None  # the proposal of the open round, from its arrival to its verdict
        self._period = Period(ordered=False)
        self._ending: tuple[Action, str] | None = None
        self._assignment_waits = False
        self._tickets = 0
        self._events = Events(opened.session, opened.epoch)
        self.deadlines = Deadlines(limits, now)
        if self.contract.max_new == 0:
            self._end(Action.FINISH, "max_new is 0")

    @property
    def closed(self) -> bool:
        return self.state in (State.FINISHED, State.FAILED)

    @property
    def ending(self) -> bool:
        """Ended from outside, and the record that says so is not durable yet."""
        return self._ending is not None and not self.closed

    @property
    def m_cap(self) -> int:
        return min(self.prefix.at.counters.limit, self.contract.m_max)

    @property
    def settled(self) -> bool:
        """No round is being scored and no append is open."""
        return self._in_flight is None and not self.prefix.pending

    def session_state(self) -> SessionState:
        """The message of 5.2, as of the last committed round."""
        at = self.prefix.at
        return SessionState(
            session=self.id,
            epoch=self.epoch,
            round=at.round,
            committed=at.committed,
            digest=at.digest,
            state=int(self.state),
            seq=self.named.seq if self.named.seq is not None else UNSET,
            reason=self.reason if self.reason is not None else UNSET,
        )

    def output(self, from_: int) -> Output | None:
        """Committed tokens at indices `from_` and later (6.7), or None when the caller must wait.

        Raises StaleEpoch when this verifier stopped serving the session (decision 65).
        """
        self._refuse_if_stopped()
        return page(
            self.prefix.output,
            from_,
            limit=self._limits.output_page_tokens,
            session=self.id,
            epoch=self.epoch,
            state=self.state,
            reason=self.reason,
            stats=self.counts.stats(),
            logprobs=self.prefix.logprobs if self.logprobs is not None else None,
        )

    def take_events(self) -> list[Event]:
        return self._events.take()

    # Assignments (6.1; decisions 41 to 43, 110, 111)

    def assign(self, assignment: Assignment, now: float) -> SessionState | Busy:
        """PUT drafter. Busy while a round or append is open: let it settle, then call again (decision 43)."""
        self._refuse_if_stopped()
        repeat = self.named.is_repeat(assignment, instance=self._instance, drafting=self.state is State.DRAFTING)
        self._check_assignment(assignment, repeat)
        if repeat:
            return self.session_state()
        if self._proposal is not None or self.prefix.pending:
            self._assignment_waits = True
            return Busy()
        self._assignment_waits = False
        self._in_flight = None  # a self-decoded token still being scored is not needed
        fresh = assignment.drafter != self.named.uri or self.state is not State.DRAFTING
        self.named.accept(assignment, instance=self._instance)
        if self.named.uri is None:
            self._self_decode(ordered=True)
            return self.session_state()
        if fresh:
            self.prefix.limited(escalation.assigned(self.prefix.at.counters, self.contract, assignment.m_init))
            self.deadlines.assigned(now)
        self.state = State.DRAFTING
        return self.session_state()

    def assignment_given_up(self) -> None:
        """The caller of a Busy `assign` went away or was told to come again."""
        self._assignment_waits = False

    def _check_assignment(self, assignment: Assignment, repeat: bool) -> None:
        if assignment.epoch != self.epoch:
            raise StaleEpoch(f"epoch {assignment.epoch} is not {self.epoch}", state=self.session_state())
        self._refuse_if_ended()
        self.named.check(assignment, self.contract)
        if not repeat:
            self.named.check_seq(assignment, self.session_state())

    # Policies (6.6)

    def policy(self, policy: Policy) -> SessionState:
        """POST policy: another sampling profile from a round on. Raises what Profiles.accept raises (50, 51)."""
        self._refuse_if_stopped()
        self._refuse_if_ended()
        current = self._in_flight.round if self._in_flight is not None else self.prefix.tip.round
        self.profiles.accept(policy, current=current, state=self.session_state())
        return self.session_state()

    # Proposals (6.3 steps 1 to 5; order by decision 60)

    def propose(self, peer: str, proposal: Proposal, now: float) -> Replay | Join | Begin:
        """Steps 1 to 5 for a proposal of the authenticated instance `peer`.

        Raises NotAssigned, StaleEpoch, SessionClosed, StaleBase, LimitExceeded or BadProposal. A refused proposal
        consumes nothing: the round stays open.
        """
        self._refuse_if_stopped()
        self.named.authorize(peer, proposal)
        if proposal.epoch != self.epoch:
            raise StaleEpoch(f"epoch {proposal.epoch} is not {self.epoch}", state=self.session_state())
        known = known_round(proposal, self.prefix, self._proposal, self.session_state())
        if known is not None:
            return known
        self._refuse_if_ended()
        self.named.authorize_new_round()
        check_base(proposal, self.prefix.at, self.session_state())
        check_limit(proposal, self.m_cap, self._limits.round_row_bytes // (VALUE_BYTES * self._vocabulary))
        try:
            rows = check_content(proposal, self.contract, self._vocabulary)
        except BadProposal:
            self._refusal(now)
            raise
        if rows is not None:
            self.named.proposed()
        self._proposal = proposal
        self.deadlines.proposed()
        return Begin(work=self._next_work(scoreable(proposal, self.contract, self.prefix.at.committed)), rows=rows)

    def _refusal(self, now: float) -> None:
        """A proposal of the drafter named was refused for what it is. Three in a row end the assignment (82).

        Being over m_cap is none: we named the cap.
        """
        if self.named.refused() >= self._limits.refusals_limit:
            self._hand_back(Action.SWITCH, "proposals refused", now)

    def rows_obtained(self, ticket: int) -> bool:
        """Step 5 is done for the work with this ticket: all its draft rows are in hand and passed. False: unwanted."""
        if not self.wants(ticket):
            return False
        self.named.proposed()
        return True

    def rows_refused(self, ticket: int, now: float) -> bool:
        """The draft rows of this work are bad or cannot be had: the round is rejected, nothing is consumed (63)."""
        if not self.wants(ticket):
            return False
        self._in_flight = self._proposal = None
        self.deadlines.verdict_sent(now)
        self._refusal(now)
        return True

    def awaited(self, round_: int) -> Verdict | None:
        """For a request that waits on `round_`: its verdict, or None while it is open.

        Raises StaleEpoch when the session was lost, SessionClosed when it ended without deciding the round.
        """
        self._refuse_if_stopped()
        verdict = self.prefix.verdict(self.id, round_)
        if verdict is not None:
            return verdict
        self._refuse_if_ended()
        assert self._proposal is not None
        assert self._proposal.round == round_, "ends by a verdict, the end, being stopped; refusals the caller knows"
        return None

    # Scoring and commit (6.3 steps 6 to 9)

    def _next_work(self, proposed: tuple[int, ...]) -> Work:
        """Work on top of the tip: the last known token, then the proposed ones."""
        self._tickets += 1
        round_ = self.prefix.tip.round + 1
        self._in_flight = Work(
            ticket=self._tickets,
            round=round_,
            start=self.prefix.last_position,
            tokens=(self.prefix.last_token, *proposed),
            committed=self.prefix.tip.committed,
            rule=self.contract.rule,
            profile=self.profiles.in_force(round_),
        )
        return self._in_flight

    def scored(self, ticket: int, best: Sequence[int], *, load: int, logprobs: Sequence[bytes] = ()) -> bool:
        """Steps 7 to 9 for the work with this ticket: make the record, commit nothing. The lists are those of `decide`.

        Returns False when the work is no longer wanted (cancelled, reassigned, stopped) and its rows are dropped.
        """
        work = self._in_flight
        if work is None or work.ticket != ticket:
            return False
        self._in_flight = None
        pending = decide(
            self.prefix.tip,
            self.contract,
            epoch=self.epoch,
            scored=work.tokens[1:],
            best=best,
            proposed=len(self._proposal.tokens) if self._proposal is not None else None,
            load=load,
            sampling=self.profiles.changed_with(work.round),
            logprobs=logprobs,
        )
        if pending.self_decoded:
            self._period.token_scored()
        self.prefix.push(pending)
        return True

    def wants(self, ticket: int) -> bool:
        """Whether the rows of this work still matter."""
        return self._in_flight is not None and self._in_flight.ticket == ticket

    def score_failed(self, ticket: int, reason: str) -> bool:
        """The pass gave no usable rows for this work (non-finite logits): nothing is committed, the session fails."""
        if not self.wants(ticket):
            return False
        self._end(Action.FAIL, reason)
        return True

    def to_append(self) -> Append | None:
        """The record to append next, or None. The same value until its outcome is reported."""
        return self.prefix.to_append()

    def appended(self, tag: str, now: float) -> Settled:
        """The record of `to_append` is durable: prefix, output, counters and verdict move together (6.3 step 8)."""
        pending = self.prefix.appended(tag)
        if isinstance(pending.record, EndRecord):
            self._close(State.FINISHED if pending.record.end is Action.FINISH else State.FAILED)
            self._say(pending.record.end, self.reason)
            return Settled(record=pending.record, proposed=None, closed=True)
        proposed = len(self._proposal.tokens) if self._proposal is not None else None
        self.counts.committed(pending.record, proposed)
        self._proposal = None
        self._act(pending, now)
        if self._ending is not None and not self.prefix.pending and not self.closed:
            self._push_end()
        return Settled(record=pending.record, proposed=proposed, closed=self.closed)

    def append_unknown(self, log: bytes, now: float) -> Settled | Append | Stopped:
        """The append's answer was lost or was 412: settle it by what the log says now (decision 64).

        Settled: it stands (if `stopped` is then set, a higher fence follows it). Append: send again, with the new tag.
        Raises IllFormed when the log cannot be read.
        """
        match self.prefix.look_for_pending(log):
            case OurRecordStands(tag=tag, fenced=fenced):
                settled = self.appended(tag, now)
                if fenced and not self.closed:
                    self.lost("fenced after the last commit")
                return settled
            case OurRecordAbsent():
                append = self.to_append()
                assert append is not None
                return append
            case FencedOff():
                return self.lost("fenced")
            case ForeignWriter():
                return self.lost("another writer's record is in the log")
            case LogShrank():  # pragma: no branch - the last of what a lookup can find
                return self.lost("the log lost acknowledged records: store fault")

    def _act(self, pending: Pending, now: float) -> None:
        """Carry the round's action out on our side (6.5.2)."""
        match pending.action:
            case Action.CONTINUE | Action.REDUCE:
                self.deadlines.verdict_sent(now)
                if self._period.over and not self.prefix.pending:
                    self._hand_back(Action.SELF_DECODE, None, now)
            case Action.SWITCH:
                self._hand_back(Action.SWITCH, None, now)
            case Action.SELF_DECODE:
                self._self_decode(ordered=False)
            case Action.FINISH:
                self._close(State.FINISHED)
                self._say(Action.FINISH, None)
            case Action.FAIL:  # pragma: no branch - the last of all actions
                self.reason = LADDER_EXHAUSTED
                self._close(State.FAILED)
                self._say(Action.FAIL, self.reason)

    # Self-decoding (6.5.2; decisions 80, 81, 110)

    def self_work(self, load: int, now: float) -> Work | None:
        """The next token to decode by ourselves, or None when there is none to score now."""
        if self.state is not State.SELF_DECODING or self.stopped is not None or self._ending is not None:
            return None
        if self._in_flight is not None or self._assignment_waits:
            return None
        tip = self.prefix.tip_pending
        finishing = tip is not None and tip.action is Action.FINISH
        if finishing or self.prefix.pending >= self._limits.appends_ahead:
            return None
        if self._period.may_go_on(self.contract, load):
            return self._next_work(())
        if not self.prefix.pending:
            self._hand_back(Action.SELF_DECODE, None, now)
        return None

    def _self_decode(self, *, ordered: bool) -> None:
        self.state = State.SELF_DECODING
        self.named.void = True
        self._period = Period(ordered=ordered)
        self.deadlines.stop()

    # Waiting and ending

    def next_deadline(self) -> float | None:
        """When `expire` should be called next, in the caller's seconds; None while nothing runs out."""
        if self.closed or self.stopped is not None or not self.settled:
            return None
        return self.deadlines.next(self.state)

    def expire(self, now: float, load: int) -> None:
        """Do what is due at `now` (decision 82). Early or late calls are harmless."""
        due = self.next_deadline()
        if due is None or now < due:
            return
        if self.state is State.DRAFTING:
            self._hand_back(Action.SWITCH, "no proposal in time", now)
        elif self.deadlines.waited_too_long(now):
            self._end(Action.FAIL, "no drafter for too long")
        elif self.deadlines.ever_assigned and escalation.may_self_decode(self.contract, load):
            self._self_decode(ordered=False)
        else:
            self.deadlines.repeated(now)
            if self.deadlines.ever_assigned:
                self._say(Action.SWITCH, "still waiting for a drafter")

    def cancel(self, reason: str) -> None:
        """End the session from outside (decision 37). A round whose record was sent is settled first (decision 64)."""
        if not self.closed and self.stopped is None and self._ending is None:
            self._end(Action.FAIL, reason)

    def _end(self, end: Action, reason: str) -> None:
        """End without a round that says so: an `end` record comes first, then the final page and event (83)."""
        self._ending = (end, reason)
        self._in_flight = None
        self.named.void = True
        if not self.prefix.pending:
            self._push_end()

    def _push_end(self) -> None:
        assert self._ending is not None
        end, self.reason = self._ending
        record = EndRecord(epoch=self.epoch, end=end, reason=self.reason)
        self.prefix.push(Pending(record, write_record(record), self.prefix.at, end, self_decoded=True))

    def _close(self, state: State) -> None:
        self.state = state
        self._drop_work()

    def lost(self, reason: str) -> Stopped:
        """The log is fenced (6.3 step 8), gone or damaged: discard the round, release nothing, stop serving."""
        self.stopped = reason
        self._drop_work()
        return Stopped(reason=reason)

    def _drop_work(self) -> None:
        self.named.void = True
        self._in_flight = None
        self._proposal = None
        self.prefix.drop_pending()
        self.deadlines.stop()

    def _hand_back(self, kind: Action, reason: str | None, now: float) -> None:
        """No drafter may propose any more; the router is asked for one (decisions 79, 81, 82)."""
        self.state = State.WAITING
        self.named.void = True
        self._period = Period(ordered=False)
        self.deadlines.handed_back(now)
        self._say(kind, reason)

    def _say(self, kind: Action, reason: str | None) -> None:
        self._events.say(kind, self.prefix.at, seq=self.named.seq, reason=reason)

    def _refuse_if_ended(self) -> None:
        if self.closed or self._ending is not None:
            why = f": {self.reason}" if self.reason else ""
            raise SessionClosed(f"the session has ended{why}", state=self.session_state())

    def _refuse_if_stopped(self) -> None:
        if self.stopped is not None:
            raise StaleEpoch(f"this verifier no longer serves the session: {self.stopped}", state=self.session_state())
