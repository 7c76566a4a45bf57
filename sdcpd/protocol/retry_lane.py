"""Calls to be made, numbered, and their repeats with the identical body (decision 36)."""

from typing import Final, Generic, TypeVar

import msgspec

from sdcpd.protocol.placement_values import (
    AskState,
    Assign,
    Close,
    Drop,
    FailingOver,
    Moved,
    Name,
    Open,
    Patience,
    PlacementAction,
    Publish,
    Read,
    ReadLog,
    ReadRecord,
    SetPolicy,
    WriteLog,
    WriteRecord,
)

C = TypeVar("C", bound=PlacementAction)

LONGEST_RETRY_AFTER_S: Final = 10.0
"""A peer's Retry-After is believed up to this: no peer may park a session for as long as it likes."""

Step = PlacementAction | Moved | FailingOver


class Outbox:
    """What one machine wants done, in order, until it is taken; and the count of its calls."""

    def __init__(self, patience: Patience, jitter: float) -> None:
        assert 0 < jitter <= 1
        self.patience = patience
        self.jitter = jitter
        self.calls = 0
        self._steps: list[Step] = []

    def put(self, step: Step) -> None:
        self._steps.append(step)

    def take(self) -> tuple[Step, ...]:
        steps, self._steps = tuple(self._steps), []
        return steps


class Lane(Generic[C]):
    """At most one call of a kind, and its repeats.

    `action` is the call being tried, None when idle. It is either in flight (`due` None) or waits to be sent again at
    `due`. `tries` counts sends, `since` is when the first was sent.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.action: C | None = None
        self.due: float | None = None
        self.tries = 0
        self.since = 0.0

    @property
    def in_flight(self) -> bool:
        return self.action is not None and self.due is None

    def answers(self, call: int) -> bool:
        """Whether `call` is the try in flight. Anything else is the outcome of a call given up long ago."""
        return self.action is not None and self.due is None and self.action.call == call

    def send(self, action: C, now: float) -> None:
        """Make a new call; a predecessor is forgotten."""
        self.action, self.due, self.tries, self.since = action, now, 0, now
        self.repeat(now)

    def postpone(self, action: C, at: float) -> None:
        """Make a new call at `at`, or with the next `repeat` after it; a predecessor is forgotten."""
        self.action, self.due, self.tries, self.since = action, at, 0, at

    def wait(self, now: float, retry_after_s: float | None = None) -> None:
        """Send it again later: after a backoff that doubles, or after Retry-After where that is longer."""
        assert self.in_flight
        patience = self._outbox.patience
        backoff = min(patience.first_retry_s * 2 ** min(self.tries - 1, 20), patience.longest_retry_s)
        self.due = now + max(backoff * self._outbox.jitter, min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))

    def hurry(self, now: float) -> None:
        """If it is waiting, send it now."""
        if self.due is not None:
            self.due = now
            self.repeat(now)

    def repeat(self, now: float) -> None:
        """Send it if it is due."""
        if self.action is None or self.due is None or self.due > now:
            return
        self._outbox.calls += 1
        self.action = msgspec.structs.replace(self.action, call=self._outbox.calls)
        self.due = None
        self.tries += 1
        self._outbox.put(self.action)

    def clear(self) -> None:
        self.action = self.due = None


MainLane = Lane[WriteRecord | ReadRecord | Open | Name | Publish | Assign]
"""What a placement does one after the other."""

FailoverLane = Lane[ReadLog | WriteLog | Publish | ReadRecord | AskState]
"""What a failover does one after the other."""

AnyLane = (
    MainLane
    | FailoverLane
    | Lane[SetPolicy]
    | Lane[Publish]
    | Lane[Read]
    | Lane[Close]
    | Lane[Drop]
    | Lane[ReadLog | WriteLog]
)
