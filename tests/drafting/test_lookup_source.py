"""Prompt lookup against its slow, obvious twin; the cheap guess; the bound on memory."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sdcpd.drafting.lookup_source import MATCH_LIMIT, LookupSource
from sdcpd.drafting.settings import LookupSettings
from sdcpd.drafting.source import Draft

SESSION = b"s" * 16
OTHER = b"o" * 16

tokens = st.lists(st.integers(0, 3), max_size=60)


def slow_draft(context: Sequence[int], shortest: int, longest: int, limit: int) -> Draft:
    """The rule as one would say it: try each length, each earlier place from the end, and copy token by token."""
    seen = list(context)
    if not seen:
        return Draft(tokens=(), matched=0)
    for n in range(longest, shortest - 1, -1):
        for at in range(len(seen) - 1, n - 1, -1):
            if seen[at - n : at] == seen[len(seen) - n :]:
                matched = max(
                    k for k in range(1, min(at, MATCH_LIMIT) + 1) if seen[at - k : at] == seen[len(seen) - k :]
                )
                run = list(seen)
                for step in range(limit):
                    run.append(run[at + step])
                return Draft(tokens=tuple(run[len(seen) :]), matched=matched)
    for at in range(len(seen) - 1, 0, -1):
        if seen[at - 1] == seen[-1]:
            return Draft(tokens=(seen[at],), matched=0)
    return Draft(tokens=(seen[-1],), matched=0)


@given(
    prompt=tokens,
    pieces=st.lists(tokens, max_size=6),
    shortest=st.integers(1, 4),
    more=st.integers(0, 3),
    limit=st.integers(1, 12),
)
@settings(deadline=None)
def test_the_index_agrees_with_the_twin_however_the_context_grew(
    prompt: list[int], pieces: list[list[int]], shortest: int, more: int, limit: int
) -> None:
    source = LookupSource(LookupSettings(prompt_lookup_min=shortest, prompt_lookup_max=shortest + more))
    source.open(SESSION, prompt)
    context = list(prompt)
    for piece in [[], *pieces]:
        source.extend(SESSION, piece)
        context += piece
        assert source.propose(SESSION, limit) == slow_draft(context, shortest, shortest + more, limit)


def lookup(context: Sequence[int], limit: int, **changes: Any) -> Draft:
    source = LookupSource(LookupSettings(**changes))
    source.open(SESSION, context)
    return source.propose(SESSION, limit)


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    context = [1, 2, 3, 7, 7, 9, 2, 3, 8, 8, 1, 2, 3]
    assert lookup(context, 2, prompt_lookup_min=2, prompt_lookup_max=3) == Draft(tokens=(7, 7), matched=3)


def test_the_latest_of_equally_long_matches_wins() -> None:
    context = [1, 2, 5, 5, 1, 2, 6, 6, 1, 2]
    assert lookup(context, 2).tokens == (6, 6)


def test_a_loop_is_drafted_to_any_length() -> None:
    assert lookup([9, 1, 2, 3, 1, 2, 3], 8).tokens == (1, 2, 3, 1, 2, 3, 1, 2)


def test_how_long_a_match_is_shows_beyond_the_longest_n_gram() -> None:
    run = list(range(100, 120))
    assert lookup([*run, 7, 8, *run], 2) == Draft(tokens=(7, 8), matched=20)


def test_without_a_match_there_is_one_cheap_guess() -> None:
    """Decision 102."""
    assert lookup([4, 5, 6, 4], 8) == Draft(tokens=(5,), matched=0)
    assert lookup([1, 2, 3], 8) == Draft(tokens=(3,), matched=0)
    assert lookup([], 8) == Draft(tokens=(), matched=0)


def test_the_operator_bounds_the_draft() -> None:
    assert len(lookup([1, 2, 3, 1, 2], 32, num_speculative_tokens=4).tokens) == 4


def test_sessions_do_not_see_each_other() -> None:
    source = LookupSource(LookupSettings())
    source.open(SESSION, [1, 2, 3, 4])
    source.open(OTHER, [1, 2])
    assert source.propose(OTHER, 4) == Draft(tokens=(2,), matched=0)
    source.close(OTHER)
    source.close(OTHER)
    source.open(OTHER, [3, 4, 5, 3, 4])
    assert source.propose(OTHER, 1).tokens == (5,)
    source.extend(SESSION, [1, 2])
    assert source.propose(SESSION, 2).tokens == (3, 4)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=90), max_size=12))
@settings(deadline=None, max_examples=50)
def test_memory_is_bounded_and_what_is_kept_is_the_end(pieces: list[list[int]]) -> None:
    bound = 64
    source = LookupSource(LookupSettings(history_tokens=bound))
    source.open(SESSION, [])
    context: list[int] = []
    for piece in pieces:
        source.extend(SESSION, piece)
        context += piece
        history = source._histories[SESSION]
        kept = len(history._tokens)
        assert min(bound, len(context)) <= kept <= 2 * bound
        assert all(len(index) <= kept for index in history._indexes.values())
        assert source.propose(SESSION, 5) == slow_draft(context[len(context) - kept :], 2, 5, 5)
