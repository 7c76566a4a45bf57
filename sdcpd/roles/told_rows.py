"""Log-probabilities of output that other verifiers committed: told by the rows of the prefill that runs it (114).

A session that is taken over with `sdcpd_logprobs` owes entries for tokens it did not score. Their rows come by the way
while keys and values of the prefix are computed anew, before the open is answered, so no reader ever waits for them. A
row holds a whole vocabulary for a moment; `ROWS_AT_ONCE` bounds how many of one session a pass has.
"""

from typing import Final

from msgspec.structs import replace

from sdcpd.engine.spans import Row, Span, Told
from sdcpd.protocol.prefix import Prefix

ROWS_AT_ONCE: Final = 128
"""Of a vocabulary of 150,000: 77 MB in float32."""


def runnable(prefix: Prefix, start: int, end: int) -> int:
    """Where a prefill of known positions from `start` to `end` has to stop for this pass."""
    first = _first_row(prefix)
    return end if first is None else min(end, max(first, start) + ROWS_AT_ONCE)


def telling(prefix: Prefix, span: Span, alternatives: int) -> Span:
    """The prefill span, with those of its rows that tell of committed tokens without an entry."""
    first = _first_row(prefix)
    end = span.start + len(span.tokens)
    if first is None or end <= first:
        return span
    begin = max(first, span.start)
    following = prefix.known[begin + 1 : end + 1]
    return replace(span, rows=end - begin, judge=Told(following), logprobs=alternatives)


def told(prefix: Prefix, rows: tuple[Row, ...]) -> None:
    """Keep what the rows of a span said, in its order."""
    prefix.logprobs.extend(row.logprobs or b"" for row in rows)


def _first_row(prefix: Prefix) -> int | None:
    """Position of the first row that is to tell something: the one before the first token without an entry."""
    missing = len(prefix.logprobs)
    return None if missing >= len(prefix.output) else len(prefix.prompt) - 1 + missing
