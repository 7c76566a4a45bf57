"""The cache role: serves commit logs, directory records and objects to peers (draft 6.8; decisions 85-91, 105-112).

Handlers only wait. An append is put into one bounded queue; one task takes all that wait there as one batch, has it
written and synced by a worker, and wakes the callers: while one sync runs the next batch gathers, so many sessions
share each. What is queued is carried out whether or not its caller still waits, since a caller that went away cannot
say that it wishes the record unwritten (decision 64: it will read the log).

A read of a log waits for the appends to it that were queued before, so that a caller whose answer was lost finds its
own record rather than a log that is about to change.

Who may do what (decision 112): commits and the creation of a log are the verifier's, fences the router's, ends
either's; both read logs. Drafters never see a log. Directory records are the routers' alone, since they hold prompts
(106). Removing a log before its time is the operator's, removing a record the router's and the operator's. Objects are
as on every node (object_cache.py).
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Final, assert_never

import msgspec
import structlog
import trio

from sdcpd.cache.files import Files
from sdcpd.cache.journal import WriteResult, Written
from sdcpd.cache.log_reading import Copy, ReadFailed, ReadMoved, ReadPlan, ReadSpoiled
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
    LogUnavailable,
    LogUnsettled,
    RecordKind,
    RemoveLog,
    ReplaceRecord,
    StoreFact,
    octets_of,
    read_log_records,
)
from sdcpd.cache.log_store import LogStore
from sdcpd.cache.refs import LogName, RecordName, directory_path, is_record, parse_path, scope_path
from sdcpd.cache.settings import CacheSettings
from sdcpd.protocol.problems import (
    Conflict,
    IllFormed,
    NoRoom,
    Overloaded,
    PreconditionFailed,
    Problem,
    StaleEpoch,
    TooLarge,
    UnknownResource,
)
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.object_cache import RETRY_AFTER_S, ObjectCache, ObjectCacheSnapshot, ScopePurged, allow
from sdcpd.roles.ports import Peer, Ports
from sdcpd.roles.waits import Changes

log = structlog.get_logger(__name__)

READ_TRIES: Final = 3
"""A log may be moved while it is read, and moved again; more often would be a fault of ours."""
FACTS_TOLD: Final = 100
"""Lines of one report; a badly damaged journal may hold a fact for each of its logs."""

PURGED_TOGETHER: Final = 256
"""Removals that share a sync, of which others' appends then wait for one."""

LISTED_LIMIT: Final = 256
"""Records of one page of a directory, which takes some 25 KiB."""

_ROUTERS: Final = frozenset({"router"})
_LOG_READERS: Final = frozenset({"verifier", "router"})
_RECORD_WRITERS: Final = {
    RecordKind.COMMIT: frozenset({"verifier"}),
    RecordKind.FENCE: frozenset({"router"}),
    RecordKind.END: frozenset({"verifier", "router"}),
}


