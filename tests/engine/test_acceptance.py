"""Rules 2 and 65281 on tensors against the reference: every precision, ties, tiny q, one token, mixed neighbours."""

import math
import random
from itertools import permutations
from typing import Any

import pytest
import torch

from sdcpd.engine import acceptance
from sdcpd.engine.acceptance import judge_pass, judge_rows
from sdcpd.engine.batch import Batch
from sdcpd.engine.spans import Drawn, Judge, Kept, Row, Shelf, Weighed
from sdcpd.engine.target_rows import target_masses
from sdcpd.protocol import distributions
from sdcpd.protocol.acceptance import accept_speculative, draw_each
from sdcpd.protocol.distributions import Profile
from sdcpd.protocol.draft_rows import check_rows, one_hot, row_of
from sdcpd.protocol.draws import RoundDraws

PROFILES = [
    Profile(),
    Profile(temperature_milli=0),
    Profile(temperature_milli=1),
    Profile(temperature_milli=10**9),
    Profile(temperature_milli=700, top_k=3),
    Profile(top_k=1),
    Profile(top_k=10**9, top_p_milli=0),
    Profile(top_p_milli=1),
    Profile(top_p_milli=900),
    Profile(temperature_milli=1300, top_k=40, top_p_milli=950),
]


def logits(rows: int, vocabulary: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """With ties: bf16 has them by itself, and a few are put in."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype)
    if vocabulary > 3:
        values[:, 3] = values.amax(-1)
        values[:, vocabulary // 2] = values[:, vocabulary - 1]
        values[0, 1] = -math.inf
    return values


def draws(m: int, seed: int) -> RoundDraws:
    chance = random.Random(seed)
    return RoundDraws(tuple(chance.random() for _ in range(m)), tuple(chance.random() for _ in range(m + 1)))


def proposal(vocabulary: int, m: int, profile: Profile, seed: int) -> tuple[Weighed, tuple[int, ...]]:
    """A proposal whose rows are one-hot, truncated or have a tiny q, and its tokens."""
    chance = random.Random(seed)
    proposed = tuple(chance.randrange(vocabulary) for _ in range(m))
    rows = []
    for place, token in enumerate(proposed):
        other = (token + 1) % vocabulary
        shared = row_of([(token, 0.25), (other, 0.75)]) if vocabulary > 1 else one_hot(token)
        tiny = row_of([(token, 1e-42), (other, 1.0)]) if vocabulary > 1 else one_hot(token)
        rows.append((one_hot(token), shared, tiny)[place % 3])
    return Weighed(profile, check_rows(rows, proposed), draws(m, seed + 1)), (0, *proposed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 2, 5, 300])
def test_masses_are_those_of_the_reference(dtype: torch.dtype, vocabulary: int) -> None:
    values = logits(len(PROFILES), vocabulary, dtype, seed=1)
    masses, finite = target_masses(values, PROFILES)
    assert finite.all()
    for row, profile, got in zip(values.float().tolist(), PROFILES, masses.tolist(), strict=True):
        wanted = distributions.target_masses(row, profile)
        assert [mass > 0 for mass in got] == [mass > 0 for mass in wanted]
        # The exponentials of two libraries may differ in their last bit, 2^-53 of the value; masses are in 2^-44.
        assert all(abs(one - other) <= 1 + (other >> 50) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 2, 5, 300])
def test_rounds_are_judged_as_by_the_reference(dtype: torch.dtype, vocabulary: int) -> None:
    spans = [proposal(vocabulary, 1 + number % 7, PROFILES[number % 10], seed=number) for number in range(60)]
    values = logits(sum(len(tokens) for _, tokens in spans), vocabulary, dtype, seed=2)
    answers = judge_rows(values, spans)
    first = 0
    for (judge, tokens), rows in zip(spans, answers, strict=True):
        own = values[first : first + len(tokens)].float().tolist()
        target = [distributions.target_masses(row, judge.profile) for row in own]
        right = accept_speculative(tokens[1:], target, judge.rows, judge.draws)
        assert [row.token for row in rows] == [*tokens[1 : 1 + right.accepted], right.additional]
        drawn = judge_rows(values[first : first + len(tokens)], [(Drawn(judge.profile, judge.draws.tokens), tokens)])
        assert tuple(row.token for row in drawn[0]) == draw_each(target, judge.draws)
        assert all(row.finite and row.margin == math.inf for row in rows)
        first += len(tokens)


def batch(judged: list[tuple[Judge | None, tuple[int, ...]]]) -> Batch:
    count = sum(len(tokens) for _, tokens in judged)
    return Batch([], [], [], (), list(range(count)), tuple(len(tokens) for _, tokens in judged), tuple(judged))


def test_a_verdict_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, sampled, seeded and kept sessions share a pass, in any order and in parts of any size."""
    vocabulary = 64
    judged: list[tuple[Judge | None, tuple[int, ...]]] = [
        proposal(vocabulary, 1, Profile(temperature_milli=0), seed=1),
        proposal(vocabulary, 5, Profile(temperature_milli=700, top_k=9), seed=2),
        (None, (4, 5, 6)),
        (Drawn(Profile(top_p_milli=800), (0.1, 0.5, 0.9)), (7, 8, 9)),
    ]
    values = [logits(len(tokens), vocabulary, torch.float32, seed=len(tokens)) for _, tokens in judged]
    alone = [judge_pass(one, batch([how])) for one, how in zip(values, judged, strict=True)]
    for order in permutations(range(4)):
        for at_once in (1, 600, 1 << 25):
            monkeypatch.setattr(acceptance, "ELEMENTS_AT_ONCE", at_once)
            together = judge_pass(torch.cat([values[n] for n in order]), batch([judged[n] for n in order]))
            assert together == [alone[n][0] for n in order]


def test_rows_on_a_shelf_are_judged_as_if_at_once() -> None:
    values = logits(5, 64, torch.bfloat16, seed=3)
    judge, tokens = proposal(64, 4, Profile(), seed=3)
    shelf = Shelf()
    assert judge_pass(values, batch([(Kept(shelf), tokens)])) == [()]
    kept = shelf.logits
    assert isinstance(kept, torch.Tensor)
    assert judge_rows(kept, [(judge, tokens)]) == judge_rows(values, [(judge, tokens)])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 2])
