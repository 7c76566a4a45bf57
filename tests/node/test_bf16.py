"""bf16: a pass over several tokens may round otherwise than a pass over one. Whatever differs is a near tie.

Differences are counted (`record_property`, shown by `pytest --junit-xml` and in the failure's text), and each must lie
where the two best logits are closer than a few steps of bf16 at their size (draft 6.4: "as computed by the verifier's
scoring passes").
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sdcpd.engine.spans import Span
from sdcpd.frontend.chat_template import ChatMessage
from sdcpd.frontend.text import load_model_text
from tests.support.cluster import OracleSource
from tests.support.real_node import LoadedModel, running_node

PROMPTS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "prompts.jsonl").read_text().splitlines()]
MAX_NEW = 12
NEAR_TIE_LOGITS = 0.5
"""Logits of this model reach 40, where neighbouring bf16 numbers are 0.25 apart."""


async def margin_at(model: LoadedModel, tokens: tuple[int, ...]) -> float:
    """Best minus second best logit for what follows `tokens`, in one pass."""
    engine = model.engine
    sequence = engine.open_sequence()
    assert engine.reserve(sequence, len(tokens))
    batch = engine.plan([Span(sequence=sequence, tokens=tokens, start=0, rows=1)])
    answers = await model.thread.run(partial(engine.run, batch))
    engine.close_sequence(sequence)
    return answers[0][0].margin


@pytest.mark.model
async def test_differences_in_bf16_are_near_ties(
    demo_model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model = LoadedModel(demo_model, dtype="bf16", kv_cache_bytes=256 << 20)
    text = load_model_text(model.name, model.folder)
    shortest = {
        family: min((one["prompt"] for one in PROMPTS if one["family"] == family), key=len)
        for family in ("chat", "structured", "edit")
    }
    differences = 0
    for family, content in shortest.items():
        prompt = text.encode_chat([ChatMessage(role="user", content=content)], {}, 0.0)
        plain = await model.plain_greedy(prompt, MAX_NEW, text.stop)

        def right(context: object, limit: int, plain: tuple[int, ...] = plain, start: int = len(prompt)) -> list[int]:
            assert isinstance(context, list)
            return list(plain[len(context) - start :][:limit]) or [0]

        async with running_node(model, tmp_path / family, source=partial(OracleSource, right)) as node:
            drafted, _ = await node.generate(prompt, MAX_NEW, text.stop)
        first = next(
            (place for place, pair in enumerate(zip(plain, drafted, strict=False)) if pair[0] != pair[1]), None
        )
        if first is not None:
            differences += 1
            margin = await margin_at(model, (*prompt, *plain[:first]))
            assert margin < NEAR_TIE_LOGITS, f"{family}: token {first} differs with a margin of {margin}"
    record_property("texts_that_differ", differences)
    assert model.free
