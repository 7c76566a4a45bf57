"""A linear layer over the rows of a pass.

On CPU the weights are put into oneDNN's blocked layout once, at load. Two things come of it. It is faster for more
than one row (fp32, SmolLM2-135M, AVX2: 8 rows cost 1.3 to 1.5 times one row, against 2 times and more for
torch.nn.functional.linear). And a row's result does not depend on how many rows share the pass, bit for bit, which
MKL's fp32 product does not offer: with it, speculation and batching do not change the text.

The operators are the ones torch's own compiler emits for linear layers on CPU, but they are not documented API.
Where they are missing or refuse (another torch, bf16 on a CPU without AVX-512), the plain product takes their place:
same values up to rounding, without the promise about bits.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear


class Linear:
    """y = x W^T + b. `weight` [out, in], `bias` [out] or None."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor | None = weight
        self._bias = bias
        self._packed: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def pack(self) -> None:
        """Change to the blocked layout; the plain weight is let go."""
        assert self._weight is not None, "packed before"
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight)
        self._weight = None

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if self._packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
            return product
        assert self._weight is not None
        return linear(rows, self._weight, self._bias)

    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor:
        """sums + y for `rows`, in one operation where that exists; the same bits either way."""
        if self._packed is not None:
            total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, sums, self._packed, self._bias, "add")
            return total
        return sums + self(rows)


_PROBE_SIZE: Final = 32


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `Linear.pack` works here. Tried, not guessed: it depends on torch's build, the CPU and the dtype."""
    if device.type != "cpu":
        return False
    probe = Linear(torch.eye(_PROBE_SIZE, dtype=dtype), None)
    rows = torch.arange(2 * _PROBE_SIZE, dtype=dtype).view(2, _PROBE_SIZE)
    try:
        with torch.inference_mode():
            probe.pack()
            return torch.equal(probe.added_to(rows, rows), 2 * rows)
    except (AttributeError, RuntimeError):
        return False
