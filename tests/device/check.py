"""The parts of `scripts/device_check`. Each says what it found as findings; none prints.

equality     small models of all kinds: the device's fp32 logits are those of the CPU up to rounding, in one pass
             and cut into passes beside neighbours
bits         bf16 and int8: in how many passes a row got other bits than in one pass of its own. None may where the
             engine says `batch_invariant`; with `fast` the number is told
passes       a shape with random weights: ms of a pass by rows and by sessions, beside the time in which the
             device's memory could be read for the same weights; prefill tokens a second
text         the demo model: greedy texts of the device in fp32 are those of the CPU
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final, Literal

import torch
from msgspec import Struct

from sdcpd.engine.device import DTYPES
from sdcpd.engine.forward import Engine, wants_invariance
from sdcpd.engine.model_config import ModelConfig, ModelRefused
from sdcpd.engine.settings import EngineSettings
from sdcpd.engine.spans import Span
from sdcpd.engine.weights import random_weights
from tests.device.shapes import EXACT

ROUNDING: Final = 2e-3
"""Largest difference of fp32 logits, as a share of their spread: sums of a few hundred terms in another order."""
REPEATS: Final = 7
ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
SESSIONS: Final = (1, 4, 8, 16)
PREFIX_TOKENS: Final = 512


class Finding(Struct, frozen=True):
    """One number. `holds` is None where it is a measurement and nothing is promised."""

    name: str
    value: float
    holds: bool | None = None


class Text(Struct, frozen=True):
    """Tokens and their logits, computed in one pass by themselves."""

    tokens: list[int]
    logits: torch.Tensor


def assemble(
    config: ModelConfig,
    device: str,
    dtype: Literal["bf16", "fp32"],
    *,
    quantization: Literal["none", "int8"] = "none",
    numerics: Literal["auto", "fast", "batch_invariant"] = "auto",
    pool_bytes: int = 1 << 28,
    drawn_on: str | None = None,
) -> Engine:
    """An engine with random weights; drawn on the CPU two devices have the same. Raises ModelRefused."""
    settings = EngineSettings(
        model="random",
        device="cuda" if device == "cuda" else "cpu",
        dtype=dtype,
        quantization=quantization,
        numerics=numerics,
        kv_cache_bytes=pool_bytes,
    )
    where = torch.device(device)
    weights = random_weights(
        config,
        where,
        DTYPES[dtype],
        int8=quantization == "int8",
        invariant=wants_invariance(settings, where),
        drawn_on=None if drawn_on is None else torch.device(drawn_on),
    )
    return Engine.assemble(settings, config, weights)


def text_of(engine: Engine, count: int, seed: int) -> Text:
    """Random tokens and what the engine makes of them in one pass."""
    random = Random(seed)
    tokens = [random.randrange(engine.info.vocabulary) for _ in range(count)]
    return Text(tokens=tokens, logits=whole(engine, tokens))


def whole(engine: Engine, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of all tokens in one pass of a fresh sequence."""
    sequence = engine.open_sequence()
    assert engine.reserve(sequence, len(tokens))
    logits = engine.compute(engine.plan([Span(sequence=sequence, tokens=tuple(tokens), start=0, rows=len(tokens))]))
    engine.close_sequence(sequence)
    return logits


