"""The verifier role: what it answers, and which sessions it hosts (draft 6.1, 6.3, 6.7).

Handlers wait; sessions work. A request task that goes away (client gone, handler cancelled) changes nothing about the
round it waited for: rounds belong to the session's keeper, keepers to this role's nursery.
"""

from collections import OrderedDict
from typing import TypeVar

import structlog
import trio
from msgspec import UNSET, Struct

from sdcpd.protocol.distributions import profile_of
from sdcpd.protocol.encoding import decode_tokens
from sdcpd.protocol.messages import Assignment, Output, Policy, Proposal, SessionOpen, SessionState, Status, Verdict
from sdcpd.protocol.problems import (
    BadContract,
    Conflict,
    IllFormed,
    Overloaded,
    Problem,
    SessionClosed,
    StaleEpoch,
    UnknownResource,
)
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Begin, Busy, Join, Replay
from sdcpd.protocol.takeover import Takeover, check_epoch
from sdcpd.protocol.terms import InstanceRole, Rule, session_path_id
from sdcpd.roles.hosted import Hosted
from sdcpd.roles.kv_room import KvRoom
from sdcpd.roles.load_meter import LoadMeter, measure_full_rows
from sdcpd.roles.outbox import Outbox
from sdcpd.roles.ports import Content, Engine, Peer, Ports
from sdcpd.roles.reporter import Reporter
from sdcpd.roles.resume import read_takeover
from sdcpd.roles.row_supply import AuditedDrafter, RowSupply
from sdcpd.roles.session_kv import SessionKv
from sdcpd.roles.verifier_settings import VerifierSettings
from sdcpd.roles.verify_loop import VerifyLoop
from sdcpd.roles.waits import within

log = structlog.get_logger(__name__)

RULES_SERVED = tuple(int(rule) for rule in Rule)
FORGOTTEN_IDS = 4096
"""Ids of ended sessions remembered only to answer 410 rather than 404; 16 octets each."""
FETCH_LIMIT_S = 10.0

T = TypeVar("T")


class HostedSession(Struct, frozen=True):
    """One session for `sdcpctl`: lengths and counts, never a token."""

    session: str
    epoch: int
    state: str
    round: int
    prompt_tokens: int
    committed_tokens: int
    max_new: int
    m_cap: int
    drafter: str | None
    low: int
    rounds: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    age_s: float
    reason: str | None


class VerifierSnapshot(Struct, frozen=True):
    """What `sdcpctl` shows of a verifier; `full_rows` is the row count at which its load is 100 percent."""

    instance: str
    load: int
    passes: int
    pages: int
    free_pages: int
    waiting_for_pages: int
    full_rows: int
    audits: tuple[AuditedDrafter, ...]
    sessions: tuple[HostedSession, ...]


