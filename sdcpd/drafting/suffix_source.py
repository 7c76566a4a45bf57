"""Suffix decoding: drafts from what followed the end of the context before, by frequency (Oliaro 2025).

Theory. Drafts come from the session's own text (prompt and committed output), from earlier outputs, and from an
operator's corpus (suffix_matches.py says how they are found). Each end of the context that occurred before, long or
short, proposes the likeliest continuation; its *score* is the sum of the probabilities that each further token is
reached, by the frequencies seen, hence the expected number of right tokens. The highest score wins, of equals the
longer match, of those the session's own text. A draft ends where its whole probability falls below `min_token_prob`, or
at `max_spec_factor` times the matched length: short matches make short drafts.

Why `max_spec_factor` is 4 here and 1 elsewhere: how long a draft pays is decided afterwards by length.py, which learns
for each length of match how far it carries. Replaying 48 greedy answers of SmolLM2-135M-Instruct (7,740 tokens, nothing
remembered from one to the next, a further row costing 2 % of a pass), tokens in the time of a plain pass:

    | | chat | code | edit | qa | structured | all |
    | prompt lookup | 1.61 | 2.80 | 2.90 | 2.76 | 1.91 | 2.26 |
    | factor 1 | 1.55 | 2.73 | 2.69 | 2.66 | 1.85 | 2.17 |
    | factor 2 | 1.62 | 2.91 | 2.87 | 2.83 | 1.97 | 2.29 |
    | factor 4 | 1.62 | 2.95 | 2.94 | 2.78 | 1.96 | 2.31 |
    | without bound | 1.62 | 2.93 | 2.96 | 2.84 | 1.97 | 2.32 |

A depth of 12 instead of 24 gave the same; a floor of 0.3 instead of 0.1 helped answers from passages and nothing else.

What is remembered of a session is its output, when it ends, for sessions of the same scope only (draft 4.1). The oldest
outputs go first when all together exceed their bounds. Prompts are never remembered.

Cost, on one busy Zen 4 core in a context of 2,000 tokens: 10 microseconds to add a token, 20 for a draft, 30 with 40
remembered outputs (medians; drafts around a loop take some hundred). Memory: 130 octets a token, at most 360.

Without any match there is one cheap guess, the last token again (decision 102).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from sdcpd.drafting.settings import SuffixSettings
from sdcpd.drafting.source import Draft
from sdcpd.drafting.suffix_matches import Matches, Path, Texts

OUTPUT_LIMIT = 4096
"""Tokens of one output that are remembered, its first: so long does ending a session take ten milliseconds at most."""


class SuffixSource:
    """A DraftSource. The role bounds the number of sessions; all else is bounded by the settings.

    `corpus` holds texts that are always there, for all scopes.
    """

    def __init__(self, settings: SuffixSettings, corpus: Sequence[Sequence[int]] = ()) -> None:
        self._settings = settings
        self._contexts: dict[bytes, _Context] = {}
        self._past = _Past(settings)
        self._corpus = Texts()
        for text in corpus:
            _add(self._corpus, text)

    def open(self, session: bytes, prompt: Sequence[int], scope: bytes | None = None) -> None:
        """Tokens may be opened anew within one session: what it has written is then part of `prompt`."""
        context = _Context(self._settings, scope)
        context.extend(prompt)
        self._contexts[session] = context

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        context = self._contexts[session]
        context.extend(committed)
        context.output += committed[: OUTPUT_LIMIT - len(context.output)]

    def propose(self, session: bytes, limit: int, assumed: Sequence[int] = ()) -> Draft:
        assert limit >= 1
        settings, context = self._settings, self._contexts[session]
        limit = min(limit, settings.num_speculative_tokens)
        best = Path([], 0.0)
        longest = 0
        for matches in self._matches(context, assumed):
            for matched, positions in matches.by_length(settings.max_tree_depth):
                bound = min(limit, max(1, int(matched * settings.max_spec_factor)))
                if (bound, matched) <= (best.score, longest):
                    continue  # no score exceeds its number of tokens
                path = matches.texts.follow(positions, bound, settings.min_token_prob, assumed)
                if (path.score, matched) > (best.score, longest):
                    best, longest = path, matched
        if best.tokens:
            return Draft(tokens=tuple(best.tokens), matched=longest, score=best.score)
        last = assumed[-1:] or context.tokens[-1:]
        return Draft(tokens=tuple(last), matched=0)

    def _matches(self, context: "_Context", assumed: Sequence[int]) -> Iterator[Matches]:
        """Those in the session's own text first."""
        past = self._past.of(context.scope)
        others = [texts for texts in (past, self._corpus) if texts is not None and texts.texts]
        for matches in (context.own, *context.elsewhere(others)):
            if not assumed:
                yield matches
                continue
            further = matches.copy()
            for token in assumed:
                further.step(token)
            yield further

    def close(self, session: bytes) -> None:
        context = self._contexts.pop(session, None)
        if context is not None:
            self._past.remember(context.scope, context.output)


