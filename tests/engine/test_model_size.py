"""Sizes counted from the shape are those of the tensors that are loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdcpd.engine.linear import can_halve
from sdcpd.engine.model_config import read_model_config
from sdcpd.engine.model_size import measure
from tests.support.engines import load

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3_moe", MIXTURE),
    ],
)
def test_sizes_of_families(tiny_models: Callable[..., Path], family: str, options: dict[str, Any]) -> None:
    folder = tiny_models(family, **options)
    (folder / "tokenizer.json").write_text("{}")
    size = measure(read_model_config(folder))
    with safe_open(folder / "model.safetensors", framework="np") as tensors:
        counts = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118  # no dict
    assert size.parameters == sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in counts)
    engine = load(folder, dtype="bf16", quantization="int8")
    assert engine.info.weights_bytes == size.weights_bytes("bf16", "int8") == size.least_weights_bytes("bf16", "int8")
    for dtype in ("bf16", "fp32"):
        kept_bytes = load(folder, dtype=dtype).info.weights_bytes
        assert size.least_weights_bytes(dtype) <= kept_bytes <= size.weights_bytes(dtype)


@pytest.mark.skipif(not can_halve(torch.device("cpu"), torch.float32), reason="weights are kept as they are here")
def test_the_least_of_fp32_is_what_weights_that_fp16_holds_take(tiny_models: Callable[..., Path]) -> None:
    folder = tiny_models("qwen2")
    (folder / "tokenizer.json").write_text("{}")
    tensors = load_file(folder / "model.safetensors")
    rounded = {name: (64 * tensor).round() / 64 for name, tensor in tensors.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    size = measure(read_model_config(folder))
    assert load(folder, dtype="fp32").info.weights_bytes == size.least_weights_bytes("fp32")
    assert size.weights_bytes("fp32") - size.least_weights_bytes("fp32") == 2 * size.linear_weights


def test_pages_take_what_a_token_takes(tiny_llama: Path) -> None:
    engine = load(tiny_llama, kv_cache_bytes=1 << 20)
    size = measure(read_model_config(tiny_llama))
    assert engine.info.pages == (1 << 20) // (size.kv_bytes_a_token("fp32") * engine.info.page_tokens)
    assert size.kv_bytes_a_token("bf16") == 2 * 2 * 2 * 16 * 2
    assert engine.info.weights_bytes == size.weights_bytes("fp32")
