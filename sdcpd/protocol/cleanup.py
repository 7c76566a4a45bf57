"""Ending what a session holds elsewhere: DELETE at its verifier, DELETE of assignments (decisions 37, 45).

Both are retried within bounds, and both have a net below them: a verifier ends a session nobody carries on (82), a
drafter drops state it gets no verdict for (45). So giving up here leaks for a while, never for good.

A verifier that is asked to end a session writes so into its log. Where none does, as none lives or none knows the
session, the router writes it (last_record).
"""

from collections.abc import Collection

from sdcpd.protocol.fleet import Fleet
from sdcpd.protocol.last_record import LastRecord
from sdcpd.protocol.placement_values import (
    Accepted,
    Close,
    Drop,
    Lost,
    Outcome,
    Plan,
    ReadLog,
    Refused,
    WriteLog,
    passing,
    retry_after_s,
)
from sdcpd.protocol.retry_lane import Lane, Outbox

CleanupLane = Lane[Close] | Lane[Drop] | Lane[ReadLog | WriteLog]


class Cleanup:
    """The closing of one session.

    A DELETE can overtake the session-open it is meant for: while one may still be carried out, a 404 is not the end
    of it but a reason to ask again. While one is under way (a long prefill, say) asking goes on until it has ended,
    and `close_give_up_s` counts from there.
    """

    def __init__(self, plan: Plan, fleet: Fleet, outbox: Outbox) -> None:
        self._plan = plan
        self._fleet = fleet
        self._outbox = outbox
        self._close: Lane[Close] = Lane(outbox)
        self._drops: dict[str, Lane[Drop]] = {}
        self._open_in_flight = False
        self._open_lost = False
        self._last = LastRecord(plan, outbox)
        self._epoch = 0
        self._reason = ""

    @property
    def closing(self) -> bool:
        return self._close.action is not None

    @property
    def done(self) -> bool:
        return not self.closing and not self._drops and self._last.done

    @property
    def dropping(self) -> Collection[str]:
        """Drafters with a DELETE under way: an assignment sent there now could be taken for the one to be dropped."""
        return self._drops.keys()

    def lanes(self) -> tuple[CleanupLane, ...]:
        return (self._close, self._last.lane, *self._drops.values())

    def next_deadline(self) -> float | None:
        """When `tick` has something to do besides the lanes' repeats."""
        return self._last.next_deadline()

    def tick(self, now: float) -> None:
        self._last.tick(now)

    def close_log(self, epoch: int, reason: str, now: float) -> None:
        """The session ended at `epoch`, and there is no verifier that could be told."""
        self._last.begin(epoch, reason, now)

    def close(
        self, verifier: str, epoch: int, reason: str, now: float, *, open_in_flight: bool, open_lost: bool
    ) -> None:
        """End the session at its verifier. `open_lost`: some session-open got no answer and may yet be carried out."""
        self._epoch, self._reason = epoch, reason
        self._open_in_flight, self._open_lost = open_in_flight, open_lost
        self._close.send(Close(verifier=verifier, session=self._plan.session), now)

    def open_settled(self, outcome: Outcome, now: float) -> None:
        """The session-open that was under way when the closing began has ended: ask again at once."""
        self._open_in_flight = False
        self._open_lost = self._open_lost or isinstance(outcome, Lost)
        self._close.since = now
        self._close.hurry(now)

    def drop(self, drafter: str, now: float) -> None:
        """End the assignment at a drafter, unless it is dead or already asked."""
        if drafter in self._drops or not self._fleet.alive(drafter, now):
            return
        lane: Lane[Drop] = Lane(self._outbox)
        self._drops[drafter] = lane
        lane.send(Drop(drafter=drafter, session=self._plan.session), now)

    def outcome(self, call: int, outcome: Outcome, now: float) -> bool:
        """How a call of ours ended; False when it is none of ours."""
        if self._close.answers(call):
            self._close_outcome(outcome, now)
            return True
        if self._last.lane.answers(call):
            self._last.outcome(outcome, now)
            return True
        for drafter, lane in self._drops.items():
            if lane.answers(call):
                if passing(outcome) and lane.tries < self._outbox.patience.tries:
                    lane.wait(now, retry_after_s(outcome))
                else:
                    del self._drops[drafter]
                return True
        return False

    def _close_outcome(self, outcome: Outcome, now: float) -> None:
        unknown = isinstance(outcome, Refused) and outcome.status == 404
        again = passing(outcome) or (unknown and (self._open_in_flight or self._open_lost))
        patient = self._open_in_flight or now - self._close.since < self._outbox.patience.close_give_up_s
        if again and patient:
            self._close.wait(now, retry_after_s(outcome))
            return
        self._close.clear()
        if not isinstance(outcome, Accepted):
            self._last.begin(self._epoch, self._reason, now)
