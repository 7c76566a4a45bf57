"""A linear layer over the rows of a pass.

Whichever product serves it, a row's result should not depend on how many rows share the pass: then speculation and
batching do not change the text. MKL's fp32 product does not offer that; the ones here do, or are made to.

On CPU the weights are put into oneDNN's blocked layout once, at load. That is also faster for more than one row (fp32,
SmolLM2-135M, AVX2: 8 rows cost 1.3 to 1.5 times one row, against 2 times and more for torch.nn.functional.linear).
The operators are the ones torch's own compiler emits for linear layers on CPU, but they are not documented API. Where
they are missing or refuse (another torch, bf16 on a CPU without AVX-512), the plain product takes their place. In fp32,
weights that fp16 holds exactly are kept in it: 2.2 times as fast at one row (1.8 with the rows that it is padded to),
1.7 times at eight.

Int8 is weight-only and symmetric, one scale an output: W[o, i] is near scale[o] * q[o, i] with q in -127 .. 127. The
scale is rounded to the model's dtype before q is chosen, so that rounding costs nothing twice. On CPU the product is
one of integers (fixed_point.py), or, where that cannot be had, torch's kernel for int8 weights, which is slow in fp32.
Elsewhere q is widened for each product: less memory, no less time.

Where no product keeps its bits in company (measured at load, `keeps_bits`), rows go through it in tiles of one size,
padded with zeros: every product then has the same shape.
"""

from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from sdcpd.engine.device import has_avx512
from sdcpd.engine.fixed_point import FixedPoint, quantized_engine

INT8_LARGEST: Final = 127
TILE_ROWS: Final = 16
"""Rows of a tile: what a busy pass of rounds has, at little more than the price of one row."""

_PROBE_SIZE: Final = 32
_COMPANY: Final = (2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 16, 31, 32, 33, 62, 64, 73)
"""Numbers of rows with which a layer is tried; kernels change their ways at powers of two and at remainders."""
_ALONE: Final = 16
"""Rows that are tried alone."""


class _Product(Protocol):
    """y = x W^T + b for rows [T, in]."""

    def __call__(self, rows: Tensor) -> Tensor: ...
    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor: ...
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...


class _Plain:
    """torch.nn.functional.linear."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)

    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor:
        return sums + self(rows)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class _Packed:
    """oneDNN's product over its own layout; the addition is part of it, with the same bits."""

    __slots__ = ("_bias", "_packed")

    def __init__(self, plain: _Plain) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight)
        self._bias = plain.bias

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return product

    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor:
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, sums, self._packed, self._bias, "add")
        return total

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._packed,) if self._bias is None else (self._packed, self._bias)


class _Half:
    """Weights in fp16, rows and sums in fp32, by the product of torch's quantized modules.

    For weights that fp16 holds to the last bit, as it does those of most bf16 checkpoints: the product is then as good
    as any other in fp32, and reads half the memory. It takes six rows at a time, and adds up one row or two that are
    left over in another order than three and more: so where they would be left over, there are three.
    """

    STRIDE: Final = 6
    LEFT_OVER: Final = 3

    __slots__ = ("_like", "_packed")

    def __init__(self, plain: _Plain) -> None:
        with quantized_engine():
            self._packed: Any = torch.ops.quantized.linear_prepack_fp16(plain.weight, plain.bias)
        half = plain.weight.to("meta", torch.float16)
        self._like = (half,) if plain.bias is None else (half, plain.bias.to("meta"))
        """As large as what is kept in memory, which is no tensor."""

    def __call__(self, rows: Tensor) -> Tensor:
        count = len(rows)
        left_over = count % self.STRIDE
        if 0 < left_over < self.LEFT_OVER:
            rows = pad(rows, (0, 0, 0, self.LEFT_OVER - left_over))
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self._packed)
        return product[:count]

    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor:
        return self(rows).add_(sums)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._like


class _Int8:
    """Weights q int8 [out, in] and scales [out], widened for each product: the twin of those below."""

    __slots__ = ("_bias", "_scales", "_values")

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._values = values
        self._scales = scales
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        scaled = self._unscaled(rows)
        return scaled if self._bias is None else scaled + self._bias

    def _unscaled(self, rows: Tensor) -> Tensor:
        return linear(rows, self._values.to(rows.dtype)) * self._scales

    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor:
        return sums + self(rows)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        own = (self._values, self._scales)
        return own if self._bias is None else (*own, self._bias)


