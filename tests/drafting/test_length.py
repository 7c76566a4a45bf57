"""The choice of M (draft 6.2): the rule itself, its three estimates, and the loop they close."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.drafting.length import (
    MODEL_PRIOR,
    POSITIONS,
    Acceptance,
    LengthChooser,
    VerifyTime,
    best_length,
    expected_tokens,
)
from sdcpd.drafting.settings import LengthSettings
from sdcpd.drafting.source import MODEL

SETTINGS = LengthSettings()

alphas = st.floats(0.0, 1.0)


def best_m(alpha: float, limit: int, *, fixed_s: float, token_s: float) -> int:
    """With the same alpha at each position."""
    return best_length(lambda _: alpha, limit, fixed_s=fixed_s, token_s=token_s).m


@given(alphas, st.integers(1, 64))
def test_expected_tokens_is_the_sum_over_what_may_happen(alpha: float, m: int) -> None:
    """ "The expected number of tokens committed per round is (1 - alpha^(M+1)) / (1 - alpha) for alpha < 1, and M + 1
    for alpha = 1": one token, and one more for each further position that is reached."""
    assert expected_tokens(alpha, m) == pytest.approx(sum(alpha**k for k in range(m + 1)), rel=1e-6)


@given(alphas, st.integers(1, 64), st.floats(1e-4, 1.0), st.floats(0.0, 0.1))
def test_no_other_m_within_the_limit_is_better(alpha: float, limit: int, fixed_s: float, token_s: float) -> None:
    """ "the drafter chooses the M within its limits that maximizes that quantity divided by (M * t_d + t_v)"."""

    def rate(m: int) -> float:
        return expected_tokens(alpha, m) / (fixed_s + m * token_s)

    chosen = best_m(alpha, limit, fixed_s=fixed_s, token_s=token_s)
    assert 1 <= chosen <= limit
    assert rate(chosen) == pytest.approx(max(rate(m) for m in range(1, limit + 1)), rel=1e-9)


def test_the_ends_of_the_rule() -> None:
    assert best_m(1.0, 32, fixed_s=0.02, token_s=0.001) == 32
    assert best_m(1.0, 32, fixed_s=0.001, token_s=0.02) == 1, "a token dearer than a round"
    assert best_m(0.0, 32, fixed_s=0.02, token_s=0.001) == 1
    assert best_m(0.0, 32, fixed_s=0.02, token_s=0.0) == 1, "of equals the smallest"
    assert best_m(0.5, 32, fixed_s=0.02, token_s=0.0) == 32, "t_row = 0: the draft's rule with free tokens"
    assert best_m(0.5, 1, fixed_s=0.02, token_s=0.0) == 1


