"""The decoder: tokens in, hidden states and logits out. One code for all families, CPU and CUDA.

    x = embedding[tokens]
    for each layer:
        q, k, v = qkv(norm(x));  rotate q and k;  write k and v to the pool;  x += o(attention(q, pool))
        x += mlp(norm(x))
    logits = head(norm(x))

T is the number of tokens of the pass, of all sequences. Only attention knows of sequences; all else is done for the T
rows at once. On CPU a layer of a small model takes a millisecond or two, so each avoidable operation counts: what is
the same in all layers (angles, masks, indexes) is made once a pass.
"""

import torch
from torch import Tensor
from torch.linalg import vector_norm

from sdcpd.engine.attention import PagedAttention
from sdcpd.engine.batch import Segment
from sdcpd.engine.model_config import ModelConfig
from sdcpd.engine.rope import Rotation
from sdcpd.engine.weights import Weights


class Decoder:
    """A model on its device. Stateless between calls: keys and values live in the pool that is passed in."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        *,
        invariant: bool = True,
    ) -> None:
        """`invariant`: attention pads rows and keys so that a row's bits do not depend on its pass."""
        self._invariant = invariant
        self._config = config
        self._weights = weights
        self._epsilon = torch.tensor(config.norm_epsilon, dtype=torch.float32, device=device)
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
        windowed = frozenset(config.window_layers)
        turning = heads + kv_heads
        attentions = self._attentions(segments, page_tokens, pool)
        cosines, sines = self._rotation.at(positions)
        states = self._weights.embedding.index_select(0, tokens)
        for number, layer in enumerate(self._weights.layers):
            memory = pool[number]
            normed = self._norm(states, layer.input_norm)
            projected = layer.qkv(normed).view(-1, turning + kv_heads, head_dim)
            turned = projected[:, :turning]
            if layer.qk_norm is not None:
                turned = self._norm(turned, layer.qk_norm)
            turned = self._rotation.turn(turned, cosines, sines)
            memory[:kv_heads].index_copy_(1, slots, turned[:, heads:].transpose(0, 1))
            memory[kv_heads:].index_copy_(1, slots, projected[:, turning:].transpose(0, 1))
            states = layer.o.added_to(states, attentions[number in windowed](turned, memory))
            states = layer.mlp.added_to(states, self._norm(states, layer.post_norm))
        return states

    def _attentions(
        self, segments: tuple[Segment, ...], page_tokens: int, pool: Tensor
    ) -> tuple[PagedAttention, PagedAttention]:
        """Of the layers that see all keys, and of those with a window; one and the same while no text outgrows it."""
        config, window = self._config, self._config.window

        def attention(window: int | None) -> PagedAttention:
            return PagedAttention(
                segments,
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                page_tokens=page_tokens,
                like=pool,
                window=window,
                invariant=self._invariant,
            )

        if window is None or all(segment.length <= window for segment in segments):
            whole = attention(None)
            return whole, whole
        if len(config.window_layers) == config.layers:
            windowed = attention(window)
            return windowed, windowed
        return attention(None), attention(window)

    def logits(self, states: Tensor) -> Tensor:
        """[N, hidden] as the last layer left them -> [N, vocabulary]."""
        return self._weights.head(self._norm(states, self._weights.norm))

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm over the last dimension; scaled in float32, weighted in the model's dtype.

        Written out, because torch's rms_norm is eight operations on CPU and cost 6 to 9 % of a pass; this is five.
        """
        length = vector_norm(values, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._epsilon, length, length, value=1 / values.shape[-1]).rsqrt_()
        return (values * scale).to(values.dtype).mul_(weight)
