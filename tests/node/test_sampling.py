"""Sampling by a real engine: rule 65281 writes the same text whatever is drafted; rule 2 runs through the whole node.

On a tiny random model in seconds; on the demo model with a real prompt where it is there (`model`). In fp32: in bf16 a
pass over several tokens may round otherwise than a pass over one, and a draw on an edge then falls on the other side.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdcpd.drafting.source import DraftSource
from sdcpd.frontend.chat_template import ChatMessage
from sdcpd.frontend.text import load_model_text
from tests.support.cluster import OracleSource
from tests.support.real_node import LoadedModel, running_node

PROMPTS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "prompts.jsonl").read_text().splitlines()]
MIB = 1 << 20
WARM: dict[str, Any] = {"temperature_milli": 900, "top_k": 50, "top_p_milli": 950}

Texts = dict[int, tuple[int, ...]]


def partly_right(prompt: tuple[int, ...], texts: Texts) -> DraftSource:
    """Proposes what some text goes on with, every fourth token spoilt."""

    def continue_(context: Sequence[int], limit: int) -> list[int]:
        written = tuple(context[len(prompt) :])
        for text in texts.values():
            if text[: len(written)] == written:
                draft = list(text[len(written) :][:limit]) or [0]
                return [7 if (len(written) + place) % 4 == 3 else token for place, token in enumerate(draft)]
        return [0]

    return OracleSource(continue_)


async def check(model: LoadedModel, prompt: tuple[int, ...], state: Path, seeds: Sequence[int], max_new: int) -> None:
    """Without a drafter, with prompt lookup, and with a source that is often right: the same texts."""
    alone: Texts = {}
    async with running_node(model, state / "alone", drafter=False) as node:
        for seed in seeds:
            alone[seed], _ = await node.generate(prompt, max_new, (), seed=seed, **WARM)
        again, _ = await node.generate(prompt, max_new, (), seed=seeds[0], **WARM)
        assert again == alone[seeds[0]]
    assert len(set(alone.values())) == len(seeds), "seeds differ, texts differ"
    for name, source in (("lookup", None), ("right", partial(partly_right, prompt, alone))):
        async with running_node(model, state / name, source=source) as node:
            for seed in seeds:
                drafted, _ = await node.generate(prompt, max_new, (), seed=seed, **WARM)
                assert drafted == alone[seed], f"seed {seed} with {name}"
            accepted = node.sample("sdcpd_spec_decode_num_accepted_tokens_total")
            assert node.sample("sdcpd_spec_decode_num_drafts_total") > 0
        if source is not None:
            assert accepted > len(seeds) * max_new / 2
    assert model.free


async def test_the_text_is_the_seeds(tiny_llama: Path, tmp_path: Path) -> None:
    model = LoadedModel(tiny_llama, dtype="fp32", kv_cache_bytes=4 * MIB)
    await check(model, tuple(range(20, 50)), tmp_path, (1, 2, 3), 40)


@pytest.mark.model
async def test_the_text_is_the_seeds_on_a_real_prompt(demo_model: Path, tmp_path: Path) -> None:
    model = LoadedModel(demo_model, dtype="fp32", kv_cache_bytes=512 * MIB)
    text = load_model_text(model.name, model.folder)
    content = min((one["prompt"] for one in PROMPTS if one["family"] == "edit"), key=len)
    prompt = text.encode_chat([ChatMessage(role="user", content=content)], {}, 0.0)
    await check(model, prompt, tmp_path, (1, 2), 24)


async def test_rule_2_through_the_node(tiny_llama: Path, tmp_path: Path) -> None:
    """Prompt lookup's one-hot rows; temperature 0 under rule 2 writes the greedy text (decision 13)."""
    model = LoadedModel(tiny_llama, dtype="fp32", kv_cache_bytes=4 * MIB)
    prompt = tuple(range(20, 40)) * 2
    greedy = await model.plain_greedy(prompt, 30, ())
    async with running_node(model, tmp_path) as node:
        assert (await node.generate(prompt, 30, (), rule=2))[0] == greedy
        tokens, _ = await node.generate(prompt, 30, (), **WARM)
        assert len(tokens) == 30
        assert node.sample("sdcpd_spec_decode_num_drafts_total") > 0
        assert node.sample("sdcpd_proposals_refused_total") == 0
    assert model.free
