"""A draft is sampled from exactly the row that is published: rows, draws, edges, and the map of a reduced head."""

import math
import random
from typing import Any

import pytest
import torch

from sdcpd.engine.acceptance import judge_pass
from sdcpd.engine.batch import Batch
from sdcpd.engine.draft_rows import in_full, sample_drafts
from sdcpd.engine.spans import Judge, Row, Sampled
from sdcpd.protocol.distributions import Profile
from sdcpd.protocol.draft_rows import check_rows, ids_of, values_of
from tests.support.chance import deviations

PROFILES = [
    Profile(top_k=64),
    Profile(temperature_milli=0, top_k=64),
    Profile(temperature_milli=1, top_k=64),
    Profile(temperature_milli=100_000, top_k=8),
    Profile(temperature_milli=700, top_k=5, top_p_milli=900),
    Profile(top_k=64, top_p_milli=0),
    Profile(top_k=256, top_p_milli=1),
    Profile(top_k=1),
]


def logits(rows: int, vocabulary: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("vocabulary", [1, 2, 7, 300])
def test_every_row_is_one_that_the_verifier_takes(profile: Profile, vocabulary: int) -> None:
    values = logits(12, vocabulary, vocabulary)
    chance = random.Random(0)
    judges = [Sampled(profile, chance.choice((0.0, chance.random(), 1.0 - 2**-53))) for _ in range(12)]
    for row in sample_drafts(values, judges):
        assert row.drafted is not None
        check_rows([row.drafted], (row.token,))
        assert list(ids_of(row.drafted)) == sorted(ids_of(row.drafted))
        assert row.drafted.entries <= profile.top_k


def test_the_row_is_temperature_top_k_and_top_p_of_the_logits() -> None:
    values = torch.tensor([[1.0, 4.0, 2.0, 3.0, -math.inf]])
    (row,) = sample_drafts(values, [Sampled(Profile(temperature_milli=2000, top_k=3), 0.5)])
    assert row.drafted is not None
    masses = [math.exp(logit / 2) for logit in (4.0, 2.0, 3.0)]
    assert ids_of(row.drafted) == (1, 2, 3)
    assert values_of(row.drafted) == pytest.approx([mass / sum(masses) for mass in masses], rel=1e-6)
    (row,) = sample_drafts(values, [Sampled(Profile(top_k=3, top_p_milli=700), 0.999)])
    assert row.drafted is not None
    assert ids_of(row.drafted) == (1, 3), "up to and including the token that reaches the threshold"


def test_tokens_follow_their_rows() -> None:
    """Chi-square of 20,000 tokens against the one row they were all drawn from (bugs: the drafter that does not)."""
    profile = Profile(temperature_milli=1500, top_k=8)
    draws = random.Random(5)
    judges = [Sampled(profile, draws.random()) for _ in range(20_000)]
    rows = sample_drafts(logits(1, 40, 3).expand(len(judges), -1), judges)
    row = rows[0].drafted
    assert row is not None
    assert all(one.drafted == row for one in rows)
    counts = {token: sum(one.token == token for one in rows) for token in ids_of(row)}
    expected = {token: value * len(rows) for token, value in zip(ids_of(row), values_of(row), strict=True)}
    statistic = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in expected)
    assert deviations(statistic, len(expected) - 1) < 4.0


def batch(judged: list[tuple[Judge | None, tuple[int, ...]]]) -> Batch:
    places = list(range(len(judged)))
    return Batch(places, places, places, (), places, tuple(1 for _ in judged), tuple(judged))


def test_in_a_pass_each_span_has_its_own_judge() -> None:
    values = logits(4, 50, 9)
    values[3, 0] = math.nan
    sampled = Sampled(Profile(top_k=4), 0.3)
    answers = judge_pass(values, batch([(None, (1,)), (sampled, (2,)), (None, (3,)), (sampled, (4,))]))
    assert [row.drafted is not None for (row,) in answers] == [False, True, False, False]
    assert answers[1] == (sample_drafts(values[1:2], [sampled])[0],)
    assert not answers[3][0].finite
    assert answers[0][0].token == int(values[0].argmax())


def test_a_reduced_heads_rows_are_told_in_the_full_vocabulary() -> None:
    tokens = [3, 10, 200]
    (row,) = sample_drafts(torch.tensor([[0.0, 1.0, 2.0]]), [Sampled(Profile(top_k=2), 0.99)])
    full = in_full(row, tokens)
    assert full.drafted is not None
    assert (full.token, ids_of(full.drafted)) == (200, (10, 200))
    assert full.drafted.values == (row.drafted.values if row.drafted else b"")
    greedy: Any = in_full(Row(token=1, margin=0.5, finite=True), tokens)
    assert (greedy.token, greedy.margin, greedy.drafted) == (10, 0.5, None)
