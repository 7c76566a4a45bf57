"""Prompt lookup: a draft copied from where the last tokens stood before (Saxena 2023, "prompt lookup decoding").

Theory. The context is the prompt followed by the committed output. Take its last n tokens, longest n first; find the
latest earlier place where they stand; what followed there is the draft. When the copy runs into the end of the
context it goes on into what it has just drafted, so that a loop of period k is drafted to any length.

Why the latest place and not the first: replaying 48 greedy answers of SmolLM2-135M-Instruct (7,740 tokens), with M
chosen by length.py, the latest gave 3.19 tokens a pass on edit tasks and the first 3.10; chat 1.69 and 1.63, questions
with passages 3.07 and 2.85, code 3.06 and 3.12, structured output 2.05 both. Without going on into its own draft: 3.14
on edit tasks.

Cost. Each n has a hash index from n-gram to the position behind its latest occurrence, grown by one entry a committed
token, so a draft costs n look-ups whatever the length of the context. An n-gram enters its index only once a token
follows it: the context's own end is never its own match.

Without any match there is one cheap guess (decision 102): what last followed the last token, or that token again.
"""

from collections.abc import Sequence

from sdcpd.drafting.settings import LookupSettings
from sdcpd.drafting.source import Draft

MATCH_LIMIT = 32
"""How far back a match is followed to tell how long it is. Longer ones say nothing more about what comes next."""


class LookupSource:
    """A DraftSource. Its state is one `_History` a session; the role bounds the number of sessions."""

    def __init__(self, settings: LookupSettings) -> None:
        self._settings = settings
        self._histories: dict[bytes, _History] = {}

    def open(self, session: bytes, prompt: Sequence[int], scope: bytes | None = None) -> None:  # noqa: ARG002  # nothing is remembered for others
        history = _History(self._settings)
        history.extend(prompt)
        self._histories[session] = history

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        self._histories[session].extend(committed)

    def propose(self, session: bytes, limit: int, assumed: Sequence[int] = ()) -> Draft:
        assert limit >= 1
        return self._histories[session].propose(min(limit, self._settings.num_speculative_tokens), assumed)

    def close(self, session: bytes) -> None:
        self._histories.pop(session, None)


class _History:
    """The tokens of one session and their indexes.

    `_tokens` is the last part of prompt and output, `_indexes[n]` maps each n-gram that has a successor in it to the
    position of that successor, the latest one winning. Positions count from the start of `_tokens`.
    """

    def __init__(self, settings: LookupSettings) -> None:
        self._history_tokens = settings.history_tokens
        self._tokens: list[int] = []
        # 1 serves the cheap guess even where it is too short for a match.
        lengths = range(settings.prompt_lookup_min, settings.prompt_lookup_max + 1)
        self._lengths = tuple(reversed(lengths))
        self._indexes: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sorted({1, *lengths})}

    def extend(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        self._tokens.extend(tokens)
        if len(self._tokens) > 2 * self._history_tokens:
            # Twice the bound before it is cut to the bound: the cost of indexing anew is spread over as many tokens.
            del self._tokens[: -self._history_tokens]
            known = 0
            for index in self._indexes.values():
                index.clear()
        for n, index in self._indexes.items():
            # Successors at known.. are new, and so are the n-grams before them; a successor needs n tokens before it.
            first = max(known, n)
            starts = (self._tokens[first - n + k :] for k in range(n))
            index.update(zip(zip(*starts, strict=False), range(first, len(self._tokens)), strict=False))

    def propose(self, limit: int, assumed: Sequence[int]) -> Draft:
        self._tokens += assumed  # for the moment, and in no index
        draft = self._propose(limit)
        del self._tokens[len(self._tokens) - len(assumed) :]
        return draft

    def _propose(self, limit: int) -> Draft:
        if not self._tokens:
            return Draft(tokens=(), matched=0)
        for n in self._lengths:
            at = self._find(n)
            if at is not None:
                return Draft(tokens=self._copy(at, limit), matched=self._agreement(at, n))
        at = self._find(1)
        return Draft(tokens=(self._tokens[-1 if at is None else at],), matched=0)

    def _find(self, n: int) -> int | None:
        if len(self._tokens) <= n:
            return None
        return self._indexes[n].get(tuple(self._tokens[-n:]))

    def _copy(self, at: int, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens from position `at` on; past the end of the context the copy repeats with its period."""
        tokens = self._tokens
        run = tokens[at : at + limit]
        while len(run) < limit:
            run.extend(run[: limit - len(run)])
        return tuple(run)

    def _agreement(self, at: int, n: int) -> int:
        """How many tokens before `at` equal the context's last ones, given that n do."""
        tokens = self._tokens
        longest = min(MATCH_LIMIT, at)
        while n < longest and tokens[at - 1 - n] == tokens[-1 - n]:
            n += 1
        return n
