"""Ports with nothing real behind them: trio's clock (virtual under MockClock), a memory log, recorded events."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import trio

from sdcpd.cache.refs import RecordName, parse_reference, record_reference
from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, log_tag, read_records
from sdcpd.protocol.messages import Event, Status
from sdcpd.roles.ports import (
    FETCH_LIMIT_BYTES,
    Appended,
    AppendOutcome,
    BelowFence,
    Content,
    Done,
    Leased,
    LeaseOutcome,
    Listed,
    ListedRecord,
    ListOutcome,
    Missing,
    Objects,
    ReadOutcome,
    RecordOutcome,
    RemoveOutcome,
    RenewOutcome,
    StoreRefused,
    TagMismatch,
    Unreachable,
)

T = TypeVar("T")


class TrioClock:
    def now(self) -> float:
        return trio.current_time()

    async def sleep_until(self, at: float) -> None:
        await trio.sleep_until(at)


class SeededStream:
    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def octets(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def uniform(self) -> float:
        return self._random.random()


class SeededRandomness:
    def stream(self, name: str) -> SeededStream:
        return SeededStream(name)


class InlineWorkers:
    async def run(self, function: Callable[..., T], *args: object) -> T:
        return function(*args)

    async def run_short(self, function: Callable[..., T], *args: object) -> T:
        return await self.run(function, *args)


class SlowWorkers:
    """Inline, but each call first takes up to `limit_s` of virtual time, drawn from a seed: a busy disk."""

    def __init__(self, seed: int, limit_s: float) -> None:
        self._random = random.Random(seed)
        self._limit_s = limit_s

    async def run(self, function: Callable[..., T], *args: object) -> T:
        await trio.sleep(self._random.uniform(0, self._limit_s))
        return function(*args)

    async def run_short(self, function: Callable[..., T], *args: object) -> T:
        return await self.run(function, *args)


class CountingMeters:
    """Sums of counters by name, and by name and labels; observations are only counted."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        self.by_labels: dict[tuple[str, ...], float] = {}  # by (name, value of each label)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount
        series = (name, *labels.values())
        self.by_labels[series] = self.by_labels.get(series, 0) + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.count(name)


class MemoryLogs(Objects):
    """Commit logs in memory by the rules of 6.8. `faults` is consulted before each append and says what happens."""

    def __init__(self, append_s: float = 0.001) -> None:
        self.logs: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.records: dict[str, bytes] = {}
        self.leases: list[str] = []  # not released yet; they hold nothing here
        self._drawn = 0
        self.faults: list[
            str
        ] = []  # "lost": not written, no answer. "unanswered": written, no answer. A number: that status
        self.full = ""  # a status with which every append is refused
        self.append_times: dict[str, list[float]] = {}  # how long the next appends to a log take, where not `append_s`
        self._append_s = append_s

    def _tag(self, ref: str) -> str:
        return log_tag(raw for _, raw in read_records(self.logs[ref]))

    async def create_log(self, ref: str, epoch: int, record: bytes = b"") -> AppendOutcome:
        await trio.sleep(self._append_s)
        if ref in self.logs:
            return TagMismatch()
        self.logs[ref] = record
        return Appended(tag=self._tag(ref))

    async def append(self, ref: str, record: bytes, *, epoch: int, if_match: str) -> AppendOutcome:
        times = self.append_times.get(ref)
        await trio.sleep(times.pop(0) if times else self._append_s)
        fault = self.full if self.full else self.faults.pop(0) if self.faults else None
        if fault == "lost":
            return Unreachable(reason="lost")
        if fault is not None and fault.isdigit():
            return StoreRefused(status=int(fault), detail="as told")
        entries = [entry for entry, _ in read_records(self.logs[ref])]
        if any(isinstance(entry, FenceRecord) and entry.epoch > epoch for entry in entries):
            return BelowFence()
        if if_match != self._tag(ref):
            return TagMismatch()
        self.logs[ref] += record
        return Unreachable(reason="unanswered") if fault == "unanswered" else Appended(tag=self._tag(ref))

    async def read_log(self, ref: str) -> ReadOutcome:
        return Content(octets=self.logs[ref], tag=self._tag(ref)) if ref in self.logs else Missing()

    async def publish(self, ref: str, octets: bytes, *, ttl_ms: int) -> AppendOutcome:
        self.objects[ref] = octets
        return Appended(tag='"object"')

    async def fetch(
        self, ref: str, wait_s: float = 0.0, *, limit_bytes: int = FETCH_LIMIT_BYTES, also: str | None = None
    ) -> ReadOutcome:
        return Content(octets=self.objects[ref], tag='"object"') if ref in self.objects else Missing()

    async def remove(self, ref: str) -> RemoveOutcome:
        self.objects.pop(ref, None)
        return Done()

    async def lease(self, base: str, refs: Sequence[str], ttl_ms: int) -> LeaseOutcome:
        missed = tuple(ref for ref in refs if ref not in self.objects)
        if len(missed) == len(refs):
            return Leased(lease=None, missed=missed, ttl_ms=0)
        self._drawn += 1
        self.leases.append(f"{base}leases/{self._drawn}")
        return Leased(lease=self.leases[-1], missed=missed, ttl_ms=ttl_ms)

    async def renew(self, lease: str, ttl_ms: int) -> RenewOutcome:
        return Leased(lease=lease, missed=(), ttl_ms=ttl_ms) if lease in self.leases else Missing()

    async def read_record(self, ref: str) -> ReadOutcome:
        if ref not in self.records:
            return Missing()
        return Content(octets=self.records[ref], tag=log_tag([self.records[ref]]))

    async def write_record(self, ref: str, octets: bytes, if_match: str | None) -> RecordOutcome:
        held = self.records.get(ref)
        if held != octets and if_match != (None if held is None else log_tag([held])):
            return TagMismatch()
        self.records[ref] = octets
        return Appended(tag=log_tag([octets]))

    async def remove_record(self, ref: str) -> RemoveOutcome:
        self.records.pop(ref, None)
        return Done()

    async def list_records(self, base: str, scope: bytes | None, after: bytes | None = None) -> ListOutcome:
        """Pages of two, in the order of their paths."""
        found = [parse_reference(ref) for ref in sorted(self.records)]
        names = [each.name for each in found if each.base == base and each.name.scope == scope]
        here = [name.session for name in names if isinstance(name, RecordName)]
        start = 0 if after is None else here.index(after) + 1
        page = here[start : start + 2]
        tags = (log_tag([self.records[record_reference(base, scope, session)]]) for session in page)
        return Listed(
            records=tuple(ListedRecord(session, tag) for session, tag in zip(page, tags, strict=True)),
            more=len(here) > start + 2,
        )

    async def release(self, lease: str) -> RemoveOutcome:
        if lease in self.leases:
            self.leases.remove(lease)
        return Done()

    def commits(self, ref: str) -> list[CommitRecord]:
        return [entry for entry, _ in read_records(self.logs[ref]) if isinstance(entry, CommitRecord)]


class RecordedPeers:
    """Takes events and statuses; everything else is not called by a verifier."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def report_status(self, router: str, message: Status) -> Done:
        return Done()

    async def report_event(self, router: str, message: Event) -> Done:
        self.events.append(message)
        return Done()
