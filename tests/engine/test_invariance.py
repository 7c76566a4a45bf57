"""The promise `numerics = "batch_invariant"`, bit by bit, and what happens where it cannot be kept."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdcpd.engine import forward, weights
from sdcpd.engine.forward import Engine
from sdcpd.engine.linear import Linear, can_halve, keeps_bits
from sdcpd.engine.model_config import ModelRefused
from sdcpd.engine.spans import Span
from tests.support.engines import greedy, load, some_tokens, whole

CPU = torch.device("cpu")
PRECISIONS: list[dict[str, Any]] = [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16", "quantization": "int8"}]

ROUNDED: dict[str, Any] = {"dtype": "fp32", "rounded": True}
"""fp32 over weights of a bf16 checkpoint, which are kept in fp16 where that pays."""


def engine_of(tiny_llama: Path, folder: Path, precision: dict[str, Any]) -> Engine:
    """An engine in a precision of the lists above; `folder` is for a copy with rounded weights."""
    settings = {name: value for name, value in precision.items() if name != "rounded"}
    if "rounded" not in precision:
        return load(tiny_llama, **settings)
    tensors = load_file(tiny_llama / "model.safetensors")
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    # What fp16 cannot hold is near enough to zero to be it.
    rounded = {name: tensor.where(tensor.abs() > 1e-4, 0.0) for name, tensor in rounded.items()}
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_bytes((tiny_llama / file).read_bytes())
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    engine = load(folder, **settings)
    if can_halve(CPU, torch.float32):
        assert engine.info.weights_bytes < load(tiny_llama, **settings).info.weights_bytes
    return engine


class Passes:
    """Random passes over one engine: a prefix and M rows of a text, among neighbours of all kinds."""

    def __init__(self, engine: Engine, texts: list[list[int]], seed: int) -> None:
        self.engine = engine
        self.texts = texts
        self.random = Random(seed)
        self.expected = [whole(engine, text) for text in texts]

    def check(self, prefix: int, rows: int, neighbours: int) -> None:
        """The rows after `prefix` tokens of some text, in a pass with others that are in the middle of theirs."""
        place = self.random.randrange(len(self.texts))
        spans = [self._span(place, prefix, rows)]
        for _ in range(neighbours):
            other = self.random.randrange(len(self.texts))
            spans.append(self._span(other, self.random.randrange(40), self.random.choice((1, 1, 2, 5, 9, 30))))
        self.random.shuffle(spans)
        found = self.engine.compute(self.engine.plan([span for _, span in spans]))
        for (text, span), end in zip(spans, accumulate(span.rows for _, span in spans), strict=True):
            wanted = self.expected[text][span.start : span.start + span.rows]
            assert torch.equal(found[end - span.rows : end], wanted), (span.start, span.rows, len(spans))
            self.engine.close_sequence(span.sequence)

    def _span(self, place: int, prefix: int, rows: int) -> tuple[int, Span]:
        """Its prefix is run first, cut at random."""
        engine, text = self.engine, self.texts[place]
        sequence = engine.open_sequence()
        assert engine.reserve(sequence, prefix + rows)
        at = 0
        while at < prefix:
            count = min(prefix - at, self.random.choice((1, 8, 33, 100)))
            chunk = Span(sequence=sequence, tokens=tuple(text[at : at + count]), start=at, rows=0)
            engine.compute(engine.plan([chunk]))
            at += count
        return place, Span(sequence=sequence, tokens=tuple(text[prefix : prefix + rows]), start=prefix, rows=rows)


def differing_rows(engine: Engine, tokens: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each row of a text run one token a pass, beside that of one pass."""
    sequence = engine.open_sequence()
    for at, expected in enumerate(whole(engine, tokens)):
        assert engine.reserve(sequence, at + 1)
        span = Span(sequence=sequence, tokens=(tokens[at],), start=at, rows=1)
        yield engine.compute(engine.plan([span]))[0], expected
    engine.close_sequence(sequence)


@pytest.mark.parametrize("precision", [*PRECISIONS, ROUNDED])
def test_200_prefixes_of_1_to_8_rows_among_0_to_15_neighbours(
    tiny_llama: Path, tmp_path: Path, precision: dict[str, Any]
) -> None:
    engine = engine_of(tiny_llama, tmp_path, precision)
    assert engine.info.numerics == "batch_invariant", "the default on a CPU"
    passes = Passes(engine, [some_tokens(210, seed=seed) for seed in range(3)], seed=7)
    for number in range(200):
        passes.check(prefix=number, rows=1 + number % 8, neighbours=passes.random.randrange(16))


