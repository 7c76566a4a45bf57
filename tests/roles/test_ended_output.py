"""Pages of a session that ended, from its log as it stands (decisions 39, 91)."""

import pytest
from msgspec.structs import replace
from trio.testing import MockClock

from sdcpd.cache.refs import log_reference
from sdcpd.protocol.commit_log import CommitRecord, write_record
from sdcpd.protocol.messages import Output
from sdcpd.protocol.problems import Overloaded, SessionClosed
from sdcpd.protocol.terms import Action
from sdcpd.roles.ended_output import ended_page
from sdcpd.roles.ports import ReadOutcome, StoreRefused, Unreachable
from sdcpd.roles.router_views import RoutedSession
from tests.roles.test_router import Cluster, world
from tests.support.messages import CACHE, SESSION, VERIFIER
from tests.support.ports import MemoryLogs

REF = log_reference(CACHE, None, SESSION)
ENDED = RoutedSession(
    session="s",
    model="toy",
    state="finished",
    epoch=2,
    round=2,
    prompt_tokens=3,
    committed_tokens=3,
    max_new=3,
    verifier=VERIFIER,
    drafter=None,
    speculation=True,
    age_s=1.0,
)


class Told(MemoryLogs):
    """Reads answer as told."""

    answer: ReadOutcome | None = None

    async def read_log(self, ref: str) -> ReadOutcome:
        return await super().read_log(ref) if self.answer is None else self.answer


async def page(logs: MemoryLogs, from_: int = 0, ended: RoutedSession = ENDED) -> Output:
    ports, _, _ = world(Cluster(logs))
    return await ended_page(ports, REF, SESSION, ended, from_, 1.0, 2)


def written(*rounds: tuple[int, ...]) -> Told:
    logs, committed = Told(), 0
    logs.logs[REF] = b""
    for number, emitted in enumerate(rounds, 1):
        committed += len(emitted)
        record = CommitRecord(epoch=1, round=number, emitted=emitted, committed=committed, digest=bytes(32))
        logs.logs[REF] += write_record(record)
    return logs


async def test_pages_to_the_last(autojump_clock: MockClock) -> None:
    logs = written((7, 8), (9,))
    first, last = await page(logs), await page(logs, 2)
    assert (first.tokens, first.final, first.epoch) == ((7, 8), False, 2)
    assert (last.tokens, last.final, last.finish) == ((9,), True, Action.FINISH)


async def test_a_log_that_lost_records_is_not_the_answer(autojump_clock: MockClock) -> None:
    """Fewer tokens than readers were given must never look like the end of a finished answer."""
    with pytest.raises(SessionClosed, match="lost records"):
        await page(written((7, 8)))
    short = await page(written((7, 8)), ended=replace(ENDED, committed_tokens=0, state="failed", reason="no"))
    assert (short.tokens, short.finish, short.reason) == ((7, 8), Action.FAIL, "no")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (StoreRefused(status=409, detail="the log is damaged"), SessionClosed),
        (StoreRefused(status=503, detail="busy"), Overloaded),
        (Unreachable("?"), Overloaded),
    ],
)
async def test_only_trouble_that_passes_is_waited_for(
    answer: ReadOutcome, problem: type[Exception], autojump_clock: MockClock
) -> None:
    logs = written((7, 8), (9,))
    logs.answer = answer
    with pytest.raises(problem):
        await page(logs)
