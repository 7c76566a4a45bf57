"""Attention of a ragged pass over paged keys and values, on torch's scaled dot product.

Query i of a span of m over k keys sees keys 0 .. k-m+i. That is always said by an explicit mask: the `is_causal` flag
of the scaled dot product aligns the triangle with the first key, which is wrong as soon as there is a cached prefix.

Grouped queries are folded: the heads that share a key head become rows of one product, so each key is read once and
nothing is repeated in memory. Row (token, group) of a key head stands at token * groups + group.

Rows and keys are padded, to multiples of ROW_MULTIPLE and KEY_MULTIPLE. On CPU a row then has the same bits however
many rows share the pass, whatever their neighbours, however the prefix was cut into passes (measured for 1 to 160
tokens, fp32 and bf16; multiples of 64 or 256 keys are not enough, because the kernel works in blocks of 512 keys and a
shorter last block changes the order of its sums). It costs 2 to 3 % of a pass at 256 tokens of context, less later.
Padded rows are the next segment's or zeros and see one key; their results are dropped.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sdcpd.engine.batch import Segment

ROW_MULTIPLE: Final = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """What attention needs to know of one segment in all layers of a pass.

    `mask` is [1, 1, rows, keys], additive. `index` (int64 [keys]) lists the slots to gather when they are not in place.
    """

    first: int
    count: int
    first_row: int
    rows: int
    mask: Tensor
    base: int
    keys: int
    index: Tensor | None


def row_padding(tokens: int, groups: int) -> int:
    """Rows that a buffer of queries needs for a pass of `tokens`, so that the last segment's padding is inside."""
    return tokens * groups + ROW_MULTIPLE


def read_segment(segment: Segment, groups: int, page_tokens: int, like: Tensor) -> Reading:
    """Prepare a segment for all layers. `like` gives dtype and device of the mask."""
    device = like.device
    rows = -(-segment.count * groups // ROW_MULTIPLE) * ROW_MULTIPLE
    last_seen = torch.zeros(rows, dtype=torch.int64, device=device)
    start = segment.length - segment.count
    last_seen[: segment.count * groups] = torch.arange(
        start * groups, segment.length * groups, dtype=torch.int64, device=device
    ).div_(groups, rounding_mode="floor")
    hidden = torch.arange(segment.keys, device=device) > last_seen[:, None]
    mask = torch.zeros((rows, segment.keys), dtype=like.dtype, device=device).masked_fill_(hidden, float("-inf"))
    return Reading(
        first=segment.first,
        count=segment.count,
        first_row=segment.first * groups,
        rows=rows,
        mask=mask[None, None],
        base=segment.base or 0,
        keys=segment.keys,
        index=None if segment.base is not None else _gather_index(segment, page_tokens, device),
    )


def _gather_index(segment: Segment, page_tokens: int, device: torch.device) -> Tensor:
    """Slots of the first `keys` positions; past the sequence's end its first slot stands in, masked."""
    pages = torch.tensor(segment.pages, dtype=torch.int64, device=device)
    slots = (pages[:, None] * page_tokens + torch.arange(page_tokens, device=device)).flatten()[: segment.keys]
    index = slots.new_full((segment.keys,), segment.pages[0] * page_tokens)
    index[: len(slots)] = slots
    return index


def attend(reading: Reading, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One segment's attention in one layer.

    `queries` [kv_heads, >= rows of the pass, head_dim], folded; `keys` and `values` [kv_heads, slots, head_dim], the
    pool's. Returns [kv_heads, rows, head_dim] of which the first count * groups rows count.
    """
    rows = queries[None, :, reading.first_row : reading.first_row + reading.rows]
    if reading.index is None:
        end = reading.base + reading.keys
        keys, values = keys[:, reading.base : end], values[:, reading.base : end]
    else:
        keys, values = keys.index_select(1, reading.index), values.index_select(1, reading.index)
    return scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=reading.mask)[0]
