"""The drafter's machine for one session (draft 6.2 and the end of 6.3; decisions 42 to 45, 52, 57 to 62, 102, 111).

Theory. The machine holds what the drafter last learned of the committed prefix and makes sure that at most one
proposal is out. Whoever drives it drafts, sends and waits, and hands each outcome in; the answer is a Step.

    READY        nothing is out; `propose` may be called
    OUTSTANDING  one proposal is out. Its outcome moves the machine, to READY, STOPPED, or back to OUTSTANDING when
                 the same round has to be sent again
    STOPPED      no more proposals, `stopped` says why. Only a later assignment moves it

Nothing is believed that does not verify: an assignment and each verdict must continue the digest chain (4.2). What the
drafter holds is never more than a copy; the verifier decides, so every doubt ends in giving the session up, which
costs speed only.

An assignment that arrives while a proposal is out is kept aside until the outcome is known, since the verifier may
have decided the round before it answered the router (43). A higher epoch is the exception: its verifier is another
one, the old proposal can no longer be committed, so it is forgotten at once and its outcome ignored.

The machine knows no tasks, clocks, sources or addresses; `now` is passed in. What is drafted ahead on the assumption of
full acceptance (59) is none of its business: it is proposed like any other draft, once this machine holds the digest
that it was made for.
"""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from sdcpd.protocol.digests import contract_digest, extend, prompt_digest
from sdcpd.protocol.draft_rows import DraftRow, inline
from sdcpd.protocol.draft_steps import Assigned, Ignored, Proceed, Resend, Settled, Step, Stop, StopReason
from sdcpd.protocol.messages import Assignment, Contract, Proposal, Sampling, SessionState, Status, Verdict
from sdcpd.protocol.problems import BadContract, Conflict, IllFormed, SessionClosed, StaleEpoch
from sdcpd.protocol.terms import TOKEN_LIMIT, Action, Rule

# A stop that an assignment received meanwhile overtakes. Not the ends of the session or of its epoch, nor a verifier
# whose word does not hold.
_OVERTAKEN = frozenset(
    {
        StopReason.SWITCHED,
        StopReason.SELF_DECODING,
        StopReason.NOT_ASSIGNED,
        StopReason.LOST,
        StopReason.REFUSED,
    }
)
_RULES = tuple(int(rule) for rule in Rule)
_STOPPING = {
    Action.SWITCH: StopReason.SWITCHED,
    Action.SELF_DECODE: StopReason.SELF_DECODING,
    Action.FINISH: StopReason.FINISHED,
    Action.FAIL: StopReason.FAILED,
}


class Identity(Struct, frozen=True):
    """What this drafter is, for judging assignments. `model` is a digest of weights, or of a method (decision 10);
    `method` is how it drafts, for routers that prefer one."""

    instance: str
    model: bytes
    tokenizer: bytes
    vocabulary: int
    method: str | UnsetType = UNSET


def check_identity(assignment: Assignment, identity: Identity) -> None:
    """Is the assignment one that this drafter can carry out? Raises IllFormed (400) or BadContract (422; 9, 10, 44)."""
    contract = assignment.contract
    if assignment.drafter != identity.instance:
        raise IllFormed("the assignment names another drafter")
    if contract.tokenizer != identity.tokenizer:
        raise BadContract("this drafter does not run the contract's tokenizer")
    if contract.drafters is not UNSET and identity.model not in contract.drafters:
        raise BadContract("the contract's drafters do not include this drafter's model")
    if contract.rule not in _RULES:
        raise BadContract(f"acceptance rule {contract.rule} is not known here; known are {_RULES}")


def _order(assignment: Assignment) -> tuple[int, int | UnsetType]:
    return assignment.epoch, assignment.seq


def is_behind(assignment: Assignment, held: tuple[int, int | UnsetType]) -> bool:
    """Is the assignment older than (epoch, seq)? Without sequence numbers the epoch alone tells (decision 111)."""
    epoch, seq = held
    if assignment.epoch != epoch:
        return assignment.epoch < epoch
    return assignment.seq is not UNSET and seq is not UNSET and assignment.seq < seq


