"""Paged ragged attention against a slow twin that writes the definition out (bug 23)."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sdcpd.engine.attention import PagedAttention
from sdcpd.engine.batch import Segment

PAGE = 16


def twin(queries: Tensor, keys: Tensor, values: Tensor, window: int = 1 << 30) -> Tensor:
    """[m, heads, d], [k, kv_heads, d] twice -> [m, heads, d]; in float64, one by one.

    Query i sees keys 0 .. k-m+i, of these the last `window`.
    """
    count, heads, head_dim = queries.shape
    length, kv_heads, _ = keys.shape
    out = torch.zeros(queries.shape, dtype=torch.float64)
    for i in range(count):
        seen = length - count + i + 1
        for head in range(heads):
            mine = head // (heads // kv_heads)
            first = max(0, seen - window)
            scores = keys[first:seen, mine].double() @ queries[i, head].double() / math.sqrt(head_dim)
            out[i, head] = torch.softmax(scores, 0) @ values[first:seen, mine].double()
    return out


class World:
    """Sequences with scattered pages in one pool of one layer, and the definition's answer for each."""

    def __init__(
        self, spans: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int = 16, window: int | None = None
    ) -> None:
        """`spans`: (cached tokens, tokens in this pass) of each sequence."""
        generator = torch.Generator().manual_seed(3)
        needs = [-(-(cached + count) // PAGE) for cached, count in spans]
        order = torch.randperm(sum(needs) + 2, generator=generator).tolist()
        # What nobody wrote is not a number: a kernel that looks at it, if only to mask it, is found out.
        self.pool = torch.full((2 * kv_heads, len(order) * PAGE, head_dim), math.nan)
        total = sum(count for _, count in spans)
        self.heads = torch.randn((total, heads + kv_heads, head_dim), generator=generator)
        self.segments: list[Segment] = []
        self.expected: list[Tensor] = []
        first = 0
        for (cached, count), need in zip(spans, needs, strict=True):
            pages = tuple(order.pop() for _ in range(need))
            length = cached + count
            keys = torch.randn((length, kv_heads, head_dim), generator=generator)
            values = torch.randn((length, kv_heads, head_dim), generator=generator)
            slots = torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(length)])
            self.pool[:kv_heads, slots] = keys.transpose(0, 1)
            self.pool[kv_heads:, slots] = values.transpose(0, 1)
            self.segments.append(Segment(first=first, count=count, length=length, pages=pages))
            self.expected.append(twin(self.heads[first : first + count, :heads], keys, values, window or 1 << 30))
            first += count
        self.shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": window}

    def attend(self, segments: list[Segment], heads: Tensor) -> Tensor:
        attention = PagedAttention(segments, page_tokens=PAGE, like=self.pool, **self.shape)
        found = attention(heads, self.pool)
        return found.view(len(heads), self.shape["heads"], self.shape["head_dim"])

    def alone(self, place: int) -> Tensor:
        segment = self.segments[place]
        moved = Segment(first=0, count=segment.count, length=segment.length, pages=segment.pages)
        return self.attend([moved], self.heads[segment.first : segment.first + segment.count])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (3, 3), (7, 1)])
@torch.inference_mode()
def test_each_sequence_gets_what_the_definition_says(heads: int, kv_heads: int) -> None:
    world = World([(0, 1), (0, 16), (5, 3), (30, 1), (15, 2), (500, 11), (509, 5)], heads, kv_heads)
    found = world.attend(world.segments, world.heads)
    for segment, expected in zip(world.segments, world.expected, strict=True):
        part = found[segment.first : segment.first + segment.count]
        assert torch.allclose(part.double(), expected, atol=1e-5), segment


@pytest.mark.parametrize("window", [1, 7, 512, 600])
@torch.inference_mode()
def test_a_window_hides_all_keys_before_it(window: int) -> None:
    world = World([(0, 1), (0, 16), (5, 3), (511, 9), (700, 1), (1100, 15), (1530, 12)], 4, 2, window=window)
    found = world.attend(world.segments, world.heads)
    for place, (segment, expected) in enumerate(zip(world.segments, world.expected, strict=True)):
        part = found[segment.first : segment.first + segment.count]
        assert torch.allclose(part.double(), expected, atol=1e-5), segment
        for i in range(segment.count):  # and a query alone, whose gathering may begin at a later block
            one = Segment(first=0, count=1, length=segment.start + i + 1, pages=segment.pages)
            assert torch.equal(world.attend([one], world.heads[segment.first + i][None])[0], part[i]), (place, i)


@torch.inference_mode()
def test_three_queries_over_eight_keys_see_six_seven_and_eight() -> None:
    world = World([(5, 3)], 2, 1)
    before = world.attend(world.segments, world.heads)
    pages = world.segments[0].pages
    for key, changed in ((5, [0, 1, 2]), (6, [1, 2]), (7, [2])):
        world.pool[1, pages[0] * PAGE + key] += 1.0  # a value, so that only who looks at it changes
        after = world.attend(world.segments, world.heads)
        assert [i for i in range(3) if not torch.equal(after[i], before[i])] == changed
        before = after


@torch.inference_mode()
def test_neighbours_do_not_change_a_bit() -> None:
    world = World([(40, 4), (0, 30), (300, 1), (7, 9)], 9, 3)
    together = world.attend(world.segments, world.heads)
    for place, segment in enumerate(world.segments):
        part = together[segment.first : segment.first + segment.count]
        assert torch.equal(part, world.alone(place))


@pytest.mark.parametrize("cached", [0, 40, 255, 505, 700])
@torch.inference_mode()
def test_a_query_alone_has_the_bits_it_has_in_a_pass(cached: int) -> None:
    count = 17
    world = World([(cached, count)], 9, 3)
    together = world.attend(world.segments, world.heads)
    for i in range(count):
        pages = world.segments[0].pages
        one = Segment(first=0, count=1, length=cached + i + 1, pages=pages)
        assert torch.equal(world.attend([one], world.heads[i : i + 1])[0], together[i]), i
