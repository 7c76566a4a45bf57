"""The packed product equals the plain one, and a row of it does not depend on its neighbours."""

import pytest
import torch

from sdcpd.engine.linear import Linear, can_halve, can_pack, keeps_bits

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch or CPU has no packed product")

needs_halving = pytest.mark.skipif(not can_halve(CPU, torch.float32), reason="this torch or CPU has no fp16 product")


def make(biased: bool, out: int = 96, width: int = 64) -> tuple[Linear, Linear]:
    """The same layer twice: plain, packed."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((out, width), generator=generator)
    bias = torch.randn(out, generator=generator) if biased else None
    packed = Linear(weight, bias)
    packed.pack()
    return Linear(weight, bias), packed


def make_half(biased: bool, out: int = 96, width: int = 64) -> Linear:
    """With weights of a bf16 checkpoint, in fp32."""
    plain, _ = make(biased, out, width)
    weight, *bias = plain.tensors
    return Linear((weight / 16).bfloat16().float(), bias[0] if bias else None)


@needs_packing
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 33])
@torch.inference_mode()
def test_packed_is_plain_up_to_rounding(biased: bool, count: int) -> None:
    plain, packed = make(biased)
    assert packed.packed
    assert not plain.packed
    rows = torch.randn((count, 64), generator=torch.Generator().manual_seed(1))
    sums = torch.randn((count, 96), generator=torch.Generator().manual_seed(2))
    assert torch.allclose(plain(rows), packed(rows), atol=1e-5)
    assert torch.allclose(plain.added_to(sums, rows), sums + plain(rows), atol=1e-5)
    assert torch.allclose(packed.added_to(sums, rows), sums + packed(rows), atol=1e-5)


@needs_packing
@pytest.mark.parametrize(("out", "width"), [(96, 64), (960, 576), (576, 1536)])
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(out: int, width: int) -> None:
    _, packed = make(True, out, width)
    rows = torch.randn((130, width), generator=torch.Generator().manual_seed(1))
    sums = torch.randn((130, out), generator=torch.Generator().manual_seed(2))
    alone = torch.cat([packed(row[None]) for row in rows])
    for count in (2, 3, 4, 5, 8, 13, 16, 31, 64, 130):
        assert torch.equal(packed(rows[:count]), alone[:count])
        assert torch.equal(packed.added_to(sums[:count], rows[:count]), sums[:count] + alone[:count])


@needs_halving
@pytest.mark.parametrize("biased", [False, True])
@torch.inference_mode()
def test_weights_in_half_precision_give_what_the_whole_ones_do(biased: bool) -> None:
    plain, halved = (make_half(biased) for _ in range(2))
    halved.halve()
    assert sum(one.numel() * one.element_size() for one in halved.tensors) == 2 * 96 * 64 + 4 * 96 * biased
    for count in (1, 2, 3, 5, 33):
        rows = torch.randn((count, 64), generator=torch.Generator().manual_seed(1))
        sums = torch.randn((count, 96), generator=torch.Generator().manual_seed(2))
        assert torch.allclose(plain(rows), halved(rows), atol=1e-5)
        assert torch.equal(halved.added_to(sums, rows), sums + halved(rows))


@needs_halving
@pytest.mark.parametrize(("out", "width"), [(96, 64), (960, 576), (576, 1536)])
def test_weights_in_half_precision_keep_a_rows_bits(out: int, width: int) -> None:
    halved = make_half(True, out, width)
    halved.halve()
    assert keeps_bits(halved, CPU, torch.float32)


def test_only_weights_that_fp16_holds_are_kept_in_it() -> None:
    assert make_half(False).fits_half
    assert not make(False)[0].fits_half, "24 bits"
    assert not Linear(torch.full((4, 4), 1e6).bfloat16(), None).fits_half, "too large"
    assert not Linear(torch.full((4, 4), 1e-7).bfloat16(), None).fits_half, "too small"
    assert not can_halve(CPU, torch.bfloat16)
    assert not can_halve(torch.device("meta"), torch.float32)


def test_packing_is_not_claimed_for_other_devices() -> None:
    assert not can_pack(torch.device("meta"), torch.float32)
