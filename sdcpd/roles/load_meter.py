"""The verifier's load, in percent, and the cost curve it is measured against (decision 47)."""

from collections import deque

from sdcpd.engine.cost_curve import CostCurve
from sdcpd.engine.spans import Span
from sdcpd.roles.ports import Clock, Engine

WINDOW_S = 1.0
COST_RATIO = 1.5
ROWS_TRIED = (1, 2, 4, 8, 16, 32, 64, 128)
REPEATS = 3
LEAST_S = 1e-6
"""A pass of no measurable time."""
MEASURING_LIMIT_S = 2.0
"""No count is begun after this much time, nor one that would not fit: a slow machine has a shorter curve."""


class LoadMeter:
    """Time-weighted rows of the passes of the last second, over the rows at which a pass costs 1.5 times one row.

    Idle time counts as zero. The pages that open sessions hold, as a share of all pages, are the other measure; the
    larger of the two is the load. Both rounded down, capped at 100.
    """

    def __init__(self, full_rows: int) -> None:
        self.full_rows = full_rows
        self._passes: deque[tuple[float, float, float]] = deque()  # start, end, share of full rows; one after the other
        self._busy_s = 0.0  # sum over them of share times duration: asked some times a round, so nothing is walked

    def passed(self, start: float, end: float, rows: int) -> None:
        share = min(1.0, rows / self.full_rows)
        self._passes.append((start, end, share))
        self._busy_s += share * (end - start)
        self._forget(end - WINDOW_S)

    def percent(self, now: float, held_pages: int, pages: int) -> int:
        self._forget(now - WINDOW_S)
        busy_s = self._busy_s
        if self._passes and self._passes[0][0] < now - WINDOW_S:  # only the oldest can reach out of the window
            start, _, share = self._passes[0]
            busy_s -= share * (now - WINDOW_S - start)
        return min(100, max(int(100 * busy_s / WINDOW_S), 100 * held_pages // pages))

    def _forget(self, before: float) -> None:
        passes = self._passes
        while passes and passes[0][1] <= before:
            start, end, share = passes.popleft()
            self._busy_s -= share * (end - start)
        if not passes:
            self._busy_s = 0.0  # what rounding has left


async def measure_curve(engine: Engine, clock: Clock) -> CostCurve:
    """What passes of 1, 2, 4, ... rows cost here, as far as the time allows.

    Takes the best of a few repeats, so that a busy moment at start does not pass for a slow device.
    """
    sequence = engine.open_sequence()
    points: list[tuple[int, float]] = []
    began = clock.now()
    try:
        for rows in ROWS_TRIED:
            if rows > engine.info.context_tokens or not engine.reserve(sequence, rows):
                break
            span = Span(sequence=sequence, tokens=(0,) * rows, start=0, rows=rows)
            best_s = float("inf")
            for _ in range(REPEATS):
                started = clock.now()
                await engine.run_pass([span])
                best_s = min(best_s, clock.now() - started)
            points.append((rows, max(best_s, LEAST_S)))
            if clock.now() - began + 2 * REPEATS * best_s > MEASURING_LIMIT_S:
                break
    finally:
        engine.close_sequence(sequence)
    return CostCurve(points or [(1, LEAST_S)])
