"""Suffix decoding: drafts from what followed the end of the context before, by frequency (Oliaro 2025).

Theory. All phrases of the session's own text (prompt and committed output) are in one trie, those of earlier outputs in
another, those of an operator's corpus in a third (suffix_trie.py). Each end of the context that occurred before, long
or short, proposes the likeliest continuation; its *score* is the sum of the probabilities that each further token is
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
    | factor 4 | 1.62 | 2.95 | 2.95 | 2.80 | 1.97 | 2.31 |
    | without bound | 1.62 | 2.93 | 2.96 | 2.84 | 1.97 | 2.32 |

A depth of 12 instead of 24 gave the same; a floor of 0.3 instead of 0.1 helped answers from passages and nothing else.

What is remembered of a session is its output, when it ends, for sessions of the same scope only (draft 4.1): one trie a
scope, the oldest outputs going first when all together exceed their bounds. Prompts are never remembered.

Cost, on one busy Zen 4 core in a context of 2,000 tokens: 8 microseconds to add a token (a copy 40, new text 2), 18 for
a draft, 26 with 40 remembered outputs; memory up to 0.9 KiB a token.

Without any match there is one cheap guess, the last token again (decision 102).
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sdcpd.drafting.settings import SuffixSettings
from sdcpd.drafting.source import Draft
from sdcpd.drafting.suffix_trie import Path, Place, SuffixTrie

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
        self._corpus = SuffixTrie(settings.max_tree_depth)
        for text in corpus:
            self._corpus.extend(text)
            self._corpus.finish()

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
        for matched, place, trie in self._candidates(context, assumed):
            bound = min(limit, max(1, int(matched * settings.max_spec_factor)))
            if (bound, matched) <= (best.score, longest):
                continue  # no score exceeds its number of tokens
            path = trie.follow(place, bound, settings.min_token_prob, assumed)
            if (path.score, matched) > (best.score, longest):
                best, longest = path, matched
        if best.tokens:
            return Draft(tokens=tuple(best.tokens), matched=longest, score=best.score)
        last = assumed[-1:] or context.tokens[-1:]
        return Draft(tokens=tuple(last), matched=0)

    def _candidates(self, context: "_Context", assumed: Sequence[int]) -> Iterator[tuple[int, Place, SuffixTrie]]:
        """(matched tokens, place, trie): the session's own text first, in each trie the longest match first."""
        tries = [trie for trie in (self._past.of(context.scope), self._corpus) if trie is not None and trie.texts]
        walked = [(context.trie, list[Place](context.trie.own_places)), *context.elsewhere(tries)]
        for trie, found in walked:
            places = found
            for token in assumed:
                places = trie.step(places, token)
            for matched, place in zip(range(len(places), 0, -1), places, strict=True):
                yield matched, place, trie

    def close(self, session: bytes) -> None:
        context = self._contexts.pop(session, None)
        if context is not None:
            self._past.remember(context.scope, context.output)


class _Context:
    """One session: its text as a trie, where its end stands in other tries, and its output for later."""

    def __init__(self, settings: SuffixSettings, scope: bytes | None) -> None:
        self._settings = settings
        self.scope = scope
        self.trie = SuffixTrie(settings.max_tree_depth)
        self.tokens: list[int] = []
        self.output: list[int] = []
        self._walks: list[_Walk] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        if len(self.tokens) > 2 * self._settings.history_tokens:
            # Twice the bound before it is cut to the bound: the cost of a new trie is spread over as many tokens.
            del self.tokens[: -self._settings.history_tokens]
            self.trie = SuffixTrie(self._settings.max_tree_depth)
            tokens = self.tokens
        self.trie.extend(tokens)
        for walk in self._walks:
            walk.behind += len(tokens)

    def elsewhere(self, tries: Sequence[SuffixTrie]) -> Iterator[tuple[SuffixTrie, list[Place]]]:
        """Where the ends of the text occur in other tries."""
        known = {id(walk.trie): walk for walk in self._walks}
        self._walks = [known.get(id(trie)) or _Walk(trie) for trie in tries]
        for walk in self._walks:
            walk.catch_up(self.tokens)
            yield walk.trie, walk.places


class _Walk:
    """Where a growing text stands in a trie, `behind` tokens ago. Places found in another version are found anew."""

    def __init__(self, trie: SuffixTrie) -> None:
        self.trie = trie
        self.places: list[Place] = []
        self.behind = 0
        self._version = -1

    def catch_up(self, tokens: Sequence[int]) -> None:
        if self._version != self.trie.version or self.behind >= self.trie.max_depth:
            self.places, self._version = self.trie.places(tokens), self.trie.version
        elif self.behind:
            for token in tokens[-self.behind :]:
                self.places = self.trie.step(self.places, token)
        self.behind = 0


class _Past:
    """Outputs of ended sessions by scope; the oldest goes first, whatever its scope."""

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._tries: dict[bytes | None, SuffixTrie] = {}
        self._order: OrderedDict[int, bytes | None] = OrderedDict()  # number of an output -> its scope
        self._numbers = 0
        self._tokens = 0

    def of(self, scope: bytes | None) -> SuffixTrie | None:
        return self._tries.get(scope)

    def remember(self, scope: bytes | None, output: Sequence[int]) -> None:
        settings = self._settings
        if len(output) < 2 or len(output) > settings.max_cached_tokens or not settings.max_cached_requests:
            return
        trie = self._tries.setdefault(scope, SuffixTrie(settings.max_tree_depth))
        trie.extend(output)
        trie.finish()
        self._order[self._numbers] = scope
        self._numbers += 1
        self._tokens += len(output)
        while self._tokens > settings.max_cached_tokens or len(self._order) > settings.max_cached_requests:
            self._forget_one()

    def _forget_one(self) -> None:
        _, scope = self._order.popitem(last=False)
        trie = self._tries[scope]
        before = trie.tokens
        trie.forget_first()
        self._tokens -= before - trie.tokens
        if not trie.texts:
            del self._tries[scope]
