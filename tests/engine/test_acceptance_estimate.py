"""alpha from rounds: what was not judged does not count."""

import random

import pytest

from sdcpd.engine.acceptance_estimate import AcceptanceEstimate


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("length", [1, 8])
def test_it_finds_alpha_whatever_the_length(alpha: float, length: int) -> None:
    chance, estimate = random.Random(1), AcceptanceEstimate(0.005)
    for _ in range(2000):
        accepted = 0
        while accepted < length and chance.random() < alpha:
            accepted += 1
        estimate.judged(accepted, length)
    assert estimate.alpha(0.5) == pytest.approx(alpha, abs=0.06)


def test_the_prior_counts_while_little_is_known() -> None:
    estimate = AcceptanceEstimate(0.1)
    assert estimate.alpha(0.7) == pytest.approx(0.7)
    estimate.judged(0, 4)
    assert 0.3 < estimate.alpha(0.7) < 0.6
    for _ in range(60):
        estimate.judged(0, 4)
    assert estimate.alpha(0.7) < 0.15
    estimate.forget(0.1)
    assert estimate.alpha(0.7) > 0.4
    assert estimate.tested == pytest.approx(1.0, abs=0.1)
