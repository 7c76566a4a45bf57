"""Reading one session's output to its end (draft 6.7; decisions 36 to 39).

One long poll is under way from the moment the session is open to its last page. The end may be learned twice, from
the verifier's event and from the final page; the page decides, because it alone brings the last tokens. Only where the
verifier no longer serves the output does the event count, and only if every token up to it was read.
"""

from typing import Final

from msgspec import Struct, UnsetType

from sdcpd.protocol.messages import Event, Output
from sdcpd.protocol.output_copy import OutputCopy, PageFault
from sdcpd.protocol.placement_values import (
    Ending,
    Lost,
    Outcome,
    Plan,
    Read,
    Refused,
    passing,
    retry_after_s,
)
from sdcpd.protocol.retry_lane import Lane, Outbox
from sdcpd.protocol.terms import Action

IDLE_POLL_S: Final = 0.1
"""Least time between polls that bring nothing, should a verifier answer them at once."""


REPOLL_S: Final = 2.0
"""A poll for output that exists is answered at once; one that is not has been lost, and a new one is sent."""


class Unserved(Struct, frozen=True):
    """The verifier does not serve the output any more, though it may not be complete. `kind` labels a failover."""

    kind: str


class OutputReader:
    """Polls, retries, and the copy they fill. `announced` is the verifier's finish or fail event, once it came.

    While output is *awaited*, because the verifier stated more than was read, it may stand still only so long.
    """

    def __init__(self, plan: Plan, epoch: int, outbox: Outbox) -> None:
        self.copy = OutputCopy(plan.session, epoch, plan.contract, plan.prompt, plan.logprobs)
        self.lane: Lane[Read] = Lane(outbox)
        self.announced: Event | None = None
        self.verifier = plan.verifier
        self._plan = plan
        self._patience = outbox.patience
        self._wait_s = 0.0  # how long awaited output may stand still ...
        self._due: float | None = None  # ... and until when; None while nothing is awaited
        self._repoll_at = 0.0  # when a poll under way counts as lost, while output is awaited

    @property
    def awaiting(self) -> bool:
        return self._due is not None

    def next_deadlines(self) -> list[float]:
        """When `tick` has something to do."""
        return [] if self._due is None else [self._due, self._repoll_at]

    def await_more(self, wait_s: float, now: float) -> None:
        """Output is known to exist that was not read yet: it must come, and may stand still for `wait_s` at most."""
        self._wait_s, self._due = wait_s, now + wait_s
        self._repoll_at = now + REPOLL_S
        self.lane.hurry(now)

    def await_nothing(self) -> None:
        self._due = None

    def tick(self, now: float) -> bool:
        """Repeat a poll that was lost; True when awaited output has stood still for too long."""
        if self._due is not None and self._due <= now:
            return True
        if self._due is not None and self._repoll_at <= now:
            self._repoll_at = now + REPOLL_S
            self.again(now)
        return False

    def leave(self) -> None:
        """The verifier is no longer asked."""
        self.lane.clear()
        self.announced = self._due = None

    def move(self, verifier: str, epoch: int) -> None:
        """From now on the output is read at `verifier`, and only what it says at this epoch counts (6.7)."""
        self.leave()
        self.verifier = verifier
        self.copy.move(epoch)

    def begin(self, now: float) -> None:
        """Start polling, if that has not happened yet."""
        if self.lane.action is None:
            self.lane.send(self._next(), now)

    def again(self, now: float) -> None:
        """Send a new poll, whatever became of the one before."""
        self.lane.send(self._next(), now)

    def outcome(self, outcome: Outcome, now: float) -> Ending | Unserved | None:
        """Take a page or a failure to get one; returns how the session ended, or that it has to be read elsewhere."""
        if isinstance(outcome, Output):
            held = self.copy.complete
            fault = self.copy.take(outcome, self._plan.vocabulary)
            if fault is not None and fault.breach:
                return Ending(finish=Action.FAIL, reason="verifier_breach", detail=fault.value)
            if fault is None:
                return self._taken(held, now)
            if fault is PageFault.NEW_EPOCH:
                return Unserved("moved")
            outcome = Lost(fault.value)
        if not passing(outcome):
            return self._refused(outcome)
        if now - self.lane.since >= self._patience.read_give_up_s:
            return Unserved("unreadable")
        self.lane.wait(now, retry_after_s(outcome))
        return None

    def _taken(self, held: int, now: float) -> Ending | None:
        final = self.copy.final
        if self._due is not None and self.copy.complete > held:
            self._due = now + self._wait_s
            self._repoll_at = now + REPOLL_S
        if final is None:
            # `since` is when this poll was sent, or first sent: pages that bring tokens are followed at once.
            at = now if self.copy.complete > held else max(now, self.lane.since + IDLE_POLL_S)
            if at > now:
                self.lane.postpone(self._next(), at)
            else:
                self.lane.send(self._next(), now)
            return None
        finish = Action.FINISH if final.finish is Action.FINISH else Action.FAIL
        reason = None if isinstance(final.reason, UnsetType) else final.reason
        return Ending(
            finish=finish,
            reason="failed" if finish is Action.FAIL and not reason else reason,
            gone=True,
            stats=None if isinstance(final.stats, UnsetType) else final.stats,
        )

    def _refused(self, outcome: Outcome) -> Ending | Unserved:
        """The verifier no longer serves the output, for good."""
        told = self.announced
        if told is not None and told.committed == len(self.copy) and told.digest == self.copy.digest:
            reason = None if isinstance(told.reason, UnsetType) else told.reason
            return Ending(finish=told.kind, reason=reason, gone=True)
        return Unserved(unserved_kind(outcome))

    def _next(self) -> Read:
        return Read(
            verifier=self.verifier,
            session=self._plan.session,
            start=self.copy.complete,
            wait_s=self._patience.poll_s,
        )


def unserved_kind(outcome: Outcome) -> str:
    """Why a verifier does not serve a session any more, by its refusal of any call on it (65, 95)."""
    match outcome:
        case Refused(status=404):
            return "forgotten"
        case Refused(status=409, suffix="sdcp-stale-epoch"):
            return "fenced"
        case Refused(status=410):
            return "closed"
        case _:
            return "unreadable"
