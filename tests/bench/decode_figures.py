"""What decoded texts say: figures of one method over the texts of a family."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from tests.bench.decoding import POSITIONS, Text

GRID: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 33, 48, 65)
"""Rows for which passes are timed; those between lie on a line."""


def tokens_per_s(texts: Sequence[Text]) -> float:
    """Of decoding. Texts that end in their first round have no part in it."""
    ms = sum(text.decode_ms for text in texts)
    return sum(text.decoded_tokens for text in texts) / ms * 1000 if ms else 0.0


def at_rows(cost_ms: Mapping[int, float], rows: float) -> float:
    """Time of a pass over `rows`, between the nearest that were measured."""
    if rows in cost_ms:
        return cost_ms[int(rows)]
    low = max((one for one in cost_ms if one < rows), default=min(cost_ms))
    high = min((one for one in cost_ms if one > rows), default=max(cost_ms))
    share = (rows - low) / (high - low) if high > low else 0.0
    return cost_ms[low] + share * (cost_ms[high] - cost_ms[low])


def grid_for(texts: Sequence[Text]) -> tuple[int, ...]:
    """The rows of `GRID` that are needed for these texts."""
    largest = max((rows for text in texts for rows in text.rows), default=1)
    above = next((rows for rows in GRID if rows >= largest), GRID[-1])
    return tuple(rows for rows in GRID if rows <= above)


def method_figures(
    texts: Sequence[Text], plain: Sequence[Text] | None, greedy: Sequence[Text] | None, cost_ms: Mapping[int, float]
) -> dict[str, float]:
    """One method over a family. `plain` is our own decoding, `greedy` that of transformers, of the same prompts;
    `cost_ms` the time of a pass by its rows."""
    speed = tokens_per_s(texts)
    tokens = sum(len(text.tokens) for text in texts)
    rounds = sum(max(0, len(text.rows) - 1) for text in texts)
    figures = {
        "tokens_per_s": speed,
        "first_token_ms": sum(text.first_ms for text in texts) / len(texts),
        "cycles_per_1k": 1000 * sum(len(text.rows) for text in texts) / tokens,
        "ms_per_cycle": sum(text.decode_ms for text in texts) / rounds if rounds else 0.0,
    }
    if greedy is not None and (other := tokens_per_s(greedy)):
        figures["ratio_to_transformers"] = speed / other
    if plain is None or not (own := tokens_per_s(plain)):
        return figures
    figures["ratio_to_plain"] = speed / own
    figures["equal_texts"] = sum(a.tokens == b.tokens for a, b in zip(texts, plain, strict=True)) / len(texts)
    drafts = sum(text.drafts for text in texts)
    if not drafts:
        return figures
    passes = Counter(rows for text in texts for rows in text.rows)
    mean_ms = sum(count * at_rows(cost_ms, rows) for rows, count in passes.items()) / passes.total()
    ceiling = tokens / passes.total() * at_rows(cost_ms, 1) / mean_ms
    settled = sum(text.settled_drafts for text in texts)
    looked_up = sum(text.lookup_drafts for text in texts)
    return figures | {
        "ratio_of_ceiling": figures["ratio_to_plain"] / ceiling,
        "ceiling": ceiling,
        "mean_acceptance_length": 1 + sum(text.accepted for text in texts) / drafts,
        "mean_proposed": sum(text.proposed for text in texts) / drafts,
        "cache_draft_share": looked_up / settled if settled else 0.0,
        "cache_accepted_length": sum(text.lookup_accepted for text in texts) / looked_up if looked_up else 0.0,
    }


def acceptance_by_position(texts: Sequence[Text]) -> dict[str, float]:
    """By position from 1: of the proposals that long, the share in which it was accepted."""
    found = {}
    for place, position in enumerate(POSITIONS):
        long_enough = sum(rows > position for text in texts for rows in text.rows)
        if long_enough:
            found[f"{position}"] = sum(text.accepted_at[place] for text in texts if text.accepted_at) / long_enough
    return found
