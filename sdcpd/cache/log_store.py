"""The commit logs of this node: conditional appends, fences, one sync for all that wait (draft 6.8; decisions 85-91).

How an append travels. Whoever owns the store (roles/cache.py) collects requests and, one batch at a time,

    batch = store.prepare(requests, copies, now)      decides every request, in order; changes nothing
    result = store.write_batch(batch)                 in a worker thread, unless `is_quick`: write all frames, sync once
    outcomes = store.settle(batch, result, now)       the index moves; only now does an append exist

So an append is judged against all that is settled and all that precedes it in its batch, and nothing is ever visible
that is not durable: a failed write leaves the index where it was, and there is no state to roll back. All but
`write_batch`, `read` and `read_copies` is bookkeeping for one thread; those three take finished orders and share
nothing with it. The rules of a log are in log_batch.py.

Directory records (decision 106) are in the same journal and share its syncs; they are read, moved and recovered as logs
are.

Life of a log: kept while its session runs, then `log_retention_s` more (90); one that nobody touches for
`abandoned_log_retention_s` goes as well. Times are the owner's; a restart begins them anew. Segments are given back
from the oldest on; where garbage outweighs what is needed, the oldest segment's logs are written again at the end
(BASE). While that goes on, `journal_bytes` may be exceeded by as much as is still needed.
"""

from collections import deque
from collections.abc import Sequence
from typing import assert_never

from msgspec import Struct

from sdcpd.cache.files import Files, Lock
from sdcpd.cache.journal import Journal, NotWritten, Stopped, WriteOrder, WriteResult, Written
from sdcpd.cache.journal_frames import SEGMENT_HEADER_BYTES, payload_offset
from sdcpd.cache.log_batch import Draft
from sdcpd.cache.log_index import Log, LogIndex, place
from sdcpd.cache.log_reading import (
    Copy,
    DamagedPlan,
    ReadFailed,
    ReadMoved,
    ReadPlan,
    ReadResult,
    ReadSpoiled,
    plan_read,
    read,
    read_copies,
)
from sdcpd.cache.log_recovery import Recovered, recover
from sdcpd.cache.log_requests import (
    LogAppended,
    LogDamaged,
    LogFull,
    LogMissing,
    LogOutcome,
    LogPosition,
    LogRemoved,
    LogRequest,
    LogUnavailable,
    LogUnsettled,
    RecordEntry,
    StoreFact,
)
from sdcpd.cache.refs import is_record
from sdcpd.cache.settings import CacheSettings

QUICK_BYTES = 64 << 10
QUICK_FRAMES = 64
"""A batch within both that is not synced takes tens of microseconds to write, less than handing it to a thread."""

EXPIRED_BATCH = 256
"""Expired logs removed in one batch, so that appends do not wait for a long list."""


class Batch(Struct, frozen=True):
    """Requests with their outcomes (should the write succeed), and the order that makes them so."""

    requests: tuple[LogRequest, ...]
    outcomes: tuple[LogOutcome, ...]
    order: WriteOrder

    @property
    def empty(self) -> bool:
        """Nothing to write or to give back: settle at once."""
        return not self.order.frames and not self.order.drop


class LogStoreSnapshot(Struct, frozen=True):
    """For operators and checkers."""

    logs: int
    directory_records: int
    damaged_logs: int
    """Of both."""
    segments: int
    journal_bytes: int
    live_bytes: int
    stopped: str | None


