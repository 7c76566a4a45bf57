"""Rule 1's argmax: the smallest id among the maxima, and no token from a row that cannot be trusted (bugs 3 and 7)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sdcpd.engine.spans import Row
from sdcpd.engine.target_rows import read_rows, rows_on_device

Reader = Callable[[Tensor], list[Row]]
READERS = [read_rows, rows_on_device]
LARGE = 151_936


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_id_wins_a_tie(read: Reader, dtype: torch.dtype) -> None:
    (row,) = read(torch.tensor([[0.0, 5.0, 5.0, 1.0]], dtype=dtype))
    assert (row.token, row.margin, row.finite) == (1, 0.0, True)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("count", [1, 64])
def test_ties_far_apart_in_a_large_vocabulary(read: Reader, count: int) -> None:
    logits = torch.zeros((count, LARGE))
    logits[:, 70_000] = logits[:, 140_000] = 3.5
    assert [(row.token, row.margin) for row in read(logits)] == [(70_000, 0.0)] * count


@pytest.mark.parametrize("read", READERS)
def test_close_values_tie_in_bf16(read: Reader) -> None:
    """5.00 and 5.01 round to the same bf16 value; judged is what was computed."""
    logits = torch.tensor([[5.00, 5.01]])
    assert read(logits)[0].token == 1
    assert read(logits.bfloat16())[0].token == 0


@pytest.mark.parametrize("read", READERS)
def test_margin_is_best_minus_second(read: Reader) -> None:
    (row,) = read(torch.tensor([[-1.0, 2.5, 4.0]]))
    assert (row.token, row.margin) == (2, 1.5)
    (row,) = read(torch.tensor([[-math.inf, 2.5, -math.inf]]))
    assert (row.token, row.margin, row.finite) == (1, math.inf, True), "masked entries are no failure"


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "bad", [[1.0, math.nan, 9.0], [math.nan] * 3, [1.0, math.inf, 2.0], [-math.inf] * 3, [math.nan, math.inf, 0.0]]
)
def test_a_row_that_is_not_finite_says_so_and_spares_its_neighbours(read: Reader, bad: list[float]) -> None:
    good = [1.0, 0.0, 3.0]
    rows = read(torch.tensor([good, bad, good]))
    assert [row.finite for row in rows] == [True, False, True]
    assert rows[0] == rows[2]
    assert rows[0].token == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_agree_and_leave_the_logits_alone(dtype: torch.dtype) -> None:
    logits = torch.randn((40, 500), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[3, 7] = math.nan
    before: Tensor = logits.clone()
    assert read_rows(logits) == rows_on_device(logits)
    assert torch.equal(before.nan_to_num(), logits.nan_to_num())
