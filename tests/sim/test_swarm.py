"""Fifty seeds of the simulation; a failing one prints what replays it."""

import pytest

from tests.sim import report
from tests.sim.world import run_seed

SEEDS = 50


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.kind == 0, report.failure(outcome)