class Verifier:
    """Hosts sessions over one engine.

    `instance` is the role's base URI; it reports to `routers` and uses the caches whose base URIs are `caches`.
    """

    def __init__(
        self,
        settings: VerifierSettings,
        ports: Ports,
        *,
        instance: str,
        routers: tuple[str, ...],
        caches: tuple[str, ...],
        boot: bytes,
    ) -> None:
        assert ports.engine is not None
        self._settings = settings
        self._ports = ports
        self._engine: Engine = ports.engine
        self._instance = instance
        self._caches = caches
        self._boot = boot
        self._open: OrderedDict[bytes, Hosted] = OrderedDict()
        self._ended: OrderedDict[bytes, Hosted] = OrderedDict()
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()
        self._waiters = 0
        self._supply = RowSupply(settings, ports, self._engine.info.vocabulary)
        self._draws = ports.randomness.stream("verifier draws")
        self._meter = LoadMeter(full_rows=1)
        self._room = KvRoom(self._open.values)
        self._loop = VerifyLoop(settings, ports, self._engine, self._meter, self._open.values, self.load, self._room)
        self._reporter = Reporter(routers, self.status, ports)
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._meter.full_rows = await measure_full_rows(self._engine, self._ports.clock)
        log.info("verifier ready", instance=self._instance, full_rows=self._meter.full_rows)
        info = self._engine.info
        if info.session_tokens < info.context_tokens:
            log.warning(
                "the KV pool is smaller than the model's context; give it more memory (engine.kv_cache_bytes)",
                session_tokens=info.session_tokens,
                model_context_tokens=info.context_tokens,
            )
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._loop.run)
            nursery.start_soon(self._forget_ended)
            await nursery.start(self._reporter.run)
            task_status.started()

    # Table 1 and decision 37

    async def open_session(self, peer: Peer, message: SessionOpen) -> tuple[SessionState, bool]:
        """POST sessions. The flag tells a new session from a repeated open (decision 29)."""
        if self._nursery is None:
            raise Overloaded("the verifier is not running yet", retry_after_s=1)
        known = self._open.get(message.session) or self._ended.get(message.session)
        if known is not None and message.epoch <= known.opened.epoch:
            _check_repeat(known, message)
            return await self._opened(known), False
        self._check_contract(message)
        prompt, taken = await self._prompt(message), None
        try:
            if message.resume is not UNSET:
                taken = await read_takeover(message, prompt, self._engine.info.vocabulary, self._ports.objects)
        except Problem:
            if not self._hosts(message.session, message.epoch):
                raise
        if self._hosts(message.session, message.epoch):  # another request opened it while this one was fetching
            return await self.open_session(peer, message)
        self._displace(message.session)
        hosted = self._admit(message, prompt, taken)
        self._nursery.start_soon(self._host, hosted)
        return await self._opened(hosted), True

    async def name_drafter(self, peer: Peer, session: bytes, message: Assignment) -> SessionState:
        """PUT sessions/{id}/drafter. Waits a little for an open round to settle (decision 43)."""
        _check_same_session(session, message.session)
        hosted = self._hosted(session)
        machine = self._machine(hosted)
        with trio.move_on_after(self._settings.assignment_wait_s):
            try:
                while isinstance(answer := machine.assign(message, self._ports.clock.now()), Busy):
                    await self._wait(hosted)
            finally:
                machine.assignment_given_up()
                self._loop.wake()  # self-decoding stood still for this assignment, and goes on if it was given up
            hosted.changes.notify()
            return answer
        raise Overloaded("a round is still open; come again", retry_after_s=1)

    async def propose(self, peer: Peer, message: Proposal) -> Verdict:
        """POST proposals (6.3)."""
        hosted = self._hosted(message.session)
        machine = self._machine(hosted)
        try:
            answer = machine.propose(peer.uri, message, self._ports.clock.now())
        except Problem as problem:
            self._ports.meters.count("proposals_refused_total", reason=problem.suffix or str(problem.status))
            hosted.changes.notify()  # a refusal may have ended the assignment
            raise
        match answer:
            case Replay(verdict=verdict):
                return verdict
            case Begin():
                hosted.begin(message, answer)
                hosted.changes.notify()
            case Join():
                pass
        attempt = hosted.judging.attempt
        assert attempt is not None
        while attempt.problem is None:
            decided = machine.awaited(message.round)
            if decided is not None:
                return decided
            await self._wait(hosted)
        raise attempt.problem

    async def read_output(self, peer: Peer, session: bytes, from_: int, wait_s: float) -> Output:
        """GET sessions/{id}/output?from=n: waits up to `wait_s` seconds for the first token (6.7, decision 38)."""
        hosted = self._hosted(session)
        machine = self._machine(hosted)
        with trio.move_on_after(wait_s):
            while (page := machine.output(from_)) is None:
                await self._wait(hosted)
            return page
        return Output(session=session, epoch=machine.epoch, from_=from_, tokens=(), final=False)

    async def set_policy(self, peer: Peer, session: bytes, message: Policy) -> SessionState:
        """POST sessions/{id}/policy (6.6)."""
        _check_same_session(session, message.session)
        state = self._machine(self._hosted(session)).policy(message)
        log.info("sampling profile set", session=session_path_id(session), from_round=message.from_round)
        return state

    async def session_state(self, peer: Peer, session: bytes) -> SessionState:
        """GET sessions/{id} (decision 37). A session that was lost here lives elsewhere, or nowhere (65)."""
        machine = self._machine(self._hosted(session))
        if machine.stopped is not None:
            raise StaleEpoch(f"this verifier no longer serves the session: {machine.stopped}")
        return machine.session_state()

    async def cancel_session(self, peer: Peer, session: bytes) -> None:
        """DELETE sessions/{id} (decision 37). Answers once the end is durable and the KV is free."""
        hosted = self._hosted(session)
        machine = hosted.machine  # also while the prompt is still being run: nobody waits for it any more
        if machine is None:
            raise Overloaded("the session is still being opened", retry_after_s=1)
        machine.cancel("cancelled")
        hosted.free_kv()  # at once, even while its last record is still on the way: nothing more will be scored
        hosted.changes.notify()
        with trio.move_on_after(self._settings.assignment_wait_s):
            while not machine.closed and machine.stopped is None:
                await self._wait(hosted)
            return
        raise Overloaded("the end is not durable yet; come again", retry_after_s=1)

    # For the reporter, the router's placement and sdcpctl

    @property
    def accepted(self) -> bool:
        """Some router has taken a status of ours that has not expired: the verifier is ready (decision 97)."""
        return self._reporter.accepted

    def load(self) -> int:
        """Percent (decision 47). While a session waits for pages, all count as held."""
        info = self._engine.info
        held = info.pages if self._room.waiting else info.pages - self._engine.free_pages
        return self._meter.percent(self._ports.clock.now(), held, info.pages)

    @property
    def waiting_for_pages(self) -> int:
        return self._room.waiting

    def moves(self, limit_s: float) -> bool:
        """Whether the verify loop gets on: no pass has been running for longer than `limit_s`."""
        began = self._loop.pass_began_at
        return began is None or self._ports.clock.now() - began < limit_s

    def status(self) -> Status:
        info = self._engine.info
        return Status(
            instance=self._instance,
            role=int(InstanceRole.VERIFIER),
            load=self.load(),
            queue=len(self._open),
            ttl_ms=self._settings.ttl_ms,
            model=info.model,
            tokenizer=info.tokenizer,
            vocabulary=info.vocabulary,
            context_tokens=info.session_tokens,
            boot=self._boot,
            rules=RULES_SERVED,
            kv_milli=1000 * (info.pages - self._engine.free_pages) // info.pages,
        )

    def snapshot(self) -> VerifierSnapshot:
        now = self._ports.clock.now()
        return VerifierSnapshot(
            instance=self._instance,
            load=self.load(),
            passes=self._loop.passes,
            pages=self._engine.info.pages,
            free_pages=self._engine.free_pages,
            waiting_for_pages=self._room.waiting,
            full_rows=self._meter.full_rows,
            audits=self._supply.audits(),
            sessions=tuple(_describe(hosted, now) for hosted in (*self._open.values(), *self._ended.values())),
        )

    # Inside

    async def _host(self, hosted: Hosted) -> None:
        await hosted.keep(self._session_ended)

    def _session_ended(self, hosted: Hosted) -> None:
        """The session is over or lost here, and its KV is free: keep its output for a while (decision 39)."""
        if self._open.get(hosted.id) is not hosted:
            return  # displaced by a higher epoch
        del self._open[hosted.id]
        if hosted.machine is None:
            return  # never opened: nothing to remember, the router may try again
        self._ended[hosted.id] = hosted
        while len(self._ended) > self._settings.ended_sessions:
            self._forget(next(iter(self._ended)))

    def _hosts(self, session: bytes, epoch: int) -> bool:
        """Whether the session is here at this epoch or a higher one, open or ended."""
        known = self._open.get(session) or self._ended.get(session)
        return known is not None and known.opened.epoch >= epoch

    def _displace(self, session: bytes) -> None:
        """A higher epoch was found true: what is here of a lower one is over (decision 29)."""
        old = self._open.pop(session, None) or self._ended.pop(session, None)
        if old is not None:
            old.displace()
        self._forgotten.pop(session, None)

    def _forget(self, session: bytes) -> None:
        del self._ended[session]
        self._forgotten[session] = None
        while len(self._forgotten) > FORGOTTEN_IDS:
            self._forgotten.popitem(last=False)

    async def _forget_ended(self) -> None:
        clock, retention_s = self._ports.clock, self._settings.ended_retention_s
        while True:
            await clock.sleep_until(clock.now() + min(retention_s, 10.0))
            overdue = clock.now() - retention_s
            for session, hosted in list(self._ended.items()):
                if hosted.ended_at is not None and hosted.ended_at <= overdue:
                    self._forget(session)

    def _hosted(self, session: bytes) -> Hosted:
        hosted = self._open.get(session) or self._ended.get(session)
        if hosted is not None:
            return hosted
        if session in self._forgotten:
            raise SessionClosed("the session ended long ago; its output is in its commit log")
        raise UnknownResource("no such session at this verifier")

    def _machine(self, hosted: Hosted) -> Session:
        if hosted.machine is None or not (hosted.open or hosted.machine.closed or hosted.machine.stopped):
            raise Overloaded("the session is still being opened", retry_after_s=1)
        return hosted.machine

    async def _opened(self, hosted: Hosted) -> SessionState:
        """Wait until the open is decided."""
        while True:
            if hosted.refused is not None:
                raise hosted.refused
            machine = hosted.machine
            if machine is not None and machine.stopped is not None:
                raise StaleEpoch(f"this verifier no longer serves the session: {machine.stopped}")
            if machine is not None and (hosted.open or machine.closed):
                return machine.session_state()
            await self._wait(hosted)

    async def _wait(self, hosted: Hosted) -> None:
        if self._waiters >= self._settings.max_waiters:
            raise Overloaded("too many waiting requests at this verifier", retry_after_s=1)
        self._waiters += 1
        try:
            await hosted.changes.wait()
        finally:
            self._waiters -= 1

    def _check_contract(self, message: SessionOpen) -> None:
        """6.1: a target that is not ours MUST be refused; so is all that we do not serve (decisions 9, 12, 19)."""
        contract, info = message.contract, self._engine.info
        check_epoch(message)
        if contract.target != info.model:
            raise BadContract("target: not the digest of the model served here")
        if contract.tokenizer != info.tokenizer:
            raise BadContract("tokenizer: not the digest of the tokenizer served here")
        if contract.rule not in RULES_SERVED:
            raise BadContract(f"rule: {contract.rule} is not served here; this version serves {RULES_SERVED}")
        if contract.rule == Rule.REPLAYABLE_SAMPLING and profile_of(contract.sampling).seed is None:
            raise BadContract("sampling.seed: rule 65281 needs a seed in the contract")
        if not message.commit_log.startswith(self._caches):
            raise IllFormed("commit_log: not on a cache that this verifier may use")
        if message.resume is not UNSET and not message.resume.committed_tokens.startswith(self._caches):
            raise IllFormed("resume.committed_tokens: not on a cache that this verifier may use")

    async def _prompt(self, message: SessionOpen) -> tuple[int, ...]:
        """The prompt's tokens, checked against vocabulary and context before anything is made of them."""
        prompt = message.prompt
        if isinstance(prompt, str):
            prompt = await self._fetch_tokens(prompt)
        info = self._engine.info
        if not prompt:
            raise IllFormed("prompt: empty; the model needs at least one token to start from")
        if max(prompt) >= info.vocabulary:
            raise IllFormed(f"prompt: token {max(prompt)} is outside the vocabulary of {info.vocabulary}")
        if len(prompt) + message.contract.max_new > info.session_tokens:
            raise IllFormed(
                f"prompt: {len(prompt)} tokens and max_new {message.contract.max_new} exceed the "
                f"{info.session_tokens} tokens that a session may have here"
            )
        return prompt

    async def _fetch_tokens(self, ref: str) -> tuple[int, ...]:
        if not ref.startswith(self._caches):
            raise IllFormed("prompt: reference is not on a cache that this verifier may use")
        content = await within(FETCH_LIMIT_S, lambda: self._ports.objects.fetch(ref))
        if not isinstance(content, Content):
            raise Overloaded("prompt: the referenced object could not be read", retry_after_s=1)
        return decode_tokens(content.octets)

    def _admit(self, message: SessionOpen, prompt: tuple[int, ...], taken: Takeover | None) -> Hosted:
        """Take the session in, behind all others; it waits for pages if it must. 503 when too many do."""
        if len(self._open) >= self._settings.max_sessions:
            raise Overloaded(f"all {self._settings.max_sessions} sessions are taken", retry_after_s=1)
        hosted = Hosted(
            message,
            prompt,
            instance=self._instance,
            settings=self._settings,
            ports=self._ports,
            kv=SessionKv(self._engine),
            vocabulary=self._engine.info.vocabulary,
            outbox=Outbox(message.router if message.router is not UNSET else None, self._ports),
            supply=self._supply,
            draws=self._draws,
            load=self.load,
            on_work=self._loop.wake,
            taken=taken,
        )
        self._open[message.session] = hosted
        self._room.let_in()
        if not hosted.kv.reserved_tokens and self._room.waiting > self._settings.max_waiting_sessions:
            del self._open[message.session]
            hosted.kv.close()
            raise Overloaded("not enough free KV pages, and too many sessions wait for some", retry_after_s=1)
        return hosted


