"""Attention of a ragged pass over paged keys and values, on torch's scaled dot product.

Query i of a span of m over k keys sees keys 0 .. k-m+i. That is always said by an explicit mask: the `is_causal` flag
of the scaled dot product aligns the triangle with the first key, which is wrong as soon as there is a cached prefix.

Per layer, the keys and values of a segment are gathered from their pages, then multiplied. (Reading them where they lie
was tried for sequences of consecutive pages: no faster on CPU, since the product reads strided memory badly. So was one
product for all segments of equal size: a little faster for short contexts, slower once eight sequences' keys no
longer fit the cache.) Grouped queries are folded: the heads that share a key head become rows of one product, so each
key is read once and nothing is repeated in memory.

Rows and keys are padded, to multiples of ROW_MULTIPLE and KEY_MULTIPLE. On CPU a row then has the same bits however
many rows share the pass, whatever their neighbours, however the prefix was cut into passes (measured for 1 to 160
tokens, fp32 and bf16; multiples of 64 or 256 keys are not enough, because the kernel works in blocks of 512 keys and a
shorter last block changes the order of its sums). The price at 256 tokens of context: not visible for one sequence,
10 % of a pass for eight; less for longer ones. Padded queries repeat the first and see one key; padded keys repeat
the first and are masked.

In a layer with a window a query sees the last `window` keys only, its own included. Gathering then begins at the block
of keys that holds the first one seen, so that blocks lie as they do without a window: skipped blocks add exact zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sdcpd.engine.batch import Segment
from sdcpd.engine.device import on_device

ROW_MULTIPLE: Final = 4
KEY_MULTIPLE: Final = 512


@dataclass(frozen=True, slots=True)
class _Reading:
    """One segment. Its queries are rows `first` .. of the gathered ones, `rows` a key head.

    `mask` [1, 1, rows, keys], additive; `slots` int64 [keys].
    """

    first: int
    rows: int
    mask: Tensor
    slots: Tensor


class PagedAttention:
    """Attention of one pass. Built once, then called for each layer."""

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        like: Tensor,
        window: int | None = None,
        invariant: bool = True,
    ) -> None:
        """`like` gives dtype and device of queries, keys and values. Without `invariant` nothing is padded."""
        row_multiple, key_multiple = (ROW_MULTIPLE, KEY_MULTIPLE) if invariant else (1, 1)
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._readings: list[_Reading] = []
        groups = heads // kv_heads
        queries: list[Tensor] = []
        outputs: list[Tensor] = []
        first = 0
        for segment in segments:
            rows = _round_up(segment.count * groups, row_multiple)
            start = 0 if window is None else max(0, segment.start - window + 1) // key_multiple * key_multiple
            keys = _round_up(segment.length - start, key_multiple)
            mask = _mask(segment, groups, rows, start, keys, window, like)
            slots = _slots(segment, page_tokens, start, keys, like.device)
            self._readings.append(_Reading(first, rows, mask, slots))
            queries.append(_query_index(segment, heads, kv_heads, rows, like.device))
            outputs.append(_output_index(segment, kv_heads, groups, first, like.device))
            first += rows * kv_heads
        self._queries = torch.cat(queries)
        self._outputs = torch.cat(outputs)

    def __call__(self, heads: Tensor, pool: Tensor) -> Tensor:
        """One layer. `heads` [T, heads + kv_heads, head_dim]: rotated queries, then keys (which are not looked at).

        `pool` [2 * kv_heads, slots, head_dim] is the layer's part of the page pool, the pass's own keys and values
        included. Returns [T, heads * head_dim].
        """
        kv_heads, head_dim = self._kv_heads, self._head_dim
        queries = heads.view(-1, head_dim).index_select(0, self._queries)
        found: list[Tensor] = []
        for reading in self._readings:
            rows = queries[reading.first : reading.first + reading.rows * kv_heads]
            gathered = pool.index_select(1, reading.slots)
            attended = scaled_dot_product_attention(
                rows.view(1, kv_heads, reading.rows, head_dim),
                gathered[None, :kv_heads],
                gathered[None, kv_heads:],
                attn_mask=reading.mask,
            )
            # On CPU the kernel's result lies in memory as [rows, kv_heads, head_dim], so this copies nothing.
            found.append(attended.transpose(1, 2).reshape(-1, head_dim))
        together = found[0] if len(found) == 1 else torch.cat(found)
        return together.index_select(0, self._outputs).view(len(heads), -1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _mask(
    segment: Segment, groups: int, rows: int, first_key: int, keys: int, window: int | None, like: Tensor
) -> Tensor:
    """0 where a query may look, -inf elsewhere: [1, 1, rows, keys]. Row r is token r // groups of the segment."""
    last_seen = torch.full((rows,), first_key, device=like.device)
    tokens = torch.arange(segment.start, segment.length, device=like.device)
    last_seen[: segment.count * groups].view(segment.count, groups).copy_(tokens[:, None])
    numbers = torch.arange(first_key, first_key + keys, device=like.device)
    hidden = numbers > last_seen[:, None]
    if window is not None:
        hidden |= numbers <= last_seen[:, None] - window
    return like.new_zeros((1, 1, rows, keys)).masked_fill_(hidden, float("-inf"))


def _slots(segment: Segment, page_tokens: int, first_key: int, keys: int, device: torch.device) -> Tensor:
    """The slots to gather: those of the segment's positions, then the first of them again and again."""
    pages = on_device(segment.pages, device)
    own = (pages[:, None] * page_tokens + torch.arange(page_tokens, device=device)).flatten()[
        first_key : segment.length
    ]
    return torch.cat((own, own[:1].expand(keys - len(own))))


def _query_index(segment: Segment, heads: int, kv_heads: int, rows: int, device: torch.device) -> Tensor:
    """Where each folded query stands among the [T * (heads + kv_heads)] heads of the pass: [kv_heads * rows].

    Query head h reads key head h // groups; a key head's rows are its groups, token by token.
    """
    tokens = torch.arange(segment.first, segment.first + segment.count, device=device) * (heads + kv_heads)
    folded = (tokens[:, None] + torch.arange(heads, device=device)).view(segment.count, kv_heads, heads // kv_heads)
    folded = folded.transpose(0, 1).reshape(kv_heads, -1)
    return torch.cat((folded, folded[:, :1].expand(-1, rows - folded.shape[1])), 1).flatten()


def _output_index(segment: Segment, kv_heads: int, groups: int, first: int, device: torch.device) -> Tensor:
    """Where head h of each token stands among the results, which lie as [rows, kv_heads]: [count * heads]."""
    rows = torch.arange(segment.count * groups, device=device).view(segment.count, 1, groups) * kv_heads
    return (first + rows + torch.arange(kv_heads, device=device)[:, None]).flatten()