@pytest.mark.parametrize("precision", [*PRECISIONS, ROUNDED])
def test_30_whole_texts_with_and_without_speculation_are_one(
    tiny_llama: Path, tmp_path: Path, precision: dict[str, Any]
) -> None:
    """Rounds of the verifier with drafts of all qualities, against one token a pass."""
    engine = engine_of(tiny_llama, tmp_path, precision)
    random = Random(3)
    for seed in range(30):
        prompt = some_tokens(5 + 6 * seed, seed=seed)
        plain = greedy(engine, prompt, 40)
        known = list(prompt)
        sequence = engine.open_sequence()
        while len(known) < len(prompt) + 40:
            done = len(known) - len(prompt)
            draft = [t if random.random() < 0.8 else 5 for t in plain[done : done + random.randrange(9)]]
            start = engine.valid_tokens(sequence)
            assert engine.reserve(sequence, len(known) + len(draft))
            span = Span(sequence=sequence, tokens=(*known[start:], *draft), start=start, rows=len(draft) + 1)
            rows = engine.run(engine.plan([span]))[0]
            accepted = next((i for i, token in enumerate(draft) if token != rows[i].token), len(draft))
            known += [*draft[:accepted], rows[accepted].token]
            engine.truncate(sequence, len(known) - 1)
        engine.close_sequence(sequence)
        assert known[len(prompt) : len(prompt) + 40] == plain


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.model
def test_the_demo_model_keeps_its_bits(demo_model: Path, precision: dict[str, Any]) -> None:
    engine = load(demo_model, kv_cache_bytes=1 << 28, threads=0, **precision)
    assert engine.info.numerics == "batch_invariant"
    passes = Passes(engine, [some_tokens(90, vocabulary=49152, seed=seed) for seed in range(2)], seed=1)
    for prefix, rows, neighbours in ((0, 8, 2), (30, 1, 0), (77, 5, 3)):
        passes.check(prefix, rows, neighbours)


def test_fast_is_close_and_pads_nothing(tiny_llama: Path) -> None:
    fast, exact = load(tiny_llama, numerics="fast"), load(tiny_llama)
    assert (fast.info.numerics, exact.info.numerics) == ("fast", "batch_invariant")
    assert fast.info.model == exact.info.model, "the same target"
    tokens = some_tokens(100)
    assert torch.allclose(whole(fast, tokens), whole(exact, tokens), atol=1e-4)
    for found, expected in differing_rows(fast, tokens[:40]):
        assert torch.allclose(found, expected, atol=1e-4)


@pytest.fixture
def rows_that_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose rows feel each other, as those of some libraries do in their last bits."""

    def mixing(self: Linear, rows: Tensor) -> Tensor:
        product = self._product(rows)
        return product + 1e-6 * len(rows) * product

    monkeypatch.setattr(Linear, "__call__", mixing)
    monkeypatch.setattr(Linear, "added_to", lambda self, sums, rows: sums + self(rows))


def test_a_promise_that_does_not_hold_is_not_made(tiny_llama: Path, rows_that_mix: None) -> None:
    assert load(tiny_llama).info.numerics == "fast"
    with pytest.raises(ModelRefused, match='numerics = "batch_invariant" does not hold here'):
        load(tiny_llama, numerics="batch_invariant")


def test_layers_that_do_not_keep_bits_go_through_tiles(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL's plain fp32 product, and a made-up one that is worse."""
    monkeypatch.setattr(weights, "can_pack", lambda device, dtype: False)
    engine = load(tiny_llama, numerics="batch_invariant")
    tokens = some_tokens(50)
    for found, expected in differing_rows(engine, tokens):
        assert torch.equal(found, expected)
    monkeypatch.setattr(forward, "rows_keep_their_bits", lambda engine: True)
    assert torch.allclose(whole(load(tiny_llama, numerics="fast"), tokens), whole(engine, tokens), atol=1e-4)


@torch.inference_mode()
def test_tiles_make_rows_equal() -> None:
    layer = Linear(torch.randn((70, 64), generator=torch.Generator().manual_seed(0)), None)
    rows = torch.randn((50, 64), generator=torch.Generator().manual_seed(1))
    expected = layer(rows)
    layer.tile(16)
    assert keeps_bits(layer, CPU, torch.float32)
    for count in (1, 15, 16, 17, 50):
        assert torch.allclose(layer(rows[:count]), expected[:count], atol=1e-4)
        assert layer(rows[:count]).shape == (count, 70)