def _check_repeat(known: Hosted, message: SessionOpen) -> None:
    """A repeated open must be the same (decision 29)."""
    if message.epoch < known.opened.epoch:
        raise StaleEpoch(f"epoch {message.epoch} is below {known.opened.epoch}")
    if message.contract != known.opened.contract or message.prompt != known.opened.prompt:
        raise Conflict("the session is open with another contract or prompt")
    if message.resume != known.opened.resume or message.commit_log != known.opened.commit_log:
        raise Conflict("the session is open with another commit_log or resume")
    if message.logprobs != known.opened.logprobs:
        raise Conflict("the session is open with another sdcpd_logprobs")


def _check_same_session(in_path: bytes, in_body: bytes) -> None:
    if in_path != in_body:
        raise IllFormed("session: body and path name different sessions")


def _describe(hosted: Hosted, now: float) -> HostedSession:
    machine = hosted.machine
    contract = hosted.opened.contract
    stats = machine.counts.stats() if machine is not None else None
    return HostedSession(
        session=session_path_id(hosted.id),
        epoch=hosted.opened.epoch,
        state=machine.state.name.lower() if machine is not None else "opening",
        round=machine.prefix.at.round if machine is not None else 0,
        prompt_tokens=len(hosted.prompt),
        committed_tokens=machine.prefix.at.committed if machine is not None else 0,
        max_new=contract.max_new,
        m_cap=machine.m_cap if machine is not None else contract.m_max,
        drafter=machine.named.uri if machine is not None else None,
        low=machine.prefix.at.counters.c if machine is not None else 0,
        rounds=stats.rounds if stats is not None else 0,
        drafts=stats.drafts if stats is not None else 0,
        draft_tokens=stats.draft_tokens if stats is not None else 0,
        accepted_tokens=stats.accepted_tokens if stats is not None else 0,
        age_s=now - hosted.started_at,
        reason=(machine.stopped or machine.reason) if machine is not None else None,
    )
