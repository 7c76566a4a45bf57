"""The acceptance rules on plain values, and the cut at stop tokens and max_new (draft 6.3 step 7, 6.4).

This is the reference: short enough to be checked by eye. engine/acceptance.py does rules 2 and 65281 on tensors, and a
test holds the two to each other. Target rows come as integer masses (distributions.py); draws come from draws.py.

Rule 65281 (decision 115) is rule 1 over other tokens: the target draws its token at each position, and a proposed token
is accepted when it equals the draw. `accept_equal` is both.
"""

from collections.abc import Sequence

from msgspec import Struct

from sdcpd.protocol.distributions import SCALE, draw
from sdcpd.protocol.draft_rows import CheckedRow, ids_of, values_of
from sdcpd.protocol.draws import RoundDraws


class Accepted(Struct, frozen=True):
    """What a rule gives: `accepted` = a, and the one additional token."""

    accepted: int
    additional: int


def argmax(row: Sequence[float]) -> int:
    """Most probable token of one row of V logits, ties to the smallest id (draft 4.1, decision 68)."""
    best = max(row)
    return next(token for token, logit in enumerate(row) if logit == best)


def accept_equal(proposed: Sequence[int], chosen: Sequence[int]) -> Accepted:
    """Rules 1 and 65281: accept x[i] while it equals the target's own choice; the additional token is its next (6.4).

    `proposed` holds x[1..M], M >= 0; `chosen` the target's choice at p[1..M+1]: the argmax under rule 1, the draw by
    u(n) under rule 65281. M = 0 is a self-decoded round.
    """
    assert len(chosen) == len(proposed) + 1, (len(chosen), len(proposed))
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == chosen[accepted]:
        accepted += 1
    return Accepted(accepted=accepted, additional=chosen[accepted])


def draw_each(target: Sequence[Sequence[int]], draws: RoundDraws) -> tuple[int, ...]:
    """The target's own token at each row, by inverse CDF with that row's value: rule 65281, and a self-decoded round
    under rule 2."""
    return tuple(draw(masses, u) for masses, u in zip(target, draws.tokens, strict=True))


def accept_speculative(
    proposed: Sequence[int], target: Sequence[Sequence[int]], draft: Sequence[CheckedRow], draws: RoundDraws
) -> Accepted:
    """Rule 2 (6.4). `target` holds p[1..M+1] as masses, `draft` the checked rows q[1..M].

    x[i] is accepted if r * q(x) < p(x), both by their row's sum (decisions 72, 73): a token that the target gives no
    mass is never accepted. At the first that is not, the additional token comes from the residual; else from p[M+1].
    """
    assert len(target) == len(proposed) + 1 == len(draft) + 1
    for place, (token, masses, row, r) in enumerate(zip(proposed, target, draft, draws.tests, strict=False)):
        if not r * (row.chosen / row.total) < masses[token] / sum(masses):
            return Accepted(accepted=place, additional=draw(residual(masses, row), draws.tokens[place]))
    return Accepted(accepted=len(proposed), additional=draw(target[-1], draws.tokens[len(proposed)]))


def residual(masses: Sequence[int], row: CheckedRow) -> Sequence[int]:
    """max(0, p - q) as masses again; p itself where rounding leaves nothing of it (decision 71)."""
    total = sum(masses)
    q = dict(zip(ids_of(row.row), values_of(row.row), strict=True))
    left = [int(max(0.0, mass / total - q.get(token, 0.0) / row.total) * SCALE) for token, mass in enumerate(masses)]
    return left if any(left) else masses


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
