"""Loops at the end of a text, against the plain definition."""

from hypothesis import given
from hypothesis import strategies as st

from sdcpd.drafting.repetition import LAST_TOKENS, LONGEST_PERIOD, ends_in_a_loop


def plainly(tokens: list[int]) -> bool:
    last = tokens[len(tokens) - LAST_TOKENS :] if len(tokens) >= LAST_TOKENS else []
    return bool(last) and any(
        all(last[place] == last[place % period] for place in range(LAST_TOKENS))
        for period in range(1, LONGEST_PERIOD + 1)
    )


@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.integers(0, 80),
    st.lists(st.integers(0, 2), max_size=2),
)
def test_loops_are_found_and_nothing_else(before: list[int], loop: list[int], times: int, after: list[int]) -> None:
    tokens = before + loop * times + after
    assert ends_in_a_loop(tokens) == plainly(tokens)


def test_a_short_text_is_no_loop() -> None:
    assert not ends_in_a_loop([7] * (LAST_TOKENS - 1))
    assert ends_in_a_loop([7] * LAST_TOKENS)


def test_a_long_period_is_no_loop() -> None:
    assert ends_in_a_loop(list(range(LONGEST_PERIOD)) * 8)
    assert not ends_in_a_loop(list(range(LONGEST_PERIOD + 1)) * 8)
