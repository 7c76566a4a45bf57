"""One session in the router's care: makes the calls that its placement asks for, and hands its output to the client.

The task is dull on purpose: it makes each call under its deadline, tells the machine how it ended, and starts what the
machine wants next. Calls run beside each other (an output poll while a drafter is named); the machine ignores the
outcome of a call it has given up. Sessions belong to the role: a client that leaves only sets a mark here.
"""

from collections.abc import AsyncIterator, Callable
from typing import Final, assert_never

import structlog
import trio
from msgspec import UNSET
from msgspec.structs import replace

from sdcpd.protocol.messages import Event, Output, Sampling, SessionState
from sdcpd.protocol.placement import Placement
from sdcpd.protocol.placement_values import (
    FIRST_EPOCH,
    Accepted,
    AskState,
    Assign,
    Close,
    Drop,
    Ending,
    FailingOver,
    LogText,
    Lost,
    Moved,
    Name,
    Open,
    Outcome,
    PlacementAction,
    Publish,
    Read,
    ReadLog,
    ReadRecord,
    RecordText,
    Refused,
    SetPolicy,
    Stored,
    WriteLog,
    WriteRecord,
)
from sdcpd.protocol.retry_lane import Step
from sdcpd.protocol.terms import Action, session_path_id
from sdcpd.roles.adoption import Claimed
from sdcpd.roles.generation import Passage
from sdcpd.roles.ports import (
    Appended,
    AppendOutcome,
    BelowFence,
    Content,
    Done,
    Missing,
    Ports,
    ReadOutcome,
    Refusal,
    StoreRefused,
    TagMismatch,
    Unreachable,
)
from sdcpd.roles.router_settings import RouterSettings
from sdcpd.roles.traffic import Enrolled, Pace
from sdcpd.roles.waits import Changes, within

PAGE_TOKENS: Final = 4096
"""Tokens of one page for the client, as of a page from the verifier (decision 39)."""

Answer = SessionState | Output | Done | Refusal | AppendOutcome | ReadOutcome
"""All ends that a call of this task can have."""