class _Prefix(Struct, frozen=True):
    """A committed prefix as an assignment tells it, verified against the chain."""

    tokens: tuple[int, ...]
    digest: bytes
    round: int
    m_cap: int


class DraftSession:
    """One session as its drafter sees it.

    Invariants: the digest is d[committed] over prompt and tokens; `round` is the last round with a verdict; a
    proposal that is out extends exactly this prefix and carries round + 1.
    """

    def __init__(
        self,
        assignment: Assignment,
        prompt: tuple[int, ...],
        committed_tokens: tuple[int, ...] | None,
        *,
        vocabulary: int,
        now: float,
        silence_limit_s: float,
    ) -> None:
        """Take a first assignment. `committed_tokens` is the content of its reference, None without one.

        Raises IllFormed for tokens or numbers that cannot be, Conflict when prompt and tokens do not lead to the
        assignment's digest, SessionClosed when nothing is left to draft.
        """
        assert vocabulary <= TOKEN_LIMIT
        self.session = assignment.session
        self.prompt = prompt
        self._assignment = assignment
        self._vocabulary = vocabulary
        if not self._are_tokens(prompt):
            raise IllFormed("a prompt token is outside the vocabulary")  # decision 22
        self._start = prompt_digest(contract_digest(assignment.contract), prompt)
        self._silence_limit_s = silence_limit_s
        first = self._prefix(assignment, committed_tokens, held=())
        self._tokens = list(first.tokens)
        self._digest = first.digest
        self._round = first.round
        self._m_cap = first.m_cap
        self._outstanding: Proposal | None = None
        self._pending: _Prefix | None = None
        self._stopped: StopReason | None = None
        self._rewinds = 0
        self._heard_at = now

    # What is known

    @property
    def order(self) -> tuple[int, int | UnsetType]:
        """(epoch, seq) of the latest assignment accepted."""
        return _order(self._assignment)

    @property
    def epoch(self) -> int:
        return self._assignment.epoch

    @property
    def verifier(self) -> str:
        return self._assignment.verifier

    @property
    def contract(self) -> Contract:
        return self._assignment.contract

    @property
    def sampling(self) -> Sampling | UnsetType:
        """The profile in force, if it was updated (6.6): a hint for a source that samples; correctness needs none."""
        return self._assignment.sampling

    @property
    def round(self) -> int:
        """The last round with a verdict, or the one the assignment named."""
        return self._round

    @property
    def committed(self) -> int:
        return len(self._tokens)

    @property
    def digest(self) -> bytes:
        return self._digest

    @property
    def m_cap(self) -> int:
        return self._m_cap

    @property
    def outstanding(self) -> Proposal | None:
        return self._outstanding

    @property
    def stopped(self) -> StopReason | None:
        return self._stopped

    @property
    def rewinds(self) -> int:
        """Grows whenever tokens that were once held as committed are no longer; else tokens are only added."""
        return self._rewinds

    def tokens_from(self, index: int) -> tuple[int, ...]:
        """Committed output tokens at output index `index` and later."""
        return tuple(self._tokens[index:])

    @property
    def limit(self) -> int:
        """Largest M worth proposing: min(m_max, m_cap), and no token beyond max_new (decision 58), at least 1.

        One proposed token fewer than remain is enough, as the verifier adds one.
        """
        remaining = self.contract.max_new - len(self._tokens)
        return max(1, min(self.contract.m_max, self._m_cap, remaining - 1))

    def next_deadline(self) -> float:
        """When to call `expire`: the state is dropped after so long without a verdict (decision 45)."""
        return self._heard_at + self._silence_limit_s

    # Assignments

    def assign(self, assignment: Assignment, committed_tokens: tuple[int, ...] | None, *, now: float) -> Assigned:
        """Take a further assignment of the same session.

        Raises StaleEpoch when it is behind the one held (44, 111), Conflict when it contradicts what is held, and
        what the constructor raises. A problem changes nothing.
        """
        held = self._assignment
        assert assignment.session == self.session
        if is_behind(assignment, self.order):
            raise StaleEpoch("a later assignment of this session was accepted")
        if self.is_repeat(assignment):
            return Assigned.REPEATED
        if assignment.contract != held.contract:
            raise Conflict("the contract of a session never changes")
        prefix = self._prefix(assignment, committed_tokens, held=self._tokens)
        if assignment.epoch > held.epoch:
            self._outstanding = self._pending = None
            changed = Assigned.RESTARTED
        elif assignment.verifier != held.verifier:
            raise Conflict("another verifier in the same epoch")  # decision 30
        elif self._stopped is not None:
            changed = Assigned.ADOPTED
        elif not self._agrees(prefix):
            raise Conflict("another prefix than the verifier committed")
        elif prefix.round <= self._round:
            changed = Assigned.KEPT
        else:
            changed = Assigned.ADOPTED if self._outstanding is None else Assigned.PENDING
        self._assignment, self._heard_at = assignment, now
        if changed in (Assigned.ADOPTED, Assigned.RESTARTED):
            self._adopt(prefix)
        elif self._outstanding is not None and prefix.round >= self._round:
            self._pending = prefix  # an equal round too: it overtakes a 403 to what was sent before it
        return changed

    def is_repeat(self, assignment: Assignment) -> bool:
        """Is this the assignment we hold? By (epoch, seq); without sequence numbers by content."""
        if assignment.seq is not UNSET and self._assignment.seq is not UNSET:
            return _order(assignment) == self.order
        return assignment == self._assignment

    def _agrees(self, prefix: _Prefix) -> bool:
        """In one epoch committed output only grows, by at least one token a round."""
        ahead = len(prefix.tokens) - len(self._tokens)
        if (ahead > 0) != (prefix.round > self._round) or (ahead < 0) != (prefix.round < self._round):
            return False
        common = min(len(prefix.tokens), len(self._tokens))
        return list(prefix.tokens[:common]) == self._tokens[:common]

    def _adopt(self, prefix: _Prefix) -> None:
        assert self._outstanding is None
        if list(prefix.tokens[: len(self._tokens)]) != self._tokens:
            self._rewinds += 1
        self._tokens = list(prefix.tokens)
        self._digest, self._round, self._m_cap = prefix.digest, prefix.round, prefix.m_cap
        self._stopped = None

    def _prefix(
        self, assignment: Assignment, committed_tokens: tuple[int, ...] | None, *, held: Sequence[int]
    ) -> _Prefix:
        """The assignment's prefix, from its own tokens, or from ours where it brings none."""
        contract = assignment.contract
        if assignment.m_init < 1:
            raise IllFormed("m_init is 0")  # decision 42
        if committed_tokens is None:
            if len(held) < assignment.committed:
                raise Conflict("the assignment brings no committed tokens, and they are not held here")
            committed_tokens = tuple(held[: assignment.committed])
        if len(committed_tokens) != assignment.committed:
            raise Conflict(f"{len(committed_tokens)} committed tokens, but committed is {assignment.committed}")
        if not self._are_tokens(committed_tokens):
            raise IllFormed("a committed token is outside the vocabulary")
        digest = extend(self._start, committed_tokens)
        if digest != assignment.digest:
            raise Conflict("prompt and committed tokens do not lead to the assignment's digest")
        if len(committed_tokens) >= contract.max_new or (committed_tokens and committed_tokens[-1] in contract.stop):
            raise SessionClosed("the committed output is complete")
        m_cap = min(assignment.m_init, contract.m_max)  # decision 42
        return _Prefix(committed_tokens, digest, assignment.round, m_cap)

    def _are_tokens(self, tokens: Sequence[int]) -> bool:
        return all(token < self._vocabulary for token in tokens)

    # Proposals and their outcomes

    def propose(
        self,
        tokens: Sequence[int],
        status: Status,
        *,
        rows: Sequence[DraftRow] = (),
        q_rows: str | UnsetType = UNSET,
    ) -> Proposal:
        """The one proposal of the next round. Only when READY; 1 <= len(tokens) <= limit, each token < 2^32.

        Tokens after a stop token are cut off: they could be accepted, but never emitted. Under rule 2 `rows` has a row
        for each token, and `q_rows` names the object that holds or would hold them; they also go inline where they are
        short (decision 101).
        """
        assert self._stopped is None, "stopped: no more proposals"
        assert self._outstanding is None, "6.2: not more than one outstanding proposal per session"
        assert 1 <= len(tokens) <= self.limit
        tokens = _up_to_stop(tokens, self.contract.stop)
        short = None if q_rows is UNSET else inline(rows[: len(tokens)])
        self._outstanding = Proposal(
            session=self.session,
            epoch=self.epoch,
            round=self._round + 1,
            drafter=self._assignment.drafter,
            base=len(self._tokens),
            base_digest=self._digest,
            tokens=tokens,
            q_rows=q_rows,
            q=UNSET if short is None else short,
            status=status,
        )
        return self._outstanding

    def verdict(self, verdict: Verdict, *, now: float) -> Step:
        """The verifier answered the proposal that is out."""
        sent = self._outstanding
        if sent is None:
            return Ignored()
        fault = self._fault(sent, verdict)
        if fault is not None:
            return self._end(StopReason.BAD_VERDICT, fault)
        settled = _settled(sent, verdict)
        self._heard_at = now
        self._outstanding = None
        self._tokens.extend(verdict.emitted)
        self._digest = verdict.digest
        self._round = verdict.round
        reason = _STOPPING.get(verdict.action)
        if reason is not None:
            return self._end(reason, f"action {verdict.action.name.lower()}", settled, after_verdict=True)
        self._m_cap = min(verdict.m_cap, self.contract.m_max)
        pending, self._pending = self._pending, None
        if pending is not None and pending.round > self._round:
            self._adopt(pending)
        return Proceed(settled=settled, after_verdict=True)

    def refused(
        self,
        status: int,
        suffix: str | None,
        *,
        state: SessionState | None,
        retry_after_s: int | None,
        m_cap: int | None,
    ) -> Step:
        """The verifier answered with a problem (Table 2, decision 36)."""
        sent = self._outstanding
        if sent is None:
            return Ignored()
        match status, suffix:
            case 409, "sdcp-stale-base":
                return self._stale_base(sent, state, retry_after_s)
            case 409, "sdcp-q-unavailable" if sent.q_rows is not UNSET:
                return Resend(sent, retry_after_s or None, publish=True)
            case 409, "sdcp-stale-epoch":
                return self._end(StopReason.STALE_EPOCH, "the session has another epoch")
            case 422, "sdcp-limit":
                return self._shorten(sent, m_cap)
            case 403, _:
                return self._end(StopReason.NOT_ASSIGNED, "403")
            case 404, _:
                return self._end(StopReason.UNKNOWN_SESSION, "404")
            case 410, _:
                return self._end(StopReason.SESSION_CLOSED, "410")
            case _ if status >= 500:
                return Resend(sent, retry_after_s or None)
            case _:
                return self._end(StopReason.REFUSED, f"{status} {suffix or 'without a type'}")

    def unanswered(self) -> Step:
        """No answer came. The proposal may have arrived: the same octets again are answered like the first (6.9)."""
        return Ignored() if self._outstanding is None else Resend(self._outstanding)

    def expire(self, now: float) -> Stop | None:
        """Give the session up when nothing was heard for too long."""
        if self._stopped is not None or now < self.next_deadline():
            return None
        return self._stop(StopReason.SILENT, f"no verdict for {self._silence_limit_s:g} s")

    def give_up(self, reason: StopReason, detail: str) -> Stop:
        """Stop for a reason of our own: DROPPED or EXHAUSTED."""
        assert reason in (StopReason.DROPPED, StopReason.EXHAUSTED)
        return self._stop(reason, detail)

    def _end(
        self, reason: StopReason, detail: str, settled: Settled | None = None, *, after_verdict: bool = False
    ) -> Proceed | Stop:
        """Stop, unless an assignment received meanwhile says otherwise."""
        pending = self._pending
        if pending is None or reason not in _OVERTAKEN or pending.round < self._round:
            return self._stop(reason, detail, settled)
        self._outstanding = self._pending = None
        self._adopt(pending)
        return Proceed(settled=settled, after_verdict=after_verdict)

    def _stop(self, reason: StopReason, detail: str, settled: Settled | None = None) -> Stop:
        self._outstanding = self._pending = None
        self._stopped = reason
        return Stop(reason, detail, settled)

    def _fault(self, sent: Proposal, verdict: Verdict) -> str | None:
        """What is wrong with a verdict, None if it follows from the proposal (6.3) and the chain (4.2)."""
        contract = self.contract
        emitted = verdict.emitted
        if (verdict.session, verdict.epoch, verdict.round) != (sent.session, sent.epoch, sent.round):
            return "it is for another session, epoch or round"
        if verdict.committed != sent.base + len(emitted) or verdict.committed > contract.max_new:
            return f"committed {verdict.committed} from base {sent.base} and {len(emitted)} tokens"
        if verdict.accepted > contract.m_max or len(emitted) > verdict.accepted + 1:
            return f"{len(emitted)} tokens emitted with {verdict.accepted} accepted"
        if not self._are_tokens(emitted) or verdict.digest != extend(sent.base_digest, emitted):
            return "its digest does not continue the chain"
        if verdict.action in _STOPPING:
            return None
        if not emitted or verdict.m_cap < 1:
            return f"it goes on with {len(emitted)} tokens emitted and m_cap {verdict.m_cap}"
        if verdict.committed == contract.max_new or emitted[-1] in contract.stop:
            return "it goes on after the end of the output"
        return None

    def _stale_base(self, sent: Proposal, state: SessionState | None, retry_after_s: int | None) -> Step:
        """409 with the session-state: go on from there if what we hold leads there (6.3 step 4; decision 61).

        A drafter may not read output (decision 33), so a state ahead of what we hold is out of reach.
        """
        if state is None or state.session != self.session:
            return self._end(StopReason.LOST, "stale base without a session-state")
        if state.epoch != self.epoch:
            return self._end(StopReason.STALE_EPOCH, f"the session is in epoch {state.epoch}")
        n = state.committed
        if n > len(self._tokens):
            return self._end(StopReason.LOST, f"the verifier is {n - len(self._tokens)} tokens ahead")
        if extend(self._start, self._tokens[:n]) != state.digest:
            return self._end(StopReason.LOST, "the verifier holds another prefix")
        if n == len(self._tokens) and state.round + 1 == sent.round:
            # We agree on everything, so another body of this round is being verified: its verdict is ours to read.
            return Resend(sent, retry_after_s or None)
        self._outstanding = None
        if n < len(self._tokens):
            self._rewinds += 1
            del self._tokens[n:]
        self._digest, self._round = state.digest, state.round
        pending, self._pending = self._pending, None
        if pending is not None and pending.round > self._round:
            self._adopt(pending)
        return Proceed()

    def _shorten(self, sent: Proposal, m_cap: int | None) -> Step:
        """422 sdcp-limit: the same round with fewer tokens (36, 57); without a usable cap one, which always fits."""
        if len(sent.tokens) == 1:
            return self._end(StopReason.REFUSED, "a limit below one token")
        self._m_cap = m_cap if m_cap is not None and 1 <= m_cap < len(sent.tokens) else 1
        q = sent.q if sent.q is UNSET else sent.q[: self._m_cap]
        self._outstanding = replace(sent, tokens=sent.tokens[: self._m_cap], q=q)
        return Resend(self._outstanding, 0)


def _up_to_stop(tokens: Sequence[int], stop: tuple[int, ...]) -> tuple[int, ...]:
    for index, token in enumerate(tokens):
        if token in stop:
            return tuple(tokens[: index + 1])
    return tuple(tokens)


def _settled(sent: Proposal, verdict: Verdict) -> Settled | None:
    """What the verdict says of our tokens, or None: the verdict of a round is returned whatever a retry holds (61)."""
    a = verdict.accepted
    kept = min(a, len(verdict.emitted))
    ours = a <= len(sent.tokens) and verdict.emitted[:kept] == sent.tokens[:kept]
    return Settled(proposed=len(sent.tokens), accepted=a) if ours else None