def test_a_row_that_is_not_finite_spoils_its_span_alone(bad: float, row: int) -> None:
    first, second = proposal(64, 2, Profile(), seed=4), proposal(64, 2, Profile(top_k=5), seed=5)
    values = logits(6, 64, torch.float32, seed=4)
    right = judge_rows(values, [first, second])
    values[row, 7] = bad
    spoilt = judge_rows(values, [first, second])
    assert spoilt == [(Row(token=0, margin=0.0, finite=False),), right[1]]
    values[row] = -math.inf
    assert judge_rows(values, [first, second])[0] == spoilt[0]


def test_large_vocabulary_ties_and_edges() -> None:
    """Equal maxima far apart, as a padded vocabulary has them: the smaller id, also as the only one left."""
    vocabulary = 151_936
    values = torch.zeros(2, vocabulary)
    values[:, 70_000] = values[:, 140_000] = 9.0
    uniforms = (0.0, 0.999999)
    for profile in (Profile(temperature_milli=0), Profile(top_k=1), Profile(top_p_milli=0)):
        rows = judge_rows(values, [(Drawn(profile, uniforms), (0, 0))])[0]
        assert [row.token for row in rows] == [70_000, 70_000]
    rows = judge_rows(values, [(Drawn(Profile(top_k=2), uniforms), (0, 0))])[0]
    assert [row.token for row in rows] == [70_000, 140_000]


def test_u_at_its_largest_draws_the_last_token_with_mass() -> None:
    values = torch.tensor([[0.0, 0.0, -math.inf]])
    largest = 1.0 - 2.0**-53
    assert judge_rows(values, [(Drawn(Profile(), (largest,)), (0,))])[0][0].token == 1
    assert distributions.draw([3, 1 << 62, 0], largest) == 1
    with pytest.raises(AssertionError, match="without mass"):
        distributions.draw([0, 0], 0.5)


def test_what_no_judge_is_asked_for_stays_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 1 alone: no masses, no distributions."""
    forbidden: Any = None
    monkeypatch.setattr(acceptance, "target_masses", forbidden)
    values = logits(3, 64, torch.float32, seed=6)
    assert [len(rows) for rows in judge_pass(values, batch([(None, (1, 2)), (None, (3,))]))] == [2, 1]
