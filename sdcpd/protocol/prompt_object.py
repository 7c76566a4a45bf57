"""How the prompt of one session travels: within each message, or once as an object that messages refer to (draft 5.2).

Theory. Session-open, every naming, every assignment and the directory record carry the prompt. A long one is published
once instead, before the first of them (decision 25), and they carry its reference. An object is short-lived: while the
session lives its life is prolonged by writing the same content again, and the same write brings it back where a cache
that restarted has lost it. So nobody has to ask whether it is still there: it is written before each session-open, in
time before it would expire, and as soon as a peer could not make use of a message that refers to it.

A cache that will not take the object costs nothing while the prompt fits into the messages: from then on it goes within
them. One that does not fit waits for room when its session is being resumed, and ends a session that has not begun.
"""

from typing import Final

from sdcpd.protocol.encoding import encode_tokens
from sdcpd.protocol.placement_values import (
    FIRST_EPOCH,
    NO_ROOM,
    Accepted,
    Ending,
    Outcome,
    Patience,
    Plan,
    Publish,
    Refused,
    passing,
    retry_after_s,
    words,
)
from sdcpd.protocol.retry_lane import Lane, MainLane, Outbox
from sdcpd.protocol.terms import Action

INLINE_LIMIT_BYTES: Final = (4 << 20) - (256 << 10)
"""Of a prompt within a message. A session-open or assignment may have 4 MiB (decision 117); three full arrays of a
contract, the references and the digests beside the prompt take well under 256 KiB."""

DOUBT_S: Final = 5.0
"""An object that was written so short a time ago is not what a peer stumbles over."""

RETRY_SHARE: Final = 0.1
"""Of the time between two renewals: how long one that failed waits. There is life left for several."""


class PromptObject:
    """The prompt of one session. `lane` holds the renewals, beside the placement's main lane."""

    def __init__(self, plan: Plan, main: MainLane, patience: Patience, outbox: Outbox) -> None:
        self.lane: Lane[Publish] = Lane(outbox)
        self._plan = plan
        self._main = main
        self._patience = patience
        self._ref = plan.prompt_ref
        self._call = None if self._ref is None else Publish(ref=self._ref, octets=encode_tokens(plan.prompt))
        self._written_at: float | None = None

    @property
    def member(self) -> tuple[int, ...] | str:
        """What a message carries as `prompt`."""
        return self._plan.prompt if self._ref is None else self._ref

    def publish(self, now: float) -> bool:
        """Before a session-open: write it on the main lane. False: there is nothing to be written."""
        if self._call is None:
            return False
        self.lane.clear()
        self._main.send(self._call, now)
        return True

    def published(self, outcome: Outcome, epoch: int, now: float) -> bool | Ending:
        """How that ended. True: `member` may be sent; False: it is being repeated."""
        if isinstance(outcome, Accepted):
            self._written(now)
            return True
        assert self._call is not None
        inline = len(self._call.octets) <= INLINE_LIMIT_BYTES
        full = isinstance(outcome, Refused) and outcome.status == NO_ROOM
        if inline:
            again = not full and self._main.tries < self._patience.tries
        else:
            again = now - self._main.since < self._patience.open_give_up_s and not (full and epoch == FIRST_EPOCH)
        if passing(outcome) and again:
            self._main.wait(now, retry_after_s(outcome))
            return False
        self._main.clear()
        if inline:
            self._ref = self._call = None
            return True
        return Ending(finish=Action.FAIL, reason="prompt_unpublished", detail=words(outcome), gone=True)

    def renew(self, now: float) -> None:
        """Write it again now, unless that is under way."""
        if self._call is not None and not self.lane.in_flight:
            self.lane.send(self._call, now)

    def doubt(self, now: float) -> None:
        """A peer could not use a message that carries the prompt: perhaps its object is gone."""
        if self._written_at is not None and now - self._written_at >= DOUBT_S:
            self.renew(now)

    def renewed(self, outcome: Outcome, now: float) -> None:
        """How a renewal ended. One that failed harms nobody yet."""
        if isinstance(outcome, Accepted):
            self._written(now)
        else:
            self._next(now + RETRY_SHARE * self._plan.prompt_renew_s)

    def _written(self, now: float) -> None:
        self._written_at = now
        self._next(now + self._plan.prompt_renew_s)

    def _next(self, at: float) -> None:
        assert self._call is not None
        self.lane.postpone(self._call, at)
