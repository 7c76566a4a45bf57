"""Ending what a session holds elsewhere: DELETE at its verifier, DELETE of assignments (decisions 37, 45).

Both are retried within bounds, and both have a net below them: a verifier ends a session nobody carries on (82), a
drafter drops state it gets no verdict for (45). So giving up here leaks for a while, never for good.
"""

from collections.abc import Collection

from sdcpd.protocol.fleet import Fleet
from sdcpd.protocol.placement_values import Close, Drop, Lost, Outcome, Plan, Refused, passing, retry_after_s
from sdcpd.protocol.retry_lane import Lane, Outbox

CleanupLane = Lane[Close] | Lane[Drop]


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

    @property
    def closing(self) -> bool:
        return self._close.action is not None

    @property
    def done(self) -> bool:
        return not self.closing and not self._drops

    @property
    def dropping(self) -> Collection[str]:
        """Drafters with a DELETE under way: an assignment sent there now could be taken for the one to be dropped."""
        return self._drops.keys()

    def lanes(self) -> tuple[CleanupLane, ...]:
        return (self._close, *self._drops.values())

    def close(self, verifier: str, now: float, *, open_in_flight: bool, open_lost: bool) -> None:
        """End the session at its verifier. `open_lost`: some session-open got no answer and may yet be carried out."""
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
        else:
            self._close.clear()
