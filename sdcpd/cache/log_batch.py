"""Deciding a batch of requests: the rules of a log (draft 6.8; decisions 86 to 91) and of a directory record (106).

They are checked in this order: a damaged log is not touched; a record below the highest fence is refused whatever the
tag (6.8: it MUST fail); the tag must be the log's; a closed session takes no commit (91); limits. A fence raises the
floor. Commits leave some space free, so that a full store can still fence and end sessions.

A directory record is replaced as a whole, on condition of its tag, or created on condition that there is none. It has
limits of its own, so that prompts, which it holds, do not crowd out commits. Of the space that commits leave free, a
replacement may use half, since a session is moved by one.

A draft sees the settled state through the index and changes nothing in it. Requests of one batch see each other.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from sdcpd.cache.journal_frames import FrameKind, FrameOrder, frame_bytes
from sdcpd.cache.log_index import Log, LogIndex
from sdcpd.cache.log_reading import Copy, ReadFailed, ReadMoved
from sdcpd.cache.log_requests import (
    AppendToLog,
    CreateLog,
    LogAppended,
    LogBelowFence,
    LogClosed,
    LogContent,
    LogDamaged,
    LogExists,
    LogFull,
    LogMissing,
    LogOutcome,
    LogRecord,
    LogRemoved,
    LogRequest,
    LogTagMismatch,
    RecordKind,
    RemoveLog,
    ReplaceRecord,
)
from sdcpd.cache.refs import is_record
from sdcpd.cache.settings import CacheSettings


class Tail:
    """One log inside a batch."""

    __slots__ = ("final", "floor", "length", "running")

    def __init__(self, log: Log | None) -> None:
        self.running: Any = hashlib.sha256() if log is None else log.running.copy()
        self.length = 0 if log is None else log.length
        self.floor = 0 if log is None else log.floor
        self.final = False if log is None else log.final

    @property
    def tag(self) -> str:
        return f'"{self.running.hexdigest()}"'


class Draft:
    """A batch in the making: the frames so far, and each touched log as it will be (None: gone)."""

    def __init__(self, settings: CacheSettings, index: LogIndex, total_bytes: int) -> None:
        self.frames: list[FrameOrder] = []
        self._settings = settings
        self._index = index
        self._total_bytes = total_bytes
        self._tails: dict[str, Tail | None] = {}
        self._logs = len(index) - index.records
        self._records = index.records
        self._record_bytes = index.record_bytes

    def copy(self, copy: Copy) -> None:
        """Write a log again as it is, or the knowledge that it is damaged."""
        plan = copy.plan
        log = self._index.get(plan.name)
        if log is None:
            return
        match copy.result:
            case LogContent(octets=octets) if log.damage is None:
                self._frame(FrameKind.BASE, plan.name, octets, Tail(log))
            case ReadMoved() | ReadFailed():
                pass  # planned again later
            case _:
                assert log.damage is not None
                self._frame(FrameKind.LOST, plan.name, log.damage.encode(), Tail(None))

    def remove(self, name: str) -> None:
        self._frame(FrameKind.REMOVE, name, b"", Tail(None))
        if is_record(name):
            self._records -= 1
            self._record_bytes -= self._occupied(name)
        else:
            self._logs -= 1
        self._tails[name] = None

    def decide(self, request: LogRequest) -> LogOutcome:
        """The outcome of a request, should the batch be written."""
        log = self._index.get(request.name)
        tail = self._tails[request.name] if request.name in self._tails else None if log is None else Tail(log)
        damage = None if log is None or request.name in self._tails else log.damage
        match request:
            case RemoveLog(name=name):
                if tail is None:
                    return LogMissing()
                self.remove(name)
                return LogRemoved()
            case CreateLog(name=name, records=records):
                if tail is not None:
                    return LogExists()
                if self._logs >= self._settings.max_logs:
                    return LogFull(f"the store keeps {self._settings.max_logs} logs at most")
                below = _below_fence(records, 0)
                if below is not None:
                    return below
                outcome = self._extend(FrameKind.CREATE, name, Tail(None), records)
                self._logs += isinstance(outcome, LogAppended)
                return outcome
            case AppendToLog(name=name, if_match=if_match, records=records):
                if damage is not None:
                    return LogDamaged(damage)
                if tail is None:
                    return LogMissing()
                below = _below_fence(records, tail.floor)
                if below is not None:
                    return below
                if if_match != tail.tag:
                    return LogTagMismatch()
                return self._extend(FrameKind.APPEND, name, tail, records) if records else LogAppended(tag=tail.tag)
            case ReplaceRecord():
                return LogDamaged(damage) if damage is not None else self._replace(request, tail)

    def _replace(self, request: ReplaceRecord, tail: Tail | None) -> LogOutcome:
        after = Tail(None)
        after.running.update(request.octets)
        after.length = len(request.octets)
        if tail is not None and tail.tag == after.tag:
            return LogAppended(tag=after.tag)
        if request.if_match is None and tail is not None:
            return LogExists()
        if request.if_match is not None and tail is None:
            return LogMissing()
        if tail is not None and request.if_match != tail.tag:
            return LogTagMismatch()
        full = self._no_room_for_record(request, tail)
        if full is not None:
            return full
        self._records += tail is None
        self._record_bytes += frame_bytes(len(request.name), after.length) - self._occupied(request.name)
        self._frame(FrameKind.CREATE, request.name, request.octets, after)
        self._tails[request.name] = after
        return LogAppended(tag=after.tag)

    def _no_room_for_record(self, request: ReplaceRecord, tail: Tail | None) -> LogFull | None:
        settings, added_bytes = self._settings, frame_bytes(len(request.name), len(request.octets))
        if len(request.octets) > settings.max_directory_record_bytes:
            return LogFull(f"a directory record may hold {settings.max_directory_record_bytes} octets")
        if tail is None and self._records >= settings.max_directory_records:
            return LogFull(f"the store keeps {settings.max_directory_records} directory records at most")
        if self._record_bytes - self._occupied(request.name) + added_bytes > settings.directory_bytes:
            return LogFull(f"directory records may take {settings.directory_bytes} octets of the journal")
        reserved_bytes = settings.reserved_journal_bytes // (1 if tail is None else 2)
        if self._total_bytes + added_bytes > settings.journal_bytes - reserved_bytes:
            return LogFull(f"the journal is full; its limit is journal_bytes = {settings.journal_bytes}")
        return None

    def _occupied(self, name: str) -> int:
        """Octets of the frame that holds a directory record as this batch has it so far; 0 when there is none."""
        if name in self._tails:
            tail = self._tails[name]
            return 0 if tail is None else frame_bytes(len(name), tail.length)
        log = self._index.get(name)
        return 0 if log is None else log.frame_bytes

    def _extend(self, kind: FrameKind, name: str, tail: Tail, records: Sequence[LogRecord]) -> LogOutcome:
        final, floor = tail.final, tail.floor
        commits = False
        for record in records:
            match record.kind:
                case RecordKind.COMMIT:
                    commits = True
                    if final:
                        return LogClosed()
                case RecordKind.FENCE:
                    floor = record.epoch
                case RecordKind.END:
                    pass
            final = final or record.final
        octets = b"".join(record.octets for record in records)
        full = self._no_room(tail.length, len(octets), reserve=commits or not records)
        if full is not None:
            return full
        after = Tail(None)
        after.running = tail.running.copy()
        after.running.update(octets)
        after.length, after.floor, after.final = tail.length + len(octets), floor, final
        self._frame(kind, name, octets, after)
        self._tails[name] = after
        return LogAppended(tag=after.tag)

    def _no_room(self, length: int, added_bytes: int, *, reserve: bool) -> LogFull | None:
        """`reserve`: leave the last bit to fences and ends."""
        settings = self._settings
        log_limit = settings.max_log_bytes + (0 if reserve else settings.reserved_log_bytes)
        if length + added_bytes > log_limit:
            return LogFull(f"the log would hold {length + added_bytes} octets; its limit is {log_limit}")
        journal_limit = settings.journal_bytes - (settings.reserved_journal_bytes if reserve else 0)
        if self._total_bytes + added_bytes > journal_limit:
            return LogFull(f"the journal is full; its limit is journal_bytes = {settings.journal_bytes}")
        return None

    def _frame(self, kind: FrameKind, name: str, payload: bytes, tail: Tail) -> None:
        frame = FrameOrder(
            kind=kind,
            name=name,
            payload=payload,
            floor=tail.floor,
            final=tail.final,
            length=tail.length,
            tag=tail.running.digest(),
        )
        self.frames.append(frame)
        self._total_bytes += frame.frame_bytes


def _below_fence(records: Sequence[LogRecord], floor: int) -> LogBelowFence | None:
    """The first record that a fence before it forbids, be that fence in the log or among the records themselves."""
    for record in records:
        if record.epoch < floor:
            return LogBelowFence(floor=floor)
        if record.kind is RecordKind.FENCE:
            floor = record.epoch
    return None
