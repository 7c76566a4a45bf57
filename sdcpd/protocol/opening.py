"""Opening one session at one verifier, for the first time or to resume it (draft 6.1, 6.9; decisions 29, 30, 36).

An open that got no answer may have been carried out. So it is repeated with the identical body, and only to the same
verifier: at another one the session is opened at another, fenced epoch (30), which is `Unopened`'s meaning. At the
first epoch the verifier's word is final where it refuses, as it speaks of the request; at a later one it may be that
verifier alone (full, out of step with the log), and another is asked if there is one.
"""

from msgspec import UNSET, Struct

from sdcpd.protocol.failover import Resumable
from sdcpd.protocol.messages import SessionOpen, SessionState
from sdcpd.protocol.placement_values import (
    FIRST_EPOCH,
    Ending,
    Lost,
    Open,
    Outcome,
    Patience,
    Plan,
    Refused,
    passing,
    retry_after_s,
    words,
)
from sdcpd.protocol.retry_lane import MainLane
from sdcpd.protocol.terms import Action


class Unopened(Struct, frozen=True):
    """Not here: the session is to be taken to another verifier, at a new epoch."""


class Opening:
    """The session-open of one epoch, on the placement's main lane. `lost`: some try may yet be carried out."""

    def __init__(self, plan: Plan, lane: MainLane, patience: Patience) -> None:
        self.lost = False
        self._plan = plan
        self._lane = lane
        self._patience = patience
        self._epoch = FIRST_EPOCH

    def first(self, now: float) -> None:
        """Open it where it was placed first (6.1)."""
        self._send(self._plan.verifier, FIRST_EPOCH, None, now)

    def resume(self, at: Resumable, now: float) -> None:
        """Open it where it goes on (6.9)."""
        self._send(at.verifier, at.epoch, at, now)

    def _send(self, verifier: str, epoch: int, resumed: Resumable | None, now: float) -> None:
        self.lost, self._epoch = False, epoch
        message = SessionOpen(
            session=self._plan.session,
            epoch=epoch,
            contract=self._plan.contract,
            prompt=self._plan.prompt,
            commit_log=self._plan.commit_log,
            resume=UNSET if resumed is None else resumed.resume,
            router=self._plan.router,
        )
        self._lane.send(Open(verifier=verifier, message=message), now)

    def outcome(self, outcome: Outcome, now: float, *, elsewhere: bool) -> SessionState | Unopened | Ending | None:
        """How a try ended. `elsewhere`: another verifier could take the session. None: it is being repeated."""
        if isinstance(outcome, SessionState):
            self._lane.clear()
            return outcome
        self.lost = self.lost or isinstance(outcome, Lost)
        tried_s = now - self._lane.since
        patient = passing(outcome) and tried_s < self._patience.open_give_up_s
        full = isinstance(outcome, Refused) and self._epoch > FIRST_EPOCH
        if patient and not (full and elsewhere):
            self._lane.wait(now, retry_after_s(outcome))
            return None
        self._lane.clear()
        if self._may_go_on(outcome, elsewhere):
            return Unopened()
        if not passing(outcome):
            gone = isinstance(outcome, Refused) and outcome.status == 404
            return Ending(finish=Action.FAIL, reason="verifier_refused", detail=words(outcome), gone=gone)
        code = "verifier_unreachable" if isinstance(outcome, Lost) else "verifier_overloaded"
        return Ending(finish=Action.FAIL, reason=code, detail=f"gave up after {tried_s:.1f} s: {words(outcome)}")

    def _may_go_on(self, outcome: Outcome, elsewhere: bool) -> bool:
        if passing(outcome):
            return elsewhere or self._epoch > FIRST_EPOCH
        out_of_step = isinstance(outcome, Refused) and outcome.status in (404, 409)
        return self._epoch > FIRST_EPOCH and (elsewhere or out_of_step)
