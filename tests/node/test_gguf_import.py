"""A GGUF file becomes the folder it came from; what is not known is refused by name."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdcpd.engine.model_config import Llama3Rope, read_model_config
from sdcpd.engine.rope import frequencies
from sdcpd.node.gguf_facts import PRE_TOKENIZERS, ImportRefused
from sdcpd.node.gguf_import import import_gguf, llama3_factors
from tests.support.engines import load, some_tokens, whole
from tests.support.gguf_files import write_gguf

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []}
        | {"norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
]


def silent(step: str, fraction: float) -> None: ...


def refused(file: Path, tmp_path: Path) -> str:
    with pytest.raises(ImportRefused) as caught:
        import_gguf(file, tmp_path / "made", silent)
    assert not (tmp_path / "made").exists()
    assert not list(tmp_path.glob(".made.part-*"))
    return str(caught.value)


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_logits_are_those_of_the_folder_it_came_from(
    tiny_models: Callable[..., Path], tiny_llama: Path, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    origin = tiny_models(family, **options)
    shutil.copy(tiny_llama / "tokenizer.json", origin)
    steps: list[float] = []
    made = tmp_path / "deep" / "made"
    import_gguf(write_gguf(origin, tmp_path / "model.gguf"), made, lambda step, fraction: steps.append(fraction))
    assert steps[-1] == 1.0
    assert steps == sorted(steps)
    tokens = some_tokens(50)
    assert torch.equal(whole(load(made, dtype="bf16"), tokens), whole(load(origin, dtype="bf16"), tokens))
    ours, theirs = read_model_config(made), read_model_config(origin)
    assert ours.pass_fields == theirs.pass_fields


def test_the_folder_is_what_others_read(tiny_llama: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    more = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.add_bos_token": True}
    import_gguf(write_gguf(tiny_llama, tmp_path / "model.gguf", more), tmp_path / "made", silent)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "made").config.model_type == "llama"
    text = "the theory of it\n<|im_end|>x"
    ids = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json")).encode(text).ids
    assert ids == [297, *Tokenizer.from_file(str(tiny_llama / "tokenizer.json")).encode(text).ids]
    assert AutoTokenizer.from_pretrained(tmp_path / "made").eos_token == "<|im_end|>"
    assert (tmp_path / "made" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("pre", list(PRE_TOKENIZERS))
def test_all_splitting_rules_are_understood_by_the_tokenizer(tiny_llama: Path, tmp_path: Path, pre: str) -> None:
    from tokenizers import Tokenizer

    import_gguf(write_gguf(tiny_llama, tmp_path / "model.gguf", pre=pre), tmp_path / "made", silent)
    tokenizer = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    text = "It's 12345 o'clock,\n\n  über  x"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_scaling_by_key_and_by_factors(tiny_llama: Path, tmp_path: Path) -> None:
    more = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    import_gguf(write_gguf(tiny_llama, tmp_path / "a.gguf", more), tmp_path / "a", silent)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["rope_scaling"]["factor"] == 2.0
    factors = llama3_factors(10_000.0, 16, 8.0)
    import_gguf(write_gguf(tiny_llama, tmp_path / "b.gguf", factors=factors), tmp_path / "b", silent)
    rope = read_model_config(tmp_path / "b").rope
    assert rope == Llama3Rope(
        theta=10_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    factors[0] = 2.0
    assert "rope_freqs.weight" in refused(write_gguf(tiny_llama, tmp_path / "c.gguf", factors=factors), tmp_path)


def test_factors_are_those_of_the_engines_rope() -> None:
    rope = Llama3Rope(theta=5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    powers = 5e5 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    expected = 1 / powers / frequencies(rope, 64)[0].double()
    assert llama3_factors(5e5, 64, 32.0) == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "more", "named"),
    [
        ({"pre": "tekken"}, {}, "tokenizer.ggml.pre is 'tekken'"),
        ({}, {"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window"),
        ({}, {"llama.expert_count": 8}, "llama.expert_count"),
        ({}, {"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({}, {"llama.rope.scaling.type": "longrope"}, "'longrope'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tiny_llama: Path, tmp_path: Path, options: dict[str, Any], more: dict[str, Any], named: str
) -> None:
    assert named in refused(write_gguf(tiny_llama, tmp_path / "model.gguf", more, **options), tmp_path)


def test_files_that_are_none(tiny_llama: Path, tmp_path: Path) -> None:
    assert "is no file" in refused(tmp_path / "none.gguf", tmp_path)
    (tmp_path / "text.gguf").write_text("not a model at all, but long enough to be looked at")
    assert "cannot be read as GGUF" in refused(tmp_path / "text.gguf", tmp_path)
    whole_file = write_gguf(tiny_llama, tmp_path / "model.gguf")
    with pytest.raises(ImportRefused, match="is there already"):
        import_gguf(whole_file, tiny_llama, silent)


def test_a_missing_reader_is_said_with_its_remedy(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'sdcpd[demo]'" in refused(tiny_llama / "config.json", tmp_path)
