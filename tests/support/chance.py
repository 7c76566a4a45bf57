"""Statistics of sampled text: a table-driven target, honest and dishonest drafters, and the chi-square of the outcome.

All of it runs on lists and from fixed seeds. A *rule* takes many rounds at once, so that the reference and the batched
version can be put to the same test.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple, Protocol

from sdcpd.protocol.acceptance import Accepted, accept_speculative
from sdcpd.protocol.distributions import Profile, target_masses
from sdcpd.protocol.draft_rows import CheckedRow, DraftRow, check_rows, ids_of, one_hot, row_of, values_of
from sdcpd.protocol.draws import RoundDraws, unseeded_round

VOCABULARY = 5
TOKENS = 2
"""Output tokens looked at: their joint distribution over V^2 = 25 outcomes."""
SESSIONS = 14_000
"""Each takes one or two rounds: 20,000 rounds in all."""


@cache
def logits_after(prefix: tuple[int, ...]) -> tuple[float, ...]:
    """The target: any logits will do that differ from prefix to prefix; some of them are tied."""
    chance = random.Random(repr(prefix[-3:]))
    return tuple(round(chance.uniform(-2.0, 2.0), 1) for _ in range(VOCABULARY))


@cache
def masses_after(prefix: tuple[int, ...], profile: Profile) -> tuple[int, ...]:
    return tuple(target_masses(logits_after(prefix), profile))


@cache
def _checked(row: DraftRow, token: int) -> CheckedRow:
    return check_rows([row], (token,))[0]


class Drafter(Protocol):
    def draft(self, prefix: tuple[int, ...]) -> tuple[int, DraftRow]: ...


class Copying:
    """Like prompt lookup: certain of a token, right or wrong, and says so in a one-hot row (decision 55)."""

    def draft(self, prefix: tuple[int, ...]) -> tuple[int, DraftRow]:
        token = (sum(prefix) * 7 + len(prefix)) % VOCABULARY
        return token, one_hot(token)


class Truncated:
    """Like a small model: samples from its own top `k` at its own temperature, from exactly the row it shows (54)."""

    def __init__(self, seed: int, k: int = 3) -> None:
        self._random = random.Random(seed)
        self._k = k
        self._rows: dict[tuple[int, ...], DraftRow] = {}

    def row(self, prefix: tuple[int, ...]) -> DraftRow:
        key = prefix[-3:]
        if key not in self._rows:
            own = random.Random(f"draft {key}")
            logits = [logit + own.gauss(0.0, 1.0) for logit in logits_after(prefix)]
            best = sorted(range(VOCABULARY), key=lambda token: -logits[token])[: self._k]
            weights = [math.exp(logits[token] / 0.8) for token in best]
            total = sum(weights)
            self._rows[key] = row_of([(token, weight / total) for token, weight in zip(best, weights, strict=True)])
        return self._rows[key]

    def draft(self, prefix: tuple[int, ...]) -> tuple[int, DraftRow]:
        row = self.row(prefix)
        return self._random.choices(ids_of(row), values_of(row))[0], row


class Steering(Truncated):
    """Lies: always proposes token 0 and reports a tiny q for it, so that it is always accepted (decision 67)."""

    def draft(self, prefix: tuple[int, ...]) -> tuple[int, DraftRow]:
        return 0, row_of([(0, 1e-6), (1, 0.5), (2, 0.5)])


class Mislabelled(Truncated):
    """Proposes its best token, and shows the row that it did not sample from (bug 5 of the field)."""

    def draft(self, prefix: tuple[int, ...]) -> tuple[int, DraftRow]:
        row = self.row(prefix)
        return ids_of(row)[0], row


class Round(NamedTuple):
    """All that a rule is given. `prefixes` are those of p[1..M+1]."""

    proposed: tuple[int, ...]
    prefixes: tuple[tuple[int, ...], ...]
    profile: Profile
    rows: tuple[CheckedRow, ...]
    draws: RoundDraws


Rule = Callable[[Sequence[Round]], list[Accepted]]


def reference(rounds: Sequence[Round]) -> list[Accepted]:
    """Rule 2 on lists."""
    return [
        accept_speculative(
            one.proposed, [masses_after(prefix, one.profile) for prefix in one.prefixes], one.rows, one.draws
        )
        for one in rounds
    ]


def texts(
    rule: Rule, drafter: Drafter, profile: Profile, *, m: int = 2, sessions: int = SESSIONS, seed: int = 1
) -> Counter[tuple[int, ...]]:
    """The first TOKENS tokens of so many sessions, each in as many rounds as it needs."""
    verifier = random.Random(f"verifier {seed}")
    outputs: list[tuple[int, ...]] = [()] * sessions
    while open_ := [number for number, output in enumerate(outputs) if len(output) < TOKENS]:
        rounds = []
        for number in open_:
            prefix, rows = outputs[number], []
            proposed: tuple[int, ...] = ()
            for _ in range(m):
                token, row = drafter.draft(prefix + proposed)
                proposed += (token,)
                rows.append(row)
            rounds.append(
                Round(
                    proposed=proposed,
                    prefixes=tuple(prefix + proposed[:count] for count in range(m + 1)),
                    profile=profile,
                    rows=tuple(_checked(row, token) for row, token in zip(rows, proposed, strict=True)),
                    draws=unseeded_round(verifier.random, m),
                )
            )
        for number, one, accepted in zip(open_, rounds, rule(rounds), strict=True):
            outputs[number] += (*one.proposed[: accepted.accepted], accepted.additional)
    return Counter(output[:TOKENS] for output in outputs)


def expected(profile: Profile) -> dict[tuple[int, ...], float]:
    """The probability of every text under the target, by plain multiplication."""
    chances = {}
    for text in product(range(VOCABULARY), repeat=TOKENS):
        chance = 1.0
        for place, token in enumerate(text):
            masses = masses_after(text[:place], profile)
            chance *= masses[token] / sum(masses)
        chances[text] = chance
    return chances


def surprise(seen: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the counts as standard deviations of a normal one (Wilson-Hilferty); infinite for what cannot be.

    Outcomes with fewer than 5 expected are put together.
    """
    count = sum(seen.values())
    if any(chances[text] == 0.0 for text in seen):
        return math.inf
    cells = [(seen[text], count * chance) for text, chance in chances.items() if chance > 0.0]
    rare = [cell for cell in cells if cell[1] < 5.0]
    cells = [cell for cell in cells if cell[1] >= 5.0]
    if rare:
        cells.append((sum(cell[0] for cell in rare), sum(cell[1] for cell in rare)))
    return deviations(sum((got - wanted) ** 2 / wanted for got, wanted in cells), len(cells) - 1)


def deviations(chi_square: float, degrees: int) -> float:
    if degrees == 0:
        return 0.0
    spread = 2.0 / (9.0 * degrees)
    return (math.pow(chi_square / degrees, 1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
