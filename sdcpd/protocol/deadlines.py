"""When a session at its verifier has waited long enough (decision 82).

Two waits, never both: for a proposal while a drafter is named, and for a drafter while none is. Neither runs while a
round or an append is open; the session asks only when it is settled. Nor does either run while the session's KV is not
there, be it that pages are waited for or that a long context is computed: then it is not others who are late.
"""

from sdcpd.protocol.session_values import SessionLimits
from sdcpd.protocol.terms import State


class Deadlines:
    """The running waits of one session, in seconds of the caller's clock."""

    def __init__(self, limits: SessionLimits, now: float) -> None:
        self._limits = limits
        self.ever_assigned = False  # in this epoch: without it a WAITING session is the router's to move
        self._proposal_due: float | None = None
        self._waiting_since = now
        self._repeat_due = now + limits.switch_repeat_s
        self._set_at = now  # when a wait began last
        self._held_at: float | None = None

    def hold(self, now: float) -> None:
        """The KV is not there: no wait runs until `go_on`."""
        if self._held_at is None:
            self._held_at = now

    def go_on(self, now: float) -> bool:
        """The KV is there, and each wait goes on where it was. Whether they had been held."""
        if self._held_at is None:
            return False
        lost_s = now - max(self._held_at, self._set_at)
        self._held_at = None
        self._waiting_since += lost_s
        self._repeat_due += lost_s
        if self._proposal_due is not None:
            self._proposal_due += lost_s
        return True

    def assigned(self, now: float) -> None:
        """A drafter was named: its first proposal may take longer, since it must reach the prefix first."""
        self.ever_assigned = True
        self._set_at = now
        self._proposal_due = now + self._limits.first_proposal_deadline_s

    def proposed(self) -> None:
        """A proposal arrived: nothing is waited for until its verdict."""
        self._proposal_due = None

    def verdict_sent(self, now: float) -> None:
        self._set_at = now
        self._proposal_due = now + self._limits.proposal_deadline_s

    def handed_back(self, now: float) -> None:
        """No drafter is named any more."""
        self._proposal_due = None
        self._waiting_since = self._set_at = now
        self._repeat_due = now + self._limits.switch_repeat_s

    def repeated(self, now: float) -> None:
        self._repeat_due = now + self._limits.switch_repeat_s

    def stop(self) -> None:
        self._proposal_due = None

    def waited_too_long(self, now: float) -> bool:
        return now >= self._waiting_since + self._limits.waiting_limit_s

    def next(self, state: State) -> float | None:
        """The next moment at which something is due in `state`."""
        if self._held_at is not None:
            return None
        if state is State.DRAFTING:
            return self._proposal_due
        if state is State.WAITING:
            return min(self._repeat_due, self._waiting_since + self._limits.waiting_limit_s)
        return None
