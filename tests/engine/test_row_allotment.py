"""Rows by their worth: at every concurrency and acceptance no worse than drafting always or never."""

import pytest

from sdcpd.engine.row_allotment import Rhythm, Tempo, Wish, allot, gain, rate
from tests.engine.test_speculation_budget import DRAFT, MACHINES, curve

AT_ONCE = Tempo()


def test_gain() -> None:
    assert gain(0.5, 0) == 0.0
    assert gain(0.5, 2) == 0.75
    assert gain(1.0, 3) == 3.0
    assert gain(0.0, 3) == 0.0


@pytest.mark.parametrize("name", list(MACHINES))
def test_never_worse_than_always_or_never(name: str) -> None:
    """1 to 64 sessions, acceptance 0 to 1, by expectation over the curve."""
    of = curve(MACHINES[name])
    for sessions in (*range(1, 17), *range(19, 65, 5)):
        for tenth in range(0, 11, 2):
            wishes = [Wish(tenth / 10, DRAFT)] * sessions
            lengths = allot(wishes, 0, of, Rhythm())
            reached = max(rate(wishes, lengths, 0, of, AT_ONCE), rate(wishes, [0] * sessions, 0, of, AT_ONCE))
            for fixed in (0, DRAFT):
                assert reached >= 0.99 * rate(wishes, [fixed] * sessions, 0, of, AT_ONCE), (sessions, tenth, fixed)


def test_the_likelier_get_more() -> None:
    lengths = allot([Wish(0.3, 8), Wish(0.9, 8), Wish(0.9, 2)], 1, curve(MACHINES["linear"]), Rhythm())
    assert lengths[0] < lengths[1]
    assert lengths[2] <= 2


def test_rows_that_cost_nothing_are_left_to_the_drafter() -> None:
    flat = curve(lambda rows: 0.01)
    assert allot([Wish(0.1, 8), Wish(0.0, 5)], 0, flat, Rhythm()) == [8, 5]


def test_a_gap_speaks_against_drafting() -> None:
    """Who waits for its drafter as long as a pass takes gets half as many passes."""
    of, wishes = curve(MACHINES["flat"]), [Wish(0.5, 1)]
    slow = Tempo(drafting=Rhythm(gap_s=0.010))
    assert rate(wishes, [1], 0, of, AT_ONCE) > rate(wishes, [0], 0, of, AT_ONCE)
    assert rate(wishes, [1], 0, of, slow) < rate(wishes, [0], 0, of, slow)
    halves = Rhythm(share=0.5)
    assert halves.turn_s(of, 8) == pytest.approx(2 * of.seconds(4))
