"""Stop strings over token and block borders.

Theory: for each stop string a small automaton (Knuth, Morris, Pratt 1977) knows how many characters of the text's end
are a beginning of that string. Text is held back while it may still be the beginning of a stop string, which is the
largest of these numbers, and let go as soon as it cannot. A character is looked at once, however the text was cut
into pieces, so the outcome is a function of the text alone: the stop string that is complete first wins, and of
several complete at the same character the longest.
"""

from typing import Final

from msgspec import Struct


class Scanned(Struct, frozen=True):
    """`text` may be shown; `matched`: a stop string is complete, what follows it is dropped."""

    text: str
    matched: bool


class StopScanner:
    """One per answer. Cost per character: amortised constant for each stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string would end every answer before it begins"
        self._stops: Final = stops
        self._fallbacks: Final = tuple(_fallback(stop) for stop in stops)
        self._states: Final = [0] * len(stops)  # characters of each stop that the text's end has matched
        self._held = ""
        self._matched = False

    def push(self, text: str) -> Scanned:
        """Take the next piece of the text."""
        assert not self._matched, "text after a stop string"
        if not self._stops:
            return Scanned(text, False)
        for index, character in enumerate(text):
            longest = self._step(character)
            if longest:
                self._matched = True
                seen = self._held + text[: index + 1]
                self._held = ""
                return Scanned(seen[: len(seen) - longest], True)
        seen = self._held + text
        shown = len(seen) - max(self._states)
        self._held = seen[shown:]
        return Scanned(seen[:shown], False)

    def finish(self) -> str:
        """What was held back, once the text has ended without a stop string."""
        assert not self._matched, "text after a stop string"
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """Move all automata by a character; the length of the longest stop string now complete, or 0."""
        longest = 0
        for number, stop in enumerate(self._stops):
            state = self._states[number]
            while state and stop[state] != character:
                state = self._fallbacks[number][state - 1]
            if stop[state] == character:
                state += 1
            self._states[number] = state
            if state == len(stop):
                longest = max(longest, state)
        return longest


def _fallback(stop: str) -> tuple[int, ...]:
    """For each i the length of the longest proper beginning of `stop` that ends at i."""
    lengths = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[index] != stop[state]:
            state = lengths[state - 1]
        if stop[index] == stop[state]:
            state += 1
        lengths[index] = state
    return tuple(lengths)
