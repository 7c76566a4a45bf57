"""A sequence's pages: reserve in advance, take back what was rejected."""

import pytest
import torch

from sdcpd.cache.gpu_tier import PagePool
from sdcpd.engine.block_tables import BlockTable


@pytest.fixture
def pool() -> PagePool:
    return PagePool(
        pages=4, page_tokens=16, layers=1, kv_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu")
    )


def test_reserving_takes_the_pages_that_are_missing(pool: PagePool) -> None:
    table = BlockTable(pool)
    assert table.reserve(16)
    assert len(table.pages) == 1
    assert table.reserve(17)
    assert table.reserve(5), "has them already"
    assert len(table.pages) == 2
    assert pool.free_pages == 2


def test_reserving_in_vain_changes_nothing(pool: PagePool) -> None:
    table, other = BlockTable(pool), BlockTable(pool)
    assert other.reserve(33)
    assert table.reserve(1)
    before = list(table.pages)
    assert not table.reserve(17)
    assert table.pages == before
    assert pool.free_pages == 0
    other.close()
    assert table.reserve(17)
    pool.check_integrity()


@pytest.mark.parametrize(("length", "kept"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3), (48, 3)])
def test_truncating_frees_pages_wholly_past_the_length(pool: PagePool, length: int, kept: int) -> None:
    table = BlockTable(pool)
    assert table.reserve(48)
    table.length = 48
    pages = list(table.pages)
    table.truncate(length)
    assert table.pages == pages[:kept], "the kept pages are the first ones, in order"
    assert table.length == length
    assert pool.free_pages == 4 - kept


def test_only_valid_positions_can_be_kept(pool: PagePool) -> None:
    table = BlockTable(pool)
    assert table.reserve(48)
    table.length = 10
    with pytest.raises(AssertionError):
        table.truncate(11)


def test_slots_follow_the_pages_in_order(pool: PagePool) -> None:
    first, table = BlockTable(pool), BlockTable(pool)
    assert table.reserve(1)
    assert first.reserve(1)
    assert table.reserve(17)
    a, b = table.pages
    assert table.slots(14, 19) == [a * 16 + 14, a * 16 + 15, b * 16, b * 16 + 1, b * 16 + 2]
