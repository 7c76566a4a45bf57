"""The decoder: tokens in, hidden states and logits out. One code for all families, CPU and CUDA.

    x = embedding[tokens]
    for each layer:
        q, k, v = qkv(norm(x));  rotate q and k;  write k and v to the pool;  x += o(attention(q, pool))
        x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

T is the number of tokens of the pass, of all sequences. Only attention knows of sequences; all else is done for the T
rows at once. On CPU a layer of a small model takes about a millisecond, so each avoidable operation counts: that is why
queries are folded into one buffer that serves all layers, and why a lone segment's result is not copied together.
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from sdcpd.engine.attention import Reading, attend, row_padding
from sdcpd.engine.model_config import ModelConfig
from sdcpd.engine.rope import Rotation
from sdcpd.engine.weights import LayerWeights, Weights


class Decoder:
    """A model on its device. Stateless between calls: keys and values live in the pool that is passed in."""

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._weights = weights
        self._rotation = Rotation(config.rope, config.head_dim, device, dtype)
        self._norm_shape = (config.hidden,)
        self.groups = config.heads // config.kv_heads

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, readings: list[Reading], pool: Tensor
    ) -> Tensor:
        """Run all layers. int64 [T] each: token ids, positions, and the slots to write. Returns [T, hidden].

        `pool` is the page pool's tensor [2, layers, kv_heads, slots, head_dim].
        """
        epsilon = self._config.norm_epsilon
        cosines, sines = self._rotation.at(positions)
        states = self._weights.embedding.index_select(0, tokens)
        queries = states.new_zeros(
            (self._config.kv_heads, row_padding(len(tokens), self.groups), self._config.head_dim)
        )
        for number, layer in enumerate(self._weights.layers):
            keys, values = pool[0, number], pool[1, number]
            normed = rms_norm(states, self._norm_shape, layer.input_norm, epsilon)
            self._project(layer, normed, cosines, sines, slots, queries, keys, values)
            states = states + layer.o(self._attention(readings, queries, keys, values, len(tokens)))
            normed = rms_norm(states, self._norm_shape, layer.post_norm, epsilon)
            gate, up = layer.gate_up(normed).chunk(2, -1)
            states = states + layer.down(silu(gate).mul_(up))
        return states

    def _project(
        self,
        layer: LayerWeights,
        normed: Tensor,
        cosines: Tensor,
        sines: Tensor,
        slots: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Queries into their folded buffer, keys and values into their slots."""
        config = self._config
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        tokens = len(normed)
        projected = layer.qkv(normed).view(tokens, heads + 2 * kv_heads, head_dim)
        turned = projected[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            turned = rms_norm(turned, (head_dim,), None, config.norm_epsilon)
            turned[:, :heads].mul_(layer.qk_norm[0])
            turned[:, heads:].mul_(layer.qk_norm[1])
        turned = self._rotation.turn(turned, cosines, sines)
        keys.index_copy_(1, slots, turned[:, heads:].transpose(0, 1))
        values.index_copy_(1, slots, projected[:, heads + kv_heads :].transpose(0, 1))
        folded = queries[:, : tokens * self.groups].view(kv_heads, tokens, self.groups, head_dim)
        folded.copy_(turned[:, :heads].view(tokens, kv_heads, self.groups, head_dim).transpose(0, 1))

    def _attention(self, readings: list[Reading], queries: Tensor, keys: Tensor, values: Tensor, tokens: int) -> Tensor:
        """Attention of all segments, unfolded: [T, heads * head_dim]."""
        config = self._config
        folded = (config.kv_heads, -1, self.groups, config.head_dim)
        if len(readings) == 1:
            found = attend(readings[0], queries, keys, values)[:, : tokens * self.groups]
            return found.view(folded).transpose(0, 1).reshape(tokens, config.heads * config.head_dim)
        out = queries.new_empty((tokens, config.kv_heads, self.groups, config.head_dim))
        for reading in readings:
            found = attend(reading, queries, keys, values)[:, : reading.count * self.groups]
            out[reading.first : reading.first + reading.count] = found.view(folded).transpose(0, 1)
        return out.view(tokens, config.heads * config.head_dim)

    def logits(self, states: Tensor) -> Tensor:
        """[N, hidden] as the last layer left them -> [N, vocabulary]."""
        return self._weights.head(rms_norm(states, self._norm_shape, self._weights.norm, self._config.norm_epsilon))
