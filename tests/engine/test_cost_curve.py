"""The cost curve: between points, behind them, and how use corrects it."""

import pytest

from sdcpd.engine.cost_curve import STRAY, CostCurve

LINEAR = [(1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0)]


def test_between_and_behind_the_points() -> None:
    curve = CostCurve(LINEAR)
    assert curve.seconds(0.5) == 1.0, "a pass has a row"
    assert [curve.seconds(rows) for rows in (1, 3, 4, 6, 100, 1024, 2048)] == [
        1.0,
        3.0,
        4.0,
        6.0,
        100.0,
        1024.0,
        2048.0,
    ]
    flat = CostCurve([(1, 2.0), (2, 2.0)])
    assert flat.seconds(700) == 2.0
    assert CostCurve([(1, 3.0)]).seconds(9) == 3.0, "one point says nothing of rows"


def test_it_never_falls() -> None:
    curve = CostCurve([(1, 2.0), (2, 5.0), (4, 3.0), (8, 9.0)])
    assert [curve.seconds(rows) for rows in (2, 3, 4, 8)] == [5.0, 5.0, 5.0, 9.0]


def test_use_corrects_it_where_it_is_used() -> None:
    curve = CostCurve(LINEAR)
    for _ in range(200):
        curve.observe(8, 20.0)
        curve.observe(1, 1.0)
    assert curve.seconds(8) == pytest.approx(20.0, rel=0.01)
    assert curve.seconds(4) == 4.0
    assert curve.seconds(1) == 1.0


def test_steps_are_found() -> None:
    curve = CostCurve([(rows, float(-(-rows // 32))) for rows in (1, 2, 4, 8, 16, 32, 64)])
    assert curve.seconds(48) == 1.5
    for _ in range(100):
        curve.observe(48, 2.0)
    assert curve.seconds(48) == pytest.approx(2.0, rel=0.01)
    assert curve.seconds(32) == 1.0


def test_a_stray_pass_moves_it_little() -> None:
    curve = CostCurve(LINEAR)
    curve.observe(4, 1e9)
    assert curve.seconds(4) <= 4.0 * (1 + 0.1 * STRAY)
    curve.observe(5000, 1.0)
    assert curve.seconds(1024) > 900, "a pass beyond the last point counts there"


def test_full_rows() -> None:
    """Decision 47: the first measured count at which a pass costs more than 1.5 times the one-row pass."""
    assert CostCurve(LINEAR).full_rows(1.5) == 2
    assert CostCurve([(1, 1.0), (2, 1.4), (4, 1.5)]).full_rows(1.5) == 4
