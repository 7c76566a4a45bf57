"""What the output must be: plain greedy decoding of the toy target, no speculation and no network.

The target's next token depends on every token before it, so that any wrong, missing or doubled one changes all that
follow.
"""

import zlib
from collections.abc import Sequence

VOCABULARY = 16


def next_token(prefix: Sequence[int]) -> int:
    return zlib.crc32(bytes(prefix)) % VOCABULARY


def output(prompt: Sequence[int], max_new: int, stop: Sequence[int]) -> tuple[int, ...]:
    """All tokens of an undisturbed answer."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_new:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tuple(tokens[len(prompt) :])
