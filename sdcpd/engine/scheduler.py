"""Which work shares the next pass (no torch). Rounds first, prefill with what is left of the token budget.

A pass costs nearly the same for a few more rows, so every round and every self-decoded token that is ready goes along,
those that wait longest first. Prefill chunks fill the rest: a long prompt therefore delays a round by at most one
chunk, and never waits for ever, because a share of every pass is kept for it.

Among prompts the shortest go first, so that a short one need not wait for a long one; the oldest gets at least half of
what there is for prompts in a pass, so that it ends.

How long a round waits. Rounds go in the order in which they became ready, and none that fits is left out for a later
one. With a budget of B tokens, at least R = B - B // 4 of them are for rounds. If W tokens of rounds stand before it
and M is the longest round, it runs in one of the next W // (R - M + 1) + 1 passes. Each of these has at most B tokens,
of which at most `chunk_tokens` are of prompts. (It may also have to wait for a page: roles/kv_room.py.)
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from sdcpd.engine.spans import Span


class Ready(Struct, frozen=True):
    """A round (or one self-decoded token) that can be scored now."""

    key: bytes
    span: Span


class Prefill(Struct, frozen=True):
    """A prompt of which `tokens` (all that is left of it) are still to be run from position `start`."""

    key: bytes
    sequence: int
    tokens: tuple[int, ...]
    start: int


class Mix(Struct, frozen=True):
    """The next pass: what it settles for whom, in span order."""

    rounds: tuple[Ready, ...]
    prefills: tuple[tuple[bytes, Span], ...]

    @property
    def spans(self) -> list[Span]:
        return [ready.span for ready in self.rounds] + [span for _, span in self.prefills]

    @property
    def rows(self) -> int:
        """One row a session plus the prefill rows: what load counts; proposed rows are not counted (decision 47)."""
        return len(self.rounds) + sum(len(span.tokens) for _, span in self.prefills)


def choose(
    ready: Sequence[Ready], prefills: Sequence[Prefill], *, budget_tokens: int, chunk_tokens: int, busy: bool
) -> Mix:
    """The next mix within `budget_tokens`; both sequences come oldest first. Never empty when there is work.

    `busy` says that some session is past its prompt, whether or not its next round is ready yet: all prefills of a pass
    together then get at most `chunk_tokens`, which bounds how long a prompt can hold a round up. Otherwise they may use
    the whole budget. A quarter of the budget is kept for prefill so that many busy sessions cannot starve a new one.
    """
    chunk = chunk_tokens if busy else budget_tokens
    kept = min(chunk, budget_tokens // 4) if prefills else 0
    left = budget_tokens - kept
    rounds: list[Ready] = []
    for one in ready:
        if rounds and len(one.span.tokens) > left:
            break
        rounds.append(one)
        left -= len(one.span.tokens)
    left = min(chunk, max(left, 0) + kept)
    return Mix(rounds=tuple(rounds), prefills=tuple(_chunks(prefills, left)))


def _chunks(prefills: Sequence[Prefill], left: int) -> Iterator[tuple[bytes, Span]]:
    """Chunks of at most `left` tokens together: the shortest prompts first, but half of it for the oldest."""
    if not prefills:
        return
    oldest = prefills[0]
    kept = min(len(oldest.tokens), left - left // 2)
    for prompt in sorted(prefills, key=lambda one: len(one.tokens)):  # stable: among equals the oldest first
        if prompt is oldest:
            kept = 0
        tokens = prompt.tokens[: left - kept]
        if tokens:
            left -= len(tokens)
            yield prompt.key, Span(sequence=prompt.sequence, tokens=tokens, start=prompt.start, rows=0)
