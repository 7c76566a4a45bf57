"""Log-probabilities against the slow way: every rule, every dtype, ties, mixed askers (decision 114)."""

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from sdcpd.engine.acceptance import judge_pass, judge_rows
from sdcpd.engine.batch import Batch
from sdcpd.engine.logprobs import Asking
from sdcpd.engine.spans import Drawn, Judge, Kept, Row, Shelf, Span, Told
from sdcpd.engine.target_rows import read_rows, rows_on_device
from sdcpd.protocol.distributions import Profile
from sdcpd.protocol.logprobs import unpack_entry
from tests.engine.test_acceptance import logits, proposal
from tests.support.engines import load, some_tokens

V = 64


def slow(row: torch.Tensor, token: int, alternatives: int) -> list[tuple[int, float]]:
    values = row.double().tolist()
    total = math.log(sum(map(math.exp, values)))
    best = sorted(range(len(values)), key=lambda one: (-values[one], one))[:alternatives]
    return [(one, values[one] - total) for one in (token, *best)]


def agrees(row: torch.Tensor, answer: Row, alternatives: int) -> bool:
    assert answer.logprobs is not None
    said, wanted = unpack_entry(answer.logprobs), slow(row, answer.token, alternatives)
    assert [token for token, _ in said] == [token for token, _ in wanted]
    return all(math.isclose(one, other, abs_tol=1e-5) for (_, one), (_, other) in zip(said, wanted, strict=True))


def batch(judged: list[tuple[Judge | None, tuple[int, ...]]], asked: tuple[int | None, ...]) -> Batch:
    rows = sum(len(tokens) for _, tokens in judged)
    return Batch([], [], [], (), list(range(rows)), tuple(len(tokens) for _, tokens in judged), tuple(judged), asked)


@pytest.mark.parametrize("read", [read_rows, rows_on_device])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 5, 300])
def test_greedy_rows(read: Any, dtype: torch.dtype, vocabulary: int) -> None:
    values = logits(4, vocabulary, dtype, seed=2)
    values[1, 0] = -0.0
    rows = read(values, Asking([20, None, 0, 3]))
    assert [replace(row, logprobs=None) for row in rows] == read(values)
    assert rows[1].logprobs is None
    for place, count in ((0, 20), (2, 0), (3, 3)):
        assert agrees(values[place], rows[place], min(count, vocabulary))


def test_ties_go_by_rising_id() -> None:
    values = torch.tensor([[0.0, -0.0, 2.0, 0.0, 2.0, -1.0]])
    (row,) = read_rows(values, Asking([5]))
    assert row.logprobs is not None
    assert [token for token, _ in unpack_entry(row.logprobs)] == [2, 2, 4, 0, 1, 3]


def test_a_row_that_cannot_be_trusted_tells_nothing() -> None:
    values = torch.tensor([[math.nan] * 3, [0.0, 1.0, 2.0]])
    for read in (read_rows, rows_on_device):
        rows = read(values, Asking([1, 1]))
        assert (rows[0].finite, rows[0].logprobs) == (False, None)
        assert agrees(values[1], rows[1], 1)


def test_every_rule_in_one_pass_whoever_asks() -> None:
    """Values are those of the raw logits, whatever the profile; verdicts are the same as without them."""
    judged: list[tuple[Judge | None, tuple[int, ...]]] = [
        proposal(V, 1, Profile(temperature_milli=0), seed=1),
        (None, (4, 5, 6)),
        proposal(V, 5, Profile(temperature_milli=700, top_k=9), seed=2),
        (Drawn(Profile(top_p_milli=800), (0.1, 0.5, 0.9)), (7, 8, 9)),
        (Told((10, 11)), (12, 10)),
    ]
    values = [logits(len(tokens), V, torch.float32, seed=len(tokens)) for _, tokens in judged]
    silent = judge_pass(torch.cat(values[:4]), batch(judged[:4], ()))
    for asked in ((2, 3, 4, 0, 5), (None, None, 20, None, 0), (1, None, None, 2, 1)):
        answers = judge_pass(torch.cat(values), batch(judged, asked))
        assert [tuple(replace(row, logprobs=None) for row in rows) for rows in answers[:4]] == silent
        for rows, count, their in zip(answers, asked, values, strict=True):
            for place, row in enumerate(rows):
                assert row.logprobs is None if count is None else agrees(their[place], row, count)
        assert [row.token for row in answers[4]] == [10, 11]


def test_rows_on_a_shelf_tell_when_they_are_judged() -> None:
    judge, tokens = proposal(V, 4, Profile(temperature_milli=800), seed=5)
    values = logits(5, V, torch.bfloat16, seed=3)
    shelf = Shelf()
    assert judge_pass(values, batch([(Kept(shelf), tokens)], (6,))) == [()]
    assert isinstance(shelf.logits, torch.Tensor)
    rows = judge_rows(shelf.logits, [(judge, tokens)], [shelf.logprobs])[0]
    assert rows == judge_rows(values, [(judge, tokens)], [6])[0]
    assert all(agrees(values[place], row, 6) for place, row in enumerate(rows))


def test_known_text_with_a_broken_row() -> None:
    values = torch.tensor([[math.nan] * 3, [0.0, 1.0, 2.0]])
    (rows,) = judge_pass(values, batch([(Told((2, 0)), (1, 2))], (1,)))
    assert rows[0].logprobs is None
    assert agrees(values[1], rows[1], 1)


def test_known_text_tells_what_decoding_told(tiny_llama: Any) -> None:
    """What a prefill says of a text is what the passes said that wrote it."""
    engine = load(tiny_llama)
    prompt = some_tokens(5)
    written: list[int] = []
    told: list[tuple[tuple[int, float], ...]] = []
    sequence = engine.open_sequence()
    assert engine.reserve(sequence, 20)
    tokens, start = tuple(prompt), 0
    while len(written) < 6:
        span = Span(sequence=sequence, tokens=tokens, start=start, rows=1, logprobs=4)
        (row,) = engine.run(engine.plan([span]))[0]
        start += len(tokens)
        tokens = (row.token,)
        written.append(row.token)
        assert row.logprobs is not None
        told.append(unpack_entry(row.logprobs))
    again = engine.open_sequence()
    assert engine.reserve(again, 20)
    known = (*prompt, *written[:-1])
    span = Span(sequence=again, tokens=known, start=0, rows=6, judge=Told(tuple(written)), logprobs=4)
    (rows,) = engine.run(engine.plan([span]))
    for row, before in zip(rows, told, strict=True):
        assert row.logprobs is not None
        now = unpack_entry(row.logprobs)
        assert [token for token, _ in now] == [token for token, _ in before]
        assert all(math.isclose(one, other, abs_tol=1e-4) for (_, one), (_, other) in zip(now, before, strict=True))
