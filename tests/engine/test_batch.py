"""Planning: the ragged row of tokens, and the assertions on what callers owe."""

import pytest
import torch

from sdcpd.cache.gpu_tier import PagePool
from sdcpd.engine.batch import plan_batch
from sdcpd.engine.block_tables import BlockTable
from sdcpd.engine.spans import Span

VOCABULARY = 100


@pytest.fixture
def tables() -> dict[int, BlockTable]:
    """Sequence 0 with 5 valid positions, sequence 1 with none; room for 32 each."""
    pool = PagePool(
        pages=4, page_tokens=16, layers=1, kv_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu")
    )
    tables = {0: BlockTable(pool), 1: BlockTable(pool)}
    for table in tables.values():
        assert table.reserve(32)
    tables[0].length = 5
    return tables


def test_spans_stand_in_one_row(tables: dict[int, BlockTable]) -> None:
    spans = [Span(sequence=0, tokens=(7, 8, 9), start=5, rows=2), Span(sequence=1, tokens=(1, 2), start=0, rows=0)]
    batch = plan_batch(spans, tables, VOCABULARY)
    assert batch.tokens == [7, 8, 9, 1, 2]
    assert batch.positions == [5, 6, 7, 0, 1]
    assert batch.slots == tables[0].slots(5, 8) + tables[1].slots(0, 2)
    assert batch.wanted == [1, 2], "the last two tokens of the first span"
    assert batch.row_counts == (2, 0)
    assert [(s.first, s.count, s.length) for s in batch.segments] == [(0, 3, 8), (3, 2, 2)]
    assert (tables[0].length, tables[1].length) == (8, 2), "planned positions count as valid"


@pytest.mark.parametrize(
    ("span", "owed"),
    [
        (Span(sequence=0, tokens=(1,), start=6, rows=1), "no hole"),
        (Span(sequence=0, tokens=(VOCABULARY,), start=5, rows=1), "token ids"),
        (Span(sequence=0, tokens=(-1,), start=5, rows=1), "token ids"),
        (Span(sequence=0, tokens=(1,) * 28, start=5, rows=1), "reserved"),
        (Span(sequence=0, tokens=(), start=5, rows=0), None),
        (Span(sequence=0, tokens=(1,), start=5, rows=2), None),
    ],
)
def test_what_callers_owe_is_asserted(tables: dict[int, BlockTable], span: Span, owed: str | None) -> None:
    with pytest.raises(AssertionError, match=owed):
        plan_batch([span], tables, VOCABULARY)


def test_what_a_rejected_proposal_left_is_overwritten_and_its_pages_stay(tables: dict[int, BlockTable]) -> None:
    pages = list(tables[0].pages)
    batch = plan_batch([Span(sequence=0, tokens=(7, 8), start=2, rows=1)], tables, VOCABULARY)
    assert batch.positions == [2, 3]
    assert batch.segments[0].length == 4, "nothing beyond the span is seen"
    assert (tables[0].length, tables[0].pages) == (4, pages)


def test_a_sequence_appears_at_most_once(tables: dict[int, BlockTable]) -> None:
    spans = [Span(sequence=0, tokens=(1,), start=5, rows=1), Span(sequence=0, tokens=(2,), start=6, rows=1)]
    with pytest.raises(AssertionError, match="at most once"):
        plan_batch(spans, tables, VOCABULARY)
