"""Records of the commit log and what a log says when it is read (draft 6.8; decisions 85 to 92).

A log is a CBOR sequence (RFC 8742) of deterministic maps of three kinds, told apart by their members: a *commit*
(has `round`), a *fence* (epoch alone, with its author), an *end* (has `end`). A commit below a fence that precedes
it does not count, whatever the store let through (decision 88).
"""

import hashlib
import io
from collections.abc import Iterable
from typing import ClassVar

from msgspec import UNSET, Struct, UnsetType, field

from sdcpd.protocol.encoding import convert, encode, load_next
from sdcpd.protocol.messages import Message, Sampling
from sdcpd.protocol.problems import IllFormed
from sdcpd.protocol.terms import Action, Hash32, Percent, Uint

RECORD_LIMIT_BYTES = 64 * 1024
"""A commit holds at most 65 tokens and two fixed maps; anything near this size is not a record of ours."""


class Control(Message, frozen=True, kw_only=True):
    """`ctl` of a commit: what 6.5 decided, so that a verdict can be rebuilt and a resume restores c, g and j.

    `accepted`, `m_cap` and `proposed` are absent in a self-decoded round, which has no verdict (decision 62).
    """

    c: Uint
    g: Uint
    j: Uint
    accepted: Uint | UnsetType = UNSET
    action: Action
    m_cap: Uint | UnsetType = UNSET
    low: Uint
    load: Percent
    sampling: Sampling | UnsetType = UNSET  # only when it changed with this round
    proposed: Uint | UnsetType = field(default=UNSET, name="sdcpd_proposed")  # M, for the figures of the session


class CommitRecord(Message, frozen=True, kw_only=True):
    """One round: its emitted tokens, and n and d[n] after them."""

    epoch: Uint
    round: Uint
    emitted: tuple[Uint, ...]
    committed: Uint
    digest: Hash32
    ctl: Control | UnsetType = UNSET


class FenceRecord(Message, frozen=True, kw_only=True):
    """From here on no commit below `epoch` counts. `by` is the author's URI and a nonce (decision 85)."""

    epoch: Uint
    by: str | UnsetType = UNSET


class EndRecord(Message, frozen=True, kw_only=True):
    """The session ended without a round that says so, or was given up (decision 83). `end` is 4 or 5."""

    epoch: Uint
    end: Action
    reason: str | UnsetType = UNSET


Record = CommitRecord | FenceRecord | EndRecord


def write_record(record: Record) -> bytes:
    """Deterministic octets of one record. The same record always has the same octets, so that a lost append can be
    recognised in the log octet for octet (decision 64)."""
    return encode(record)


def read_record(octets: bytes) -> Record:
    """Inverse of `write_record`. Raises IllFormed."""
    records = read_records(octets)
    if len(records) != 1:
        raise IllFormed(f"{len(records)} log records where one was expected")
    return records[0][0]


def read_records(octets: bytes) -> list[tuple[Record, bytes]]:
    """All records of a log with their exact octets, in order. Raises IllFormed at the first damaged one."""
    stream = io.BytesIO(octets)
    records: list[tuple[Record, bytes]] = []
    while (start := stream.tell()) < len(octets):
        item = load_next(stream)
        raw = octets[start : stream.tell()]
        if not isinstance(item, dict):
            raise IllFormed(f"log record at octet {start} is not a map")
        kind: type[Record] = CommitRecord if "round" in item else EndRecord if "end" in item else FenceRecord
        records.append((convert(item, kind), raw))
    return records


def log_tag(records: Iterable[bytes]) -> str:
    """Strong entity tag of a log: the running SHA-256 over its records' octets, as an HTTP entity tag."""
    running = hashlib.sha256()
    for record in records:
        running.update(record)
    return f'"{running.hexdigest()}"'


class LogView(Struct, frozen=True):
    """What a log says once the rules of 6.8 have been applied.

    `fence` is the highest fence epoch, 0 without one. `commits` are those that count, in order. `ended` is the end
    record that counts, if any.
    """

    fence: int
    commits: tuple[CommitRecord, ...]
    ended: EndRecord | None

    @property
    def last(self) -> CommitRecord | None:
        return self.commits[-1] if self.commits else None

    @property
    def closed(self) -> bool:
        """True when the session behind this log is over for good (decision 91)."""
        if self.ended is not None:
            return True
        last = self.last
        return last is not None and last.ctl is not UNSET and last.ctl.action in (Action.FINISH, Action.FAIL)


def view(records: Iterable[Record]) -> LogView:
    """Apply the fence rule in log order: a record below a fence that precedes it is skipped (decision 88)."""
    fence = 0
    commits: list[CommitRecord] = []
    ended: EndRecord | None = None
    for record in records:
        match record:
            case FenceRecord():
                fence = max(fence, record.epoch)
            case CommitRecord() if record.epoch >= fence:
                commits.append(record)
            case EndRecord() if record.epoch >= fence:
                ended = record
            case _:
                pass
    return LogView(fence=fence, commits=tuple(commits), ended=ended)


def fenced_above(log: bytes, epoch: int) -> bool:
    """Whether a log's octets hold a fence above `epoch`. False for a damaged log, which says nothing."""
    try:
        return view(record for record, _ in read_records(log)).fence > epoch
    except IllFormed:
        return False


class OurRecordStands(Struct, frozen=True):
    """Our record is in the log: the append succeeded. `fenced` tells whether a higher fence follows it."""

    tag: str
    fenced: bool


class OurRecordAbsent(Struct, frozen=True):
    """The log is as it was before our append: send the same octets again, with this tag."""

    tag: str


class FencedOff(Struct, frozen=True):
    """A higher fence stands and our record does not count: discard the round, release nothing, stop serving."""

    reason: ClassVar[str] = "fenced"


class ForeignWriter(Struct, frozen=True):
    """Another writer's record stands where ours should: stop serving (decision 30)."""

    reason: ClassVar[str] = "another writer's record is in the log"


class LogShrank(Struct, frozen=True):
    """The log holds fewer records than were acknowledged to us: a store fault. Stop serving, and say so loudly."""

    reason: ClassVar[str] = "the log lost acknowledged records: store fault"


Lookup = OurRecordStands | OurRecordAbsent | FencedOff | ForeignWriter | LogShrank


def look_for(log: bytes, *, record: bytes, acknowledged: int, epoch: int) -> Lookup:
    """Settle an append whose answer was lost (decision 64), from the log's octets as they are now.

    `record` is what was sent, `acknowledged` the number of records that were in the log before it, `epoch` the
    writer's. The order of the checks is the decision's: a higher fence before our record first, then our record, then
    a foreign one. Raises IllFormed for a damaged log.
    """
    records = read_records(log)
    tag = log_tag(raw for _, raw in records)
    if len(records) < acknowledged:
        return LogShrank()
    tail = records[acknowledged:]
    for position, (entry, raw) in enumerate(tail):
        if isinstance(entry, FenceRecord) and entry.epoch > epoch:
            return FencedOff()
        if raw == record:
            later = tail[position + 1 :]
            if any(isinstance(other, CommitRecord | EndRecord) and other.epoch <= epoch for other, _ in later):
                return ForeignWriter()
            fenced = any(isinstance(other, FenceRecord) and other.epoch > epoch for other, _ in later)
            return OurRecordStands(tag=tag, fenced=fenced)
        return ForeignWriter()
    return OurRecordAbsent(tag=tag)
