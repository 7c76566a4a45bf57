"""How close the choice of one token was: the margin between the two best logits at one place, for demonstrations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sdcpd.engine.forward import Engine
from sdcpd.engine.settings import EngineSettings
from sdcpd.engine.spans import Span

CHUNK_TOKENS: Final = 256
KV_CACHE_BYTES: Final = 1 << 28


def margin_after(model: Path, tokens: Sequence[int]) -> float:
    """Best minus second best logit for the token that follows `tokens`. Blocks for seconds: it loads the model."""
    engine = Engine.load(EngineSettings(model=str(model), kv_cache_bytes=KV_CACHE_BYTES))
    sequence = engine.open_sequence()
    reserved = engine.reserve(sequence, len(tokens))
    assert reserved, "demonstrations are short"
    margin = 0.0
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tuple(tokens[start : start + CHUNK_TOKENS])
        answers = engine.run(engine.plan([Span(sequence=sequence, tokens=chunk, start=start, rows=1)]))
        margin = answers[0][0].margin
    return margin
