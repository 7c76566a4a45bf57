"""The load is the same as when every pass of the last second is added up again."""

import random

from sdcpd.roles.load_meter import WINDOW_S, LoadMeter


def slow_percent(passes: list[tuple[float, float, int]], now: float, full_rows: int) -> float:
    weighted = 0.0
    for start, end, rows in passes:
        seen = min(end, now) - max(start, now - WINDOW_S)
        weighted += max(0.0, seen) * min(1.0, rows / full_rows)
    return 100 * weighted / WINDOW_S


def test_it_agrees_with_the_slow_sum() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        meter, passes, now = LoadMeter(full_rows=8), [], 1000.0
        for _ in range(300):
            now += draw.choice([0.0, 0.001, 0.01, 0.3, 2.5]) * draw.random()
            start, now = now, now + draw.choice([0.0, 0.0005, 0.02, 1.5]) * draw.random()
            rows = draw.randrange(1, 16)
            passes.append((start, now, rows))
            meter.passed(start, now, rows)
            for later in (0.0, draw.random() / 10):
                assert abs(meter.percent(now + later, 0, 10) - slow_percent(passes, now + later, 8)) < 1.001
                now += later


def test_pages_are_the_other_measure() -> None:
    meter = LoadMeter(full_rows=1)
    meter.passed(0.0, 0.25, 5)
    assert meter.percent(0.5, 10, 100) == 25
    assert meter.percent(0.5, 60, 100) == 60
    assert meter.percent(1.125, 0, 100) == 12  # half of the pass is longer ago than a second
    assert meter.percent(10.0, 0, 100) == 0
