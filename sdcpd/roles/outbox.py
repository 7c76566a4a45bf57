"""Delivers one session's events to its router: in order, at least once, with backoff (decision 49)."""

from collections import deque
from collections.abc import Callable
from functools import partial

import structlog

from sdcpd.protocol.messages import Event
from sdcpd.protocol.problems import StaleEpoch
from sdcpd.protocol.terms import Action, session_path_id
from sdcpd.roles.ports import Done, Ports, Refusal, Unreachable
from sdcpd.roles.waits import Changes, within

log = structlog.get_logger(__name__)

EVENTS_LIMIT = 64
"""Undelivered events of one session. When full the oldest goes: the later ones say what is true now."""
CALL_LIMIT_S = 5.0
BACKOFF_FIRST_S = 0.1
BACKOFF_LAST_S = 5.0
DELIVERY_LIMIT_S = 600.0
"""Give up after this: a router that was gone so long reads the session's state instead (decision 106)."""


class Outbox:
    """Events of one session on their way to `router`; without one they have nowhere to go and are dropped."""

    def __init__(self, router: str | None, ports: Ports) -> None:
        self._router = router
        self._ports = ports
        self._events: deque[Event] = deque(maxlen=EVENTS_LIMIT)
        self._changes = Changes()
        self._closed = False
        self.on_stale: Callable[[], None] | None = None  # called when the router is at another epoch (409)

    def put(self, events: list[Event]) -> None:
        if events and self._router is not None:
            self._events.extend(events)
            self._changes.notify()

    def close(self) -> None:
        """No more events will come; `run` ends when all are delivered or given up."""
        self._closed = True
        self._changes.notify()

    async def run(self) -> None:
        while True:
            while self._events:
                await self._deliver(self._events.popleft())
            if self._closed:
                return
            await self._changes.wait()

    async def _deliver(self, event: Event) -> None:
        assert self._router is not None
        clock = self._ports.clock
        give_up_at = clock.now() + DELIVERY_LIMIT_S
        backoff_s = BACKOFF_FIRST_S
        bound = log.bind(
            session=session_path_id(event.session), epoch=event.epoch, kind=Action(event.kind).name.lower()
        )
        while True:
            outcome = await within(CALL_LIMIT_S, partial(self._ports.peers.report_event, self._router, event))
            match outcome:
                case Done():
                    return
                case Refusal(status=status) if status < 500:
                    bound.info("event refused", status=status, detail=outcome.detail)
                    if outcome.suffix == StaleEpoch.suffix and self.on_stale is not None:
                        self.on_stale()
                    return
                case Refusal() | Unreachable():
                    if clock.now() + backoff_s > give_up_at:
                        bound.warning("event given up: router not reachable")
                        return
            await clock.sleep_until(clock.now() + backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_LAST_S)
