"""What a router takes from the directory when it starts (decisions 106, 111)."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace
from trio.testing import MockClock

from sdcpd.cache.refs import record_reference
from sdcpd.protocol.directory import DirectoryRecord, read_directory_record
from sdcpd.protocol.encoding import encode, encode_tokens
from sdcpd.protocol.problems import IllFormed
from sdcpd.roles.adoption import Claimed, claim_sessions
from sdcpd.roles.ports import Content, ListOutcome, ReadOutcome, RecordOutcome, StoreRefused, Unreachable
from tests.roles.test_router import Cluster, world
from tests.support.messages import CACHE, ROUTER, VERIFIER, session_open
from tests.support.ports import MemoryLogs

IDS = [bytes([number]) * 16 for number in range(1, 6)]


def record(session: bytes, router: str = ROUTER, incarnation: int = 4) -> DirectoryRecord:
    opened = session_open(session=session, router=router)
    return DirectoryRecord(open=opened, verifier=VERIFIER, epoch=3, incarnation=incarnation, m_init=8, model="toy")


async def claimed(logs: MemoryLogs, known: Callable[[bytes], bool] = lambda _: False) -> list[Claimed]:
    taken: list[Claimed] = []
    ports, _, _ = world(Cluster(logs))

    async def lost(one: Claimed) -> None:
        assert one.prompt is None
        taken.append(one)

    await claim_sessions(ports, instance=ROUTER, cache=CACHE, known=known, take=taken.append, lost=lost)
    return taken


def directory(*records: DirectoryRecord, kind: type[MemoryLogs] = MemoryLogs) -> MemoryLogs:
    logs = kind()
    for one in records:
        logs.records[record_reference(CACHE, None, one.open.session)] = encode(one)
    return logs


async def test_all_pages_are_read_and_the_incarnation_rises(autojump_clock: MockClock) -> None:
    logs = directory(*(record(session) for session in IDS))
    taken = await claimed(logs)
    assert [one.record.open.session for one in taken] == IDS
    assert {one.record.incarnation for one in taken} == {5}
    for one in taken:
        assert read_directory_record(logs.records[one.ref]) == one.record
        read = await logs.read_record(one.ref)
        assert isinstance(read, Content)
        assert read.tag == one.tag


async def test_others_sessions_and_known_ones_are_left_alone(autojump_clock: MockClock) -> None:
    logs = directory(record(IDS[0]), record(IDS[1], "http://other/router/"), record(IDS[2]))
    before = dict(logs.records)
    taken = await claimed(logs, known=lambda session: session == IDS[2])
    assert [one.record.open.session for one in taken] == [IDS[0]]
    changed = [ref for ref, octets in logs.records.items() if before[ref] != octets]
    assert changed == [record_reference(CACHE, None, IDS[0])]


async def test_a_record_that_cannot_be_read_is_removed(autojump_clock: MockClock) -> None:
    logs = directory(record(IDS[1]))
    logs.records[record_reference(CACHE, None, IDS[0])] = b"\xa1"
    taken = await claimed(logs)
    assert [one.record.open.session for one in taken] == [IDS[1]]
    assert len(logs.records) == 1


class Slow(MemoryLogs):
    """Each operation fails a few times first."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = {"list": 3, "read": 2, "write": 2}

    def _fails(self, what: str) -> bool:
        self.failures[what] -= 1
        return self.failures[what] >= 0

    async def list_records(self, base: str, scope: bytes | None, after: bytes | None = None) -> ListOutcome:
        return Unreachable("?") if self._fails("list") else await super().list_records(base, scope, after)

    async def read_record(self, ref: str) -> ReadOutcome:
        return Unreachable("?") if self._fails("read") else await super().read_record(ref)

    async def write_record(self, ref: str, octets: bytes, if_match: str | None) -> RecordOutcome:
        done = await super().write_record(ref, octets, if_match)
        return Unreachable("the answer was lost") if self._fails("write") else done


async def test_a_directory_in_trouble_is_asked_again(autojump_clock: MockClock) -> None:
    """A write whose answer was lost is known again by its nonce."""
    logs = directory(record(IDS[0]), kind=Slow)
    (one,) = await claimed(logs)
    assert one.record.incarnation == 5
    assert read_directory_record(logs.records[one.ref]) == one.record


