"""Records to append, and a log store driven by hand in one thread."""

from collections.abc import Sequence

from sdcpd.cache.files import Files
from sdcpd.cache.journal import Written
from sdcpd.cache.log_reading import ReadPlan
from sdcpd.cache.log_requests import (
    AppendToLog,
    CreateLog,
    LogAppended,
    LogContent,
    LogDamaged,
    LogMissing,
    LogOutcome,
    LogRecord,
    LogRequest,
    read_log_records,
)
from sdcpd.cache.log_store import LogStore
from sdcpd.cache.settings import CacheSettings
from sdcpd.protocol.commit_log import CommitRecord, Control, EndRecord, FenceRecord, log_tag, write_record
from sdcpd.protocol.terms import Action

EMPTY = log_tag([])
LOGS = tuple(f"v1/s/-/l/{number:022d}" for number in range(4))


def commit(epoch: int, round_: int, *tokens: int, action: Action = Action.CONTINUE) -> bytes:
    control = Control(c=0, g=0, j=0, action=action, low=0, load=0)
    return write_record(
        CommitRecord(
            epoch=epoch, round=round_, emitted=tokens or (round_,), committed=round_, digest=bytes(32), ctl=control
        )
    )


def fence(epoch: int, by: str = "http://router/router/ 1") -> bytes:
    return write_record(FenceRecord(epoch=epoch, by=by))


def end(epoch: int) -> bytes:
    return write_record(EndRecord(epoch=epoch, end=Action.FAIL, reason="cancelled"))


def records(*octets: bytes) -> tuple[LogRecord, ...]:
    return read_log_records(b"".join(octets))


class Driver:
    """A store, used as roles/cache.py does, but one call at a time."""

    def __init__(self, files: Files, settings: CacheSettings | None = None, now: float = 0.0) -> None:
        self.now = now
        self.files = files
        self.settings = CacheSettings() if settings is None else settings
        self.store = LogStore.open(self.settings, files, now)

    def batch(self, requests: Sequence[LogRequest]) -> tuple[LogOutcome, ...]:
        copies = self.store.read_copies(self.store.plan_copies())
        batch = self.store.prepare(requests, copies, self.now)
        result = Written(dropped=0) if batch.empty else self.store.write_batch(batch)
        return self.store.settle(batch, result, self.now)

    def maintain(self) -> None:
        self.store.look_for_expired(self.now)
        for _ in range(1000):
            if not self.store.maintenance_is_due():
                return
            self.batch([])
        raise AssertionError("maintenance does not come to an end")

    def create(self, name: str, *octets: bytes) -> LogOutcome:
        return self.batch([CreateLog(name=name, records=records(*octets))])[0]

    def append(self, name: str, tag: str, *octets: bytes) -> LogOutcome:
        return self.batch([AppendToLog(name=name, if_match=tag, records=records(*octets))])[0]

    def must_append(self, name: str, *octets: bytes) -> str:
        """Append at the log's end, creating it if it is not there. Returns the new tag."""
        position = self.store.position(name)
        outcome = (
            self.create(name, *octets)
            if isinstance(position, LogMissing)
            else self.append(name, self.tag(name), *octets)
        )
        assert isinstance(outcome, LogAppended), outcome
        return outcome.tag

    def tag(self, name: str) -> str:
        content = self.read(name)
        assert isinstance(content, LogContent), content
        return content.tag

    def read(self, name: str) -> LogContent | LogMissing | LogDamaged:
        plan = self.store.plan_read(name, self.now)
        if not isinstance(plan, ReadPlan):
            return plan
        content = self.store.read(plan)
        assert isinstance(content, LogContent), content
        return content

    def octets(self, name: str) -> bytes:
        content = self.read(name)
        assert isinstance(content, LogContent), content
        return content.octets

    def reopen(self) -> "Driver":
        """As a new process on the same files."""
        return Driver(self.files, self.settings, self.now)


def filled(files: Files, settings: CacheSettings | None = None) -> tuple[Driver, dict[str, bytes]]:
    """A store with four logs of 0, 1, 2 and 3 records, appended in turns, and what each holds."""
    store = Driver(files, settings)
    expected = dict.fromkeys(LOGS, b"")
    store.create(LOGS[0])
    for round_ in range(1, 4):
        for name in LOGS[round_:]:
            store.must_append(name, commit(1, round_))
            expected[name] += commit(1, round_)
    return store, expected
