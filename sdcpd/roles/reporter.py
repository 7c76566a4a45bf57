"""Reports an instance's status to its routers more often than its ttl (draft 6.1; decisions 48, 95, 97, 102).

A router believes a report for `ttl_ms` from its receipt, so one is due every third of that: two may get lost. There is
one task a router, so that a router that is gone delays nobody. `nudge` makes the next report at once, for what cannot
wait, such as a session this instance gave up. An instance is ready once a router has taken its status, and for as long
as the last one taken has not expired (97).
"""

from collections.abc import Callable
from functools import partial

import structlog
import trio

from sdcpd.protocol.messages import Status
from sdcpd.roles.ports import Done, Ports, Refusal, Unreachable
from sdcpd.roles.waits import Changes, within

log = structlog.get_logger(__name__)

REPORTS_PER_TTL = 3
BACKOFF_FIRST_S = 0.1
"""First wait after a failed report, doubled up to the ordinary period: a router that starts is found soon."""
JITTER = 0.1
"""Share by which a wait after a failure varies, so that a fleet does not fall upon a restarted router in one moment."""
GAP_S = 0.05
"""Least time between two reports to one router, however often somebody nudges."""


class Reporter:
    """Sends what `status()` returns to each of `routers` (base URIs), as long as `run` runs."""

    def __init__(self, routers: tuple[str, ...], status: Callable[[], Status], ports: Ports) -> None:
        assert routers, "an instance that reports to nobody is never assigned anything"
        self._routers = routers
        self._status = status
        self._ports = ports
        self._jitter = ports.randomness.stream("report jitter")
        self._nudges = Changes()
        self._nudged = 0
        self._good_until: dict[str, float] = {}

    @property
    def accepted(self) -> bool:
        """Has some router taken a status that has not expired yet?"""
        now = self._ports.clock.now()
        return any(now < until for until in self._good_until.values())

    def nudge(self) -> None:
        """Report again at once."""
        self._nudged += 1
        self._nudges.notify()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            for router in self._routers:
                nursery.start_soon(self._report_to, router)
            task_status.started()

    async def _report_to(self, router: str) -> None:
        clock = self._ports.clock
        bound = log.bind(router=router)
        last: str | None = None
        failures = 0
        while True:
            began = clock.now()
            nudged = self._nudged
            status = self._status()
            period_s = status.ttl_ms / 1000 / REPORTS_PER_TTL
            outcome = await within(period_s, partial(self._ports.peers.report_status, router, status))
            if isinstance(outcome, Done):
                failures = 0
                # The router counts from its receipt, which was not before the sending.
                self._good_until[router] = began + status.ttl_ms / 1000
                said, reason, due = "accepted", None, began + period_s
            else:
                failures += 1
                said, reason = _describe(outcome)
                due = clock.now() + self._backoff(failures, period_s)
            if said != last:
                last = said
                (bound.info if failures == 0 else bound.warning)("status report", outcome=said, reason=reason)
            await clock.sleep_until(min(due, began + GAP_S))
            if nudged == self._nudged:
                await self._nudges.wait_until(clock, due)

    def _backoff(self, failures: int, period_s: float) -> float:
        wait_s = min(period_s, BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 16))
        return wait_s * (1.0 + JITTER * (2.0 * self._jitter.uniform() - 1.0))


def _describe(outcome: Refusal | Unreachable) -> tuple[str, str]:
    """What happened, worded alike for alike cases so that only changes are logged; and why."""
    match outcome:
        case Refusal():
            return f"refused with {outcome.status} {outcome.suffix or ''}".rstrip(), outcome.detail
        case Unreachable():
            return "unreachable", outcome.reason