class AppendUnsettled(Problem):
    """The disk failed in the middle: the record may or may not be found later. Clients take it as no answer."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Outcome unknown"


class CacheSnapshot(ObjectCacheSnapshot, frozen=True, kw_only=True):
    """For operators and checkers."""

    logs: int
    directory_records: int
    damaged_logs: int
    segments: int
    journal_bytes: int
    live_bytes: int
    stopped: str | None
    waiting_appends: int
    records: int
    """Appends made durable since the start, and `batches` the writes they shared."""
    batches: int


class _Waiting:
    """One request in the queue. `outcome` is there once `settled` is set."""

    __slots__ = ("outcome", "request", "settled", "size_bytes")

    def __init__(self, request: LogRequest) -> None:
        self.request = request
        self.size_bytes = octets_of(request)
        self.settled = trio.Event()
        self.outcome: LogOutcome = LogUnsettled("the cache role ended before this was settled")


class Cache(ObjectCache):
    """The role. `files` is the directory of the journal."""

    def __init__(self, settings: CacheSettings, ports: Ports, files: Files) -> None:
        super().__init__(settings, ports)
        self._files = files
        self._store: LogStore | None = None
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._taken: list[_Waiting] = []
        """The batch under way."""
        self._last_of: dict[str, _Waiting] = {}
        """The last unsettled request for each log."""
        self._reads = 0
        self._changes = Changes()
        self._records = 0
        self._batches = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the journal back, then serve until cancelled.

        Raises cache.files.StateInUse when another process has the directory, OSError when the disk does not let us.
        """
        store = await self._ports.workers.run(LogStore.open, self._settings, self._files, self._ports.clock.now())
        try:
            self._report(store)
            shown = store.snapshot()
            log.info("cache ready", logs=shown.logs, segments=shown.segments, journal_bytes=shown.journal_bytes)
            self._store = store
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_batches, store)
                nursery.start_soon(self._look_after, store)
                task_status.started()
        finally:
            self._store = None
            store.close()
            for waiting in self._taken:
                waiting.settled.set()
            for waiting in self._waiting:
                waiting.outcome = LogUnavailable("the cache role has ended")
                waiting.settled.set()

    def snapshot(self) -> CacheSnapshot:
        logs = None if self._store is None else self._store.snapshot()
        return CacheSnapshot(
            **msgspec.structs.asdict(super().snapshot()),
            logs=0 if logs is None else logs.logs,
            directory_records=0 if logs is None else logs.directory_records,
            damaged_logs=0 if logs is None else logs.damaged_logs,
            segments=0 if logs is None else logs.segments,
            journal_bytes=0 if logs is None else logs.journal_bytes,
            live_bytes=0 if logs is None else logs.live_bytes,
            stopped="not running" if logs is None else logs.stopped,
            waiting_appends=len(self._waiting),
            records=self._records,
            batches=self._batches,
        )

    # Logs

    async def create_log(self, peer: Peer, name: LogName, epoch: int, octets: bytes = b"") -> str:
        """Begin a log with these records (none, or a fence; decision 86). Returns its tag."""
        records = self._records_of(peer, epoch, octets)
        if not records:
            allow(peer, _RECORD_WRITERS[RecordKind.COMMIT], "begin a log without records")
        return await self._append(CreateLog(name=name.path, records=records))

    async def append_log(self, peer: Peer, name: LogName, epoch: int, octets: bytes, if_match: str) -> str:
        """Add records to a log that is at the tag `if_match`. Returns the new tag."""
        records = self._records_of(peer, epoch, octets)
        if not records:
            raise IllFormed("an append without a record")
        return await self._append(AppendToLog(name=name.path, if_match=if_match, records=records))

    async def replace_log(self, peer: Peer, name: LogName, epoch: int, octets: bytes, if_match: str) -> str:
        """The whole log with records added, for writers that know no append (decision 87). Returns the new tag.

        Since a tag is the SHA-256 of the log, comparing the digest of the beginning compares the octets.
        """
        allow(peer, _LOG_READERS, "write a log")
        match self._running().position(name.path):
            case LogMissing():
                raise UnknownResource("no such log")
            case LogDamaged(detail=detail):
                raise Conflict(f"the log is damaged: {detail}")
            case position:
                length = position.length
        digest = await self._ports.workers.run(_digest, octets[:length])
        if if_match != position.tag or digest != position.tag:
            raise PreconditionFailed("the log is not at this tag, or the content does not begin with the log")
        records = self._records_of(peer, epoch, octets[length:])
        return await self._append(AppendToLog(name=name.path, if_match=if_match, records=records))

    async def read_log(self, peer: Peer, name: LogName) -> LogContent:
        """All acknowledged records, after the appends that were queued before this call."""
        allow(peer, _LOG_READERS, "read logs")
        return await self._read_settled(name)

    async def remove_log(self, peer: Peer, name: LogName) -> None:
        """Forget a log before its time. One that is not there is removed already."""
        allow(peer, frozenset({"operator"}), "remove logs")
        outcome = await self._submit(RemoveLog(name=name.path))
        if not isinstance(outcome, LogRemoved | LogMissing):
            raise _problem(outcome)

    # The directory (decision 106)

    async def read_record(self, peer: Peer, name: RecordName) -> LogContent:
        """A directory record's content, after the writes that were queued before this call."""
        allow(peer, _ROUTERS, "read directory records")
        return await self._read_settled(name)

    async def write_record(self, peer: Peer, name: RecordName, octets: bytes, if_match: str | None) -> str:
        """Make this the whole content of a record that is at this tag, or that is not there (None). Returns its tag."""
        allow(peer, _ROUTERS, "write directory records")
        if len(octets) > self._settings.max_directory_record_bytes:
            raise TooLarge(f"a directory record may hold {self._settings.max_directory_record_bytes} octets")
        return await self._append(ReplaceRecord(name=name.path, if_match=if_match, octets=octets))

    async def remove_record(self, peer: Peer, name: RecordName) -> None:
        """Forget a record. One that is not there is removed already."""
        allow(peer, _ROUTERS | {"operator"}, "remove directory records")
        outcome = await self._submit(RemoveLog(name=name.path))
        if not isinstance(outcome, LogRemoved | LogMissing):
            raise _problem(outcome, "record")

    async def list_records(
        self, peer: Peer, scope: bytes | None, after: bytes | None
    ) -> tuple[list[tuple[RecordName, str | None]], bool]:
        """Records of a scope with their tags (None: damaged), at most LISTED_LIMIT, and whether there are more behind.

        In a fixed order, from behind the session `after` on, and after all writes that were queued before this call.
        """
        allow(peer, _ROUTERS, "list directory records")
        queued = self._waiting or self._taken
        if queued:
            await queued[-1].settled.wait()
        behind = "" if after is None else RecordName(scope=scope, session=after).path
        entries = self._running().list_records(directory_path(scope), behind, LISTED_LIMIT + 1)
        listed = [(_record_name(entry.name), entry.tag) for entry in entries[:LISTED_LIMIT]]
        return listed, len(entries) > LISTED_LIMIT

    # Tenant erasure

    async def purge(self, peer: Peer, scope: bytes | None, *, force: bool) -> ScopePurged:
        """Forget all of a scope, its logs and directory records included. Unless forced, not while logs are open."""
        allow(peer, frozenset({"operator"}), "purge scopes")
        names, open_logs = self._running().names_below(scope_path(scope) + "/")
        if open_logs and not force:
            raise Conflict(f"{len(open_logs)} logs of this scope are open: end their sessions first, or force it")
        gone = self.purge_scope(scope, force=force)
        left: list[LogOutcome] = []
        for start in range(0, len(names), PURGED_TOGETHER):
            async with trio.open_nursery() as nursery:
                for name in names[start : start + PURGED_TOGETHER]:
                    nursery.start_soon(self._purge_log, name, left)
        if left:
            raise _problem(left[0])
        records = sum(is_record(name) for name in names)
        return msgspec.structs.replace(gone, logs=len(names) - records, records=records)

    async def _purge_log(self, name: str, left: list[LogOutcome]) -> None:
        """Problems are noted in `left`, since they must not take the other removals along."""
        try:
            outcome = await self._submit(RemoveLog(name=name))
        except Overloaded as problem:
            outcome = LogUnavailable(problem.detail)
        if not isinstance(outcome, LogRemoved | LogMissing):
            left.append(outcome)

    # The queue

    def _records_of(self, peer: Peer, epoch: int, octets: bytes) -> tuple[LogRecord, ...]:
        """The records of a body, each of the epoch that was named, each of a kind that this peer may write."""
        allow(peer, _LOG_READERS, "write a log")  # before anything is said about the body
        records = read_log_records(octets)
        for record in records:
            allow(peer, _RECORD_WRITERS[record.kind], f"write {record.kind.value} records")
            if record.epoch != epoch:
                raise IllFormed(f"a record of epoch {record.epoch} in a request that names epoch {epoch}")
            if len(record.octets) > self._settings.max_record_bytes:
                raise TooLarge(f"a record may hold {self._settings.max_record_bytes} octets")
        return records

    async def _append(self, request: CreateLog | AppendToLog | ReplaceRecord) -> str:
        match await self._submit(request):
            case LogAppended(tag=tag):
                return tag
            case outcome:
                raise _problem(outcome, "record" if isinstance(request, ReplaceRecord) else "log")

    async def _submit(self, request: LogRequest) -> LogOutcome:
        """Queue a request and wait for its outcome. Cancelling the wait does not take it out of the queue."""
        self._running()
        waiting = _Waiting(request)
        settings = self._settings
        if len(self._waiting) >= settings.max_waiting_appends or (
            self._waiting and self._waiting_bytes + waiting.size_bytes > settings.max_waiting_bytes
        ):
            raise Overloaded("too many appends wait for the journal", retry_after_s=RETRY_AFTER_S)
        self._waiting.append(waiting)
        self._waiting_bytes += waiting.size_bytes
        self._last_of[request.name] = waiting
        self._changes.notify()
        await waiting.settled.wait()
        return waiting.outcome

    def _running(self) -> LogStore:
        if self._store is None:
            raise Overloaded("the cache role is not running", retry_after_s=RETRY_AFTER_S)
        return self._store

    def _take_waiting(self) -> list[_Waiting]:
        """The next batch: as many as fit one write, at least one if any waits."""
        taken: list[_Waiting] = []
        size_bytes = 0
        while self._waiting:
            size_bytes += self._waiting[0].size_bytes
            if taken and size_bytes > self._settings.max_batch_bytes:
                break
            taken.append(self._waiting.popleft())
            self._waiting_bytes -= taken[-1].size_bytes
        return taken

    async def _write_batches(self, store: LogStore) -> None:
        while True:
            while self._waiting or store.maintenance_is_due():
                await self._write_batch(store)
            await self._changes.wait()

    async def _write_batch(self, store: LogStore) -> None:
        workers, clock = self._ports.workers, self._ports.clock
        plans = store.plan_copies()
        copies: Sequence[Copy] = await workers.run(store.read_copies, plans) if plans else ()
        self._taken = taken = self._take_waiting()
        batch = store.prepare([waiting.request for waiting in taken], copies, clock.now())
        if batch.empty:
            result: WriteResult = Written(dropped=0)
        elif store.is_quick(batch):
            result = await workers.run_short(store.write_batch, batch)
        else:
            result = await workers.run(store.write_batch, batch)
        outcomes = store.settle(batch, result, clock.now())
        appended = 0
        for waiting, outcome in zip(taken, outcomes, strict=True):
            waiting.outcome = outcome
            if self._last_of.get(waiting.request.name) is waiting:
                del self._last_of[waiting.request.name]
            waiting.settled.set()
            if isinstance(outcome, LogAppended) and isinstance(waiting.request, CreateLog | AppendToLog):
                appended += len(waiting.request.records)
        self._taken = []
        self._count(appended, written=bool(batch.order.frames) and isinstance(result, Written))
        self._report(store)

    def _count(self, appended: int, *, written: bool) -> None:
        self._records += appended
        if appended:
            self._ports.meters.count("log_records_total", appended)
        if written:
            self._batches += 1
            if self._settings.commit_durability == "fsync":
                self._ports.meters.count("log_syncs_total")

    async def _read_settled(self, name: LogName | RecordName) -> LogContent:
        if self._reads >= self._settings.max_waiting_reads:
            raise Overloaded("too many logs are being read", retry_after_s=RETRY_AFTER_S)
        self._reads += 1
        try:
            last = self._last_of.get(name.path)
            if last is not None:
                await last.settled.wait()
            return await self._read(name, "record" if isinstance(name, RecordName) else "log")
        finally:
            self._reads -= 1

    async def _read(self, name: LogName | RecordName, what: str) -> LogContent:
        store = self._running()
        for _ in range(READ_TRIES):
            plan = store.plan_read(name.path, self._ports.clock.now())
            match plan:
                case LogMissing():
                    raise UnknownResource(f"no such {what}")
                case LogDamaged(detail=detail):
                    raise Conflict(f"the {what} is damaged: {detail}")
                case ReadPlan():
                    pass
            match await self._ports.workers.run(store.read, plan):
                case LogContent() as content:
                    return content
                case ReadMoved():
                    continue
                case ReadFailed(detail=detail):
                    log.error(f"{what} not read", session=session_path_id(name.session), detail=detail)
                    raise Overloaded(f"the {what} cannot be read now", retry_after_s=RETRY_AFTER_S)
                case ReadSpoiled(detail=detail):
                    store.spoiled(plan, detail)
                    self._report(store)
                    raise Conflict(f"the {what} is damaged: {detail}")
        raise Overloaded(f"the {what} is being moved", retry_after_s=RETRY_AFTER_S)

    async def _look_after(self, store: LogStore) -> None:
        """Expired logs and objects, and maintenance that failed before."""
        clock = self._ports.clock
        while True:
            await clock.sleep_until(clock.now() + self._settings.maintenance_interval_s)
            self._objects.expire(clock.now())
            store.look_for_expired(clock.now())
            self._changes.notify()

    def _report(self, store: LogStore) -> None:
        facts = store.take_facts()
        for fact in facts[:FACTS_TOLD]:
            _tell(fact)
        if len(facts) > FACTS_TOLD:
            log.error("more facts about the journal than are told", left_out=len(facts) - FACTS_TOLD)


