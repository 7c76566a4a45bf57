"""Random appends, fences, failures and losses of power against a model of a few lines (draft 6.8; decision 106)."""

import contextlib
import random
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sdcpd.cache.log_requests import (
    AppendToLog,
    CreateLog,
    LogAppended,
    LogBelowFence,
    LogClosed,
    LogExists,
    LogMissing,
    LogOutcome,
    LogRemoved,
    LogRequest,
    LogTagMismatch,
    RecordKind,
    RemoveLog,
    ReplaceRecord,
)
from sdcpd.cache.settings import KIB, CacheSettings
from sdcpd.protocol.commit_log import log_tag
from tests.cache.log_tools import Driver, commit, end, fence, records
from tests.cache.sim_disk import PowerLoss, SimDisk, lose_power, pages

NAMES = tuple(f"v1/s/-/l/{number:022d}" for number in range(5))
DIRECTORY = tuple(f"v1/s/-/d/{number:022d}" for number in range(3))
SMALL = CacheSettings(segment_bytes=4 * KIB, journal_bytes=512 * KIB, max_record_bytes=1 * KIB, max_log_bytes=64 * KIB)

RECORDS = st.one_of(
    st.builds(commit, st.integers(1, 4), st.integers(1, 99), st.integers(0, 1 << 31)),
    st.builds(
        lambda epoch, round_, size: commit(epoch, round_, *range(size)), st.integers(1, 4), st.just(1), st.just(60)
    ),
    st.builds(fence, st.integers(1, 5), st.text("ab", max_size=2)),
    st.builds(end, st.integers(1, 5)),
)
REQUESTS = st.tuples(
    st.sampled_from(["create", "append", "append", "append", "append", "append_stale", "remove"]),
    st.sampled_from(NAMES),
    st.lists(RECORDS, max_size=3),
)

REPLACEMENTS = st.tuples(
    st.sampled_from(["put", "put", "put", "put_new", "put_stale", "remove"]),
    st.sampled_from(DIRECTORY),
    st.lists(st.builds(bytes, st.integers(0, 3 * KIB)) | st.binary(max_size=8), min_size=1, max_size=1),
)

BATCHES = st.lists(REQUESTS | REPLACEMENTS, min_size=1, max_size=6)
SEEDS = st.integers(0, 1 << 30)
PAGES = st.sampled_from([64, 512, 4096])

Model = dict[str, tuple[bytes, ...]]


def outcome(model: Model, request: LogRequest) -> tuple[object, Model]:
    """What 6.8 says of one request, from the records alone; and the model after it."""
    held = model.get(request.name)
    if isinstance(request, RemoveLog):
        return (
            (LogMissing(), model)
            if held is None
            else (LogRemoved(), {n: r for n, r in model.items() if n != request.name})
        )
    if isinstance(request, ReplaceRecord):
        return replaced(model, request)
    added = tuple(record.octets for record in request.records)
    if isinstance(request, CreateLog):
        if held is not None:
            return LogExists(), model
        held = ()
    if held is None:
        return LogMissing(), model
    floor = max((r.epoch for r in records(*held) if r.kind is RecordKind.FENCE), default=0)
    closed = any(record.final for record in records(*held))
    refused: object | None = None
    for record in request.records:
        if record.epoch < floor:
            return LogBelowFence(floor=floor), model
        if record.kind is RecordKind.FENCE:
            floor = record.epoch
        if closed and record.kind is RecordKind.COMMIT and refused is None:
            refused = LogClosed()
        closed = closed or record.final
    if isinstance(request, AppendToLog) and request.if_match != log_tag(held):
        return LogTagMismatch(), model
    if refused is not None:
        return refused, model
    return LogAppended(tag=log_tag(held + added)), {**model, request.name: held + added}


def replaced(model: Model, request: ReplaceRecord) -> tuple[LogOutcome, Model]:
    """Compare and set; what is so already is done."""
    held = model.get(request.name)
    if held is not None and held != (request.octets,):
        if request.if_match is None:
            return LogExists(), model
        if request.if_match != log_tag(held):
            return LogTagMismatch(), model
    if held is None and request.if_match is not None:
        return LogMissing(), model
    return LogAppended(tag=log_tag([request.octets])), {**model, request.name: (request.octets,)}


class LogStoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = SimDisk()
        self.driver = Driver(self.disk, SMALL)
        self.model: Model = {}

    def requests(self, drawn: list[tuple[str, str, list[bytes]]]) -> list[LogRequest]:
        """Appends name the tag that their log will have when their turn comes, or a stale one."""
        made: list[LogRequest] = []
        model = self.model
        for kind, name, octets in drawn:
            held = model.get(name, ())
            request: LogRequest
            match kind:
                case "create":
                    request = CreateLog(name=name, records=records(*octets))
                case "remove":
                    request = RemoveLog(name=name)
                case "put" | "put_new" | "put_stale":
                    tag = None if kind == "put_new" or not held else log_tag(held if kind == "put" else [b"stale"])
                    request = ReplaceRecord(name=name, if_match=tag, octets=octets[0])
                case "append":
                    request = AppendToLog(name=name, if_match=log_tag(held), records=records(*octets))
                case _:
                    request = AppendToLog(name=name, if_match=log_tag(held[:-1]), records=records(*octets))
            made.append(request)
            model = outcome(model, request)[1]
        return made

    @rule(drawn=BATCHES)
    def batch(self, drawn: list[tuple[str, str, list[bytes]]]) -> None:
        requests = self.requests(drawn)
        for request, got in zip(requests, self.driver.batch(requests), strict=True):
            expected, self.model = outcome(self.model, request)
            assert got == expected, request

    @rule(
        drawn=BATCHES,
        seed=st.integers(0, 1 << 30),
        page=st.sampled_from([64, 512, 4096]),
    )
    def batch_that_loses_power(self, drawn: list[tuple[str, str, list[bytes]]], seed: int, page: int) -> None:
        """The batch is there in part: for each log, some prefix of what the batch did to it."""
        requests = self.requests(drawn)
        possible: dict[str, list[tuple[bytes, ...] | None]] = {
            name: [self.model.get(name)] for name in NAMES + DIRECTORY
        }
        model = self.model
        for request in requests:
            model = outcome(model, request)[1]
            possible[request.name].append(model.get(request.name))
        self.disk.fail_sync = lose_power
        with contextlib.suppress(PowerLoss):
            self.driver.batch(requests)
        self.disk.fail_sync = lambda name: False
        self.restart(seed, page)
        self.model = {}
        for name in NAMES + DIRECTORY:
            position = self.driver.store.position(name)
            found = None
            if not isinstance(position, LogMissing):
                octets = self.driver.octets(name)
                found = (octets,) if name in DIRECTORY else tuple(record.octets for record in records(octets))
                self.model[name] = found
            assert found in possible[name], name

    @rule(seed=SEEDS, page=PAGES)
    def restart(self, seed: int, page: int) -> None:
        self.disk.crash(partial(pages, chance=random.Random(seed), page_bytes=page))
        self.driver = Driver(self.disk, SMALL, self.driver.now)
        facts = self.driver.store.take_facts()
        assert {fact.kind for fact in facts} <= {"torn_end_cut"}, facts

    @rule()
    def kill(self) -> None:
        self.disk.kill()
        self.driver = Driver(self.disk, SMALL, self.driver.now)
        assert self.driver.store.take_facts() == []

    @rule(drawn=BATCHES, through=st.integers(0, 2000))
    def batch_on_a_failing_disk(self, drawn: list[tuple[str, str, list[bytes]]], through: int) -> None:
        """Nothing of it is there, and the store goes on."""
        requests = self.requests(drawn)
        self.disk.fail_write = lambda name: through
        got = self.driver.batch(requests)
        self.disk.fail_write = lambda name: None
        for request, one in zip(requests, got, strict=True):
            assert not isinstance(one, LogRemoved)
            nothing = (isinstance(request, AppendToLog) and not request.records) or (
                isinstance(request, ReplaceRecord) and self.model.get(request.name) == (request.octets,)
            )
            assert not isinstance(one, LogAppended) or nothing
        self.driver.store.take_facts()

    @rule()
    def maintain(self) -> None:
        self.driver.maintain()

    @precondition(lambda self: len(self.model) > 0)
    @rule()
    def time_passes(self) -> None:
        """Closed logs go."""
        self.driver.now += SMALL.log_retention_s
        self.driver.maintain()
        for name, held in list(self.model.items()):
            if name in NAMES and any(record.final for record in records(*held)):
                del self.model[name]

    @invariant()
    def what_is_read_is_the_model(self) -> None:
        for name in NAMES + DIRECTORY:
            if name in self.model:
                assert self.driver.octets(name) == b"".join(self.model[name])
                assert self.driver.tag(name) == log_tag(self.model[name])
            else:
                assert self.driver.read(name) == LogMissing()
        listed = self.driver.store.list_records("v1/s/-/d", "", 9)
        assert [entry.name for entry in listed] == [name for name in DIRECTORY if name in self.model]
        assert [entry.tag for entry in listed] == [log_tag(self.model[entry.name]) for entry in listed]
        assert self.disk.used_bytes <= SMALL.journal_bytes


TestLogStore = LogStoreMachine.TestCase
TestLogStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
