"""Rows of q, the draft distributions of a proposal: their forms, and what makes one usable (draft 5.2, 6.3 step 5).

Three forms, each of the same numbers bit for bit: *dense* octets, V binary32 values a position, as the `q_rows` object
has them; *inline* entries, as our extension `sdcpd_q` sends them (decision 101); and `DraftRow` inside, which keeps the
non-zero entries only. A drafter that samples from a truncated q, or whose draft is certain (one-hot, decision 55), has
few of those.

Nothing is normalised here, and no draw may be made before every row has passed `check_rows`.
"""

import math
import struct
from collections.abc import Sequence
from itertools import compress, count
from typing import Final

from msgspec import Struct

from sdcpd.protocol.messages import INLINE_ENTRIES_LIMIT, InlineRow
from sdcpd.protocol.problems import BadProposal

VALUE_BYTES: Final = 4
SUM_TOLERANCE: Final = 1e-3
"""How far a row's sum may be from 1 (decision 53)."""


class DraftRow(Struct, frozen=True):
    """The non-zero entries of one row: `ids` as little-endian uint32, `values` as little-endian binary32."""

    ids: bytes
    values: bytes

    @property
    def entries(self) -> int:
        return len(self.ids) // 4


class CheckedRow(Struct, frozen=True):
    """A row that passed, with what the acceptance test needs of it: q(x), and the sum to divide by (decision 72)."""

    row: DraftRow
    chosen: float
    total: float


def one_hot(token: int) -> DraftRow:
    """The row of a draft that was not drawn at all (decision 55)."""
    return DraftRow(ids=struct.pack("<I", token), values=struct.pack("<f", 1.0))


def row_of(entries: Sequence[tuple[int, float]]) -> DraftRow:
    """A row of (id, value) entries; values are rounded to binary32. Sample from these, not from what went in."""
    return DraftRow(
        ids=struct.pack(f"<{len(entries)}I", *(token for token, _ in entries)),
        values=struct.pack(f"<{len(entries)}f", *(value for _, value in entries)),
    )


def ids_of(row: DraftRow) -> tuple[int, ...]:
    """The token ids of a row's entries."""
    return struct.unpack(f"<{row.entries}I", row.ids)


def values_of(row: DraftRow) -> tuple[float, ...]:
    """The values of a row's entries, in the order of their ids."""
    return struct.unpack(f"<{len(row.values) // VALUE_BYTES}f", row.values)


def inline(rows: Sequence[DraftRow]) -> tuple[InlineRow, ...] | None:
    """The rows for `sdcpd_q`, or None when one of them has too many entries: for all positions or not at all (101)."""
    if any(row.entries > INLINE_ENTRIES_LIMIT for row in rows):
        return None
    return tuple(InlineRow(ids=ids_of(row), values=row.values) for row in rows)


def from_inline(rows: Sequence[InlineRow], vocabulary: int) -> tuple[DraftRow, ...]:
    """Inverse of `inline`. Raises BadProposal for entries that are no row over `vocabulary` tokens."""
    for row in rows:
        if len(row.values) != VALUE_BYTES * len(row.ids):
            raise BadProposal(f"sdcpd_q: {len(row.values)} octets of values for {len(row.ids)} ids")
        if max(row.ids, default=0) >= vocabulary:
            raise BadProposal(f"sdcpd_q: an id is outside the vocabulary of {vocabulary}")
        if len(set(row.ids)) != len(row.ids):
            raise BadProposal("sdcpd_q: an id stands twice in a row")
    return tuple(DraftRow(ids=struct.pack(f"<{len(row.ids)}I", *row.ids), values=row.values) for row in rows)


def dense(rows: Sequence[DraftRow], vocabulary: int) -> bytes:
    """The content of a `q_rows` object (5.2): for each position V binary32 values in little-endian order."""
    octets = bytearray(VALUE_BYTES * vocabulary * len(rows))
    for position, row in enumerate(rows):
        start = VALUE_BYTES * vocabulary * position
        for place, token in enumerate(ids_of(row)):
            at = start + VALUE_BYTES * token
            octets[at : at + VALUE_BYTES] = row.values[VALUE_BYTES * place : VALUE_BYTES * (place + 1)]
    return bytes(octets)


def from_dense(octets: bytes, positions: int, vocabulary: int) -> tuple[DraftRow, ...]:
    """Inverse of `dense` for `positions` rows. Raises BadProposal for another length (decisions 9, 53).

    Takes some milliseconds a row of a large vocabulary: run it in a worker.
    """
    width = VALUE_BYTES * vocabulary
    if len(octets) != positions * width:
        raise BadProposal(f"q_rows: {len(octets)} octets, not 4 * {positions} positions * {vocabulary} tokens")
    rows: list[DraftRow] = []
    for position in range(positions):
        words = struct.unpack(f"<{vocabulary}I", octets[position * width : (position + 1) * width])
        # The zero words are the entries 0.0; a negative zero is kept, and weighs nothing.
        ids, values = list(compress(count(), words)), list(filter(None, words))
        rows.append(DraftRow(ids=struct.pack(f"<{len(ids)}I", *ids), values=struct.pack(f"<{len(values)}I", *values)))
    return tuple(rows)


def check_rows(rows: Sequence[DraftRow], tokens: Sequence[int]) -> tuple[CheckedRow, ...]:
    """6.3 step 5 for every proposed position: a distribution (decision 53), in which the proposed token is possible.

    Raises BadProposal, for the first row that is neither.
    """
    if len(rows) != len(tokens):
        raise BadProposal(f"draft rows for {len(rows)} positions, but {len(tokens)} tokens are proposed")
    return tuple(_checked(row, token, place) for place, (row, token) in enumerate(zip(rows, tokens, strict=True), 1))


def _checked(row: DraftRow, token: int, position: int) -> CheckedRow:
    values = values_of(row)
    if not all(0.0 <= value < math.inf for value in values):  # NaN is neither
        raise BadProposal(f"draft row {position}: a value is negative, infinite or not a number")
    total = math.fsum(values)  # exact, hence the same in any order
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise BadProposal(f"draft row {position}: its sum is {total:.6f}, not 1")
    ids = ids_of(row)
    chosen = values[ids.index(token)] if token in ids else 0.0
    if chosen == 0.0:
        raise BadProposal(f"draft row {position}: the proposed token has probability zero")
    return CheckedRow(row=row, chosen=chosen, total=total)
