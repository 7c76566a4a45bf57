"""Rotary embedding against transformers' frequencies and the plain formula."""

from typing import Any

import pytest
import torch

from sdcpd.engine.model_config import DefaultRope, DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope
from sdcpd.engine.rope import Rotation, frequencies, stretched_frequencies

YARN: dict[str, Any] = {
    "theta": 10_000.0,
    "factor": 4.0,
    "original_context": 64,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: list[tuple[Rope, dict[str, Any]]] = [
    (LinearRope(theta=5000.0, factor=2.5), {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}),
    (
        Llama3Rope(theta=500_000.0, original_context=64, **LLAMA3),
        {"rope_type": "llama3", "rope_theta": 500_000.0, "original_max_position_embeddings": 64, **LLAMA3},
    ),
    (
        YarnRope(**YARN),
        {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    (
        YarnRope(**YARN | {"truncate": False, "beta_fast": 16.0, "attention_factor": 1.3}),
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
            "beta_fast": 16.0,
            "attention_factor": 1.3,
        },
    ),
    (
        YarnRope(**YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}),
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
    ),
]


@pytest.mark.parametrize(("rope", "parameters"), VARIANTS)
def test_scaled_frequencies_are_those_of_transformers(rope: Rope, parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=64, max_position_embeddings=256, rope_parameters=dict(parameters))
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    found, scale = frequencies(rope, 64)
    assert torch.equal(found, expected)
    assert scale == pytest.approx(factor, abs=0)


@pytest.mark.parametrize("length", [1, 256, 257, 300, 1000])
def test_dynamic_frequencies_are_those_of_transformers(length: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}
    config = LlamaConfig(head_dim=64, max_position_embeddings=256, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=torch.tensor(length))
    rope = DynamicRope(theta=10_000.0, factor=3.0, original_context=256)
    assert torch.allclose(stretched_frequencies(rope, 64, torch.tensor([length])), expected, rtol=1e-6, atol=0)
    if length <= 256:
        assert torch.equal(frequencies(rope, 64)[0], expected)


def test_plain_frequencies() -> None:
    found, scale = frequencies(DefaultRope(theta=100.0), 4)
    assert found.tolist() == pytest.approx([1.0, 0.1])
    assert scale == 1.0


def test_turning_is_rotating_pairs() -> None:
    """Dimension i against i + half, by the angle position * f[i]: checked with plain sines and cosines."""
    rope = YarnRope(**YARN)
    rotation = Rotation(rope, 8, torch.device("cpu"), torch.float32)
    positions = torch.tensor([0, 1, 7, 200])
    heads = torch.randn((4, 3, 8), generator=torch.Generator().manual_seed(0))
    found = rotation.turn(heads, *rotation.at(positions))
    steps, scale = frequencies(rope, 8)
    angles = positions.double()[:, None, None] * steps.double()
    left, right = heads.double()[..., :4], heads.double()[..., 4:]
    expected = torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)
    assert torch.allclose(found.double(), expected * scale, atol=1e-5)
