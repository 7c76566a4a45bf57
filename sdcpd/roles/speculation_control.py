"""Speculation under load at one verifier: tells the budget what happens, and the sessions what it says (74, 82, 110).

    passes, rounds -> engine/speculation_budget.py -> a ceiling of m_cap in each verdict
                                                   -> "unprofitable" and "profitable" events of kind 3

The router alone names drafters. So a session whose speculation does not pay goes on drafting until the router has
ordered it to decode alone, and the other way round. `speculation = "on"` leaves all to the drafters, "off" wants none.
"""

from collections.abc import Hashable, Iterable

import structlog
from msgspec import UNSET

from sdcpd.engine.cost_curve import CostCurve
from sdcpd.engine.scheduler import Mix
from sdcpd.engine.speculation_budget import Mode, Passed, SpeculationBudget, Standing
from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Settled
from sdcpd.protocol.terms import M_MAX_LIMIT, State, session_path_id
from sdcpd.roles.ports import Meters
from sdcpd.roles.verifier_settings import VerifierSettings

log = structlog.get_logger(__name__)


class SpeculationControl:
    """Of all sessions of a verifier. There is a budget from `measured` on, where it is automatic."""

    def __init__(self, settings: VerifierSettings, meters: Meters) -> None:
        self._settings = settings
        self._meters = meters
        self._budget: SpeculationBudget | None = None
        self._last_ended: float | None = None

    def measured(self, curve: CostCurve) -> None:
        """What passes cost, as of the start."""
        if self._settings.speculation != "auto":
            return
        self._budget = SpeculationBudget(
            curve,
            ema_alpha=self._settings.ema_alpha,
            update_interval=self._settings.update_interval,
            down_hysteresis=self._settings.down_hysteresis,
            up_hysteresis=self._settings.up_hysteresis,
        )

    def ceiling(self, session: bytes) -> int:
        """What the load leaves of the session's m_cap (decision 74)."""
        ceiling = None if self._budget is None else self._budget.ceiling(session)
        return M_MAX_LIMIT if ceiling is None else ceiling

    def settled(self, session: bytes, settled: Settled) -> None:
        """A record of the session became durable."""
        record = settled.record
        if self._budget is None or not isinstance(record, CommitRecord):
            return
        if settled.proposed is None:
            self._budget.decoded_alone(session)
        else:
            assert record.ctl is not UNSET
            assert record.ctl.accepted is not UNSET
            self._budget.judged(session, record.ctl.accepted, settled.proposed)

    def passed(self, mix: Mix, started: float, ended: float, sessions: Iterable[Session]) -> None:
        """A pass is over; `sessions` are all that are open."""
        gap_s = 0.0 if self._last_ended is None else max(0.0, started - self._last_ended)
        self._last_ended = ended
        if self._budget is None or mix.prefills:
            return  # a pass with prompts says little of rows: most of theirs have no logits
        states = [session.state for session in sessions]
        drafting_open = states.count(State.DRAFTING)
        alone_open = states.count(State.SELF_DECODING)
        drafting = sum(len(ready.span.tokens) > 1 for ready in mix.rounds)
        alone = len(mix.rounds) - drafting
        self._budget.passed(
            Passed(
                rows=sum(len(ready.span.tokens) for ready in mix.rounds),
                seconds=ended - started,
                gap_s=gap_s,
                drafting=drafting,
                drafting_open=max(drafting, drafting_open),
                alone=alone,
                alone_open=max(alone, alone_open),
            )
        )

    def review(self, sessions: Iterable[Session]) -> list[bytes]:
        """Tell the sessions what pays, if it is time to; the ids of those that have an event now."""
        if self._settings.speculation == "off":
            return [session.id for session in sessions if self._advise(session, pays=False)]
        budget = self._budget
        if budget is None or not budget.due:
            return []
        open_ = {session.id: session for session in sessions}
        standing: dict[Hashable, Standing] = {key: _standing(session) for key, session in open_.items()}
        budget.review(standing)
        return [key for key, session in open_.items() if self._advise(session, pays=budget.pays(key))]

    def _advise(self, session: Session, *, pays: bool) -> bool:
        told = session.advise(pays=pays)
        if told:
            word = "profitable" if pays else "unprofitable"
            self._meters.count("speculation_advice_total", advice=word)
            log.info("speculation is " + word, session=session_path_id(session.id), round=session.prefix.at.round)
        return told


def _standing(session: Session) -> Standing:
    if session.state is State.DRAFTING:
        mode = Mode.DRAFTING
    elif session.state is State.SELF_DECODING and session.named.unprofitable:
        mode = Mode.ALONE
    else:
        mode = Mode.OTHER
    return Standing(mode, session.contract.m_max)
