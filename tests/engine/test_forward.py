"""The whole engine: transformers' logits and tokens, and passes that may be cut and mixed in any way.

The slow twin here is the same engine with one sequence and one pass (itself held to transformers). On CPU with packed
weights, equal means equal bits.
"""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdcpd.engine.forward import Engine
from sdcpd.engine.linear import can_pack
from sdcpd.engine.model_config import ModelRefused
from sdcpd.engine.model_digest import tokenizer_digest
from sdcpd.engine.settings import EngineSettings
from sdcpd.engine.spans import Span
from tests.support.engines import feed, greedy, load, some_tokens, whole
from tests.support.tiny_models import make_tiny_llama

TinyModels = Callable[..., Path]

LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MIXTURE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32}),
    ("llama", {"num_key_value_heads": 4, "shard_size": "60KB"}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 30}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}),
    ("qwen3_moe", MIXTURE),
    ("qwen3_moe", MIXTURE | {"norm_topk_prob": False, "mlp_only_layers": [0], "attention_bias": True}),
    ("qwen3_moe", MIXTURE | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 20}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True, "head_dim": 32}),
    (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
         | {"original_max_position_embeddings": 64}},
    ),
]  # fmt: skip


def reference(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Logits of transformers in fp32: [tokens, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    return load(tiny_llama)


@pytest.fixture
def small(tiny_llama: Path) -> Engine:
    """Six pages of 16 tokens."""
    page = 2 * 2 * 2 * 16 * 16 * 4
    return load(tiny_llama, page_tokens=16, kv_cache_bytes=6 * page)


def same_bits(engine: Engine) -> bool:
    return engine.info.device == "cpu" and can_pack(torch.device("cpu"), torch.float32)


def assert_equal(engine: Engine, found: Tensor, expected: Tensor) -> None:
    """Equal bits where that is promised, else equal up to rounding."""
    if same_bits(engine):
        assert torch.equal(found, expected)
    else:
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    tiny_models: TinyModels, family: str, options: dict[str, Any]
) -> None:
    folder = tiny_models(family, **options)
    (folder / "tokenizer.json").write_text("{}")
    tokens = some_tokens(200)  # past the original context of the scaled ropes
    engine = load(folder)
    expected = reference(folder, tokens)
    assert expected.std() > 0.1, "a model that says something"
    assert torch.allclose(whole(engine, tokens), expected, atol=1e-4)
    output = greedy(engine, tokens[:20], 12)
    assert output == reference(folder, tokens[:20] + output)[19:-1].argmax(-1).tolist()


def test_scaled_ropes_differ_from_the_plain_one(tiny_models: TinyModels) -> None:
    """The test above would pass if both sides skipped the scaling."""
    plain = reference(tiny_models("llama"), some_tokens(200))
    for family, options in FAMILIES:
        if family == "llama" and "rope_parameters" in options:
            assert not torch.allclose(reference(tiny_models("llama", **options), some_tokens(200)), plain, atol=1e-2)


def test_windows_matter_in_the_tests_above(tiny_models: TinyModels) -> None:
    tokens = some_tokens(200)
    free, bounded = (reference(tiny_models("mistral", sliding_window=size), tokens) for size in (None, 30))
    assert torch.allclose(free[:30], bounded[:30], atol=1e-4), "before the window is full"
    assert not torch.allclose(free[60:], bounded[60:], atol=1e-2)


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_dynamic_rope_beyond_the_original_context(tiny_models: TinyModels, factor: float) -> None:
    """Each row is what transformers says when it reads token by token with its cache."""
    scaling = {"rope_type": "dynamic", "factor": factor, "rope_theta": 10000.0}
    folder = tiny_models("llama", max_position_embeddings=64, rope_parameters=scaling)
    (folder / "tokenizer.json").write_text("{}")
    engine, tokens = load(folder), some_tokens(64 * int(factor))
    assert engine.info.context_tokens == len(tokens)
    found = whole(engine, tokens)
    assert torch.allclose(found[:64], reference(folder, tokens[:64]), atol=1e-4)
    assert torch.allclose(found, one_by_one(folder, tokens), atol=1e-4)
    plain = whole(load(tiny_models_like(folder, "default"), context_tokens=64), tokens[:64])
    assert torch.equal(plain, found[:64]), "within the original context it is no scaling"
    # However the text is cut: prompts that end before, at and after the original context.
    for cut in (1, 50, 63, 64, 65, 90):
        sequence = engine.open_sequence()
        feed(engine, sequence, tokens[:cut], rows=0)
        for at in range(cut, cut + 24, 6):
            assert_equal(engine, feed(engine, sequence, tokens[at : at + 6]), found[at : at + 6])
        engine.close_sequence(sequence)


def one_by_one(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Logits of transformers in fp32 when it is given one token at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows, cache = [], None
    with torch.inference_mode():
        for token in tokens:
            answer = model(torch.tensor([[token]]), cache=cache, use_cache=True)
            cache = answer.past_key_values
            rows.append(answer.logits[0, 0])
    return torch.stack(rows)


def tiny_models_like(folder: Path, rope_type: str) -> Path:
    """The same weights under another rope."""
    other = folder.parent / f"{folder.name}-{rope_type}"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": rope_type, "rope_theta": 10000.0}
    (other / "config.json").write_text(json.dumps(config))
    return other


@pytest.mark.parametrize("family", ["mistral", "qwen3_moe"])
def test_windows_and_experts_give_the_same_bits_however_a_text_is_cut(tiny_models: TinyModels, family: str) -> None:
    """Windows that end in the middle of blocks of keys; experts shared with a neighbour."""
    options: dict[str, Any] = {"max_position_embeddings": 2048, "sliding_window": 600}
    folder = tiny_models(family, **options, **({} if family == "mistral" else MIXTURE | {"use_sliding_window": True}))
    (folder / "tokenizer.json").write_text("{}")
    engine, tokens = load(folder), some_tokens(1300)
    expected = whole(engine, tokens)
    sequence, other = engine.open_sequence(), engine.open_sequence()
    at = 0
    for count in (500, 11, 1, 2, 8, 580, 5, 9, 1, 40, 7):
        assert engine.reserve(sequence, at + count)
        assert engine.reserve(other, at + 3)
        spans = [
            Span(sequence=other, tokens=(5, 6, 7), start=min(3, engine.valid_tokens(other)), rows=1),
            Span(sequence=sequence, tokens=tuple(tokens[at : at + count]), start=at, rows=count),
        ]
        assert_equal(engine, engine.compute(engine.plan(spans))[1:], expected[at : at + count])
        at += count
    engine.close_sequence(sequence)
    engine.close_sequence(other)


@pytest.mark.parametrize("cut", range(1, 16))
def test_every_split_of_prefix_and_scored_rows(engine: Engine, cut: int) -> None:
    """Bug 23: `cut` cached and 16 - cut scored give the last rows of one pass over 16."""
    tokens = some_tokens(16)
    sequence = engine.open_sequence()
    assert feed(engine, sequence, tokens[:cut], rows=0).shape == (0, 300)
    assert_equal(engine, feed(engine, sequence, tokens[cut:]), whole(engine, tokens)[cut:])
    engine.close_sequence(sequence)


def test_chunks_of_any_size(engine: Engine) -> None:
    tokens = some_tokens(250)
    expected = whole(engine, tokens)
    for size in (1, 7, 64, 100):
        sequence = engine.open_sequence()
        parts = [feed(engine, sequence, tokens[at : at + size]) for at in range(0, 250, size)]
        assert_equal(engine, torch.cat(parts), expected)
        engine.close_sequence(sequence)


def test_only_wanted_rows_are_answered(engine: Engine) -> None:
    tokens = some_tokens(10)
    sequence = engine.open_sequence()
    assert_equal(engine, feed(engine, sequence, tokens, rows=3), whole(engine, tokens)[-3:])
    engine.close_sequence(sequence)
    sequence = engine.open_sequence()
    assert engine.reserve(sequence, 10)
    (rows,) = engine.run(engine.plan([Span(sequence=sequence, tokens=tuple(tokens), start=0, rows=3)]))
    expected = whole(engine, tokens)[-3:]
    assert [row.token for row in rows] == expected.argmax(-1).tolist()
    best, second = expected.topk(2).values.unbind(-1)
    assert [row.margin for row in rows] == pytest.approx((best - second).tolist(), abs=1e-4)
    engine.close_sequence(sequence)


@pytest.mark.parametrize("order", list(permutations(range(4)))[::3])
def test_a_mixed_pass_gives_each_sequence_what_it_gets_alone(engine: Engine, order: tuple[int, ...]) -> None:
    """Bug 6: verification rows of 1, 5, 8 tokens and a prefill chunk share a pass, in any order."""
    prefixes = [some_tokens(count, seed=count) for count in (30, 3, 100, 1)]
    scored = [some_tokens(count, seed=50 + count) for count in (1, 5, 8, 40)]
    rows = [1, 5, 8, 0]
    sequences = [engine.open_sequence() for _ in prefixes]
    for sequence, prefix in zip(sequences, prefixes, strict=True):
        feed(engine, sequence, prefix, rows=0)
    spans = []
    for i in order:
        start = len(prefixes[i])
        assert engine.reserve(sequences[i], start + len(scored[i]))
        spans.append(Span(sequence=sequences[i], tokens=tuple(scored[i]), start=start, rows=rows[i]))
    answers = engine.run(engine.plan(spans))
    for i, answer in zip(order, answers, strict=True):
        alone = whole(engine, prefixes[i] + scored[i])[len(prefixes[i]) :]
        assert [row.token for row in answer] == alone[len(alone) - rows[i] :].argmax(-1).tolist()
        assert len(answer) == rows[i]
    # The chunk that wanted no rows left the right keys and values behind.
    tail = some_tokens(3, seed=99)
    after = feed(engine, sequences[3], tail)
    assert_equal(engine, after, whole(engine, prefixes[3] + scored[3] + tail)[-3:])
    for sequence in sequences:
        engine.close_sequence(sequence)


def test_rejected_tokens_leave_nothing_behind(engine: Engine) -> None:
    """Bugs 12 and 18: slots of rejected tokens are written anew, and positions have no hole."""
    prompt, right = some_tokens(20), some_tokens(30, seed=1)
    sequence = engine.open_sequence()
    feed(engine, sequence, prompt, rows=0)
    for at in range(0, 30, 3):
        wrong = some_tokens(6, seed=100 + at)
        feed(engine, sequence, right[at : at + 2] + wrong)
        engine.truncate(sequence, 20 + at + 2)
        found = feed(engine, sequence, right[at + 2 : at + 3])
        assert engine.valid_tokens(sequence) == 20 + at + 3
        assert_equal(engine, found, whole(engine, prompt + right[: at + 3])[-1:])
    engine.close_sequence(sequence)


def test_speculation_gives_plain_greedy_tokens(engine: Engine) -> None:
    """Rounds as the verifier runs them, with drafts that are right, half right and wrong."""
    prompt = some_tokens(12)
    plain = greedy(engine, prompt, 40)
    sequence = engine.open_sequence()
    feed(engine, sequence, prompt[:-1], rows=0)
    known, rounds = list(prompt), 0
    output: list[int] = []
    while len(output) < 40:
        ahead = plain[len(output) : len(output) + 4]
        draft = [token if (place + rounds) % 3 else 299 - token for place, token in enumerate(ahead)]
        base = len(known)
        assert engine.reserve(sequence, base + len(draft))
        span = Span(sequence=sequence, tokens=(known[-1], *draft), start=base - 1, rows=len(draft) + 1)
        rows = engine.run(engine.plan([span]))[0]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == rows[accepted].token:
            accepted += 1
        emitted = [*draft[:accepted], rows[accepted].token]
        known += emitted
        output += emitted
        engine.truncate(sequence, len(known) - 1)
        rounds += 1
    assert output[:40] == plain
    assert rounds < 40, "some drafts were right"
    engine.close_sequence(sequence)


def test_a_row_that_is_not_finite_fails_its_sequence_alone(tmp_path: Path) -> None:
    """Bug 7: a NaN in one sequence's keys and values reaches no other, nor who gets its pages next."""
    folder = make_tiny_llama(tmp_path)
    weights = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["model.embed_tokens.weight"][7, 3] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = load(folder, page_tokens=16)
    good = [token for token in some_tokens(40) if token != 7]
    expected = engine_rows(engine, good)
    healthy, sick = engine.open_sequence(), engine.open_sequence()
    assert engine.reserve(healthy, len(good))
    assert engine.reserve(sick, 4)
    spans = [
        Span(sequence=sick, tokens=(1, 7, 2, 3), start=0, rows=3),
        Span(sequence=healthy, tokens=tuple(good), start=0, rows=len(good)),
    ]
    bad, rows = engine.run(engine.plan(spans))
    assert [row.finite for row in bad] == [False] * 3
    assert list(rows) == expected
    later = feed(engine, sick, [4])
    assert later.isnan().all(), "it stays failed"
    engine.close_sequence(sick)
    engine.close_sequence(healthy)
    for _ in range(3):  # whoever takes over the pages
        assert engine_rows(engine, good) == expected


def engine_rows(engine: Engine, tokens: Sequence[int]) -> list[object]:
    sequence = engine.open_sequence()
    assert engine.reserve(sequence, len(tokens))
    rows = engine.run(engine.plan([Span(sequence=sequence, tokens=tuple(tokens), start=0, rows=len(tokens))]))[0]
    engine.close_sequence(sequence)
    return list(rows)


def test_out_of_pages_is_said_and_changes_nothing(small: Engine) -> None:
    assert small.info.pages == 6
    first, second = small.open_sequence(), small.open_sequence()
    tokens = some_tokens(60)
    before = feed(small, first, tokens)
    assert small.free_pages == 2
    assert not small.reserve(second, 33)
    assert small.free_pages == 2
    assert small.reserve(second, 32)
    assert small.reserve(first, 64), "inside its last page"
    assert not small.reserve(first, 65)
    small.close_sequence(first)
    assert small.free_pages == 4
    assert small.reserve(second, 96)
    small.close_sequence(second)
    assert small.free_pages == 6
    small.pool.check_integrity()
    assert_equal(small, whole(small, tokens), before)


def test_sequences_in_scattered_pages(small: Engine) -> None:
    """Two sequences grow by turns, so that neither lies in one piece; then one takes over the other's pages."""
    a, b = some_tokens(48, seed=1), some_tokens(48, seed=2)
    expected_a, expected_b = whole(small, a), whole(small, b)
    first, second = small.open_sequence(), small.open_sequence()
    for at in range(0, 48, 16):
        assert_equal(small, feed(small, first, a[at : at + 16]), expected_a[at : at + 16])
        assert_equal(small, feed(small, second, b[at : at + 16]), expected_b[at : at + 16])
    small.close_sequence(first)
    assert_equal(small, whole(small, a), expected_a)
    small.close_sequence(second)
    small.pool.check_integrity()


def test_the_context_ends_where_it_ends(tiny_llama: Path) -> None:
    """Bug 10: the last position works, the one after is not ours to run; callers clamp."""
    engine = load(tiny_llama, context_tokens=64)
    assert engine.info.context_tokens == 64
    sequence = engine.open_sequence()
    feed(engine, sequence, some_tokens(63), rows=0)
    assert feed(engine, sequence, [5]).isfinite().all()
    with pytest.raises(AssertionError):
        engine.reserve(sequence, 65)
    with pytest.raises(AssertionError):
        engine.plan([Span(sequence=sequence, tokens=(1,), start=64, rows=1)])


def test_what_is_loaded_is_told(tiny_llama: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, float]] = []
    settings = EngineSettings(model=str(tiny_llama), device="cpu", dtype="fp32", kv_cache_bytes=1 << 22)
    engine = Engine.load(settings, lambda step, fraction: steps.append((step, fraction)), tmp_path)
    info = engine.info
    assert (info.vocabulary, info.context_tokens, info.page_tokens) == (300, 256, 64)
    assert (info.dtype, info.device) == ("fp32", "cpu")
    assert info.pages == engine.free_pages == (1 << 22) // (2 * 2 * 2 * 64 * 16 * 4)
    assert info.tokenizer == tokenizer_digest(tiny_llama)
    assert load(tiny_llama).info.model == info.model
    assert load(tiny_llama, dtype="bf16").info.model != info.model
    assert {step for step, fraction in steps if fraction == 1.0} == {"digest", "weights", "warm-up"}
    assert len(list(tmp_path.iterdir())) == 1, "the hash of the weights is kept"


def test_memory_for_pages(tiny_llama: Path) -> None:
    with pytest.raises(ModelRefused, match="kv_cache_bytes is 100 bytes"):
        load(tiny_llama, kv_cache_bytes=100)
    share = load(tiny_llama, kv_cache_bytes=None, kv_cache_share=0.01)
    assert share.info.pages > 64
    assert load(tiny_llama, kv_cache_share=0.01).info.pages == 512, "bytes win over the share"


def test_bf16_stays_close_to_fp32(tiny_llama: Path) -> None:
    tokens = some_tokens(40)
    exact, rough = whole(load(tiny_llama), tokens), whole(load(tiny_llama, dtype="bf16"), tokens)
    assert rough.dtype == torch.bfloat16
    assert torch.allclose(rough.float(), exact, atol=0.05 * float(exact.std()) + 0.2)


def test_doubled_qk_norms_change_the_logits(tiny_models: TinyModels) -> None:
    """Bug 24: norms that are read but not applied would pass many a test."""
    folder = tiny_models("qwen3", shard_size="10MB")
    (folder / "tokenizer.json").write_text("{}")
    tokens = some_tokens(20)
    before = whole(load(folder), tokens)
    weights = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in ("q_norm", "k_norm"):
        weights[f"model.layers.0.self_attn.{name}.weight"] *= 2
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        after = whole(load(folder), tokens)
        assert not torch.allclose(after, before, atol=1e-3)
        before = after


@pytest.mark.model
def test_demo_model_is_that_of_transformers(demo_model: Path) -> None:
    prompts = ["The capital of France is", "def add(a, b):\n    return", "1, 2, 3, 4,"]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    engine = load(demo_model, kv_cache_bytes=1 << 26, threads=0)
    for prompt in prompts:
        tokens = tokenizer.encode(prompt).ids
        output = greedy(engine, tokens, 16)
        everything = tokens + output
        expected = reference(demo_model, everything)
        found = whole(engine, everything)
        assert torch.allclose(found, expected, rtol=1e-5, atol=2e-4)
        assert output == expected[len(tokens) - 1 : -1].argmax(-1).tolist()


@pytest.mark.model
def test_demo_model_gives_the_same_bits_however_a_text_is_cut(demo_model: Path) -> None:
    """Prefill of a prompt, then rounds of 1 to 9 rows, beside another sequence: the bits of one pass over all."""
    engine = load(demo_model, kv_cache_bytes=1 << 26, threads=0)
    tokens = some_tokens(90, vocabulary=49152)
    expected = whole(engine, tokens)
    sequence, other = engine.open_sequence(), engine.open_sequence()
    feed(engine, sequence, tokens[:45], rows=0)
    at = 45
    for count in range(1, 10):
        assert engine.reserve(sequence, at + count)
        assert engine.reserve(other, 3 * count)
        spans = [
            Span(sequence=other, tokens=(5, 6, 7), start=3 * (count - 1), rows=1),
            Span(sequence=sequence, tokens=tuple(tokens[at : at + count]), start=at, rows=count),
        ]
        assert_equal(engine, engine.compute(engine.plan(spans))[1:], expected[at : at + count])
        at += count
    assert at == 90


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu(tiny_llama: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tokens = some_tokens(100)
    assert torch.allclose(
        whole(load(tiny_llama, device="cuda"), tokens).cpu(), whole(load(tiny_llama), tokens), atol=1e-3
    )
