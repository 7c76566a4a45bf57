"""A session of which the prompt is gone ends, and what it committed is kept (draft 6.8; decisions 83, 106)."""

import pytest
from trio.testing import MockClock

from sdcpd.protocol import digests
from sdcpd.protocol.commit_log import CommitRecord, EndRecord, FenceRecord, Record, read_records, write_record
from sdcpd.protocol.directory import DirectoryRecord
from sdcpd.protocol.terms import Action
from sdcpd.roles.adoption import Claimed
from sdcpd.roles.lost_prompt import end_without_prompt
from sdcpd.roles.ports import AppendOutcome, ReadOutcome, StoreRefused, Unreachable
from sdcpd.roles.router_views import RoutedSession
from tests.roles.test_router import V1, Cluster, world
from tests.support.messages import contract, session_open
from tests.support.ports import MemoryLogs

OPENED = session_open(prompt="http://c.example/cache/v1/s/-/o/x/1/0/tokens", contract=contract(max_new=9, stop=(2,)))
REF = OPENED.commit_log


def rounds(*blocks: tuple[int, ...]) -> list[Record]:
    digest, committed, records = b"d" * 32, 0, list[Record]()
    for number, block in enumerate(blocks, 1):
        digest, committed = digests.extend(digest, block), committed + len(block)
        records.append(CommitRecord(epoch=1, round=number, emitted=block, committed=committed, digest=digest))
    return records


def stored(logs: MemoryLogs, *records: Record) -> MemoryLogs:
    logs.logs[REF] = b"".join(map(write_record, records))
    return logs


async def ended(logs: MemoryLogs, epoch: int = 1) -> tuple[RoutedSession, list[str]]:
    """How it ended, and which calls were made to peers."""
    cluster = Cluster(logs)
    ports, _, _ = world(cluster)
    record = DirectoryRecord(open=OPENED, verifier=V1, epoch=epoch, incarnation=2, m_init=8, model="toy")
    view = await end_without_prompt(ports, Claimed(record=record, ref="r", tag="t", prompt=None))
    return view, [operation for operation, _, _ in cluster.calls]


def records_of(logs: MemoryLogs) -> list[Record]:
    return [record for record, _ in read_records(logs.logs[REF])]


async def test_its_log_is_closed_and_its_verifier_let_go(autojump_clock: MockClock) -> None:
    logs = stored(MemoryLogs(), *rounds((10, 11), (12,)), FenceRecord(epoch=3))
    view, calls = await ended(logs)
    assert records_of(logs)[-1] == EndRecord(epoch=3, end=Action.FAIL, reason="prompt_lost")
    assert (view.state, view.reason, view.epoch) == ("failed", "prompt_lost", 3)
    assert (view.round, view.committed_tokens) == (2, 3)
    assert calls == ["cancel"]


@pytest.mark.parametrize(
    ("last", "state", "reason"),
    [
        (rounds((10, 2))[0], "finished", None),
        (EndRecord(epoch=1, end=Action.FAIL, reason="cancelled"), "cancelled", "cancelled"),
        (EndRecord(epoch=1, end=Action.FAIL, reason="ladder"), "failed", "ladder"),
    ],
)
async def test_one_that_is_over_is_left_as_it_is(
    last: Record, state: str, reason: str | None, autojump_clock: MockClock
) -> None:
    logs = stored(MemoryLogs(), last)
    view, calls = await ended(logs)
    assert (view.state, view.reason) == (state, reason)
    assert records_of(logs) == [last]
    assert calls == []


class Contested(MemoryLogs):
    """The verifier commits between each look and the end, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.late = rounds((10,), (11,), (12,))

    async def append(self, ref: str, record: bytes, *, epoch: int, if_match: str) -> AppendOutcome:
        if self.late:
            self.logs[ref] += write_record(self.late.pop(0))
        return await super().append(ref, record, epoch=epoch, if_match=if_match)


async def test_what_is_committed_meanwhile_counts(autojump_clock: MockClock) -> None:
    logs = stored(Contested())
    view, _ = await ended(logs)
    assert (view.reason, view.committed_tokens) == ("prompt_lost", 3)
    assert isinstance(records_of(logs)[-1], EndRecord)


class Told(MemoryLogs):
    """The first reads of the log end so."""

    def __init__(self, *answers: ReadOutcome) -> None:
        super().__init__()
        self.answers = list(answers)

    async def read_log(self, ref: str) -> ReadOutcome:
        return self.answers.pop(0) if self.answers else await super().read_log(ref)


async def test_a_store_that_does_not_answer_is_asked_again(autojump_clock: MockClock) -> None:
    logs = stored(Told(Unreachable("?"), StoreRefused(status=503, detail="busy")), *rounds((10, 2)))
    view, _ = await ended(logs)
    assert view.state == "finished"


@pytest.mark.parametrize(
    ("answers", "log"),
    [
        ((), None),
        ((Unreachable("?"),) * 10, None),
        ((StoreRefused(status=403, detail="no"),), None),
        ((), rounds((10,), (11,))[1]),
    ],
    ids=["no log", "silent", "refused", "damaged"],
)
async def test_without_a_log_that_can_be_read_it_ends_at_its_verifier(
    answers: tuple[ReadOutcome, ...], log: Record | None, autojump_clock: MockClock
) -> None:
    logs = Told(*answers)
    view, calls = await ended(logs if log is None else stored(logs, log), epoch=4)
    assert (view.state, view.reason, view.epoch) == ("failed", "prompt_lost", 4)
    assert (view.round, view.committed_tokens) == (0, 0)
    assert calls == ["cancel"]