def test_a_loaded_drafter_proposes_fewer_tokens() -> None:
    """ "A loaded drafter thereby proposes fewer tokens"."""
    lengths = [best_m(0.8, 32, fixed_s=0.02, token_s=t) for t in (0.0001, 0.001, 0.005, 0.02)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 8 > lengths[-1]


@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("m", [1, 4, 16])
def test_alpha_is_found_although_full_acceptance_hides_the_next_token(alpha: float, m: int) -> None:
    draws = random.Random(f"{alpha} {m}")
    acceptance = Acceptance(LengthSettings(ema_alpha=0.002))
    for _ in range(4000):
        accepted = next((k for k in range(m) if draws.random() >= alpha), m)
        acceptance.observe(8, proposed=m, accepted=accepted)
    assert acceptance.alpha(8) == pytest.approx(alpha, abs=0.04)


def test_alpha_starts_by_the_length_of_the_match_and_is_kept_apart() -> None:
    acceptance = Acceptance(SETTINGS)
    assert [acceptance.alpha(k) for k in (0, 1, 8)] == [0.5, pytest.approx(2 / 3), pytest.approx(0.9)]
    for _ in range(20):
        acceptance.observe(0, proposed=1, accepted=0)
    assert acceptance.alpha(0) < 0.15
    assert acceptance.alpha(8) == pytest.approx(0.9), "wrong guesses say nothing about long matches"


def test_alpha_is_known_by_position_once_positions_were_seen() -> None:
    """A model that is right once and wrong from its second token on proposes one token, whatever its mean is."""
    acceptance = Acceptance(SETTINGS)
    first, second = acceptance.by_position(MODEL)(1), acceptance.by_position(MODEL)(2)
    assert first == second == pytest.approx(MODEL_PRIOR)
    for _ in range(60):
        acceptance.observe(MODEL, proposed=4, accepted=1)
    alpha = acceptance.by_position(MODEL)
    assert alpha(1) > 0.7
    assert alpha(2) < 0.3
    assert alpha(9) == alpha(POSITIONS), "positions never judged take their class's alpha"
    assert best_length(alpha, 16, fixed_s=0.02, token_s=0.005).m == 1


@given(st.lists(alphas, min_size=POSITIONS, max_size=POSITIONS), st.integers(1, POSITIONS))
def test_expected_tokens_by_position_are_the_sum_over_what_may_happen(by_position: list[float], m: int) -> None:
    choice = best_length(lambda i: by_position[i - 1], m, fixed_s=1.0, token_s=0.0)
    expected = sum(math.prod(by_position[:k]) for k in range(choice.m + 1))
    assert choice.tokens == pytest.approx(expected)
    assert choice.tokens_per_s == pytest.approx(expected)


def test_looked_up_and_computed_tokens_have_costs_of_their_own() -> None:
    """A model's token costs as much as a quarter of a round, a looked-up one nothing."""
    chooser, acceptance, time = LengthChooser(SETTINGS), Acceptance(SETTINGS), verify_time(*[(8, 0.02)] * 20)
    for _ in range(10):
        chooser.drafted(MODEL, 4, 0.02)
        chooser.drafted(8, 32, 0.00003)
        for matched in (MODEL, 8):
            acceptance.observe(matched, proposed=10, accepted=9)
    model = chooser.choose(acceptance, time, matched=MODEL, limit=32)
    copy = chooser.choose(acceptance, time, matched=8, limit=32)
    assert model.m < 8 < copy.m
    rate = chooser.rate(time, matched=8, m=copy.m, tokens=copy.tokens)
    assert rate == pytest.approx(copy.tokens_per_s)


def test_scarce_bandwidth_makes_drafts_shorter_where_rows_are_written() -> None:
    """ "and a drafter whose cache bandwidth is scarce does the same"."""
    chooser, acceptance, time = LengthChooser(SETTINGS), Acceptance(SETTINGS), verify_time(*[(8, 0.02)] * 20)
    chooser.drafted(MODEL, 10, 0.001)
    for _ in range(5):
        chooser.published(8, 0.08)
    inline = chooser.choose(acceptance, time, matched=MODEL, limit=32)
    written = chooser.choose(acceptance, time, matched=MODEL, limit=32, publishes=True)
    assert written.m < inline.m


@given(
    st.lists(
        st.tuples(st.integers(-1, 40), st.integers(1, 64), st.integers(0, 64)).map(
            lambda t: (t[0], t[1], min(t[1], t[2]))
        )
    )
)
def test_alpha_stays_a_probability(rounds: list[tuple[int, int, int]]) -> None:
    acceptance = Acceptance(SETTINGS)
    for matched, proposed, accepted in rounds:
        acceptance.observe(matched, proposed=proposed, accepted=accepted)
        assert 0.0 < acceptance.alpha(matched) < 1.0


def verify_time(*rounds: tuple[int, float]) -> VerifyTime:
    time = VerifyTime(SETTINGS)
    for m, seconds in rounds:
        time.observe(m, seconds)
    return time


def test_the_line_of_a_verifier_is_found_through_noise_and_interruptions() -> None:
    draws = random.Random(1)
    time = VerifyTime(SETTINGS)
    for k in range(400):
        m = draws.choice((1, 1, 2, 5, 12, 32))
        seconds = (0.016 + 0.0004 * m) * draws.uniform(0.95, 1.05)
        time.observe(m, seconds + (0.5 if k % 40 == 39 else 0.0))
    fixed_s, token_s = time.line()
    assert fixed_s == pytest.approx(0.016, rel=0.25)
    assert token_s == pytest.approx(0.0004, rel=0.35)


def test_while_all_rounds_are_alike_the_assumed_share_decides() -> None:
    fixed_s, token_s = verify_time(*[(32, 0.032)] * 50).line()
    assert token_s == pytest.approx(SETTINGS.row_cost_ratio * fixed_s, rel=1e-6)
    assert fixed_s + 32 * token_s == pytest.approx(0.032)


def test_a_verifier_whose_rows_are_free_is_the_drafts_own_case() -> None:
    rounds = [(m, 0.02) for m in (1, 32, 4, 16, 8, 2) * 40]
    fixed_s, token_s = verify_time(*rounds).line()
    assert fixed_s == pytest.approx(0.02, rel=0.1)
    assert token_s < 0.02 * 0.002


def test_a_change_of_load_is_followed() -> None:
    time = verify_time(*[(m, 0.01) for m in (1, 16) * 50])
    for m in (1, 16) * 40:
        time.observe(m, 0.1)
    fixed_s, token_s = time.line()
    assert fixed_s + 8 * token_s == pytest.approx(0.1, rel=0.25)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 100.0)), max_size=40))
def test_the_line_can_always_be_used(rounds: list[tuple[int, float]]) -> None:
    fixed_s, token_s = verify_time(*rounds).line()
    assert fixed_s > 0.0
    assert token_s >= 0.0
    assert math.isfinite(fixed_s + token_s)


def lengths(accept: float, *, rounds: int, limit: int = 32, matched: int = 8, seed: int = 0) -> list[int]:
    """The closed loop: choose M, accept each token with chance `accept`, learn, again. A CPU: 16 ms + 0.4 ms a row."""
    draws = random.Random(seed)
    chooser, acceptance, time = LengthChooser(SETTINGS), Acceptance(SETTINGS), VerifyTime(SETTINGS)
    chosen = []
    for _ in range(rounds):
        m = chooser.choose(acceptance, time, matched=matched, limit=limit).m
        accepted = next((k for k in range(m) if draws.random() >= accept), m)
        chooser.drafted(matched, m, 1e-6 * m)
        acceptance.observe(matched, proposed=m, accepted=accepted)
        time.observe(m, 0.016 + 0.0004 * m)
        chosen.append(m)
    return chosen


def test_a_copying_task_is_at_long_drafts_within_a_few_rounds() -> None:
    chosen = lengths(1.0, rounds=8)
    assert chosen[0] >= 8
    assert chosen[3:] == [32] * 5


def test_a_hopeless_task_is_at_single_tokens_soon() -> None:
    chosen = lengths(0.0, rounds=30)
    assert max(chosen[10:]) <= 2
    assert chosen[-1] == 1


def test_in_between_the_loop_settles_near_the_best_m() -> None:
    best = best_m(0.7, 32, fixed_s=0.016, token_s=0.0004)
    chosen = lengths(0.7, rounds=300)[100:]
    assert sum(chosen) / len(chosen) == pytest.approx(best, rel=0.35)


@given(st.integers(1, 64), alphas)
def test_the_limit_holds(limit: int, accept: float) -> None:
    assert all(1 <= m <= limit for m in lengths(accept, rounds=10, limit=limit))
