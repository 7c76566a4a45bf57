"""A trie over all suffixes of texts, with counts: what followed a phrase, how often, and where last.

Theory. Every suffix of every text passes through the nodes that spell it, down to `max_depth` tokens; a node counts its
passes. The children of the node that spells a phrase are then the tokens that followed it, with their frequencies,
which is what SuffixDecoding (Oliaro 2025) drafts from.

A plain trie of that kind has `max_depth` nodes a token. Here a phrase that occurred once has no node: its entry in its
parent is the *position* of the token that follows it, and the text there is the rest of the path. Only a second
occurrence makes it a node. So memory is about that of the repeated phrases, and a longer path than `max_depth` can be
read where it was last seen.

Growing. The suffixes of the text being written that occurred before are the *active* nodes, deepest first, the root
last. There is one for each length up to the longest: whatever a phrase's occurrences are, those of its ends are more. A
token moves each of them to a child, or ends it there as a position. New text costs two or three steps a token, a copy
`max_depth` of them.

Forgetting. Texts go oldest first (`forget_first`): each of its suffixes is walked down once more, counting back. A
node's latest pass is of its newest text, so what is left needs no repair but for the favourite child.

Among the children of a node the favourite is the one with most passes, of equals the one that was passed last.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

END: Final = -1
"""Stands behind each finished text. No token is negative."""


class Node:
    """A phrase that occurred more than once. `count` suffixes pass it, `continued` of them go on to a child.

    `children` maps the next token to a node, or to the position that follows it when only one suffix goes there.
    `favourite` is the best child's token, `favourite_count` its passes; `latest` the position after the latest pass.
    """

    __slots__ = ("children", "continued", "count", "favourite", "favourite_count", "latest")

    def __init__(self, count: int, latest: int) -> None:
        self.count = count
        self.continued = 0
        self.children: dict[int, Node | int] = {}
        self.favourite = END
        self.favourite_count = 0
        self.latest = latest


Place = Node | int
"""Where a phrase leads: its node, or the position after its only occurrence."""


class Path:
    """What would follow a phrase, and how sure that is: `score` is the expected number of right tokens."""

    __slots__ = ("score", "tokens")

    def __init__(self, tokens: list[int], score: float) -> None:
        self.tokens = tokens
        self.score = score


class SuffixTrie:
    """Texts one after another; the last one may still grow. Positions count from the first token ever added."""

    def __init__(self, max_depth: int) -> None:
        assert max_depth >= 2
        self.max_depth: Final = max_depth
        self.version = 0  # moves with every change: a place found before it may be gone
        self._text: list[int] = []
        self._first = 0  # position of _text[0]
        self._root = Node(0, 0)
        self._active: list[Node] = [self._root]
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

    def extend(self, tokens: Sequence[int]) -> None:
        """The growing text goes on."""
        self.version += 1
        self._growing += len(tokens)
        text, root, depth_limit = self._text, self._root, self.max_depth
        active = self._active
        after = self._first + len(text)
        for token in tokens:
            text.append(token)
            after += 1
            if len(active) > depth_limit:
                del active[0]  # nothing is kept below this depth
            alive: list[Node] = []
            depth = len(active)
            for node in active:
                node.continued += 1
                child = node.children.get(token)
                if child is None:
                    node.children[token] = after
                    count = 1
                else:
                    if isinstance(child, int):
                        child = self._made_node(node, token, child, depth)
                    count = child.count = child.count + 1
                    child.latest = after
                    alive.append(child)
                if count >= node.favourite_count:
                    node.favourite, node.favourite_count = token, count
                depth -= 1
            alive.append(root)
            active = alive
        self._active = active

    def _made_node(self, parent: Node, token: int, position: int, depth: int) -> Node:
        """A second suffix comes to a phrase of `depth` tokens: what was a position becomes a node."""
        node = Node(1, position)
        parent.children[token] = node
        at = position - self._first
        if depth < self.max_depth and at < len(self._text) and self._text[at] != END:
            node.children[self._text[at]] = position + 1
            node.continued = node.favourite_count = 1
            node.favourite = self._text[at]
        return node

    def finish(self) -> None:
        """The growing text is complete; the next token begins another one."""
        self.version += 1
        self._lengths.append(self._growing)
        self._growing = 0
        self._text.append(END)
        self._active = [self._root]

    def forget_first(self) -> None:
        """Drop the oldest finished text. Never while another one grows."""
        assert self._lengths
        assert self._growing == 0
        self.version += 1
        length = self._lengths.popleft()
        for start in range(length):
            self._forget_suffix(start)
        del self._text[: length + 1]
        self._first += length + 1

    def _forget_suffix(self, start: int) -> None:
        node = self._root
        for token in self._text[start : start + self.max_depth]:
            if token == END:
                return
            node.continued -= 1
            child = node.children[token]
            left = child if isinstance(child, Node) and child.count > 1 else None
            if left is None:
                del node.children[token]  # nobody else passed here
            else:
                left.count -= 1
            if token == node.favourite:
                self._choose_favourite(node)
            if left is None:
                return
            node = left

    def _choose_favourite(self, node: Node) -> None:
        node.favourite, node.favourite_count = END, 0
        latest = -1
        for token, child in node.children.items():
            count, last = (child.count, child.latest) if isinstance(child, Node) else (1, child)
            if (count, last) > (node.favourite_count, latest):
                node.favourite, node.favourite_count, latest = token, count, last

    # Reading

    @property
    def own_places(self) -> list[Node]:
        """Places of the growing text's own ends that occurred before, the longest first.

        Without the empty one, and without one at the greatest depth: all that is known there is the end itself.
        """
        return self._active[len(self._active) > self.max_depth : -1]

    def places(self, ending: Sequence[int]) -> list[Place]:
        """Places of the ends of `ending` that occur here, the longest first; at most `max_depth` tokens are looked at.

        Where the i-th of n places is, the phrase has n - i tokens.
        """
        places: list[Place] = []
        for token in ending[-self.max_depth :]:
            places = self.step(places, token)
        return places

    def step(self, places: list[Place], token: int) -> list[Place]:
        """Places of the ends of a text that grew by `token`, from those before it."""
        text, first = self._text, self._first
        if len(places) >= self.max_depth:
            places = places[1:]
        found: list[Place] = []
        for place in (*places, self._root):
            if isinstance(place, Node):
                child = place.children.get(token)
                if child is not None:
                    found.append(child)
            elif place - first < len(text) and text[place - first] == token:
                found.append(place + 1)
        return found

    def follow(self, place: Place, limit: int, floor: float, assumed: Sequence[int] = ()) -> Path:
        """The likeliest continuation from `place`: up to `limit` tokens, as long as the whole of it has at least the
        probability `floor`. What runs into the end of the growing text goes on into what is `assumed` to stand behind
        it, and then into itself."""
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while isinstance(place, Node):
            if not place.continued:
                if not self._goes_on(place):
                    return Path(tokens, score)
                place = place.latest
                break
            probability *= place.favourite_count / place.continued
            if probability < floor or len(tokens) == limit:
                return Path(tokens, score)
            tokens.append(place.favourite)
            score += probability
            place = place.children[place.favourite]
        copied = self._copy(place, limit - len(tokens), [*assumed, *tokens])
        return Path(tokens + copied, score + probability * len(copied))

    def _goes_on(self, node: Node) -> bool:
        """Has a node without children any because it lies at the greatest depth? Else all its phrases end there."""
        at = node.latest - self._first
        return at == len(self._text) or self._text[at] != END

    def _copy(self, position: int, limit: int, behind: list[int]) -> list[int]:
        """Up to `limit` tokens from `position`. `behind` stands behind the end of the growing text, before them."""
        at = position - self._first
        run = self._text[at : at + limit]
        if END in run:
            return run[: run.index(END)]
        if len(run) < limit:
            whole = [*behind, *run]
            while whole and len(run) < limit:
                piece = whole[: limit - len(run)]
                run += piece
                whole += piece
        return run
