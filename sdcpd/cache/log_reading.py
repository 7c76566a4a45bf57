"""Reading logs back from the journal: finished orders for a worker thread, which shares nothing with the bookkeeping.

A plan names the places of a log's payloads; it stays right while the log grows, and fails as `ReadMoved` once its
segments were given back. What was read is checked against the log's tag, which is the SHA-256 of all its octets: a
reader never gets octets that were not written.
"""

import hashlib
from collections.abc import Sequence

from msgspec import Struct

from sdcpd.cache.files import Files
from sdcpd.cache.journal import segment_file
from sdcpd.cache.log_index import Log, place
from sdcpd.cache.log_requests import LogContent

READ_WINDOW_BYTES = 256 * 1024
"""Payloads of a log that lie this close together are read in one go."""


class ReadPlan(Struct, frozen=True):
    """Where one log's payloads lie, in order, and the tag they must add up to."""

    name: str
    tag: str
    places: Sequence[int]
    sizes: Sequence[int]


class DamagedPlan(Struct, frozen=True):
    """A damaged log to be moved: only the knowledge of the damage is."""

    name: str
    detail: str


class ReadMoved(Struct, frozen=True):
    """A segment went away since the plan was made: plan again."""


class ReadFailed(Struct, frozen=True):
    """The system did not let us read (too many open files, an I/O error): perhaps later."""

    detail: str


class ReadSpoiled(Struct, frozen=True):
    """The octets on disk are not what was written."""

    detail: str


ReadResult = LogContent | ReadMoved | ReadFailed | ReadSpoiled


class Copy(Struct, frozen=True):
    """A log read in order to be written again; no result for one already known to be damaged."""

    plan: ReadPlan | DamagedPlan
    result: ReadResult | None


def plan_read(log: Log) -> ReadPlan:
    """A plan for an undamaged log as it is now."""
    assert log.damage is None
    return ReadPlan(name=log.name, tag=log.tag, places=log.places[:], sizes=log.sizes[:])


def read_copies(files: Files, plans: Sequence[ReadPlan | DamagedPlan]) -> list[Copy]:
    """Read logs that are to be moved. Blocks."""
    return [Copy(plan=plan, result=read(files, plan) if isinstance(plan, ReadPlan) else None) for plan in plans]


def read(files: Files, plan: ReadPlan) -> ReadResult:
    """Read one log and check it. Blocks."""
    parts: list[bytes] = []
    window: list[tuple[int, int]] = []  # (offset, size) in the segment `segment`
    segment = -1
    try:
        for coded, size in zip(plan.places, plan.sizes, strict=True):
            number, offset = place(coded)
            if window and (number != segment or offset + size - window[0][0] > READ_WINDOW_BYTES):
                parts += _read_window(files, segment, window)
                window = []
            segment = number
            window.append((offset, size))
        if window:
            parts += _read_window(files, segment, window)
    except FileNotFoundError:
        return ReadMoved()
    except OSError as error:
        return ReadFailed(f"the journal cannot be read: {error}")
    octets = b"".join(parts)
    if f'"{hashlib.sha256(octets).hexdigest()}"' != plan.tag:
        return ReadSpoiled("its octets on disk are not what was written")
    return LogContent(octets=octets, tag=plan.tag)


def _read_window(files: Files, segment: int, window: list[tuple[int, int]]) -> list[bytes]:
    start = window[0][0]
    octets = files.read(segment_file(segment), start, window[-1][0] + window[-1][1] - start)
    return [octets[offset - start : offset - start + size] for offset, size in window]