class SessionTask:
    """Drives one Placement. `left` is set by the client's side; everything else happens in `run`.

    `readers` wait for output from outside. `attended`: a client holds the session, and its leaving ends it. One that
    was adopted from the directory belongs to whoever reads its output; `unread` tells whether nobody does.
    `enrolled`: the traffic class it is in.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        model: str,
        ports: Ports,
        settings: RouterSettings,
        adopted: Claimed | None = None,
        enrolled: Enrolled | None = None,
    ) -> None:
        self.placement = placement
        self.enrolled = enrolled
        if enrolled is not None:
            enrolled.steer(placement)
        self.pace = Pace()
        self.attended = adopted is None
        self._adopted = adopted
        self.readers = 0
        self._read_at = ports.clock.now()
        self.model = model
        self.started_at = ports.clock.now()
        self._ports = ports
        self._settings = settings
        self._drafter_switches = 0
        self._left = False
        self._stopped = False
        self._output = Changes()  # the copy grew, or the session ended
        self._wake = Changes()  # `run` has to look again
        self._sleeps_until: float | None = None
        self._nursery: trio.Nursery | None = None
        self._log = structlog.get_logger(__name__).bind(session=session_path_id(placement.plan.session))

    @property
    def session(self) -> bytes:
        return self.placement.plan.session

    @property
    def round(self) -> int:
        return self.placement.round

    async def run(self) -> None:
        """Returns when the session has ended and nothing of it is left to be closed."""
        clock, placement = self._ports.clock, self.placement
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if not self._left:
                    self._do(self._begin(clock.now()))
                while True:
                    if self._left:
                        self._do(placement.cancel(clock.now()))
                    self._do(placement.tick(clock.now()))
                    if placement.done:
                        break
                    self._sleeps_until = placement.next_deadline()
                    await self._wake.wait_until(clock, self._sleeps_until)
                nursery.cancel_scope.cancel()  # what is still under way no longer matters to anybody
        finally:
            self._nursery = None
            self._stopped = True  # if the role was stopped before the session ended, its reader must not wait for ever
            self._output.notify()

    def _begin(self, now: float) -> tuple[Step, ...]:
        if self._adopted is None:
            return self.placement.start(now)
        return self.placement.adopt(self._adopted.record.epoch, self._adopted.tag, now)

    def unread(self, now: float, limit_s: float) -> bool:
        """Whether nobody holds the session and nobody has read of it for `limit_s` (decision 106)."""
        return not self.attended and self.readers == 0 and now - self._read_at >= limit_s

    async def read(self, start: int, wait_s: float) -> Output:
        """The page from `start` on for somebody who reads from outside, waiting up to `wait_s` for it (6.7, 38)."""
        self.readers += 1
        try:
            with trio.move_on_after(wait_s):
                while (page := self.page(start)) is None:
                    await self.more()
                return page
            return Output(session=self.session, epoch=self.placement.epoch, from_=start, tokens=(), final=False)
        finally:
            self.readers -= 1
            self._read_at = self._ports.clock.now()

    def leave(self) -> None:
        """The client is gone: the session is to be cancelled, unless it has ended. Only marks it; never waits."""
        self._left = True
        self._wake.notify()

    def look(self) -> None:
        """The fleet may have changed, or the traffic class its mind."""
        if self.enrolled is not None:
            self.enrolled.steer(self.placement)
        if self._nursery is not None:
            self._do(self.placement.tick(self._ports.clock.now()))

    def command(self, give: Callable[[float], tuple[Step, ...]]) -> None:
        """An operator's command to the placement."""
        if self._nursery is not None:
            self._do(give(self._ports.clock.now()))

    def event(self, event: Event) -> None:
        """The verifier reported something. Raises what Placement.event raises."""
        if self._nursery is not None:
            self._do(self.placement.event(event, self._ports.clock.now()))

    def set_sampling(self, sampling: Sampling) -> None:
        """Another sampling profile for what is not decided yet."""
        if self._nursery is not None:
            self._do(self.placement.set_sampling(sampling, self._ports.clock.now()))

    def passage(self) -> Passage:
        """See generation.Generation."""
        return Passage(failovers=self.placement.epoch - FIRST_EPOCH, drafter_switches=self._drafter_switches)

    def pages(self) -> AsyncIterator[Output]:
        """See generation.Generation."""
        return Pages(self)

    def page(self, start: int) -> Output | None:
        """The client's page from output index `start` on, None while there is nothing to say."""
        placement = self.placement
        ending = placement.ending
        if ending is None and self._stopped:
            ending = Ending(finish=Action.FAIL, reason="router_stopped")
        output = placement.output
        there = output.complete if ending is None else len(output)  # what is not complete now will not be any more
        tokens = output.tokens(start, min(start + PAGE_TOKENS, there))
        final = ending is not None and start + len(tokens) == len(output)
        if not tokens and not final:
            return None
        page = Output(
            session=self.session,
            epoch=placement.epoch,
            from_=start,
            tokens=tokens,
            final=final,
            logprobs=output.entries(start, len(tokens)),
        )
        if not final or ending is None:
            return page
        return replace(
            page,
            finish=ending.finish,
            reason=UNSET if ending.reason is None else ending.reason,
            stats=UNSET if ending.stats is None else ending.stats,
        )

    async def more(self) -> None:
        """Return when the output has grown or the session has ended."""
        await self._output.wait()

    # Inside

    def _do(self, steps: tuple[Step, ...]) -> None:
        """Start what the machine wants, tell whoever has to know what changed."""
        assert self._nursery is not None
        for step in steps:
            if isinstance(step, Moved):
                self._drafter_switches += step.to is not None
                self._ports.meters.count("reassignments_total", reason=step.reason)
                self._log.info("session moved", reason=step.reason, to=step.to, round=self.round)
            elif isinstance(step, FailingOver):
                self._ports.meters.count("failover_total", kind=step.kind)
                self._log.warning(
                    "verifier given up", kind=step.kind, verifier=step.verifier, at_epoch=step.epoch, round=self.round
                )
            else:
                self._nursery.start_soon(self._call, step)
        if self.placement.ending is not None:
            self._output.notify()
        if self.placement.done or self.placement.next_deadline() != self._sleeps_until:
            self._wake.notify()

    async def _call(self, action: PlacementAction) -> None:
        outcome = _outcome(action, await self._made(action))
        if isinstance(outcome, Refused | Lost):
            self._log.info(
                "call failed",
                operation=type(action).__name__.lower(),
                outcome=repr(outcome.status if isinstance(outcome, Refused) else outcome.reason),
                round=self.round,
            )
        held = self.placement.output.complete
        steps = self.placement.outcome(action.call, outcome, self._ports.clock.now())
        if self.placement.output.complete > held:
            self.pace.grew(len(self.placement.output), self._ports.clock.now())
            self._output.notify()
        self._do(steps)

    async def _made(self, action: PlacementAction) -> Answer:
        """The call itself, under its deadline."""
        peers, settings = self._ports.peers, self._settings
        match action:
            case Open(verifier=verifier, message=opening):
                return await within(settings.open_deadline_s, lambda: peers.open_session(verifier, opening))
            case Name(verifier=verifier, message=naming):
                return await within(settings.name_deadline_s, lambda: peers.name_drafter(verifier, naming))
            case SetPolicy(verifier=verifier, message=policy):
                return await within(settings.name_deadline_s, lambda: peers.set_policy(verifier, policy))
            case Publish(ref=ref, octets=octets):
                ttl_ms, objects = settings.tokens_ttl_ms, self._ports.objects
                return await within(settings.publish_deadline_s, lambda: objects.publish(ref, octets, ttl_ms=ttl_ms))
            case Assign(message=message):
                return await within(settings.assign_deadline_s, lambda: peers.assign(message.drafter, message))
            case Drop(drafter=drafter, session=session):
                return await within(settings.close_deadline_s, lambda: peers.drop_assignment(drafter, session))
            case Read(verifier=verifier, session=session, start=start, wait_s=wait_s):
                limit_s = wait_s + settings.read_grace_s
                return await within(limit_s, lambda: peers.read_output(verifier, session, start, wait_s))
            case Close(verifier=verifier, session=session):
                return await within(settings.close_deadline_s, lambda: peers.cancel_session(verifier, session))
            case ReadLog(ref=ref):
                return await within(settings.log_deadline_s, lambda: self._ports.objects.read_log(ref))
            case WriteRecord(ref=ref, octets=octets, if_match=tag):
                return await within(
                    settings.publish_deadline_s, lambda: self._ports.objects.write_record(ref, octets, tag)
                )
            case ReadRecord(ref=ref):
                return await within(settings.log_deadline_s, lambda: self._ports.objects.read_record(ref))
            case AskState(verifier=verifier, session=session):
                return await within(settings.name_deadline_s, lambda: peers.session_state(verifier, session))
            case WriteLog():
                return await within(settings.log_deadline_s, lambda: self._write_log(action))
            case _:
                assert_never(action)

    async def _write_log(self, action: WriteLog) -> AppendOutcome:
        objects = self._ports.objects
        if action.if_match is None:
            return await objects.create_log(action.ref, action.epoch, action.record)
        return await objects.append(action.ref, action.record, epoch=action.epoch, if_match=action.if_match)