class Full(MemoryLogs):
    """There is no room for a while, and then there is."""

    tries = 0

    async def write_record(self, ref: str, octets: bytes, if_match: str | None) -> RecordOutcome:
        self.tries += 1
        if self.tries < 30:
            return StoreRefused(status=507, detail="no room")
        return await super().write_record(ref, octets, if_match)


async def test_a_session_is_not_left_alone_while_the_store_is_in_trouble(autojump_clock: MockClock) -> None:
    taken = await claimed(directory(record(IDS[0]), record(IDS[1]), kind=Full))
    assert [one.record.open.session for one in taken] == IDS[:2]


class Denied(MemoryLogs):
    """The store refuses for good."""

    async def write_record(self, ref: str, octets: bytes, if_match: str | None) -> RecordOutcome:
        return StoreRefused(status=403, detail="not yours")


async def test_a_session_that_the_store_does_not_give_is_left_alone(autojump_clock: MockClock) -> None:
    assert await claimed(directory(record(IDS[0]), kind=Denied)) == []


class Contested(MemoryLogs):
    """Somebody else is quicker: with a higher incarnation, with the same one as an earlier life's late write, each
    time."""

    others: tuple[DirectoryRecord, ...] = ()

    async def write_record(self, ref: str, octets: bytes, if_match: str | None) -> RecordOutcome:
        if self.others:
            self.records[ref], self.others = encode(self.others[0]), self.others[1:]
        return await super().write_record(ref, octets, if_match)


@pytest.mark.parametrize(
    ("others", "ours"),
    [
        ((record(IDS[0], incarnation=5),), False),
        ((replace(record(IDS[0]), epoch=9),), True),
        (tuple(replace(record(IDS[0]), epoch=epoch) for epoch in range(10, 30)), False),
    ],
)
async def test_of_two_routers_one_has_the_session(
    others: tuple[DirectoryRecord, ...], ours: bool, autojump_clock: MockClock
) -> None:
    logs = directory(record(IDS[0]), kind=Contested)
    assert isinstance(logs, Contested)
    logs.others = others
    taken = await claimed(logs)
    assert [(one.record.epoch, one.record.incarnation) for one in taken] == ([(9, 5)] if ours else [])


def test_the_record_survives_its_encoding() -> None:
    one = record(IDS[0])
    assert read_directory_record(encode(one)) == one
    with pytest.raises(IllFormed):
        read_directory_record(encode(replace(one, vocabulary=-1)))


PROMPT_REF = "http://c.example/cache/v1/s/-/o/x/1/0/tokens"


def referring(kind: type[MemoryLogs] = MemoryLogs) -> MemoryLogs:
    one = record(IDS[0])
    return directory(replace(one, open=replace(one.open, prompt=PROMPT_REF)), kind=kind)


class SlowToFetch(MemoryLogs):
    """Objects cannot be had at first."""

    answers: ClassVar[list[ReadOutcome]] = []

    async def fetch(self, ref: str, *args: Any, **members: Any) -> ReadOutcome:
        return self.answers.pop(0) if self.answers else await super().fetch(ref, *args, **members)


async def test_a_prompt_that_is_referred_to_is_read(autojump_clock: MockClock) -> None:
    logs = referring(SlowToFetch)
    logs.objects[PROMPT_REF] = encode_tokens((7, 8, 9))
    SlowToFetch.answers[:] = [Unreachable("?"), StoreRefused(status=503, detail="busy")]
    (one,) = await claimed(logs)
    assert one.prompt == (7, 8, 9)
    assert one.record.open.prompt == PROMPT_REF
    assert not SlowToFetch.answers


@pytest.mark.parametrize("held", [None, b"\xff", StoreRefused(status=403, detail="not ours")])
async def test_a_prompt_that_cannot_be_had_is_lost(
    held: bytes | StoreRefused | None, autojump_clock: MockClock
) -> None:
    logs = referring(SlowToFetch)
    if isinstance(held, bytes):
        logs.objects[PROMPT_REF] = held
    SlowToFetch.answers[:] = [held] if isinstance(held, StoreRefused) else []
    (one,) = await claimed(logs)
    assert one.prompt is None
    assert one.record.incarnation == 5
