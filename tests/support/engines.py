"""Driving a real engine in tests: load it small, feed it tokens, look at its logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sdcpd.engine.forward import Engine
from sdcpd.engine.settings import EngineSettings
from sdcpd.engine.spans import Span

POOL_BYTES = 1 << 24


def load(folder: Path, **settings: Any) -> Engine:
    """An fp32 engine on the CPU with one thread and a small pool, unless told otherwise."""
    small: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "kv_cache_bytes": POOL_BYTES, "threads": 1}
    return Engine.load(EngineSettings(model=str(folder), **small | settings))


def feed(engine: Engine, sequence: int, tokens: Sequence[int], rows: int | None = None) -> torch.Tensor:
    """Run `tokens` after what is valid, in one pass; the logits of the last `rows` (all by default)."""
    start = engine.valid_tokens(sequence)
    assert engine.reserve(sequence, start + len(tokens))
    wanted = len(tokens) if rows is None else rows
    return engine.compute(engine.plan([Span(sequence=sequence, tokens=tuple(tokens), start=start, rows=wanted)]))


def whole(engine: Engine, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of all tokens in one pass of a fresh sequence."""
    sequence = engine.open_sequence()
    try:
        return feed(engine, sequence, tokens)
    finally:
        engine.close_sequence(sequence)


def greedy(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens of plain greedy decoding, one a pass."""
    sequence = engine.open_sequence()
    output: list[int] = []
    tokens = list(prompt)
    while len(output) < count:
        start = engine.valid_tokens(sequence)
        assert engine.reserve(sequence, start + len(tokens))
        span = Span(sequence=sequence, tokens=tuple(tokens), start=start, rows=1)
        tokens = [engine.run(engine.plan([span]))[0][0].token]
        output += tokens
    engine.close_sequence(sequence)
    return output


def some_tokens(count: int, vocabulary: int = 300, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(vocabulary, (count,), generator=generator)]
