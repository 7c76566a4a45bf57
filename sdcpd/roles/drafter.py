"""The drafter role: takes assignments, and drafts for each session in a task of its own (draft 6.1, 6.2).

A session's life here:
1. `assign` judges an assignment, fetches what it refers to, and hands it to the session's machine
   (protocol/draft_session.py). A first one starts the session's task.
2. The task brings the draft source to the committed prefix, takes a draft from it, and sends the proposal (drafted.py).
   While it is out, the next one may be drafted ahead (ahead.py).
3. What comes back goes to the machine, which says: next round, send the same again, or stop. Between repetitions the
   task waits, longer each time.
4. A later assignment meets the machine, not the task. The task's call or wait is cut short when the machine forgot the
   proposal that is out (a new epoch), or when the router takes the session back; there is never a second one.
5. At its end the task forgets the session. A session that still counts on this drafter is named in the status as
   declined, and the routers hear of it at once (decision 102).

How drafts are made is behind drafting.py: a lookup takes microseconds and is called where it stands, a model runs in a
loop of its own.
"""

from collections import OrderedDict
from functools import partial
from typing import TypeVar, assert_never

import structlog
import trio
from msgspec import UNSET, Struct, UnsetType

from sdcpd.cache.refs import parse_reference, require_scope
from sdcpd.drafting.length import LengthChooser, VerifyTime
from sdcpd.protocol.draft_rows import one_hot
from sdcpd.protocol.draft_session import DraftSession, Identity, check_identity, is_behind
from sdcpd.protocol.draft_steps import Assigned, Ignored, Proceed, Resend, Settled, Step, Stop, StopReason
from sdcpd.protocol.encoding import decode_tokens
from sdcpd.protocol.messages import Assignment, Proposal, Status, Verdict
from sdcpd.protocol.problems import BadContract, IllFormed, Overloaded, StaleEpoch
from sdcpd.protocol.terms import InstanceRole, Rule, session_path_id
from sdcpd.roles.drafted import Drafted, DraftedSession
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.drafting import Drafting
from sdcpd.roles.ports import Content, Peer, Ports, Refusal, Unreachable
from sdcpd.roles.reporter import Reporter
from sdcpd.roles.row_shelf import RowShelf
from sdcpd.roles.waits import within

log = structlog.get_logger(__name__)

K = TypeVar("K")
V = TypeVar("V")

ENDED_LIMIT = 4096
"""Ended sessions whose (epoch, seq) is remembered, to know a late assignment from a new one (44); 100 octets each."""
DECLINED_LIMIT = 64
"""Session ids named as declined in a status; 17 octets each, so that a proposal with its status stays small."""
VERIFIERS_LIMIT = 64
"""Verifiers whose speed is remembered; beyond that the one not used for longest is measured anew."""
ACCEPT_WEIGHT = 0.1
"""Weight of a round in `accept_milli` (decision 48)."""
JITTER = 0.1

_LABELLED = frozenset(
    {
        "sdcp-stale-epoch",
        "sdcp-stale-base",
        "sdcp-q-unavailable",
        "sdcp-bad-contract",
        "sdcp-limit",
        "sdcp-session-closed",
        "sdcp-bad-proposal",
        "sdcp-not-assigned",
    }
)


class DrafterSnapshot(Struct, frozen=True):
    """What `sdcpctl` shows of a drafter."""

    instance: str
    load: int
    accept_milli: int | None
    declined: tuple[str, ...]
    sessions: tuple[DraftedSession, ...]


