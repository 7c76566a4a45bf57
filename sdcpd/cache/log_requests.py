"""What the log store is asked and what it answers, as plain values.

It keeps logs, and beside them directory records (decision 106), which are to it logs whose whole content is replaced.

A record is opaque to the store but for four things: which kind it is, its epoch, whether it ends the session, and its
octets, which are kept as they came.
"""

from enum import Enum

from msgspec import UNSET, Struct

from sdcpd.protocol.commit_log import CommitRecord, EndRecord, FenceRecord, Record, read_records
from sdcpd.protocol.terms import Action


class RecordKind(Enum):
    """The three records of a log (protocol/commit_log.py)."""

    COMMIT = "commit"
    FENCE = "fence"
    END = "end"


class LogRecord(Struct, frozen=True):
    """One record of a log. `final`: the session is over with it (decision 91)."""

    kind: RecordKind
    epoch: int
    final: bool
    octets: bytes


def read_log_records(octets: bytes) -> tuple[LogRecord, ...]:
    """Split a CBOR sequence of log records. Raises IllFormed."""
    return tuple(_log_record(record, raw) for record, raw in read_records(octets))


def _log_record(record: Record, octets: bytes) -> LogRecord:
    match record:
        case CommitRecord(epoch=epoch, ctl=ctl):
            final = ctl is not UNSET and ctl.action in (Action.FINISH, Action.FAIL)
            return LogRecord(kind=RecordKind.COMMIT, epoch=epoch, final=final, octets=octets)
        case FenceRecord(epoch=epoch):
            return LogRecord(kind=RecordKind.FENCE, epoch=epoch, final=False, octets=octets)
        case EndRecord(epoch=epoch):
            return LogRecord(kind=RecordKind.END, epoch=epoch, final=True, octets=octets)


class CreateLog(Struct, frozen=True):
    """Begin a log, with its first records or none. Refused when it exists, whatever it holds (decision 86)."""

    name: str
    records: tuple[LogRecord, ...] = ()


class AppendToLog(Struct, frozen=True):
    """Add records to a log that is at the tag `if_match`; all of them or none."""

    name: str
    if_match: str
    records: tuple[LogRecord, ...]


class RemoveLog(Struct, frozen=True):
    """Forget a log before its time (operators), or a directory record (routers)."""

    name: str


class ReplaceRecord(Struct, frozen=True):
    """Make these octets the whole content of a directory record that is at the tag `if_match`, or that is not there
    (None). A record that holds them already is done already, so that a lost answer is settled by asking again."""

    name: str
    if_match: str | None
    octets: bytes


LogRequest = CreateLog | AppendToLog | RemoveLog | ReplaceRecord


def octets_of(request: LogRequest) -> int:
    """What a request adds to the journal, headers apart."""
    match request:
        case CreateLog(records=records) | AppendToLog(records=records):
            return sum(len(record.octets) for record in records)
        case ReplaceRecord(octets=octets):
            return len(octets)
        case RemoveLog():
            return 0


class LogAppended(Struct, frozen=True):
    """The records are durable, in the sense of `commit_durability`. `tag` is the log's new entity tag."""

    tag: str


class LogRemoved(Struct, frozen=True):
    """It is gone."""


class LogExists(Struct, frozen=True):
    """Nothing was created."""


class LogMissing(Struct, frozen=True):
    """No such log."""


class LogTagMismatch(Struct, frozen=True):
    """The log is not at the tag that was named."""


class LogBelowFence(Struct, frozen=True):
    """A record's epoch is below `floor`, the highest fence (6.8)."""

    floor: int


class LogClosed(Struct, frozen=True):
    """The session of this log is over; no commit follows (decision 91). Fences and ends are still taken."""


class LogFull(Struct, frozen=True):
    """A limit is reached, of this log or of the store; nothing was written."""

    detail: str


class LogDamaged(Struct, frozen=True):
    """The log was found damaged and is neither read nor appended to."""

    detail: str


class LogUnsettled(Struct, frozen=True):
    """The disk failed in the middle. The records may or may not be found after a restart."""

    detail: str


class LogUnavailable(Struct, frozen=True):
    """The store cannot take it: a failed disk, or the store has stopped. Nothing was written."""

    detail: str


LogRefusal = (
    LogExists
    | LogMissing
    | LogTagMismatch
    | LogBelowFence
    | LogClosed
    | LogFull
    | LogDamaged
    | LogUnsettled
    | LogUnavailable
)
LogOutcome = LogAppended | LogRemoved | LogRefusal


class LogContent(Struct, frozen=True):
    """A log's acknowledged records, octet for octet, and its tag."""

    octets: bytes
    tag: str


class LogPosition(Struct, frozen=True):
    """Where a log ends."""

    tag: str
    length: int
    floor: int
    final: bool


class RecordEntry(Struct, frozen=True):
    """A directory record as it is listed, by its path. A damaged one has no tag: it can only be removed."""

    name: str
    tag: str | None


class StoreFact(Struct, frozen=True):
    """Something an operator must hear of. `log` is the log's path; no record's content is ever in here."""

    kind: str
    detail: str
    segment: int | None = None
    log: str | None = None
