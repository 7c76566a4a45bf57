"""Int8 weights times activations in fixed point of 14 bits: sums of integers, by torch's int8 product on CPU.

Products of octets are what a CPU without AVX-512 does fastest (and one with VNNI faster still), but eight bits are too
few for activations. So each row x is written with a step of its own and two digits of seven bits:

    s = max|x| / 63        x / s = hi + lo / 126 + an error of at most 1 / 252
    hi = round(x / s)      lo = round(126 * (x / s - hi))          both within -63 .. 63
    y = s * scale * (hi . q + (lo . q) / 126)

`hi` and `lo` go through the product as two rows; a second row costs little where the time is that of reading weights.
The error is 2^-14 of a row's largest element: less than what bf16 loses at that element, and what int8 weights lose
everywhere. Seven bits, because without VNNI the instruction adds two products in 16 bits with saturation:
2 * 127 * 127 just fits, with `hi` and `lo` stored around 64.

Sums of integers have one value in any order. What a row gets therefore depends on nothing but the row: batch-invariant
numerics need no care here.

Measured (one core, AVX2, linear layers of SmolLM2-135M, against torch's product of int8 and bf16): 1.3 times as fast at
1 row, 1.7 times at 8.

The operators are those of torch's quantized modules. They are not documented API and older ones are to be removed, so
they are tried at load (`linear.py`), and another product takes their place where they fail.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

_ENGINE: Final = "fbgemm"
_DIGIT: Final = 63
_ZERO: Final = 64
"""What stands for 0 in an octet of activations."""
_FINER: Final = 2.0 * _DIGIT
_SMALLEST: Final = 1e-30
"""Added to steps, so that a row of zeros gives zeros."""


class FixedPoint:
    """The product with weights q int8 [out, in] and scales [out]."""

    __slots__ = ("_packed", "_smallest", "held")

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        """Raises RuntimeError or AttributeError where torch cannot."""
        with quantized_engine():
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            quantized = torch._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0)
            self._packed: Any = torch.ops.quantized.linear_prepack(quantized, None)
        self._smallest = torch.tensor([_SMALLEST])  # one dimension: it makes steps float32 whatever the rows are
        self.held: tuple[Tensor, ...] = (values.to("meta"), scales)
        """Tensors as large as what is kept in memory; the packed weights themselves are none."""

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out], without bias, in the dtype of `rows`. A row that is not finite gives one that is not."""
        count = len(rows)
        # amax of abs: the norm for it takes four times as long.
        steps = torch.add(self._smallest, rows.abs().amax(-1, keepdim=True), alpha=1 / _DIGIT)
        scaled = rows / steps
        # Rounded here: the product's own rounding adds 64 first, and so may go the other way at a half.
        whole = scaled.round()
        rest = scaled.sub_(whole).mul_(_FINER).round_()
        product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            torch.cat((whole, rest)), 1.0, _ZERO, self._packed
        )
        return torch.add(product[:count], product[count:], alpha=1 / _FINER).mul_(steps).to(rows.dtype)


@contextmanager
def quantized_engine() -> Iterator[None]:
    """With the library whose product is meant, and without a word on what torch will remove some day."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = _ENGINE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.quantized.engine = before
