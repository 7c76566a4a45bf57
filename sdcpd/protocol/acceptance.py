"""Acceptance rule 1 on plain values, and the cut at stop tokens and max_new (draft 6.3 step 7, 6.4).

This is the reference: short enough to be checked by eye. Rules 2 and 65281 are not served yet.
"""

from collections.abc import Sequence

from msgspec import Struct


class Accepted(Struct, frozen=True):
    """What a rule gives: `accepted` = a, and the one additional token."""

    accepted: int
    additional: int


def argmax(row: Sequence[float]) -> int:
    """Most probable token of one row of V logits, ties to the smallest id (draft 4.1, decision 68)."""
    best = max(row)
    return next(token for token, logit in enumerate(row) if logit == best)


def accept_greedy(proposed: Sequence[int], best: Sequence[int]) -> Accepted:
    """Rule 1: accept x[i] while it equals argmax p[i]; the additional token is argmax p[a+1] (6.4).

    `proposed` holds x[1..M], M >= 0; `best` holds argmax p[1..M+1]. M = 0 is a self-decoded round.
    """
    assert len(best) == len(proposed) + 1, (len(best), len(proposed))
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == best[accepted]:
        accepted += 1
    return Accepted(accepted=accepted, additional=best[accepted])


class Cut(Struct, frozen=True):
    """The tokens a round commits, and whether generation ends with them."""

    emitted: tuple[int, ...]
    finished: bool


def cut(tokens: Sequence[int], *, stop: Sequence[int], remaining: int) -> Cut:
    """Truncate after the first stop token, which is kept, and at `remaining` tokens (6.3 step 7, decision 19).

    One list results, and it alone is counted, hashed, logged and shown.
    """
    emitted = tuple(tokens[:remaining])
    for position, token in enumerate(emitted):
        if token in stop:
            return Cut(emitted=emitted[: position + 1], finished=True)
    return Cut(emitted=emitted, finished=len(emitted) == remaining)