class Drafter:
    """Drafts for the sessions assigned to it. `caches` are the base URIs from which it will read objects."""

    def __init__(
        self,
        settings: DrafterSettings,
        ports: Ports,
        *,
        identity: Identity,
        drafting: Drafting,
        routers: tuple[str, ...],
        caches: tuple[str, ...],
        boot: bytes,
        cache: str | None = None,
    ) -> None:
        """`cache` is where this drafter writes its rows: its own node's, else the first of `caches`."""
        self._settings = settings
        self._ports = ports
        self._identity = identity
        self._drafting = drafting
        self._caches = caches
        self._boot = boot
        self._sessions: dict[bytes, Drafted] = {}
        self._ended: OrderedDict[bytes, tuple[int, int | UnsetType]] = OrderedDict()
        self._declined: OrderedDict[bytes, None] = OrderedDict()
        self._verify_times: OrderedDict[str, VerifyTime] = OrderedDict()
        self._shelf = RowShelf(settings, ports, cache=cache or caches[0], vocabulary=identity.vocabulary)
        self._chooser = LengthChooser(settings.length)
        self._accept: float | None = None
        self._jitter = ports.randomness.stream("retry jitter")
        self._reporter = Reporter(routers, self.status, ports)
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._drafting.run)
                await nursery.start(self._reporter.run)
                log.info("drafter ready", instance=self._identity.instance)
                task_status.started()
        finally:
            self._nursery = None

    @property
    def ready(self) -> bool:
        """A router has taken this drafter's status (decision 97)."""
        return self._reporter.accepted

    # What routers ask

    async def assign(self, peer: Peer, assignment: Assignment) -> None:
        """POST assignments. Returning means 204; drafting begins afterwards (decision 44)."""
        check_identity(assignment, self._identity)
        if self._settled_already(assignment):
            return
        prompt, committed_tokens = await self._contents(assignment)
        # Others may have come in while this one was fetched.
        if self._settled_already(assignment):
            return
        held = self._sessions.get(assignment.session)
        now = self._ports.clock.now()
        if held is not None:
            changed = held.machine.assign(assignment, committed_tokens, now=now)
            if changed in (Assigned.ADOPTED, Assigned.RESTARTED):
                held.failures = 0
                held.interrupt()
        else:
            machine = DraftSession(
                assignment,
                prompt,
                committed_tokens,
                vocabulary=self._identity.vocabulary,
                now=now,
                silence_limit_s=self._settings.silence_limit_s,
            )
            changed = Assigned.ADOPTED
            ports = self._ports
            held = Drafted(machine, self._settings, self._drafting, ports.clock, ports.meters)
            self._sessions[assignment.session] = held
            assert self._nursery is not None
            self._nursery.start_soon(self._draft_session, held)
        self._declined.pop(assignment.session, None)
        held.log().info("assigned", router=peer.uri, verifier=assignment.verifier, change=changed.value)

    async def drop_assignment(self, peer: Peer, session: bytes) -> None:
        """DELETE assignments/{session} (decision 45). Repeating it is no error."""
        held = self._sessions.get(session)
        if held is None or held.machine.stopped is not None:
            return
        self._report_stop(held, held.machine.give_up(StopReason.DROPPED, f"by {peer.uri}"))
        held.interrupt()

    def _settled_already(self, assignment: Assignment) -> bool:
        """Is nothing to be done, since we hold or held this very assignment? Raises StaleEpoch or Overloaded."""
        held = self._sessions.get(assignment.session)
        ended = self._ended.get(assignment.session)
        order = held.machine.order if held is not None else ended
        if order is not None and is_behind(assignment, order):
            raise StaleEpoch("a later assignment of this session was accepted")
        if held is not None:
            return held.machine.is_repeat(assignment)
        if ended is not None and assignment.seq is not UNSET and ended == (assignment.epoch, assignment.seq):
            return True
        if self._nursery is None:
            raise Overloaded("not running", retry_after_s=1)
        if len(self._sessions) >= self._settings.max_sessions:
            raise Overloaded(f"all {self._settings.max_sessions} sessions are taken", retry_after_s=1)
        return False

    async def _contents(self, assignment: Assignment) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The prompt, and the committed tokens if the assignment brings any."""
        prompt = assignment.prompt
        if isinstance(prompt, str):
            prompt = await self._fetch(assignment, prompt, "prompt")
        committed: tuple[int, ...] | None = None
        if assignment.committed_tokens is not UNSET:
            committed = await self._fetch(assignment, assignment.committed_tokens, "committed_tokens")
        if len(prompt) + len(committed or ()) >= self._settings.session_tokens:
            raise BadContract(f"sessions are held up to {self._settings.session_tokens} tokens here")
        return prompt, committed

    async def _fetch(self, assignment: Assignment, ref: str, what: str) -> tuple[int, ...]:
        """Read an array of tokens (decision 25), only from caches we were told of and within the scope (21)."""
        reference = parse_reference(ref)
        if reference.base not in self._caches:
            raise IllFormed(f"{what}: not on a cache that this drafter may use")
        scope = assignment.contract.scope
        require_scope(reference, None if scope is UNSET else scope)
        content = await within(self._settings.fetch_timeout_s, partial(self._ports.objects.fetch, ref))
        if not isinstance(content, Content):
            raise Overloaded(f"{what}: the referenced object could not be read", retry_after_s=1)
        return decode_tokens(content.octets)

    # One session's task

    async def _draft_session(self, held: Drafted) -> None:
        machine = held.machine
        while machine.stopped is None:
            await held.feed()
            await self._round(held)
        held.end()
        del self._sessions[machine.session]
        _remember(self._ended, machine.session, machine.order, ENDED_LIMIT)

    async def _round(self, held: Drafted) -> None:
        machine = held.machine
        if machine.stopped is not None:
            return
        sent = machine.outstanding or await self._draft(held)
        if sent is not None:
            await self._exchange(held, sent)

    async def _draft(self, held: Drafted) -> Proposal | None:
        """Draft the next round; None when the session had to be given up, or the machine moved meanwhile."""
        machine = held.machine
        verify, publishes = self._verify_time(machine.verifier), self._publishes(machine)
        draft = await held.draft(self._chooser, verify, publishes=publishes)
        if draft is None:
            return None
        if not draft.tokens:
            self._report_stop(held, machine.give_up(StopReason.EXHAUSTED, "nothing to propose, or no room for it"))
            return None
        tokens = draft.tokens[: machine.limit]  # made ahead, it may be longer than what is allowed now
        if machine.contract.rule != Rule.SPECULATIVE_SAMPLING:
            return machine.propose(tokens, self.status())
        held.out.rows = tuple(map(one_hot, draft.tokens)) if draft.rows is None else draft.rows
        assert len(held.out.rows) == len(draft.tokens), "a source that samples shows a row for each token"
        q_rows = self._shelf.name(machine)
        return machine.propose(tokens, self.status(), rows=held.out.rows, q_rows=q_rows)

    def _publishes(self, machine: DraftSession) -> bool:
        """Whether the rows of a proposal will have to be written before it is sent."""
        return machine.contract.rule == Rule.SPECULATIVE_SAMPLING and self._shelf.fetches(machine.verifier)

    async def _exchange(self, held: Drafted, sent: Proposal) -> None:
        """Send the proposal, hand its outcome to the machine, and wait where the machine's answer asks for it."""
        machine, clock = held.machine, self._ports.clock
        outcome: Verdict | Refusal | Unreachable | None = None
        self._ports.meters.count("drafter_proposals_total")
        verify, publishes = self._verify_time(machine.verifier), self._publishes(machine)
        held.draft_ahead(sent, self._chooser, verify, publishes=publishes)
        began = clock.now()
        written = await self._shelf.before(held.out, machine.verifier, sent)
        if written:
            self._chooser.published(written, clock.now() - began)
        began = clock.now()
        limit_s = min(self._settings.verdict_timeout_s, max(0.0, machine.next_deadline() - began))
        with trio.CancelScope() as held.interruptible:
            outcome = await within(limit_s, partial(self._ports.peers.propose, machine.verifier, sent))
        held.interruptible = None
        if outcome is None:
            return  # an assignment or the end of this one overtook the proposal
        ended = clock.now()
        step = self._take(held, outcome)
        if not isinstance(step, Resend):
            held.decided()
        assert self._nursery is not None
        await self._shelf.after(held.out, machine.verifier, step, self._nursery)
        first_try = held.failures == 0
        wait_s = self._wait_s(held, step)
        settled = step.settled if isinstance(step, Proceed | Stop) else None
        if settled is not None:
            self._learn(held, settled, ended - began if first_try else None)
        if isinstance(step, Stop):
            self._report_stop(held, step)
        elif wait_s > 0.0:
            with trio.CancelScope() as held.interruptible:
                await clock.sleep_until(min(clock.now() + wait_s, machine.next_deadline()))
            held.interruptible = None
        silent = machine.expire(clock.now())
        if silent is not None:
            self._report_stop(held, silent)

    def _take(self, held: Drafted, outcome: Verdict | Refusal | Unreachable) -> Step:
        """The outcome through the machine; whatever is no verdict is counted."""
        machine = held.machine
        match outcome:
            case Verdict():
                return machine.verdict(outcome, now=self._ports.clock.now())
            case Refusal():
                self._ports.meters.count("drafter_refusals_total", suffix=_label(outcome))
                held.log().info("proposal refused", status=outcome.status, suffix=outcome.suffix)
                return machine.refused(
                    outcome.status,
                    outcome.suffix,
                    state=outcome.state,
                    retry_after_s=outcome.retry_after_s,
                    m_cap=outcome.m_cap,
                )
            case Unreachable():
                self._ports.meters.count("drafter_refusals_total", suffix="unreachable")
                if held.failures == 0:
                    held.log().warning("verifier unreachable", verifier=machine.verifier, reason=outcome.reason)
                return machine.unanswered()
            case _:
                assert_never(outcome)

    def _wait_s(self, held: Drafted, step: Step) -> float:
        """How long to wait before the step is carried out, counting what failed."""
        match step:
            case Proceed(after_verdict=True):
                held.failures = 0
                return 0.0
            case Resend(retry_after_s=0):
                return 0.0  # shortened: a new body, not a repetition
            case Resend(retry_after_s=int(named_s)):
                held.failures += 1
                return max(named_s, self._backoff_s(held.failures))
            case Resend():
                held.failures += 1
                return self._backoff_s(held.failures)
            case Proceed():
                held.failures += 1
                return self._backoff_s(held.failures - 1)
            case Stop() | Ignored():
                return 0.0
            case _:
                assert_never(step)

    def _backoff_s(self, failures: int) -> float:
        if failures < 1:
            return 0.0
        wait_s = min(self._settings.backoff_last_s, self._settings.backoff_first_s * 2.0 ** min(failures - 1, 32))
        return wait_s * (1.0 + JITTER * (2.0 * self._jitter.uniform() - 1.0))

    def _learn(self, held: Drafted, settled: Settled, round_s: float | None) -> None:
        """One of our proposals has its verdict. `round_s` is None unless it was sent once."""
        held.settled(settled, self._verify_time(held.machine.verifier), round_s)
        share = settled.accepted / settled.proposed
        self._accept = share if self._accept is None else self._accept + ACCEPT_WEIGHT * (share - self._accept)

    def _verify_time(self, verifier: str) -> VerifyTime:
        known = self._verify_times.pop(verifier, None) or VerifyTime(self._settings.length)
        _remember(self._verify_times, verifier, known, VERIFIERS_LIMIT)
        return known

    def _report_stop(self, held: Drafted, stop: Stop) -> None:
        bound = held.log()
        fields = {"reason": stop.reason.value, "detail": stop.detail, "verifier": held.machine.verifier}
        if stop.reason is StopReason.BAD_VERDICT:
            bound.error("dropped a session whose verifier does not keep to the protocol", **fields)
        elif stop.reason.declined:
            bound.warning("gave a session up", **fields)
        else:
            bound.info("stopped drafting", **fields)
        if stop.reason.declined:
            _remember(self._declined, held.machine.session, None, DECLINED_LIMIT)
            self._reporter.nudge()

    # What is told of it

    def status(self) -> Status:
        """The drafter's own status (decisions 10, 47, 48, 102), also inside each proposal."""
        declined = tuple(self._declined)
        return Status(
            instance=self._identity.instance,
            role=InstanceRole.DRAFTER,
            load=self._load(),
            queue=len(self._sessions),
            accept_milli=UNSET if self._accept is None else int(1000 * self._accept),
            ttl_ms=self._settings.ttl_ms,
            model=self._identity.model,
            tokenizer=self._identity.tokenizer,
            vocabulary=self._identity.vocabulary,
            context_tokens=self._settings.session_tokens,
            boot=self._boot,
            declined=declined or UNSET,
            method=self._identity.method,
        )

    def _load(self) -> int:
        return 100 * len(self._sessions) // self._settings.max_sessions

    def snapshot(self) -> DrafterSnapshot:
        return DrafterSnapshot(
            instance=self._identity.instance,
            load=self._load(),
            accept_milli=None if self._accept is None else int(1000 * self._accept),
            declined=tuple(map(session_path_id, self._declined)),
            sessions=tuple(held.describe() for held in self._sessions.values()),
        )


def _remember(book: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    """Newest last; the oldest goes when there are too many."""
    book[key] = value
    book.move_to_end(key)
    while len(book) > limit:
        book.popitem(last=False)


def _label(refusal: Refusal) -> str:
    """A suffix we know, else the class of the status: what a peer writes never makes a new time series."""
    return refusal.suffix if refusal.suffix in _LABELLED else f"{refusal.status // 100}xx"
