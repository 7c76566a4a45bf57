"""Weight-only int8: close to what it stands for, the same by kernels and twin, another target with less memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from sdcpd.engine.linear import Int8Kernel, Linear, can_use, int8_kernel, keeps_bits, quantised
from tests.support.engines import feed, greedy, load, some_tokens, whole

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
KERNELS = ["fixed_point", "pack"]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_weight_is_within_half_a_step(dtype: torch.dtype) -> None:
    weight = random(0, 50, 64, dtype=dtype) * torch.logspace(-3, 2, 50, dtype=dtype)[:, None]
    weight[7] = 0
    values, scales = quantised(weight)
    assert values.dtype == torch.int8
    assert scales.dtype == dtype
    assert int(values.abs().amax()) == 127, "symmetric: -128 is not used"
    error = (values.double() * scales.double()[:, None] - weight.double()).abs()
    # Half a step; and where a scale was rounded down, the largest weight may be short of up to half a per cent.
    bound = torch.maximum(0.5001 * scales.double()[:, None].expand_as(error), 0.005 * weight.double().abs())
    assert bool((error <= bound).all())
    assert not values[7].any()


def made(weight: torch.Tensor, bias: torch.Tensor | None, kernel: Int8Kernel) -> Linear:
    if not can_use(kernel, CPU, weight.dtype):
        pytest.skip(f"this torch has no {kernel} product for this CPU")
    layer = Linear(weight, bias)
    layer.quantise(CPU, kernel)
    return layer


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@torch.inference_mode()
def test_kernels_and_twin_agree(kernel: Int8Kernel, dtype: torch.dtype, biased: bool) -> None:
    weight, bias = random(0, 96, 64, dtype=dtype), random(1, 96, dtype=dtype) if biased else None
    layer, twin = made(weight, bias, kernel), made(weight, bias, "widened")
    rows, sums = random(2, 33, 64, dtype=dtype), random(3, 33, 96, dtype=dtype)
    rtol, atol = (0.02, 0.1) if dtype == torch.bfloat16 else (1e-5, 1e-4)
    if kernel == "fixed_point":
        atol = max(atol, 0.005)  # 2^-14 of the largest of 64 elements, summed up
    assert torch.allclose(layer(rows), twin(rows), rtol=rtol, atol=atol)
    assert torch.allclose(layer.added_to(sums, rows), twin.added_to(sums, rows), rtol=rtol, atol=atol)
    assert torch.equal(layer.added_to(sums, rows), sums + layer(rows))
    values, scales = quantised(weight)
    exact = linear(rows.double(), values.double() * scales.double()[:, None], None if bias is None else bias.double())
    assert torch.allclose(twin(rows).double(), exact, rtol=rtol, atol=1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_keep_a_rows_bits(kernel: Int8Kernel, dtype: torch.dtype) -> None:
    for out, width in ((96, 64), (960, 576)):
        assert keeps_bits(made(random(0, out, width, dtype=dtype), None, kernel), CPU, dtype)


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        ("AVX2", torch.float32, "fixed_point"),
        ("AVX2", torch.bfloat16, "fixed_point"),
        ("AVX512", torch.bfloat16, "pack"),
        ("AVX512", torch.float32, "fixed_point"),
    ],
)
def test_the_product_follows_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capability: str, dtype: torch.dtype, kernel: Int8Kernel
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if not can_use(kernel, CPU, dtype):
        pytest.skip(f"this torch has no {kernel} product for this CPU")
    assert int8_kernel(CPU, dtype) == kernel
    assert int8_kernel(torch.device("cuda"), dtype) == "widened"


def test_without_kernels_the_twin_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise AttributeError("not in this torch")

    monkeypatch.setattr(torch, "_make_per_channel_quantized_tensor", gone)
    monkeypatch.setattr(torch, "_weight_int8pack_mm", gone)
    assert int8_kernel(CPU, torch.float32) == "widened"


@torch.inference_mode()
def test_fixed_point_at_its_edges() -> None:
    """Rows of zeros, the smallest and the largest numbers, one element far above all others; and what is not finite."""
    weight = random(0, 96, 64)
    layer, twin = made(weight, None, "fixed_point"), made(weight, None, "widened")
    rows = random(1, 6, 64)
    rows[0] = 0
    rows[1] *= 1e-20
    rows[2] *= 1e20
    rows[3, 5] = 1000
    found, expected = layer(rows), twin(rows)
    assert not found[0].any()
    for row, error in ((1, 1e-3), (2, 1e-3), (3, 0.02), (4, 1e-3)):
        assert float((found[row] - expected[row]).norm() / expected[row].norm()) < error
    # All products at their largest: nothing saturates on the way.
    most = torch.full((1, 64), 3.0)
    full = made(torch.full((96, 64), 2.0), None, "fixed_point")
    assert torch.allclose(full(most), torch.full((1, 96), 64 * 6.0), rtol=1e-3)
    assert torch.allclose(full(-most), torch.full((1, 96), -64 * 6.0), rtol=1e-3)
    for odd in (float("nan"), float("inf")):
        broken = rows[4:].clone()
        broken[0, 3] = odd
        assert not layer(broken)[0].isfinite().any()
        assert torch.equal(layer(broken)[1], found[5]), "its neighbour does not notice"


def test_an_int8_model(tiny_llama: Path) -> None:
    tokens = some_tokens(60)
    plain, small = load(tiny_llama), load(tiny_llama, quantization="int8", dtype="auto")
    assert small.info.dtype == load(tiny_llama, dtype="auto").info.dtype
    assert (plain.info.quantization, small.info.quantization) == ("none", "int8")
    exact = whole(plain, tokens)
    for dtype in ("bf16", "fp32"):
        rough = whole(load(tiny_llama, quantization="int8", dtype=dtype), tokens).float()
        assert torch.allclose(rough, exact, atol=0.1 * float(exact.std()) + 0.2)
        assert not torch.equal(rough, exact)
    assert len(greedy(small, tokens[:9], 5)) == 5


def test_int8_is_another_target(tiny_llama: Path) -> None:
    digests = {
        load(tiny_llama, quantization=quantization, dtype=dtype).info.model
        for quantization in ("none", "int8")
        for dtype in ("bf16", "fp32")
    }
    assert len(digests) == 4


def test_weights_take_the_memory_that_they_say(tiny_llama: Path) -> None:
    """fp32: all at 4 octets. int8: linear layers at 1 and a scale an output; embedding and norms in bf16."""
    linears = 2 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96) + 300 * 64
    outputs = 2 * (128 + 64 + 192 + 64) + 300
    others = 300 * 64 + 5 * 64
    assert load(tiny_llama).info.weights_bytes == 4 * (linears + others)
    int8 = load(tiny_llama, dtype="bf16", quantization="int8").info
    assert int8.weights_bytes == linears + 2 * outputs + 2 * others


def test_experts_are_quantised_too(tiny_models: Callable[..., Path]) -> None:
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []}
    folder = tiny_models("qwen3_moe", **options)
    (folder / "tokenizer.json").write_text("{}")
    tokens = some_tokens(20)
    engine = load(folder, dtype="bf16", quantization="int8")
    expected = whole(engine, tokens)
    sequence = engine.open_sequence()
    assert torch.equal(torch.cat([feed(engine, sequence, [token]) for token in tokens]), expected)
    assert engine.info.weights_bytes < load(folder, dtype="bf16").info.weights_bytes
