"""Shapes to measure passes with, by name. Weights are random: a pass costs the same whatever they are."""

from typing import Final

import msgspec

from sdcpd.engine.model_config import DefaultRope, Experts, ModelConfig

_QWEN3: Final = ModelConfig(
    family="qwen3",
    vocabulary=151_936,
    hidden=2048,
    intermediate=6144,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    norm_epsilon=1e-6,
    rope=DefaultRope(theta=1e6),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=True,
    tied=True,
    context_tokens=8192,
)
_TINY: Final = msgspec.structs.replace(
    _QWEN3,
    vocabulary=300,
    hidden=64,
    intermediate=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    context_tokens=2048,
)

SHAPES: Final[dict[str, ModelConfig]] = {
    "tiny": _TINY,
    "qwen3-1.7b": _QWEN3,
    "qwen3-4b": msgspec.structs.replace(_QWEN3, hidden=2560, intermediate=9728, layers=36, heads=32),
    "qwen3-8b": msgspec.structs.replace(_QWEN3, hidden=4096, intermediate=12288, layers=36, heads=32, tied=False),
}

EXACT: Final[dict[str, ModelConfig]] = {
    "plain": _TINY,
    "biases": msgspec.structs.replace(_TINY, family="llama", qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=False),
    "window": msgspec.structs.replace(_TINY, family="mistral", qk_norm=False, window=600, window_layers=(1,)),
    "experts": msgspec.structs.replace(
        _TINY,
        family="qwen3_moe",
        experts=Experts(layers=(0, 1), count=8, chosen=2, intermediate=32, normalised=True),
    ),
    "odd groups": msgspec.structs.replace(_TINY, family="llama", heads=9, kv_heads=3, qk_norm=False),
}
"""Small models for equality with the CPU, each with something of its own."""
