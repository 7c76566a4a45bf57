"""The decoder: tokens in, hidden states and logits out. One code for all families, CPU and CUDA.

    x = embedding[tokens]
    for each layer:
        q, k, v = qkv(norm(x));  rotate q and k;  write k and v to the pool;  x += o(attention(q, pool))
        x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

T is the number of tokens of the pass, of all sequences. Only attention knows of sequences; all else is done for the T
rows at once. On CPU a layer of a small model takes a millisecond or two, so each avoidable operation counts: what is
the same in all layers (angles, masks, indexes) is made once a pass.
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from sdcpd.engine.attention import PagedAttention
from sdcpd.engine.batch import Segment
from sdcpd.engine.model_config import ModelConfig
from sdcpd.engine.rope import Rotation
from sdcpd.engine.weights import Weights


class Decoder:
    """A model on its device. Stateless between calls: keys and values live in the pool that is passed in."""

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._weights = weights
        self._rotation = Rotation(config.rope, config.head_dim, device, dtype)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        segments: tuple[Segment, ...],
        pool: Tensor,
        page_tokens: int,
    ) -> Tensor:
        """Run all layers. int64 [T] each: token ids, positions, and the slots to write. Returns [T, hidden].

        `pool` is the page pool's tensor, [layers, 2 * kv_heads, slots, head_dim].
        """
        config = self._config
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        turning, epsilon, width = heads + kv_heads, config.norm_epsilon, (config.hidden,)
        attention = PagedAttention(
            segments, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens, like=pool
        )
        cosines, sines = self._rotation.at(positions)
        states = self._weights.embedding.index_select(0, tokens)
        for number, layer in enumerate(self._weights.layers):
            memory = pool[number]
            normed = rms_norm(states, width, layer.input_norm, epsilon)
            projected = layer.qkv(normed).view(-1, turning + kv_heads, head_dim)
            turned = projected[:, :turning]
            if layer.qk_norm is not None:
                turned = rms_norm(turned, (head_dim,), None, epsilon)
                turned[:, :heads].mul_(layer.qk_norm[0])
                turned[:, heads:].mul_(layer.qk_norm[1])
            turned = self._rotation.turn(turned, cosines, sines)
            memory[:kv_heads].index_copy_(1, slots, turned[:, heads:].transpose(0, 1))
            memory[kv_heads:].index_copy_(1, slots, projected[:, turning:].transpose(0, 1))
            states = states + layer.o(attention(turned, memory))
            normed = rms_norm(states, width, layer.post_norm, epsilon)
            gate, up = layer.gate_up(normed).chunk(2, -1)
            states = states + layer.down(silu(gate).mul_(up))
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[N, hidden] as the last layer left them -> [N, vocabulary]."""
        width, epsilon = (self._config.hidden,), self._config.norm_epsilon
        return self._weights.head(rms_norm(states, width, self._weights.norm, epsilon))