class LogStore:
    """The store. Made by `open`, ended by `close`."""

    def __init__(self, settings: CacheSettings, files: Files, lock: Lock, recovered: Recovered) -> None:
        self._settings = settings
        self._files = files
        self._lock = lock
        self._index: LogIndex = recovered.index
        self._segments = recovered.segments
        self._active = recovered.active
        self._damaged_segments = recovered.damaged_segments
        self._journal = Journal(files, sync=settings.commit_durability == "fsync", file=recovered.file)
        self._facts = recovered.facts
        self._expired: deque[str] = deque()
        self._stopped: str | None = None
        self._maintenance_failed = False
        self._writing = False

    @classmethod
    def open(cls, settings: CacheSettings, files: Files, now: float) -> "LogStore":
        """Take the directory, read everything back, make it clean. Blocks.

        Raises StateInUse when another process has the directory, OSError when the disk does not let us.
        """
        lock = files.lock("lock")
        try:
            return cls(settings, files, lock, recover(files, now))
        except BaseException:
            lock.close()
            raise

    def close(self) -> None:
        """Give the directory back. No batch may be under way."""
        self._journal.close()
        self._lock.close()

    # Bookkeeping: one thread, nothing blocks.

    def prepare(self, requests: Sequence[LogRequest], copies: Sequence[Copy], now: float) -> Batch:
        """Decide every request, in order. `copies` are what `read_copies` brought of `plan_copies`."""
        assert not self._writing, "one batch at a time"
        if self._stopped is not None:
            refused: LogOutcome = LogUnavailable(self._stopped)
            order = WriteOrder(segment=self._active, begin_segment=False, offset=self._length, frames=())
            return Batch(requests=tuple(requests), outcomes=(refused,) * len(requests), order=order)
        self._judge(copies)
        draft = Draft(self._settings, self._index, self._total_bytes)
        for copy in copies:
            draft.copy(copy)
        named = {request.name for request in requests}
        for _ in range(min(len(self._expired), EXPIRED_BATCH)):
            name = self._expired.popleft()
            log = self._index.get(name)
            if log is not None and name not in named and self._is_expired(log, now):
                draft.remove(name)
        outcomes = tuple(draft.decide(request) for request in requests)
        begin = bool(draft.frames) and self._length >= self._settings.segment_bytes
        order = WriteOrder(
            segment=self._active + 1 if begin else self._active,
            begin_segment=begin,
            offset=SEGMENT_HEADER_BYTES if begin else self._length,
            frames=tuple(draft.frames),
            drop=() if self._maintenance_failed else tuple(self._droppable()),
            keep=frozenset(self._damaged_segments),
        )
        batch = Batch(requests=tuple(requests), outcomes=outcomes, order=order)
        self._writing = not batch.empty
        return batch

    def settle(self, batch: Batch, result: WriteResult, now: float) -> tuple[LogOutcome, ...]:
        """Make a batch that `write_batch` has carried out (or an empty one) true. Returns the outcomes in order."""
        self._writing = False
        match result:
            case Written():
                self._take_in(batch.order, result, now)
                return batch.outcomes
            case NotWritten(detail=detail, no_room=no_room):
                self._facts.append(StoreFact(kind="append_failed", detail=detail, segment=batch.order.segment))
                failed: LogOutcome = LogFull(detail) if no_room else LogUnavailable(detail)
            case Stopped(detail=detail):
                if self._stopped is None:
                    self._facts.append(StoreFact(kind="store_stopped", detail=detail, segment=batch.order.segment))
                self._stopped = detail
                failed = LogUnsettled(detail)
            case _:
                assert_never(result)
        wanted = (LogAppended, LogRemoved)
        return tuple(failed if isinstance(outcome, wanted) else outcome for outcome in batch.outcomes)

    def plan_read(self, name: str, now: float) -> ReadPlan | LogMissing | LogDamaged:
        """An order to read a log as it is now; it counts as touched."""
        log = self._index.get(name)
        if log is None:
            return LogMissing()
        if log.damage is not None:
            return LogDamaged(log.damage)
        if not log.final:
            log.touched = now
        return plan_read(log)

    def position(self, name: str) -> LogPosition | LogMissing | LogDamaged:
        """Where a log ends."""
        log = self._index.get(name)
        if log is None:
            return LogMissing()
        if log.damage is not None:
            return LogDamaged(log.damage)
        return LogPosition(tag=log.tag, length=log.length, floor=log.floor, final=log.final)

    def list_records(self, directory: str, after: str, count: int) -> list[RecordEntry]:
        """The first `count` directory records below this path whose names sort behind `after`. Counts as no touch."""
        entries = []
        for name in self._index.record_names(directory, after, count):
            log = self._index.get(name)
            assert log is not None, "the index names what it has"
            entries.append(RecordEntry(name=name, tag=log.tag if log.damage is None else None))
        return entries

    def names_below(self, place: str) -> tuple[list[str], list[str]]:
        """All logs and directory records below this path; and which of them are logs of sessions that go on."""
        names = [log.name for log in self._index if log.name.startswith(place)]
        return names, [name for name in names if not is_record(name) and self._is_open(name)]

    def spoiled(self, plan: ReadPlan, detail: str) -> None:
        """A read found the log's octets changed on disk. If the log is still what it was, it is damaged."""
        log = self._index.get(plan.name)
        if log is not None and log.damage is None and log.tag == plan.tag:
            self._damaged_segments.update(place(coded)[0] for coded in log.places)
            log.spoil(detail)
            self._facts.append(StoreFact(kind="log_damaged", detail=detail, segment=log.first_segment, log=log.name))

    def look_for_expired(self, now: float) -> None:
        """Note the logs whose time is over; coming batches remove them. Maintenance that failed is tried again."""
        self._maintenance_failed = False
        self._expired = deque(log.name for log in self._index if self._is_expired(log, now))

    def maintenance_is_due(self) -> bool:
        """Is there something to write or to give back besides requests? Not after a failure, until looked for anew."""
        if self._stopped is not None or self._maintenance_failed:
            return False
        return bool(self._expired or self._droppable() or self._copying_pays())

    def plan_copies(self) -> list[ReadPlan | DamagedPlan]:
        """Logs to be moved out of the oldest segment with the next batch; empty when that does not pay yet."""
        if self._stopped is not None or self._maintenance_failed or not self._copying_pays():
            return []
        plans: list[ReadPlan | DamagedPlan] = []
        size_bytes = 0
        for log in self._index.beginning_in(min(self._segments)):
            if plans and size_bytes + log.length > self._settings.max_batch_bytes:
                break
            plans.append(plan_read(log) if log.damage is None else DamagedPlan(name=log.name, detail=log.damage))
            size_bytes += log.length
        return plans

    def is_quick(self, batch: Batch) -> bool:
        """Whether `write_batch` waits for no disk: a small write to the page cache of a segment that is there.

        A system with too many unwritten pages makes whoever adds to them wait, on Linux for at most 0.2 s at a time.
        """
        order = batch.order
        if self._settings.commit_durability == "fsync" or order.begin_segment or order.drop:
            return False
        return len(order.frames) <= QUICK_FRAMES and sum(frame.frame_bytes for frame in order.frames) <= QUICK_BYTES

    def take_facts(self) -> list[StoreFact]:
        """What happened since the last call."""
        facts, self._facts = self._facts, []
        return facts

    def snapshot(self) -> LogStoreSnapshot:
        return LogStoreSnapshot(
            logs=len(self._index) - self._index.records,
            directory_records=self._index.records,
            damaged_logs=sum(log.damage is not None for log in self._index),
            segments=len(self._segments),
            journal_bytes=self._total_bytes,
            live_bytes=self._index.live_bytes,
            stopped=self._stopped,
        )

    @property
    def stopped(self) -> str | None:
        """Why nothing is taken any more, or None."""
        return self._stopped

    # For a worker thread: these block, and touch nothing of the above.

    def write_batch(self, batch: Batch) -> WriteResult:
        """Carry the batch's order out. One at a time."""
        return self._journal.carry_out(batch.order)

    def read(self, plan: ReadPlan) -> ReadResult:
        """Read one log and check it against its tag."""
        return read(self._files, plan)

    def read_copies(self, plans: Sequence[ReadPlan | DamagedPlan]) -> list[Copy]:
        """Read the logs that are to be moved."""
        return read_copies(self._files, plans)

    # Inside.

    @property
    def _length(self) -> int:
        return self._segments[self._active]

    @property
    def _total_bytes(self) -> int:
        return sum(self._segments.values())

    def _is_expired(self, log: Log, now: float) -> bool:
        retention_s = self._settings.log_retention_s if log.final else self._settings.abandoned_log_retention_s
        return now - log.touched >= retention_s

    def _is_open(self, name: str) -> bool:
        log = self._index.get(name)
        return log is not None and log.damage is None and not log.final

    def _droppable(self) -> list[int]:
        """Segments before the first that any log needs, but never the active one."""
        needed = self._index.first_needed_segment()
        limit = self._active if needed is None else min(needed, self._active)
        return sorted(segment for segment in self._segments if segment < limit)

    def _copying_pays(self) -> bool:
        """Moving costs writing what is still needed of the oldest segment. With half the journal garbage, each octet
        is moved about once; a journal near its limit gives up some of that economy for space."""
        if len(self._segments) < 2 or self._droppable():
            return False
        settings = self._settings
        live = self._index.live_bytes
        garbage = self._total_bytes - live
        tight = self._total_bytes + 2 * settings.segment_bytes > settings.journal_bytes
        return garbage >= (settings.segment_bytes if tight else max(live, 2 * settings.segment_bytes))

    def _take_in(self, order: WriteOrder, result: Written, now: float) -> None:
        if order.frames:
            self._active = order.segment
            offset = order.offset
            for frame in order.frames:
                wrong = self._index.apply(frame, order.segment, payload_offset(offset, frame), now)
                assert wrong is None, f"a frame that was just decided does not fit its log: {wrong}"
                offset += frame.frame_bytes
            self._segments[order.segment] = offset
        for segment in order.drop[: result.dropped]:
            del self._segments[segment]
            self._damaged_segments.discard(segment)
        if result.detail is not None:
            self._facts.append(StoreFact(kind="segment_not_given_back", detail=result.detail))
            self._maintenance_failed = True

    def _judge(self, copies: Sequence[Copy]) -> None:
        """What reading for a copy says about the log itself."""
        for copy in copies:
            match copy.result:
                case ReadSpoiled(detail=detail):
                    assert isinstance(copy.plan, ReadPlan)
                    self.spoiled(copy.plan, detail)
                case ReadFailed(detail=detail):
                    self._facts.append(StoreFact(kind="log_not_read", detail=detail, log=copy.plan.name))
                    self._maintenance_failed = True
                case ReadMoved():
                    self._maintenance_failed = True  # a segment is missing that we did not give back
                case _:
                    pass
