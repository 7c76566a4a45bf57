"""The order of namings and events of one session: `seq`, and which events are repeats (decisions 49, 111).

`seq` = 2^32 x incarnation + counter. The incarnation tells lives of routers apart, the counter rises with every
naming, so a late assignment or event can be told from the current one. Events of a verifier that does not know `seq`
are told apart by (epoch, kind, committed).
"""

from collections import deque
from typing import Final

from msgspec import UNSET, UnsetType

from sdcpd.protocol.messages import Event, SessionState
from sdcpd.protocol.problems import Conflict, StaleEpoch
from sdcpd.protocol.terms import Action

EVENTS_REMEMBERED: Final = 64
"""Events without `seq` that are kept to tell repeats; a repeat follows its first within seconds."""

CATCH_UP_LIMIT: Final = 8
"""Times that a verifier may hold a higher `seq` than we gave out before that counts as a breach."""

_COUNTER_END: Final = 1 << 32


class NamingOrder:
    """`latest` is the highest `seq` given out; its counter is 0 before the first naming."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._counter = 0
        self._caught_up = 0
        self._seen: deque[tuple[int, Action, int]] = deque(maxlen=EVENTS_REMEMBERED)

    @property
    def latest(self) -> int:
        return self._incarnation * _COUNTER_END + self._counter

    def next(self) -> int:
        """Give out the `seq` of a new naming."""
        self._counter += 1
        assert self._counter < _COUNTER_END
        return self.latest

    def catch_up(self, state: SessionState | None) -> bool:
        """Whether the verifier holds a higher `seq` of this very incarnation; if so, count on from there."""
        seq = UNSET if state is None else state.seq
        if isinstance(seq, UnsetType) or seq // _COUNTER_END != self._incarnation or seq <= self.latest:
            return False
        self._caught_up += 1
        if self._caught_up > CATCH_UP_LIMIT or seq % _COUNTER_END > _COUNTER_END // 2:
            return False
        self._counter = seq % _COUNTER_END
        return True

    def overtaken(self, state: SessionState | None) -> bool:
        """Whether the verifier holds a `seq` of a later incarnation: another router has taken the session up (111)."""
        seq = UNSET if state is None else state.seq
        return not isinstance(seq, UnsetType) and seq // _COUNTER_END > self._incarnation

    def is_news(self, event: Event, epoch: int, state: SessionState | None) -> bool:
        """Whether to act on an event. The end of a session is news whatever `seq` it names.

        Raises StaleEpoch for another epoch (49) and Conflict for a `seq` never given out (111).
        """
        if event.epoch != epoch:
            raise StaleEpoch(f"the session is at epoch {epoch}, the event names {event.epoch}", state=state)
        ends = event.kind in (Action.FINISH, Action.FAIL)
        if not isinstance(event.seq, UnsetType):
            if event.seq > self.latest:
                raise Conflict(f"event names seq {event.seq}; the latest given out is {self.latest}", state=state)
            return ends or event.seq == self.latest
        key = (event.epoch, event.kind, event.committed)
        if key in self._seen:
            return ends
        self._seen.append(key)
        return True
