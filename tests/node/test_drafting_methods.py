"""Each method of drafting in a whole node over a real engine: the text is plain greedy decoding's, and drafts are used.

The draft models are the target itself, which must be right in every round, and copies of it with noise.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from sdcpd.engine.forward import Engine
from sdcpd.frontend.chat_template import ChatMessage
from sdcpd.frontend.text import load_model_text
from tests.support.engines import whole
from tests.support.real_node import LoadedModel, RunningNode, running_node
from tests.support.tiny_models import make_perturbed

PROMPTS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "prompts.jsonl").read_text().splitlines()]
MIB = 1 << 20
MODEL_METHODS = ("draft_model", "frequency_hybrid")

Prompt = tuple[int, ...]


def loaded(folder: Path) -> LoadedModel:
    return LoadedModel(folder, dtype="fp32", kv_cache_bytes=4 * MIB)


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> LoadedModel:
    return loaded(tiny_llama)


@pytest.fixture(scope="module")
def twin(tiny_llama: Path) -> LoadedModel:
    """The target as its own drafter, with an engine of its own."""
    return loaded(tiny_llama)


def some_prompts(count: int) -> list[Prompt]:
    draws = random.Random(3)
    return [tuple(draws.randrange(297) for _ in range(5 + 9 * number)) for number in range(count)]


def method(name: str, drafts: LoadedModel | None, **settings: object) -> list[str]:
    chosen = [f"drafter.method={name}"]
    if drafts is not None:
        chosen += [f"drafter.draft_model.model={drafts.folder}"]
    return chosen + [f"drafter.{key}={value}" for key, value in settings.items()]


async def outputs_of(
    node: RunningNode, prompts: Sequence[Prompt], max_new: int, stop: Sequence[int]
) -> dict[Prompt, Prompt]:
    outputs: dict[Prompt, Prompt] = {}

    async def one(prompt: Prompt) -> None:
        outputs[prompt], _ = await node.generate(prompt, max_new, stop)

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(one, prompt)
    return outputs


def counted(node: RunningNode) -> tuple[float, float, float]:
    """Drafts verified, tokens in them, tokens accepted."""
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    drafts, proposed, accepted = (node.sample(f"sdcpd_spec_decode_{name}") for name in names)
    return drafts, proposed, accepted


@pytest.mark.parametrize("name", ["ngram", "suffix", "draft_model", "frequency_hybrid"])
async def test_output_is_plain_greedy_by_every_method(
    tiny: LoadedModel, twin: LoadedModel, tmp_path: Path, name: str
) -> None:
    prompts = some_prompts(6)
    truth = {prompt: await tiny.plain_greedy(prompt, 60, (299,)) for prompt in prompts}
    drafts = twin if name in MODEL_METHODS else None
    async with running_node(tiny, tmp_path, *method(name, drafts), drafts=drafts) as node:
        assert await outputs_of(node, prompts, 60, (299,)) == truth
        assert node.node.drafter is not None
    proposed, accepted = counted(node)[1:]
    assert accepted > 0
    if name == "draft_model":
        assert accepted == proposed
    assert tiny.free
    assert twin.free


@pytest.mark.parametrize("ahead", ["true", "false"])
async def test_identity_drafter_m_accepted_in_every_round(
    tiny: LoadedModel, twin: LoadedModel, tmp_path: Path, ahead: str
) -> None:
    """fp32, 200 rounds, sessions beside each other."""
    settings = method("draft_model", twin, draft_ahead=ahead)
    settings.append("drafter.draft_model.num_speculative_tokens=4")
    async with running_node(tiny, tmp_path, *settings, drafts=twin) as node:
        for prompt in some_prompts(3):
            await outputs_of(node, [prompt, (*prompt, 7)], 200, ())
    drafts, proposed, accepted = counted(node)
    assert drafts >= 200
    assert accepted == proposed
    if ahead == "true":
        assert node.sample("sdcpd_draft_ahead_total") > 100


def agreement(target: Engine, drafts: Engine, texts: Sequence[Prompt]) -> float:
    """How often both say the same next token of a text."""
    same = total = 0
    for text in texts:
        agreed = whole(target, text).argmax(-1) == whole(drafts, text).argmax(-1)
        same += int(agreed.sum())
        total += len(agreed)
    return same / total


@pytest.mark.parametrize("chosen", [0.8, 0.5])
async def test_a_perturbed_copy_at_a_chosen_acceptance_costs_speed_only(
    tiny: LoadedModel, tmp_path: Path, chosen: float
) -> None:
    prompts = some_prompts(4)
    truth = {prompt: await tiny.plain_greedy(prompt, 80, ()) for prompt in prompts}
    texts = [(*prompt, *output) for prompt, output in truth.items()]
    low, high, found = 0.0, 1.0, 1.0
    for step in range(7):
        scale = (low + high) / 2
        copy = loaded(make_perturbed(tmp_path / f"copy{step}", tiny.folder, scale))
        found = agreement(tiny.engine, copy.engine, texts)
        if abs(found - chosen) < 0.06:
            break
        low, high = (scale, high) if found > chosen else (low, scale)
    else:
        raise AssertionError(f"no copy agrees in {chosen}: {found}")
    async with running_node(tiny, tmp_path / "node", *method("draft_model", copy), drafts=copy) as node:
        assert await outputs_of(node, prompts, 80, ()) == truth
    drafts, proposed, accepted = counted(node)
    assert drafts > len(prompts)
    assert 0.1 < accepted / proposed < 1.0
    assert copy.free


@pytest.mark.model
@pytest.mark.parametrize("name", ["suffix", "draft_model", "frequency_hybrid"])
async def test_output_is_plain_greedy_on_a_real_prompt(demo_model: Path, tmp_path: Path, name: str) -> None:
    """A few tokens of the demo model, which drafts for itself where the method has a model."""
    model = LoadedModel(demo_model, dtype="fp32", kv_cache_bytes=256 * MIB)
    drafts = LoadedModel(demo_model, dtype="fp32", kv_cache_bytes=256 * MIB) if name in MODEL_METHODS else None
    text = load_model_text(model.name, model.folder)
    content = min((one["prompt"] for one in PROMPTS if one["family"] == "edit"), key=len)
    prompt = text.encode_chat([ChatMessage(role="user", content=content)], {}, 0.0)
    truth = await model.plain_greedy(prompt, 12, text.stop)
    settings = method(name, drafts)
    async with running_node(model, tmp_path, *settings, drafts=drafts) as node:
        assert (await node.generate(prompt, 12, text.stop))[0] == truth
    _, proposed, accepted = counted(node)
    if name == "draft_model":
        assert accepted == proposed > 0