def _add(texts: Texts, text: Sequence[int]) -> None:
    for token in text:
        texts.append(token)
    texts.finish()


class _Context:
    """One session: its text, where its end stands in that and in other texts, and its output for later."""

    def __init__(self, settings: SuffixSettings, scope: bytes | None) -> None:
        self._settings = settings
        self.scope = scope
        self.own = Matches(Texts())
        self.tokens: list[int] = []
        self.output: list[int] = []
        self._walks: list[_Walk] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        if len(self.tokens) > 2 * self._settings.history_tokens:
            # Twice the bound before it is cut to the bound: the cost of beginning anew is spread over as many tokens.
            del self.tokens[: -self._settings.history_tokens]
            self.own = Matches(Texts())
            tokens = self.tokens
        own, texts = self.own, self.own.texts
        for token in tokens:
            own.step(token)
            texts.append(token)
        for walk in self._walks:
            walk.behind += len(tokens)

    def elsewhere(self, others: Sequence[Texts]) -> Iterator[Matches]:
        """Where the end of the text stands in other texts."""
        known = {id(walk.texts): walk for walk in self._walks}
        self._walks = [known.get(id(texts)) or _Walk(texts) for texts in others]
        for walk in self._walks:
            yield walk.caught_up(self.tokens, self._settings.max_tree_depth)


class _Walk:
    """Matches in texts that are not the session's own, `behind` tokens ago."""

    def __init__(self, texts: Texts) -> None:
        self.texts: Final = texts
        self.behind = 0
        self._matches: Matches | None = None
        self._version = 0

    def caught_up(self, tokens: Sequence[int], longest: int) -> Matches:
        """The matches of `tokens`. Begun anew where texts were forgotten since, or added, which no match knows of."""
        matches, version = self._matches, self.texts.end + self.texts.version
        if matches is None or self._version != version or self.behind > longest:
            matches = self._matches = Matches(self.texts)
            self._version, self.behind = version, min(longest, len(tokens))
        for token in tokens[len(tokens) - self.behind :]:
            matches.step(token)
        self.behind = 0
        return matches


class _Past:
    """Outputs of ended sessions by scope; the oldest goes first, whatever its scope."""

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._texts: dict[bytes | None, Texts] = {}
        self._order: deque[bytes | None] = deque()  # the scope of each output, oldest first
        self._tokens = 0

    def of(self, scope: bytes | None) -> Texts | None:
        return self._texts.get(scope)

    def remember(self, scope: bytes | None, output: Sequence[int]) -> None:
        settings = self._settings
        if len(output) < 2 or len(output) > settings.max_cached_tokens or not settings.max_cached_requests:
            return
        _add(self._texts.setdefault(scope, Texts()), output)
        self._order.append(scope)
        self._tokens += len(output)
        while self._tokens > settings.max_cached_tokens or len(self._order) > settings.max_cached_requests:
            self._forget_one()

    def _forget_one(self) -> None:
        scope = self._order.popleft()
        texts = self._texts[scope]
        before = texts.tokens
        texts.forget_first()
        self._tokens -= before - texts.tokens
        if not texts.texts:
            del self._texts[scope]