def _tell(fact: StoreFact) -> None:
    """One line. A torn end is what a crash leaves, and as a rule costs nothing; all else needs a person."""
    say = log.warning if fact.kind in ("torn_end_cut", "segment_not_given_back") else log.error
    session = None if fact.log is None else fact.log.rpartition("/")[2]
    say(fact.kind.replace("_", " "), session=session, segment=fact.segment, detail=fact.detail)


def _digest(octets: bytes) -> str:
    return f'"{hashlib.sha256(octets).hexdigest()}"'


def _record_name(path: str) -> RecordName:
    name = parse_path(path)
    assert isinstance(name, RecordName), "the directory lists its records"
    return name


def _problem(outcome: LogOutcome, what: str = "log") -> Problem:
    """What a peer is told when its request was not carried out."""
    match outcome:
        case LogExists():
            return PreconditionFailed(f"the {what} exists")
        case LogMissing():
            return UnknownResource(f"no such {what}")
        case LogTagMismatch():
            return PreconditionFailed(f"the {what} is not at this tag")
        case LogBelowFence(floor=floor):
            return StaleEpoch(f"the log is fenced at epoch {floor}")
        case LogClosed():
            return Conflict("the session of this log is over; no commit follows")
        case LogFull(detail=detail):
            return NoRoom(detail, retry_after_s=RETRY_AFTER_S)
        case LogDamaged(detail=detail):
            return Conflict(f"the {what} is damaged: {detail}")
        case LogUnavailable(detail=detail):
            return Overloaded(detail, retry_after_s=RETRY_AFTER_S)
        case LogUnsettled(detail=detail):
            return AppendUnsettled(detail)
        case LogAppended() | LogRemoved():
            raise AssertionError("not a refusal")
        case _:
            assert_never(outcome)