class _Int8Pack(_Int8):
    """The same by torch's CPU kernel for int8 weights."""

    __slots__ = ()

    def _unscaled(self, rows: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(rows.contiguous(), self._values, self._scales)


class _Int8Fixed:
    """The same by a product of integers (fixed_point.py)."""

    __slots__ = ("_bias", "_product")

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._product = FixedPoint(values, scales)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        product = self._product(rows)
        return product if self._bias is None else product.add_(self._bias)

    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor:
        return self(rows).add_(sums)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._product.held if self._bias is None else (*self._product.held, self._bias)


class _Tiled:
    """Another product, `tile` rows at a time, always of the same shape."""

    __slots__ = ("_tile", "product")

    def __init__(self, product: _Product, tile: int) -> None:
        self.product = product
        self._tile = tile

    def __call__(self, rows: Tensor) -> Tensor:
        count, tile = len(rows), self._tile
        padded = pad(rows, (0, 0, 0, -count % tile))
        parts = [self.product(padded[at : at + tile]) for at in range(0, len(padded), tile)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]

    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor:
        return sums + self(rows)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.product.tensors


Int8Kernel = Literal["fixed_point", "pack", "widened"]
"""Products for int8 weights: of integers, by torch's kernel, and the twin of both."""
_INT8: Final[dict[Int8Kernel, type[_Int8] | type[_Int8Fixed]]] = {
    "fixed_point": _Int8Fixed,
    "pack": _Int8Pack,
    "widened": _Int8,
}


class Linear:
    """y = x W^T + b. `weight` [out, in], `bias` [out] or None."""

    __slots__ = ("_product", "shape")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.shape: tuple[int, ...] = tuple(weight.shape)
        self._product: _Product = _Plain(weight, bias)

    @property
    def packed(self) -> bool:
        return isinstance(self._product, _Packed)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it keeps in memory."""
        return self._product.tensors

    def pack(self) -> None:
        """Change to the blocked layout; the plain weight is let go."""
        self._product = _Packed(self._plain())

    @property
    def fits_half(self) -> bool:
        """Whether the plain weight is the same in fp16."""
        weight = self._plain().weight
        return torch.equal(weight.half().to(weight.dtype), weight)

    def halve(self) -> None:
        """Change to fp16 weights under fp32 sums; the plain ones are let go."""
        self._product = _Half(self._plain())

    def quantise(self, device: torch.device, kernel: Int8Kernel) -> None:
        """Change to int8 weights on `device`; the plain ones are let go."""
        plain = self._plain()
        values, scales = quantised(plain.weight)
        bias = None if plain.bias is None else plain.bias.to(device)
        self._product = _INT8[kernel](values.to(device), scales.to(device), bias)

    def tile(self, rows: int) -> None:
        """From now on take rows in tiles of `rows`."""
        whole = self._product.product if isinstance(self._product, _Tiled) else self._product
        self._product = _Tiled(whole, rows)

    def _plain(self) -> _Plain:
        assert isinstance(self._product, _Plain), "changed before"
        return self._product

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return self._product(rows)

    def added_to(self, sums: Tensor, rows: Tensor) -> Tensor:
        """sums + y for `rows`, in one operation where that exists; the same bits either way."""
        return self._product.added_to(sums, rows)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """q int8 [out, in] and scales [out] in the weight's dtype. An output of zeros has the scale 1."""
    largest = weight.abs().amax(1).float()
    scales = torch.where(largest > 0, largest / INT8_LARGEST, 1.0).to(weight.dtype)
    # A scale rounded down leaves the largest weight a fraction above 127, hence the clamp.
    steps = (weight.float() / scales.float()[:, None]).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
    return steps.to(torch.int8), scales


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


def can_halve(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `Linear.halve` works here, with bits that do not depend on company (kernels differ by CPU)."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    probe = Linear(torch.eye(_PROBE_SIZE), torch.ones(_PROBE_SIZE))
    rows = torch.arange(2.0 * _PROBE_SIZE).view(2, _PROBE_SIZE)
    try:
        with torch.inference_mode():
            probe.halve()
            return torch.equal(probe(rows), rows + 1) and _halved_keeps_bits(device)
    except (AttributeError, RuntimeError):
        return False


def _halved_keeps_bits(device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(torch.randn((3 * _PROBE_SIZE, 2 * _PROBE_SIZE), generator=generator), None)
    layer.halve()
    return keeps_bits(layer, device, torch.float32)


def int8_kernel(device: torch.device, dtype: torch.dtype) -> Int8Kernel:
    """The product for int8 weights that is fastest here, of those that work.

    A function of the machine, not of a measurement: two equal machines must say the same. With AVX-512 torch's kernel
    goes first in bf16, for which alone there are figures: 12 ms at 1 row and 28 at 8 for all layers of SmolLM2-135M.
    """
    kernels: list[Int8Kernel] = ["fixed_point", "pack"]
    if has_avx512() and dtype == torch.bfloat16:
        kernels.reverse()
    return next((kernel for kernel in kernels if can_use(kernel, device, dtype)), "widened")


def can_use(kernel: Int8Kernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it works here: tried on a product whose exact value is known."""
    if device.type != "cpu":
        return kernel == "widened"
    probe = Linear(torch.eye(_PROBE_SIZE, dtype=dtype) * INT8_LARGEST, None)
    rows = torch.arange(2 * _PROBE_SIZE, dtype=dtype).view(2, _PROBE_SIZE)
    try:
        with torch.inference_mode():
            probe.quantise(device, kernel)
            return torch.allclose(probe(rows), rows * INT8_LARGEST, rtol=0.01, atol=1.0)
    except (AttributeError, RuntimeError):
        return False


@torch.inference_mode()
def keeps_bits(layer: Linear, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a row gets the same bits from `layer` alone and in any company, as far as trying tells."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((max(_COMPANY), layer.shape[1]), generator=generator).to(device, dtype)
    alone = torch.cat([layer(row[None]) for row in rows[:_ALONE]])
    return all(
        torch.equal(layer(rows[:count])[:_ALONE], alone[:count])
        and torch.equal(layer(rows[-count:].flip(0))[-1:], layer(rows[-count:][:1]))
        for count in _COMPANY
    )
