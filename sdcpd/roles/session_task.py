"""One session in the router's care: makes the calls that its placement asks for, and hands its output to the client.

The task is dull on purpose: it makes each call under its deadline, tells the machine how it ended, and starts what the
machine wants next. Calls run beside each other (an output poll while a drafter is named); the machine ignores the
outcome of a call it has given up. Sessions belong to the role: a client that leaves only sets a mark here.
"""

from collections.abc import AsyncIterator
from typing import Final, assert_never

import structlog
import trio
from msgspec import UNSET
from msgspec.structs import replace

from sdcpd.protocol.messages import Event, Output, Sampling, SessionState
from sdcpd.protocol.placement import Placement
from sdcpd.protocol.placement_values import (
    Accepted,
    Assign,
    Close,
    Drop,
    Ending,
    Lost,
    Moved,
    Name,
    Open,
    Outcome,
    PlacementAction,
    Publish,
    Read,
    Refused,
    SetPolicy,
)
from sdcpd.protocol.retry_lane import Step
from sdcpd.protocol.terms import Action, session_path_id
from sdcpd.roles.ports import (
    Appended,
    BelowFence,
    Done,
    Ports,
    Refusal,
    StoreRefused,
    TagMismatch,
    Unreachable,
)
from sdcpd.roles.router_settings import RouterSettings
from sdcpd.roles.waits import Changes, within

PAGE_TOKENS: Final = 4096
"""Tokens of one page for the client, as of a page from the verifier (decision 39)."""

Answer = (
    SessionState | Output | Done | Refusal | Unreachable | Appended | TagMismatch | BelowFence | StoreRefused
)  # all ends that a call of this task can have


class SessionTask:
    """Drives one Placement. `left` is set by the client's side; everything else happens in `run`."""

    def __init__(self, placement: Placement, *, model: str, ports: Ports, settings: RouterSettings) -> None:
        self.placement = placement
        self.model = model
        self.started_at = ports.clock.now()
        self._ports = ports
        self._settings = settings
        self._left = False
        self._stopped = False
        self._output = Changes()  # the copy grew, or the session ended
        self._wake = Changes()  # `run` has to look again
        self._sleeps_until: float | None = None
        self._nursery: trio.Nursery | None = None
        self._log = structlog.get_logger(__name__).bind(
            session=session_path_id(placement.plan.session), epoch=placement.epoch
        )

    @property
    def session(self) -> bytes:
        return self.placement.plan.session

    async def run(self) -> None:
        """Returns when the session has ended and nothing of it is left to be closed."""
        clock, placement = self._ports.clock, self.placement
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if not self._left:
                    self._do(placement.start(clock.now()))
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

    def leave(self) -> None:
        """The client is gone: the session is to be cancelled, unless it has ended. Only marks it; never waits."""
        self._left = True
        self._wake.notify()

    def look(self) -> None:
        """The fleet may have changed."""
        if self._nursery is not None:
            self._do(self.placement.tick(self._ports.clock.now()))

    def event(self, event: Event) -> None:
        """The verifier reported something. Raises what Placement.event raises."""
        if self._nursery is not None:
            self._do(self.placement.event(event, self._ports.clock.now()))

    def set_sampling(self, sampling: Sampling) -> None:
        """Another sampling profile for what is not decided yet."""
        if self._nursery is not None:
            self._do(self.placement.set_sampling(sampling, self._ports.clock.now()))

    def pages(self) -> AsyncIterator[Output]:
        """See generation.Generation."""
        return Pages(self)

    def page(self, start: int) -> Output | None:
        """The client's page from output index `start` on, None while there is nothing to say."""
        placement = self.placement
        ending = placement.ending
        if ending is None and self._stopped:
            ending = Ending(finish=Action.FAIL, reason="router_stopped")
        tokens = placement.output.tokens(start, start + PAGE_TOKENS)
        final = ending is not None and start + len(tokens) == len(placement.output)
        if not tokens and not final:
            return None
        page = Output(session=self.session, epoch=placement.epoch, from_=start, tokens=tokens, final=final)
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
                self._ports.meters.count("reassignments_total", reason=step.reason)
                self._log.info("session moved", reason=step.reason, to=step.to, round=self.placement.round)
            else:
                self._nursery.start_soon(self._call, step)
        if self.placement.ending is not None:
            self._output.notify()
        if self.placement.done or self.placement.next_deadline() != self._sleeps_until:
            self._wake.notify()

    async def _call(self, action: PlacementAction) -> None:
        outcome = _outcome(await self._made(action))
        if isinstance(outcome, Refused | Lost):
            self._log.info(
                "call failed",
                operation=type(action).__name__.lower(),
                outcome=repr(outcome.status if isinstance(outcome, Refused) else outcome.reason),
                round=self.placement.round,
            )
        held = len(self.placement.output)
        steps = self.placement.outcome(action.call, outcome, self._ports.clock.now())
        if len(self.placement.output) > held:
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
            case _:
                assert_never(action)


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


def _outcome(answer: Answer) -> Outcome:
    """How a call ended, in the machine's words."""
    match answer:
        case SessionState() | Output():
            return answer
        case Done() | Appended():
            return Accepted()
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
