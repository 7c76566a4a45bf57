"""Does a text end in a loop? That is a sign of a serving fault as much as of a weak model, so it is watched."""

from collections.abc import Sequence
from typing import Final

LAST_TOKENS: Final = 64
"""How much of the end is looked at: a table or a list of short items repeats a few times, hardly for so long."""
LONGEST_PERIOD: Final = 16
"""A loop of more tokens goes round fewer than four times in that."""


def ends_in_a_loop(tokens: Sequence[int]) -> bool:
    """Whether the last 64 tokens are one run of at most 16, again and again. Shorter texts never are."""
    last = tokens[-LAST_TOKENS:]
    if len(last) < LAST_TOKENS:
        return False
    return any(last[period:] == last[:-period] for period in range(1, LONGEST_PERIOD + 1))