class Pages:
    """The pages of one session for its one reader, from the placement's copy: a slow reader costs no further memory.

    A plain iterator, not an async generator: a reader may drop it anywhere, and there is nothing to be closed.
    """

    def __init__(self, task: SessionTask) -> None:
        self._task = task
        self._sent = 0
        self._over = False

    def __aiter__(self) -> "Pages":
        return self

    async def __anext__(self) -> Output:
        if self._over:
            raise StopAsyncIteration
        while (page := self._task.page(self._sent)) is None:
            await self._task.more()
        self._sent += len(page.tokens)
        self._over = page.final
        return page


def _outcome(action: PlacementAction, answer: Answer) -> Outcome:
    """How a call ended, in the machine's words."""
    match answer:
        case SessionState() | Output():
            return answer
        case Appended(tag=tag) if isinstance(action, WriteRecord):
            return Stored(tag)
        case Done() | Appended():
            return Accepted()
        case Content(octets=octets, tag=tag) if isinstance(action, ReadRecord):
            return RecordText(octets, tag)
        case Content(octets=octets):
            return LogText(octets)
        case Missing():
            return Refused(status=404, detail="there is no such object")
        case TagMismatch() if isinstance(action, WriteLog | WriteRecord):
            return Refused(status=412, detail="it is not at this tag")
        case TagMismatch():
            return Accepted()  # the object is there already: written once, by this session, for this round
        case Refusal():
            return Refused(
                status=answer.status,
                suffix=answer.suffix,
                detail=answer.detail,
                retry_after_s=answer.retry_after_s,
                state=answer.state,
            )
        case BelowFence():
            return Refused(status=409, detail="below a fence")
        case StoreRefused(status=status, detail=detail):
            return Refused(status=status, detail=detail)
        case Unreachable(reason=reason):
            return Lost(reason)
        case _:
            assert_never(answer)
