"""Weight-only int8: close to what it stands for, the same by kernel and twin, another target with less memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from sdcpd.engine.linear import Linear, can_use_int8_kernel, keeps_bits, quantised
from tests.support.engines import feed, greedy, load, some_tokens, whole

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@torch.inference_mode()
def test_kernel_and_twin_agree(dtype: torch.dtype, biased: bool) -> None:
    if not can_use_int8_kernel(CPU, dtype):
        pytest.skip("this torch has no int8 kernel for this CPU")
    weight, bias = random(0, 96, 64, dtype=dtype), random(1, 96, dtype=dtype) if biased else None
    kernel, twin = Linear(weight, bias), Linear(weight, bias)
    kernel.quantise(CPU, kernel=True)
    twin.quantise(CPU, kernel=False)
    rows, sums = random(2, 33, 64, dtype=dtype), random(3, 33, 96, dtype=dtype)
    rtol, atol = (0.02, 0.1) if dtype == torch.bfloat16 else (1e-5, 1e-4)
    assert torch.allclose(kernel(rows), twin(rows), rtol=rtol, atol=atol)
    assert torch.allclose(kernel.added_to(sums, rows), twin.added_to(sums, rows), rtol=rtol, atol=atol)
    values, scales = quantised(weight)
    exact = linear(rows.double(), values.double() * scales.double()[:, None], None if bias is None else bias.double())
    assert torch.allclose(twin(rows).double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_keeps_a_rows_bits(dtype: torch.dtype) -> None:
    if not can_use_int8_kernel(CPU, dtype):
        pytest.skip("this torch has no int8 kernel for this CPU")
    for out, width in ((96, 64), (960, 576)):
        layer = Linear(random(0, out, width, dtype=dtype), None)
        layer.quantise(CPU, kernel=True)
        assert keeps_bits(layer, CPU, dtype)


def test_an_int8_model(tiny_llama: Path) -> None:
    tokens = some_tokens(60)
    plain, small = load(tiny_llama), load(tiny_llama, quantization="int8", dtype="auto")
    assert small.info.dtype == "bf16", "what the kernel is made for"
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
