"""The verifier's load, in percent, and the cost curve it is measured against (decision 47)."""

from collections import deque

from sdcpd.engine.spans import Span
from sdcpd.roles.ports import Clock, Engine

WINDOW_S = 1.0
COST_RATIO = 1.5
ROWS_TRIED = (1, 2, 4, 8, 16, 32, 64, 128)
REPEATS = 3


class LoadMeter:
    """Time-weighted rows of the passes of the last second, over the rows at which a pass costs 1.5 times one row.

    Idle time counts as zero. The pages that open sessions hold, as a share of all pages, are the other measure; the
    larger of the two is the load. Both rounded down, capped at 100.
    """

    def __init__(self, full_rows: int) -> None:
        self.full_rows = full_rows
        self._passes: deque[tuple[float, float, int]] = deque()

    def passed(self, start: float, end: float, rows: int) -> None:
        self._passes.append((start, end, rows))
        while self._passes and self._passes[0][1] < end - WINDOW_S:
            self._passes.popleft()

    def percent(self, now: float, held_pages: int, pages: int) -> int:
        weighted = 0.0
        for start, end, rows in self._passes:
            seen = min(end, now) - max(start, now - WINDOW_S)
            if seen > 0:
                weighted += seen * min(1.0, rows / self.full_rows)
        return min(100, max(int(100 * weighted / WINDOW_S), 100 * held_pages // pages))


async def measure_full_rows(engine: Engine, clock: Clock) -> int:
    """Rows of one pass at which it first costs 1.5 times the one-row pass; the largest count tried if it never does.

    Takes the best of a few repeats, so that a busy moment at start does not pass for a slow device.
    """
    sequence = engine.open_sequence()
    try:
        largest = 1
        base_s = 0.0
        for rows in ROWS_TRIED:
            if rows > engine.info.context_tokens or not engine.reserve(sequence, rows):
                break
            span = Span(sequence=sequence, tokens=(0,) * rows, start=0, rows=rows)
            best_s = float("inf")
            for _ in range(REPEATS):
                started = clock.now()
                await engine.run_pass([span])
                best_s = min(best_s, clock.now() - started)
            if rows == 1:
                base_s = best_s
            elif best_s > COST_RATIO * base_s:
                return rows
            largest = rows
        return largest
    finally:
        engine.close_sequence(sequence)
