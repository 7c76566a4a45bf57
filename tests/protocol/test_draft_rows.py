"""Forms of a draft row (draft 5.2; decisions 53 to 55, 101)."""

import random

import pytest

from sdcpd.protocol.draft_rows import (
    DraftRow,
    check_rows,
    dense,
    from_dense,
    from_inline,
    ids_of,
    inline,
    one_hot,
    row_of,
    values_of,
)
from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.messages import INLINE_ENTRIES_LIMIT, InlineRow, Proposal
from sdcpd.protocol.problems import BadProposal
from tests.support.messages import proposal


def some_row(vocabulary: int, entries: int, seed: int) -> DraftRow:
    chance = random.Random(seed)
    weights = {token: chance.random() + 1e-6 for token in chance.sample(range(vocabulary), entries)}
    return row_of([(token, weight / sum(weights.values())) for token, weight in sorted(weights.items())])


def test_all_forms_hold_the_same_numbers() -> None:
    rows = (some_row(1000, 256, 1), one_hot(999), some_row(1000, 1, 2))
    short = inline(rows)
    assert short is not None
    assert from_inline(short, 1000) == rows == from_dense(dense(rows, 1000), 3, 1000)
    assert check_rows(rows, (ids_of(rows[0])[0], 999, ids_of(rows[2])[0]))


def test_long_rows_do_not_travel_inside() -> None:
    """Decision 101: "when they number at most 256 in every row (for all positions or not at all)"."""
    assert inline([one_hot(1), some_row(1000, INLINE_ENTRIES_LIMIT + 1, 3)]) is None


def test_inline_rows_cross_the_wire() -> None:
    short = inline([some_row(1000, 256, place) for place in range(64)])
    assert short is not None
    message = proposal((1,) * 64, q_rows="https://c.example/cache/v1/s/-/o/x", q=short)
    octets = encode(message)
    assert decode(octets, Proposal) == message
    assert len(octets) < 256 * 1024  # the limit of a proposal (decision 117)
    assert b"sdcpd_q" in octets


def test_small_values_are_kept() -> None:
    row = row_of([(3, 1e-45), (4, 1.0)])
    (checked,) = check_rows(from_dense(dense([row], 6), 1, 6), (3,))
    assert checked.chosen == values_of(row)[0] > 0.0


@pytest.mark.parametrize(
    "row",
    [
        InlineRow(ids=(1,), values=b""),
        InlineRow(ids=(1, 1), values=bytes(8)),
        InlineRow(ids=(6,), values=bytes(4)),
        InlineRow(ids=(1 << 40,), values=bytes(4)),
    ],
)
def test_inline_entries_that_are_no_row(row: InlineRow) -> None:
    with pytest.raises(BadProposal, match="sdcpd_q"):
        from_inline([row], 6)


def test_there_is_a_row_for_each_token() -> None:
    with pytest.raises(BadProposal, match="1 positions, but 2 tokens"):
        check_rows([one_hot(1)], (1, 1))
