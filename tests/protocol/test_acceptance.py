"""Rule 1 and the cut (draft 6.3 step 7, 6.4)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol.acceptance import accept_equal, argmax, cut

SMALL = st.integers(0, 3)


def test_ties_go_to_the_smallest_id() -> None:
    assert argmax([0, 5, 5, 1]) == 1
    assert argmax([float("-inf"), -1.0, -1.0]) == 1


@pytest.mark.parametrize("wrong", range(1, 9))
def test_every_position_is_checked(wrong: int) -> None:
    best = tuple(range(10, 19))
    proposed = list(best[:8])
    proposed[wrong - 1] = 99
    outcome = accept_equal(proposed, best)
    assert (outcome.accepted, outcome.additional) == (wrong - 1, best[wrong - 1])


@given(st.lists(SMALL, max_size=8), st.data())
def test_the_block_is_what_greedy_decoding_gives(proposed: list[int], data: st.DataObject) -> None:
    best = data.draw(st.lists(SMALL, min_size=len(proposed) + 1, max_size=len(proposed) + 1))
    outcome = accept_equal(proposed, best)
    block = [*proposed[: outcome.accepted], outcome.additional]
    assert block == best[: len(block)]
    assert outcome.accepted == len(proposed) or proposed[outcome.accepted] != best[outcome.accepted]


def test_rows_and_tokens_must_fit() -> None:
    with pytest.raises(AssertionError):
        accept_equal([1], [1])


def test_cut_keeps_the_stop_token_and_nothing_after_it() -> None:
    block = cut([10, 11, 2, 12], stop=(2,), remaining=9)
    assert (block.emitted, block.finished) == ((10, 11, 2), True)


@pytest.mark.parametrize(
    ("remaining", "emitted", "finished"), [(1, (10,), True), (3, (10, 11, 12), True), (4, (10, 11, 12), False)]
)
def test_cut_at_max_new(remaining: int, emitted: tuple[int, ...], finished: bool) -> None:
    block = cut([10, 11, 12], stop=(), remaining=remaining)
    assert (block.emitted, block.finished) == (emitted, finished)


@given(st.lists(SMALL, min_size=1), st.lists(SMALL), st.integers(1, 10))
def test_cut_against_a_slow_twin(tokens: list[int], stop: list[int], remaining: int) -> None:
    expected: list[int] = []
    done = False
    for token in tokens:
        expected.append(token)
        if token in stop or len(expected) == remaining:
            done = True
            break
    block = cut(tokens, stop=stop, remaining=remaining)
    assert (list(block.emitted), block.finished) == (expected, done)
