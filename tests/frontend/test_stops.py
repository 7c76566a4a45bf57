"""Stop strings: the automata against a slow twin, and the borders that go wrong in the field (bug 14)."""

import random

import pytest

from sdcpd.frontend.stops import StopScanner


def scan(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], bool]:
    """What was shown after each piece, and whether a stop string ended it."""
    scanner = StopScanner(stops)
    shown = []
    for piece in pieces:
        scanned = scanner.push(piece)
        shown.append(scanned.text)
        if scanned.matched:
            return shown, True
    return [*shown, scanner.finish()], False


def slow_twin(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """Look at every beginning of the text in turn."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (("DEFGHIJ",), ["DEF", "G", "HI", "J"], ["", "", "", ""], True),
        (("DEFGHIJ",), ["DEF", "G", "HX"], ["", "", "DEFGHX", ""], False),
        (("STOP",), ["ab ", "x STO", "P yz"], ["ab ", "x ", ""], True),
        (("STOP",), ["ab ", "x STO"], ["ab ", "x ", "STO"], False),
        (("aab",), ["aa", "a", "b"], ["", "a", ""], True),  # the beginning slides along
        (("abc", "b"), ["ab"], ["a"], True),  # the one complete first wins
        (("b", "ab"), ["ab"], [""], True),  # of two complete at once the longest
        ((), ["a", ""], ["a", "", ""], False),
        (("\n\n",), ["x\n", "y\n", "\nz"], ["x", "\ny", ""], True),
    ],
)
def test_borders(stops: tuple[str, ...], pieces: list[str], shown: list[str], matched: bool) -> None:
    assert scan(stops, pieces) == (shown, matched)


def test_the_outcome_does_not_depend_on_borders() -> None:
    draw = random.Random(14)
    ended = 0
    for _ in range(3000):
        text = "".join(draw.choices("ab ", k=draw.randrange(20)))
        stops = tuple("".join(draw.choices("ab ", k=draw.randrange(1, 5))) for _ in range(draw.randrange(1, 5)))
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(6)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        shown, matched = scan(stops, pieces)
        assert ("".join(shown), matched) == slow_twin(stops, text)
        ended += matched
    assert 500 < ended < 2900


def test_nothing_is_held_longer_than_needed() -> None:
    scanner = StopScanner(("abab",))
    assert [scanner.push(character).text for character in "xabac"] == ["x", "", "", "", "abac"]
