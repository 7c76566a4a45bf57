"""Texts, and where the end of a growing text stands in them: what followed a phrase, how often, and where last.

Theory. What SuffixDecoding (Oliaro 2025) reads off a tree of all suffixes is, for each end of the context, where it
occurred before and what came then. Here nothing is kept but the texts and, for each token and each pair of tokens, the
places where it stands. The *matches* of a context are the places in the texts that agree with its end in two tokens or
more. A token more leaves those that go on with it, and adds the places of its pair as new ones. So the matches of each
length are there without a search, longest first, and the frequencies of what follows are counted from the texts when a
draft is made. Places of the last token alone are looked at where there is nothing longer.

Against a tree of counts: adding a token is an append, forgetting one is its reverse, and memory does not depend on how
much repeats itself (a first version kept a trie with nodes for repeated phrases: 0.8 KiB a token on mixed text, ten
times as much where a passage stood twice, and ending a session took a second). The price is that common pairs have many
places: only the `PLACES_LIMIT` latest are looked at for new matches. Longer matches live on, however old they are.

Among what follows a phrase the most frequent token is the likeliest, of equals the one that followed last.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Final

END: Final = -1
"""Stands behind each finished text. No token is negative."""
PLACES_LIMIT: Final = 16
"""Latest places of a pair of tokens, or of a token, that become matches of it: frequencies are counted over so many."""
MATCHES_LIMIT: Final = 32
"""Matches kept, the longest: in a text that goes round in a loop there are as many as rounds, and all say the same."""
TOKEN_BITS: Final = 32


class Path:
    """What would follow, and how sure that is: `score` is the expected number of right tokens."""

    __slots__ = ("score", "tokens")

    def __init__(self, tokens: list[int], score: float) -> None:
        self.tokens = tokens
        self.score = score


class Texts:
    """Texts one after another; the last one may still grow. Positions count from the first token ever added."""

    def __init__(self) -> None:
        self.version = 0  # moves when something is forgotten: positions found before it may be gone
        self._text: list[int] = []
        self._first = 0  # position of _text[0]
        self._places: dict[int, list[int]] = {}  # token, or pair as one number -> positions behind it, rising
        self._lengths: deque[int] = deque()  # of the finished texts
        self._growing = 0  # tokens of the growing one

    @property
    def texts(self) -> int:
        """Finished texts held."""
        return len(self._lengths)

    @property
    def tokens(self) -> int:
        """Tokens held, of finished texts and the growing one."""
        return len(self._text) - len(self._lengths)

    @property
    def end(self) -> int:
        """The position that the next token will have."""
        return self._first + len(self._text)

    def append(self, token: int) -> None:
        """The growing text goes on."""
        text, places = self._text, self._places
        behind = self._first + len(text) + 1
        places.setdefault(token, []).append(behind)
        if self._growing:
            places.setdefault(_pair(text[-1], token), []).append(behind)
        text.append(token)
        self._growing += 1

    def finish(self) -> None:
        """The growing text is complete; the next token begins another one."""
        self._lengths.append(self._growing)
        self._growing = 0
        self._text.append(END)

    def forget_first(self) -> None:
        """Drop the oldest finished text. Never while another one grows."""
        assert self._lengths
        assert self._growing == 0
        self.version += 1
        length = self._lengths.popleft()
        text = self._text[:length]
        for key in (*text, *map(_pair, text, text[1:])):
            places = self._places[key]
            if len(places) == 1:
                del self._places[key]
            else:
                del places[0]
        del self._text[: length + 1]
        self._first += length + 1

    def latest_places(self, *tokens: int) -> list[int]:
        """Positions behind the latest occurrences of a token or a pair of tokens, the latest first."""
        places = self._places.get(tokens[0] if len(tokens) == 1 else _pair(*tokens))
        return [] if places is None else places[: -PLACES_LIMIT - 1 : -1]

    def goes_on(self, position: int, token: int) -> bool:
        """Does `token` stand at `position`?"""
        at = position - self._first
        return at < len(self._text) and self._text[at] == token

    def follow(self, positions: list[int], limit: int, floor: float, assumed: Sequence[int] = ()) -> Path:
        """The likeliest continuation of what ends before `positions`: up to `limit` tokens, as long as the whole of it
        has at least the probability `floor`. What runs into the end of the growing text goes on into what is `assumed`
        to stand behind it, and then into itself."""
        text, size = self._text, len(self._text)
        places = [position - self._first for position in positions]
        whole = text[places[0] : places[0] + limit]
        if len(whole) == limit and END not in whole and all(text[at : at + limit] == whole for at in places):
            return Path(whole, float(limit))  # all agree; most long matches do
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < limit:
            if len(places) == 1:
                copied = self._copy(places[0], limit - len(tokens), [*assumed, *tokens])
                return Path(tokens + copied, score + probability * len(copied))
            places = [place for place in places if place < size and text[place] != END]
            if not places:
                break
            best, count = self._likeliest(places)
            probability *= count / len(places)
            if probability < floor:
                break
            tokens.append(best)
            score += probability
            places = [place + 1 for place in places if text[place] == best]
        return Path(tokens, score)

    def _likeliest(self, places: list[int]) -> tuple[int, int]:
        """The most frequent token at these indexes, of equals the one that stands last, and how often it is there."""
        text = self._text
        found = [text[place] for place in places]
        first = found[0]
        if found.count(first) == len(found):
            return first, len(found)
        counts = Counter(found)
        ((best, most), (_, next_most), *_) = counts.most_common(2)
        if next_most == most:
            best = text[max(place for place in places if counts[text[place]] == most)]
        return best, most

    def _copy(self, at: int, limit: int, behind: list[int]) -> list[int]:
        """Up to `limit` tokens from index `at`. `behind` stands behind the end of the growing text, before them."""
        run = self._text[at : at + limit]
        if END in run:
            return run[: run.index(END)]
        if len(run) < limit and (not self._text or self._text[-1] != END):
            whole = [*behind, *run]
            while whole and len(run) < limit:
                piece = whole[: limit - len(run)]
                run += piece
                whole += piece
        return run


def _pair(token: int, next_token: int) -> int:
    """Two tokens as one number, above every token."""
    return (token + 1 << TOKEN_BITS) + next_token


class Matches:
    """Where the end of a context stands in `texts`.

    A match of two tokens or more is kept as (distance, birth): after n tokens of the context it stands at position
    n - distance, and its first agreeing token was the context's token `birth`. Neither changes while it lives, and
    older ones come first.
    """

    __slots__ = ("_alive", "_count", "_last", "texts")

    def __init__(self, texts: Texts) -> None:
        self.texts: Final = texts
        self._count = 0  # tokens of the context
        self._last = END
        self._alive: list[tuple[int, int]] = []

    def copy(self) -> "Matches":
        copied = Matches(self.texts)
        copied._count, copied._last = self._count, self._last
        copied._alive = self._alive  # replaced by a step, never changed
        return copied

    def step(self, token: int) -> None:
        """The context goes on. Where it is the growing text itself, before that one does."""
        count, goes_on = self._count, self.texts.goes_on
        alive = [match for match in self._alive if goes_on(count - match[0], token)]
        count = self._count = count + 1
        if self._last != END and (places := self.texts.latest_places(self._last, token)):
            known = {distance for distance, _ in alive}
            alive += [(count - place, count - 2) for place in places if count - place not in known]
            del alive[MATCHES_LIMIT:]
        self._last = token
        self._alive = alive

    def by_length(self, longest: int) -> Iterator[tuple[int, list[int]]]:
        """(n, positions) for each n such that some place agrees in exactly n tokens, longest first: the positions
        behind all places that agree in n tokens or more. Beyond `longest` >= 2 tokens all agree alike."""
        count, alive = self._count, self._alive
        if not alive and self._last != END:
            places = self.texts.latest_places(self._last)
            if places:
                yield 1, places
        positions: list[int] = []
        for number, (distance, birth) in enumerate(alive):
            positions.append(count - distance)
            length = min(longest, count - birth)
            if number + 1 == len(alive) or min(longest, count - alive[number + 1][1]) < length:
                yield length, positions.copy()
