"""The page pool's bookkeeping: a page is free or referred to, never both, whatever the order of calls."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.cache.gpu_tier import PagePool


def make(pages: int) -> PagePool:
    return PagePool(
        pages=pages,
        page_tokens=16,
        layers=2,
        kv_heads=3,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_the_tensor_is_as_large_as_its_pages() -> None:
    pool = make(5)
    assert tuple(pool.slots.shape) == (2, 6, 80, 4)
    size = PagePool.page_bytes(page_tokens=16, layers=2, kv_heads=3, head_dim=4, dtype=torch.float32)
    assert pool.slots.numel() * 4 == 5 * size
    assert pool.slots.isfinite().all()


def test_a_page_comes_back_when_its_last_reference_goes() -> None:
    pool = make(4)
    pages = pool.allocate(3)
    assert pool.free_pages == 1
    assert not pool.can_allocate(2)
    pool.retain(pages[:1])
    pool.release(pages)
    assert pool.free_pages == 3, "one page is still shared"
    pool.release(pages[:1])
    assert pool.free_pages == 4
    pool.check_integrity()


def test_misuse_is_ours_and_asserted() -> None:
    pool = make(2)
    pages = pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.allocate(2)
    pool.release(pages)
    with pytest.raises(AssertionError):
        pool.release(pages)
    with pytest.raises(AssertionError):
        pool.retain(pages)


def test_integrity_sees_a_page_that_is_free_and_used() -> None:
    pool = make(2)
    pool.allocate(1)
    pool._free.append(0)
    with pytest.raises(AssertionError):
        pool.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 8)), max_size=60))
def test_free_and_used_are_all_pages_after_any_calls(calls: list[tuple[str, int]]) -> None:
    pool = make(7)
    held: list[int] = []
    for what, number in calls:
        if what == "allocate" and pool.can_allocate(number):
            pages = pool.allocate(number)
            assert not set(pages) & set(held), "nobody else's page"
            held += pages
        elif what == "retain" and held:
            page = held[number % len(held)]
            pool.retain([page])
            held.append(page)
        elif what == "release" and held:
            pool.release([held.pop(number % len(held))])
        pool.check_integrity()
        assert pool.free_pages == 7 - len(set(held))
