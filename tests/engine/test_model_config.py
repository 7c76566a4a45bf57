"""Reading config.json: what changes the forward pass is carried out or refused by name (bugs 10, 24)."""

import json
from pathlib import Path
from typing import Any

import pytest

from sdcpd.engine.model_config import (
    DefaultRope,
    DynamicRope,
    Experts,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    ModelRefused,
    YarnRope,
    read_model_config,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def read(folder: Path, context_tokens: int | None = None, **members: Any) -> ModelConfig:
    """The config of a llama with these members changed; ... takes one away."""
    config = {name: value for name, value in (LLAMA | members).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(folder, context_tokens)


def refused(folder: Path, context_tokens: int | None = None, **members: Any) -> str:
    with pytest.raises(ModelRefused) as refusal:
        read(folder, context_tokens, **members)
    assert str(folder / "config.json") in str(refusal.value)
    return str(refusal.value)


def test_a_plain_llama(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.heads, config.kv_heads, config.head_dim, config.context_tokens) == (4, 2, 16, 256)
    assert config.rope == DefaultRope(theta=10_000.0)
    assert {config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.tied} == {False}
    assert config.norm_epsilon == 1e-6


def test_an_explicit_head_dim_wins(tmp_path: Path) -> None:
    assert read(tmp_path, head_dim=32).head_dim == 32
    assert read(tmp_path, head_dim=None).head_dim == 16
    assert read(tmp_path, model_type="qwen3").head_dim == 128, "that family's own default"
    assert "head_dim" in refused(tmp_path, head_dim=15)
    assert "hidden_size 66" in refused(tmp_path, hidden_size=66)


def test_key_heads(tmp_path: Path) -> None:
    assert read(tmp_path, num_key_value_heads=...).kv_heads == 4
    assert read(tmp_path, num_key_value_heads=None, model_type="qwen2").kv_heads == 4
    assert "num_key_value_heads is missing" in refused(tmp_path, num_key_value_heads=..., model_type="mistral")
    assert "multiple" in refused(tmp_path, num_key_value_heads=3)


@pytest.mark.parametrize(
    ("family", "members", "biases"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {"attention_bias": True, "sliding_window": None}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_by_family(tmp_path: Path, family: str, members: dict[str, Any], biases: tuple[bool, ...]) -> None:
    config = read(tmp_path, model_type=family, **members)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm == (family == "qwen3")


def test_both_spellings_of_rope_scaling_mean_the_same(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = read(tmp_path, rope_theta=5000.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    newest = read(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0})
    assert old == new == newest
    assert old.rope == LinearRope(theta=5000.0, factor=2.0)
    assert old != read(tmp_path, rope_theta=5000.0, rope_scaling=None)


def test_llama3_and_yarn(tmp_path: Path) -> None:
    assert read(tmp_path, rope_scaling=LLAMA3_ROPE).rope == Llama3Rope(
        theta=10_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
    )
    yarn = read(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}).rope
    assert isinstance(yarn, YarnRope)
    assert (yarn.factor, yarn.original_context, yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (4.0, 64, 32, 1, True)


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, "'foo'"),
        ({"rope_scaling": {"type": "dynamic"}}, "lacks factor"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": None}}, "lacks low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ],
)
def test_other_ropes_are_refused_by_name(tmp_path: Path, members: dict[str, Any], named: str) -> None:
    assert named in refused(tmp_path, **members)


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": ...}, "model_type is ''"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config names AWQ"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config names GPTQ"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "quantization_config names fp8 (e4m3)"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config names FP4 (mxfp4)"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "quantization_config names an unnamed method (NVFP4)"),
        ({"quantization_config": {"fmt": "e4m3"}}, "quantization_config"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, members: dict[str, Any], named: str) -> None:
    assert named in refused(tmp_path, **members)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="Hugging Face folder"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelRefused):
        read_model_config(tmp_path)


def test_the_context_can_be_lowered_not_raised(tmp_path: Path) -> None:
    assert read(tmp_path, 100).context_tokens == 100
    assert read(tmp_path, 256).context_tokens == 256
    assert "max_position_embeddings is 256" in refused(tmp_path, 257)


TYPES = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("members", "layers"),
    [
        ({"model_type": "mistral"}, (0, 1)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, (1,)),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": TYPES}, (1,)),
        ({"model_type": "qwen3_moe", "use_sliding_window": True} | MIXTURE, (0, 1)),
    ],
)
def test_a_window_in_force_names_its_layers(tmp_path: Path, members: dict[str, Any], layers: tuple[int, ...]) -> None:
    config = read(tmp_path, sliding_window=128, **members)
    assert (config.window, config.window_layers) == (128, layers)
    assert read(tmp_path, 100, sliding_window=128, **members).pass_fields == config.pass_fields


def test_windows_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    assert "sliding_window is 0" in refused(tmp_path, model_type="mistral", sliding_window=0)
    sliding: dict[str, Any] = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 128}
    assert "layer_types has 1" in refused(tmp_path, layer_types=["sliding_attention"], **sliding)


def test_dynamic_scaling_stretches_the_context(tmp_path: Path) -> None:
    dynamic: dict[str, Any] = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    config = read(tmp_path, **dynamic)
    assert config.rope == DynamicRope(theta=10_000.0, factor=2.0, original_context=256)
    assert config.context_tokens == 512
    assert read(tmp_path, 300, **dynamic).context_tokens == 300
    assert "(with dynamic scaling by 2.0: 512)" in refused(tmp_path, 513, **dynamic)


def test_experts(tmp_path: Path) -> None:
    moe = {"model_type": "qwen3_moe"} | MIXTURE
    both = Experts(layers=(0, 1), count=8, chosen=2, intermediate=32, normalised=False)
    assert read(tmp_path, **moe).experts == both
    assert read(tmp_path, **moe | {"num_experts": None, "num_local_experts": 8}).experts == both
    found = read(tmp_path, **moe, mlp_only_layers=[1], norm_topk_prob=True).experts
    assert found == Experts(layers=(0,), count=8, chosen=2, intermediate=32, normalised=True)
    sparse = read(tmp_path, **moe, decoder_sparse_step=2).experts
    assert sparse is not None
    assert sparse.layers == (1,)
    assert read(tmp_path, **moe, mlp_only_layers=[0, 1]).experts is None
    assert read(tmp_path).experts is None
    for name in MIXTURE:
        assert f"{name} is missing" in refused(tmp_path, **moe | {name: None})
    assert "num_experts_per_tok is 9" in refused(tmp_path, **moe | {"num_experts_per_tok": 9})


@pytest.mark.parametrize(
    "members",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 256},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 128},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2},
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 128, "layer_types": ["full_attention"]},
    ],
)
def test_a_window_that_never_bites_is_no_matter(tmp_path: Path, members: dict[str, Any]) -> None:
    assert read(tmp_path, **members).context_tokens == 256


def test_an_unknown_kind_of_layer_is_refused(tmp_path: Path) -> None:
    assert "'linear_attention'" in refused(tmp_path, model_type="qwen3", layer_types=["linear_attention"])
