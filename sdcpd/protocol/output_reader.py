"""Reading one session's output to its end (draft 6.7; decisions 36 to 39).

One long poll is under way from the moment the session is open to its last page. The end may be learned twice, from
the verifier's event and from the final page; the page decides, because it alone brings the last tokens. Only where the
verifier no longer serves the output does the event count, and only if every token up to it was read.
"""

from typing import Final

from msgspec import UnsetType

from sdcpd.protocol.messages import Event, Output
from sdcpd.protocol.output_copy import OutputCopy
from sdcpd.protocol.placement_values import (
    Ending,
    Lost,
    Outcome,
    Plan,
    Read,
    Refused,
    passing,
    retry_after_s,
    words,
)
from sdcpd.protocol.retry_lane import Lane, Outbox
from sdcpd.protocol.terms import Action

IDLE_POLL_S: Final = 0.1
"""Least time between polls that bring nothing, should a verifier answer them at once."""


class OutputReader:
    """Polls, retries, and the copy they fill. `announced` is the verifier's finish or fail event, once it came."""

    def __init__(self, plan: Plan, epoch: int, outbox: Outbox) -> None:
        self.copy = OutputCopy(plan.session, epoch, plan.contract, plan.prompt)
        self.lane: Lane[Read] = Lane(outbox)
        self.announced: Event | None = None
        self._plan = plan
        self._patience = outbox.patience

    def begin(self, now: float) -> None:
        """Start polling, if that has not happened yet."""
        if self.lane.action is None:
            self.lane.send(self._next(), now)

    def again(self, now: float) -> None:
        """Send a new poll, whatever became of the one before."""
        self.lane.send(self._next(), now)

    def outcome(self, outcome: Outcome, now: float) -> Ending | None:
        """Take a page or a failure to get one; returns how the session ended, once that is known."""
        if isinstance(outcome, Output):
            held = len(self.copy)
            fault = self.copy.take(outcome, self._plan.vocabulary)
            if fault is not None and fault.breach:
                return Ending(finish=Action.FAIL, reason="verifier_breach", detail=fault.value)
            if fault is None:
                return self._taken(held, now)
            outcome = Lost(fault.value)
        if not passing(outcome):
            return self._refused(outcome)
        if now - self.lane.since >= self._patience.read_give_up_s:
            return Ending(finish=Action.FAIL, reason="output_unreadable", detail=words(outcome))
        self.lane.wait(now, retry_after_s(outcome))
        return None

    def _taken(self, held: int, now: float) -> Ending | None:
        final = self.copy.final
        if final is None:
            # `since` is when this poll was sent, or first sent: pages that bring tokens are followed at once.
            at = now if len(self.copy) > held else max(now, self.lane.since + IDLE_POLL_S)
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

    def _refused(self, outcome: Outcome) -> Ending:
        """The verifier no longer serves the output, for good."""
        told = self.announced
        if told is not None and told.committed == len(self.copy) and told.digest == self.copy.digest:
            reason = None if isinstance(told.reason, UnsetType) else told.reason
            return Ending(finish=told.kind, reason=reason, gone=True)
        status = outcome.status if isinstance(outcome, Refused) else 0
        reason = {404: "verifier_lost", 410: "output_gone"}.get(status, "output_unreadable")
        return Ending(finish=Action.FAIL, reason=reason, detail=words(outcome), gone=status in (404, 410))

    def _next(self) -> Read:
        return Read(
            verifier=self._plan.verifier,
            session=self._plan.session,
            start=len(self.copy),
            wait_s=self._patience.poll_s,
        )
