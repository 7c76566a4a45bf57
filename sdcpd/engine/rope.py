"""Rotary position embedding and its scaling variants (RoFormer; linear, dynamic NTK, Llama 3.1, YaRN).

Dimension i of the first half of a head turns against dimension i of the second half by the angle position * f[i].
The variants only choose f and one common factor for cosines and sines. The order of float32 operations follows the
published reference implementations, since a frequency that is off in its last bit is felt at position 100,000.

Dynamic scaling is the one variant whose f depends on the length of the text, beyond the original context. Here the
token at position p is turned as the last of a text of p + 1 tokens, as query and as key, and so stays: what the
published implementation does when it decodes token by token with its cache. (Reading a long prompt at once it turns all
tokens by the prompt's length. Then what a row says would depend on how its prefix was cut into passes, and no key could
be used again: a rejected draft, a chunk, a neighbour in the pass would show in the text.)
"""

import math
from typing import assert_never

import torch
from torch import Tensor

from sdcpd.engine.model_config import DefaultRope, DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope


def frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """f, float32 [head_dim / 2], and the factor on cosines and sines. With DynamicRope: within the original context."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / powers
    match rope:
        case DefaultRope() | DynamicRope():
            return plain, 1.0
        case LinearRope():
            return plain / rope.factor, 1.0
        case Llama3Rope():
            return _llama3(rope, plain), 1.0
        case YarnRope():
            return _yarn(rope, powers, head_dim), _yarn_attention_factor(rope)
        case _:
            assert_never(rope)


def stretched_frequencies(rope: DynamicRope, head_dim: int, lengths: Tensor) -> Tensor:
    """f for the last tokens of texts of `lengths` (int64 [..., 1]) beyond the original context: [..., head_dim / 2]."""
    within = lengths.clamp(min=rope.original_context)
    stretched = rope.factor * within / rope.original_context - (rope.factor - 1)
    theta = rope.theta * stretched ** (head_dim / (head_dim - 2))
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=lengths.device) / head_dim)


def _llama3(rope: Llama3Rope, plain: Tensor) -> Tensor:
    """Keep wavelengths below original/high_freq_factor, stretch those above original/low_freq_factor, ramp between."""
    wavelength = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    scaled = torch.where(wavelength > longest, plain / rope.factor, plain)
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, ramp, scaled)


def _yarn(rope: YarnRope, powers: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn often keep their frequency, those that turn seldom are interpolated, a ramp between."""

    def dimension_that_turns(times: float) -> float:
        return (head_dim * math.log(rope.original_context / (times * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as published: keeps the ramp's slope finite
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_attention_factor(rope: YarnRope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class Rotation:
    """Turns queries and keys. Built once a model; `at` is called once a pass, `turn` once a layer."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        found, self._factor = frequencies(rope, head_dim)
        # One row for all positions, or, where f changes with them, a row for each. (Made on the fly, powers differ in
        # their last bits with the number of tokens in the pass.)
        self._by_position = isinstance(rope, DynamicRope)
        if isinstance(rope, DynamicRope):
            lengths = torch.arange(1, int(rope.original_context * max(1.0, rope.factor)) + 1)[:, None]
            found = torch.where(lengths <= rope.original_context, found, stretched_frequencies(rope, head_dim, lengths))
        self._frequencies = found.to(device)
        self._half = head_dim // 2
        self._dtype = dtype

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines for int64 `positions` [T]: two tensors [T, 1, head_dim]."""
        found = self._frequencies
        if self._by_position:
            found = found.index_select(0, positions)[:, None]
        angles = positions[:, None, None].float() * found
        cosines, sines = angles.cos() * self._factor, angles.sin() * self._factor
        cosines = torch.cat((cosines, cosines), -1).to(self._dtype)
        # The first half is (x1 cos - x2 sin), the second (x2 cos + x1 sin): with the sign in the sines, one roll does.
        return cosines, torch.cat((-sines, sines), -1).to(self._dtype)

    def turn(self, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Rotated `heads` [T, heads, head_dim]."""
        return torch.addcmul(heads * cosines, heads.roll(self._half, -1), sines)