def trial(engine: Engine, texts: Sequence[Text], random: Random, *, prefix: int, rows: int, beside: int) -> float:
    """A pass over `rows` tokens after a `prefix` of some text, among `beside` others in the middle of theirs.

    The largest difference to one pass of the text alone, as a share of the logits' spread; 0.0 means equal bits.
    """
    spans: list[tuple[Span, Text]] = []
    for number in range(beside + 1):
        text = random.choice(texts)
        start = prefix if number == 0 else random.randrange(min(40, len(text.tokens) - 9))
        count = rows if number == 0 else random.choice((1, 1, 2, 5, 9))
        sequence = engine.open_sequence()
        assert engine.reserve(sequence, start + count)
        at = 0
        while at < start:
            size = min(start - at, random.choice((1, 8, 33, 200)))
            chunk = Span(sequence=sequence, tokens=tuple(text.tokens[at : at + size]), start=at, rows=0)
            engine.compute(engine.plan([chunk]))
            at += size
        tokens = tuple(text.tokens[start : start + count])
        spans.append((Span(sequence=sequence, tokens=tokens, start=start, rows=count), text))
    random.shuffle(spans)
    found = engine.compute(engine.plan([span for span, _ in spans]))
    worst, at = 0.0, 0
    for span, text in spans:
        expected = text.logits[span.start : span.start + span.rows]
        got = found[at : at + span.rows]
        at += span.rows
        if not torch.equal(got, expected):
            worst = max(worst, difference(got, expected))
        engine.close_sequence(span.sequence)
    return worst


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one, as a share of the spread of what is expected; infinite where a number is none."""
    gap = (found.float().cpu() - expected.float().cpu()).abs().max() / expected.float().cpu().std()
    return float(gap) if bool(gap.isfinite()) else float("inf")


def equality(device: str, trials: int) -> Iterator[Finding]:
    """Part 1, on the models of `EXACT`. On the CPU it holds the engine to itself: whether this script is right."""
    for name, config in EXACT.items():
        engine, reference = (assemble(config, where, "fp32", drawn_on="cpu") for where in (device, "cpu"))
        texts = [text_of(engine, 700, seed) for seed in range(2)]
        gap = max(difference(text.logits, whole(reference, text.tokens)) for text in texts)
        yield Finding(f"equality.{name}.one_pass", gap, gap <= ROUNDING)
        random = Random(1)
        gap = max(
            trial(engine, texts, random, prefix=random.randrange(600), rows=1 + number % 9, beside=random.randrange(8))
            for number in range(trials)
        )
        yield Finding(f"equality.{name}.cut_and_mixed", gap, gap <= ROUNDING)
        engine.pool.check_integrity()
        yield Finding(f"equality.{name}.pages_lost", engine.info.pages - engine.free_pages, engine.free_pages > 0)


def bits(device: str, config: ModelConfig, trials: int) -> Iterator[Finding]:
    """Part 2: `trials` prefixes by 1 to 8 rows among up to 15 neighbours, for each precision and numerics."""
    for dtype, quantization in (("bf16", "none"), ("bf16", "int8"), ("fp32", "none")):
        for numerics in ("batch_invariant", "fast"):
            name = f"bits.{dtype if quantization == 'none' else quantization}.{numerics}"
            try:
                engine = assemble(config, device, dtype, quantization=quantization, numerics=numerics)  # type: ignore[arg-type]  # literals out of the loops
            except ModelRefused:
                yield Finding(f"{name}.refused", 1)
                continue
            texts = [text_of(engine, 250, seed) for seed in range(2)]
            random = Random(2)
            changed = sum(
                trial(engine, texts, random, prefix=number % 200, rows=1 + number % 8, beside=random.randrange(16)) > 0
                for number in range(trials)
            )
            yield Finding(f"{name}.passes_changed", changed, changed == 0 if numerics == "batch_invariant" else None)


def passes(device: str, config: ModelConfig, quantization: Literal["none", "int8"]) -> Iterator[Finding]:
    """Part 3. ms of passes of `config` with random weights in bf16."""
    engine = assemble(
        config, device, "bf16", quantization=quantization, pool_bytes=_pool_bytes(config), drawn_on=device
    )
    name = "passes.bf16" if quantization == "none" else "passes.int8"
    floor = read_ms(device, engine.info.weights_bytes)
    yield Finding(f"{name}.floor_ms", floor)
    for rows in ROWS:
        spent = pass_ms(engine, device, sessions=1, rows=rows)
        yield Finding(f"{name}.rows_{rows}_ms", spent)
        yield Finding(f"{name}.rows_{rows}_ratio_to_floor", spent / floor)
    for sessions in SESSIONS[1:]:
        for rows in (1, 9):
            yield Finding(f"{name}.sessions_{sessions}_rows_{rows}_ms", pass_ms(engine, device, sessions, rows))
    count = min(2048, config.context_tokens // 2)
    spent = timed_ms(device, lambda: whole_prompt(engine, count), repeats=3)
    yield Finding(f"{name}.prefill_tokens_per_s", count / spent * 1000)


def _pool_bytes(config: ModelConfig) -> int:
    """Room for the most sessions measured and a prompt."""
    token = 2 * config.layers * config.kv_heads * config.head_dim * 2
    return token * (max(SESSIONS) * (_prefix(config) + 128) + config.context_tokens)


def _prefix(config: ModelConfig) -> int:
    return min(PREFIX_TOKENS, config.context_tokens // 4)


def whole_prompt(engine: Engine, count: int) -> None:
    sequence = engine.open_sequence()
    assert engine.reserve(sequence, count)
    engine.run(engine.plan([Span(sequence=sequence, tokens=(1,) * count, start=0, rows=1)]))
    engine.close_sequence(sequence)


def pass_ms(engine: Engine, device: str, sessions: int, rows: int) -> float:
    """A pass over `rows` tokens of each of `sessions`, after a prefix, up to the rows on the host."""
    start = min(PREFIX_TOKENS, engine.info.context_tokens // 4)
    opened = [engine.open_sequence() for _ in range(sessions)]
    for sequence in opened:
        assert engine.reserve(sequence, start + rows)
        engine.compute(engine.plan([Span(sequence=sequence, tokens=(1,) * start, start=0, rows=0)]))
    spans = [Span(sequence=sequence, tokens=(2,) * rows, start=start, rows=rows) for sequence in opened]
    spent = timed_ms(device, lambda: engine.run(engine.plan(spans)))
    for sequence in opened:
        engine.close_sequence(sequence)
    return spent


def read_ms(device: str, size: int) -> float:
    """In what time this device reads that many octets of memory: the least that a pass over weights can take."""
    values = torch.ones(max(1, size // 4), dtype=torch.float32, device=device)
    return timed_ms(device, values.sum)


def timed_ms(device: str, function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall time after two warm runs."""
    spent: list[float] = []
    for number in range(repeats + 2):
        _settle(device)
        started = time.perf_counter()
        function()
        _settle(device)
        if number >= 2:
            spent.append((time.perf_counter() - started) * 1000)
    return statistics.median(spent)


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def text(device: str, folder: Path, count: int) -> Iterator[Finding]:
    """Part 4. In fp32, where rounding leaves the argmax alone but for near ties."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    engines = [
        Engine.load(EngineSettings(model=str(folder), device=where, dtype="fp32", kv_cache_bytes=1 << 27))  # type: ignore[arg-type]  # "cpu" or "cuda"
        for where in (device, "cpu")
    ]
    for number, prompt in enumerate(("The capital of France is", "def add(a, b):\n    return", "1, 2, 3, 4,")):
        ids = tokenizer.encode(prompt).ids
        ours, theirs = (greedy(engine, ids, count) for engine in engines)
        same = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), count)
        yield Finding(f"text.prompt_{number}.tokens_equal", same, same == count)


def greedy(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    sequence = engine.open_sequence()
    tokens, start = list(prompt), 0
    output: list[int] = []
    while len(output) < count:
        assert engine.reserve(sequence, start + len(tokens))
        span = Span(sequence=sequence, tokens=tuple(tokens), start=start, rows=1)
        start += len(tokens)
        tokens = [engine.run(engine.plan([span]))[0][0].token]
        output += tokens
    engine.close_sequence(sequence)
    return output
