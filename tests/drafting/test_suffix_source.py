"""Suffix decoding against its slow, obvious twin; scores, scopes, and the bounds on memory."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sdcpd.drafting.settings import SuffixSettings
from sdcpd.drafting.source import Draft
from sdcpd.drafting.suffix_matches import PLACES_LIMIT
from sdcpd.drafting.suffix_source import OUTPUT_LIMIT, SuffixSource

SESSION = b"s" * 16
OTHER = b"o" * 16
SCOPE = b"c" * 16

tokens = st.lists(st.integers(0, 3), max_size=40)


class Twin:
    """The rule as one would say it: find every occurrence of every end, count what follows, walk on."""

    def __init__(self, rule: SuffixSettings) -> None:
        self._rule = rule
        self._corpora: list[list[list[int]]] = []

    def propose(
        self, own: list[int], past: list[list[int]], corpus: list[list[int]], limit: int, assumed: list[int]
    ) -> Draft:
        rule = self._rule
        ending = [*own, *assumed]
        best: tuple[float, int, list[int]] = (0.0, 0, [])
        for texts in ([own], past, corpus):
            growing = texts[0] is own if texts else False
            longer = False  # was there a longer match in these texts?
            for matched in range(min(rule.max_tree_depth, len(ending)), 0, -1):
                if not self._places(texts, ending[-matched:], own if growing and not assumed else None):
                    continue
                if matched == 1 and longer:
                    continue
                longer = True
                bound = min(limit, max(1, int(matched * rule.max_spec_factor)))
                found, score = self._follow(texts, ending[-matched:], bound, assumed if growing else None)
                if (score, matched) > best[:2]:
                    best = (score, matched, found)
        if best[2]:
            return Draft(tokens=tuple(best[2]), matched=best[1], score=best[0])
        return Draft(tokens=tuple(ending[-1:]), matched=0)

    def _places(self, texts: list[list[int]], phrase: list[int], own: list[int] | None) -> list[tuple[int, int]]:
        """(text, position behind an occurrence), oldest first; the own end is no occurrence of itself."""
        found = [
            (number, start + len(phrase))
            for number, text in enumerate(texts)
            for start in range(len(text) - len(phrase) + 1)
            if text[start : start + len(phrase)] == phrase
        ]
        return [place for place in found if own is None or place[1] < len(own)]

    def _follow(
        self, texts: list[list[int]], phrase: list[int], limit: int, assumed: list[int] | None
    ) -> tuple[list[int], float]:
        run: list[int] = []
        probability, score = 1.0, 0.0
        while len(run) < limit:
            whole = [*phrase, *run]
            # It stands in one place only: copied from there, whatever that leads to.
            if len(self._all(texts, whole)) == 1:
                ((number, at),) = self._all(texts, whole)
                drafted = len(run)
                while len(run) < limit:
                    place = at + len(run) - drafted
                    text = texts[number] if assumed is None else [*texts[number], *assumed, *run]
                    if place >= len(text):
                        break
                    run.append(text[place])
                    score += probability
                return run, score
            following = [
                (texts[number][at], order)
                for order, (number, at) in enumerate(self._all(texts, whole))
                if at < len(texts[number])
            ]
            if not following:
                return run, score
            counts = Counter(token for token, _ in following)
            token = max(counts, key=lambda one: (counts[one], max(order for t, order in following if t == one)))
            probability *= counts[token] / len(following)
            if probability < self._rule.min_token_prob:
                return run, score
            run.append(token)
            score += probability
        return run, score

    def _all(self, texts: list[list[int]], phrase: list[int]) -> list[tuple[int, int]]:
        return self._places(texts, phrase, None)


def same(found: Draft, expected: Draft) -> bool:
    return (found.tokens, found.matched, round(found.score, 9)) == (
        expected.tokens,
        expected.matched,
        round(expected.score, 9),
    )


@given(
    outputs=st.lists(tokens, max_size=4),
    corpus=st.lists(tokens, max_size=2),
    prompt=tokens.filter(bool),
    pieces=st.lists(tokens, max_size=4),
    assumed=st.lists(st.integers(0, 3), max_size=4),
    depth=st.integers(2, 7),
    factor=st.sampled_from((0.5, 1.0, 4.0)),
    floor=st.sampled_from((0.0, 0.1, 0.4)),
    limit=st.integers(1, 12),
    bound=st.sampled_from((0, 30, 1000)),
)
@settings(deadline=None)
def test_the_matches_agree_with_the_twin_however_the_texts_grew(
    outputs: list[list[int]],
    corpus: list[list[int]],
    prompt: list[int],
    pieces: list[list[int]],
    assumed: list[int],
    depth: int,
    factor: float,
    floor: float,
    limit: int,
    bound: int,
) -> None:
    rule = SuffixSettings(max_tree_depth=depth, max_spec_factor=factor, min_token_prob=floor, max_cached_tokens=bound)
    source, twin = SuffixSource(rule, corpus), Twin(rule)
    past: list[list[int]] = []
    source.open(SESSION, prompt)
    context = list(prompt)
    for number, piece in enumerate([[], *pieces]):
        source.extend(SESSION, piece)
        context += piece
        assert same(source.propose(SESSION, limit), twin.propose(context, past, corpus, limit, []))
        assert same(source.propose(SESSION, limit, assumed), twin.propose(context, past, corpus, limit, assumed))
        if number < len(outputs):  # another session ends meanwhile
            source.open(OTHER, [0])
            source.extend(OTHER, outputs[number])
            source.close(OTHER)
            past += [outputs[number]] if 2 <= len(outputs[number]) <= bound else []
            while sum(map(len, past)) > bound:
                del past[0]
        assert same(source.propose(SESSION, limit), twin.propose(context, past, corpus, limit, []))


def draft(context: Sequence[int], limit: int, **changes: Any) -> Draft:
    source = SuffixSource(SuffixSettings(**changes))
    source.open(SESSION, context)
    return source.propose(SESSION, limit)


def test_the_more_frequent_continuation_wins_and_of_equals_the_latest() -> None:
    assert draft([1, 2, 5, 9, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 1) == Draft(tokens=(5,), matched=2, score=2 / 3)
    assert draft([1, 2, 5, 1, 2, 6, 1, 2], 1).tokens == (6,)


def test_the_score_is_the_expected_number_of_right_tokens() -> None:
    """After (1, 2): 5 in two cases of three; after it 3 in one of two; then that text goes on alone."""
    context = [1, 2, 5, 3, 4, 1, 2, 5, 9, 1, 2, 6, 7, 8, 0, 1, 2]
    found = draft(context, 3, min_token_prob=0.0)
    assert found.tokens[0] == 5
    assert found.score == 2 / 3 + 1 / 3 + 1 / 3


def test_an_improbable_path_is_not_followed() -> None:
    context = [7, 1, 7, 2, 7, 3, 7, 4, 7]
    assert draft(context, 4, min_token_prob=0.3) == Draft(tokens=(7,), matched=0)


def test_short_matches_make_short_drafts() -> None:
    context = [*range(20, 40), 5, *range(20, 22)]
    assert len(draft(context, 32, max_spec_factor=1.0).tokens) == 2
    assert len(draft(context, 32, max_spec_factor=4.0).tokens) == 8


def test_copies_go_on_beyond_the_longest_match_and_around_loops() -> None:
    line = list(range(100, 160))
    assert draft([*line, 7, *line[:30]], 28, max_tree_depth=8).tokens == tuple(line[30:58])
    assert draft([9, 1, 2, 3, 1, 2, 3], 8).tokens == (1, 2, 3, 1, 2, 3, 1, 2)


def test_without_a_match_there_is_one_cheap_guess() -> None:
    """Decision 102."""
    assert draft([4, 5, 6], 8) == Draft(tokens=(6,), matched=0)
    assert draft([], 8) == Draft(tokens=(), matched=0)


def write(source: SuffixSource, output: Sequence[int], scope: bytes | None = None, session: bytes = OTHER) -> None:
    source.open(session, [0], scope)
    source.extend(session, output)
    source.close(session)


def test_outputs_are_remembered_within_their_scope_only() -> None:
    source = SuffixSource(SuffixSettings())
    write(source, [1, 2, 3, 4], SCOPE)
    for scope, tokens in ((SCOPE, (3, 4)), (None, (2,)), (b"d" * 16, (2,))):
        source.open(SESSION, [1, 2], scope)
        assert source.propose(SESSION, 2).tokens == tokens
    source.open(OTHER, [8, 9, 5, 5], SCOPE)
    source.close(OTHER)
    source.open(SESSION, [8], SCOPE)
    assert source.propose(SESSION, 1) == Draft(tokens=(8,), matched=0), "prompts are not remembered"


def test_the_corpus_is_there_for_all_and_never_goes() -> None:
    source = SuffixSource(SuffixSettings(max_cached_tokens=4), [[1, 2, 3, 4]])
    for _ in range(5):
        write(source, [5, 6, 7, 8])
    source.open(SESSION, [1, 2], SCOPE)
    assert source.propose(SESSION, 2) == Draft(tokens=(3, 4), matched=2, score=2.0)


def test_the_oldest_outputs_go_first_whatever_their_scope() -> None:
    source = SuffixSource(SuffixSettings(max_cached_requests=2))
    for number, scope in enumerate((None, SCOPE, None)):
        write(source, [number, 10 + number, 20 + number], scope)
    known = {}
    for number, scope in enumerate((None, SCOPE, None)):
        source.open(SESSION, [number], scope)
        known[number] = source.propose(SESSION, 1).matched
    assert known == {0: 0, 1: 1, 2: 1}
    assert source._past.of(None) is not None


def test_what_a_session_leaves_is_bounded_and_gone_when_its_bound_is_reached() -> None:
    source = SuffixSource(SuffixSettings(max_cached_tokens=OUTPUT_LIMIT))
    write(source, [1] * (OUTPUT_LIMIT + 500))
    assert source._past._tokens == OUTPUT_LIMIT
    write(source, [2, 3])
    assert source._past._tokens == 2
    off = SuffixSource(SuffixSettings(max_cached_requests=0))
    write(off, [1, 2, 3])
    assert off._past.of(None) is None


def test_texts_that_forgot_everything_hold_nothing() -> None:
    source = SuffixSource(SuffixSettings(max_cached_tokens=100))
    write(source, [1, 2, 1, 2, 3, 1, 1, 2, 3] * 5)
    texts = source._past.of(None)
    assert texts is not None
    texts.forget_first()
    assert (texts._text, texts._places, texts.tokens, texts.texts) == ([], {}, 0, 0)


def test_of_a_common_token_the_latest_places_count_but_long_matches_live_on() -> None:
    """A line, then a hundred times its last token: the line's own place is still known to who writes it again."""
    line = [7, 8, 9, 5]
    noise = [token for number in range(100) for token in (100 + number, 5)]
    assert draft([*line, 6, *noise, 8, 5], 1, min_token_prob=0.0).score == 1 / (PLACES_LIMIT - 1)
    found = draft([*line, 6, *noise, *line], 1)
    assert found == Draft(tokens=(6,), matched=4, score=1.0)


@given(st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=90), max_size=12))
@settings(deadline=None, max_examples=50)
def test_a_sessions_own_text_is_bounded_and_what_is_kept_is_the_end(pieces: list[list[int]]) -> None:
    rule = SuffixSettings(history_tokens=64, max_tree_depth=8)
    source = SuffixSource(rule)
    source.open(SESSION, [])
    context: list[int] = []
    for piece in pieces:
        source.extend(SESSION, piece)
        context += piece
        kept = source._contexts[SESSION].tokens
        assert len(kept) <= 128
        assert kept == context[-len(kept) :]
        assert len(kept) >= min(64, len(context))
        if max(map(kept.count, kept)) <= PLACES_LIMIT:  # of a commoner token the twin looks at more places
            assert same(source.propose(SESSION, 8), Twin(rule).propose(kept, [], [], 8, []))


def test_sessions_end_and_begin_anew() -> None:
    source = SuffixSource(SuffixSettings())
    source.close(OTHER)
    source.open(SESSION, [1, 2, 3])
    source.open(SESSION, [4, 5])
    assert source.propose(SESSION, 4, assumed=[4]).tokens == (5, 4, 5, 4), "around the loop that is assumed"
