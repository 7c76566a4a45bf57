"""Verifiers die, hang and come back in mid-answer: the client's stream is that of the undisturbed run (draft 6.8, 6.9).

Whatever happens, each test ends with the same demand: all tokens, each once, in order, equal to plain greedy decoding.
`pages` checks on the way that indices continue and that epochs never step back.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from sdcpd.cache.refs import LogName, parse_path
from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, Record, read_records
from sdcpd.protocol.messages import Output
from sdcpd.protocol.terms import Action
from sdcpd.roles.generation import Generation, GenerationRequest
from sdcpd.roles.ports import Peer
from tests.support.cluster import MODEL, Cluster, OracleSource, running_cluster, verifier_uri
from tests.support.toy_engine import greedy
from tests.system.test_cluster import half_right

PROMPT = (5, 6, 7, 8)
LENGTH = 60
V1, V2, V3 = verifier_uri(0), verifier_uri(1), verifier_uri(2)
Blow = Callable[[Cluster, str], Awaitable[None]]


@asynccontextmanager
async def cluster_of(path: Path, verifiers: int = 2, drafters: int = 1, pass_s: float = 0.01) -> AsyncIterator[Cluster]:
    with trio.fail_after(3600):
        sources = [OracleSource(half_right) for _ in range(drafters)]
        async with running_cluster(path, sources, verifiers=verifiers, pass_s=pass_s) as cluster:
            yield cluster


async def stream(
    cluster: Cluster, at: int, blow: Callable[[str], Awaitable[None]], *, speculation: bool = True
) -> tuple[list[int], Output]:
    """One answer, and the blow that its verifier gets once `at` tokens are there."""
    request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=LENGTH, stop=(), speculation=speculation)
    async with cluster.router.generation(request) as generation:
        return await pages(generation, at, lambda: blow(home(cluster)))


async def pages(generation: Generation, at: int, blow: Callable[[], Awaitable[None]]) -> tuple[list[int], Output]:
    tokens: list[int] = []
    epoch, struck = 0, False
    async for page in generation.pages():
        assert page.from_ == len(tokens), "a gap, a duplicate or a step back"
        assert page.epoch >= epoch
        epoch = page.epoch
        tokens += page.tokens
        if page.final:
            if page.reason == "cancelled":
                return tokens, page  # the verifier is not asked for its account any more
            assert page.stats, "the figures are the whole session's, whatever became of its verifiers"
            assert page.stats.accepted_tokens + page.stats.rounds >= len(tokens) > page.stats.accepted_tokens
            return tokens, page
        if len(tokens) >= at and not struck:
            struck = True
            await blow()
    raise AssertionError("no final page")


def home(cluster: Cluster) -> str:
    """The verifier of the one session."""
    (session,) = [one for one in cluster.router.snapshot().sessions if one.state not in ("finished", "failed")]
    return session.verifier


def whole(answer: tuple[list[int], Output], epoch: int | None = None) -> None:
    tokens, final = answer
    assert final.finish is Action.FINISH, final.reason
    assert tokens == greedy(PROMPT, LENGTH)
    assert epoch is None or final.epoch == epoch


async def log_of(cluster: Cluster) -> list[Record]:
    """The one log there is."""
    store = cluster.cache._store
    assert store is not None
    (name,) = [log.name for log in store._index if "/l/" in log.name]
    parsed = parse_path(name)
    assert isinstance(parsed, LogName)
    content = await cluster.cache.read_log(Peer(uri="x", role="router"), parsed)
    return [record for record, _ in read_records(content.octets)]


@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("at", [0, 1, 20])
async def test_a_verifier_killed_in_mid_answer(
    tmp_path: Path, at: int, speculation: bool, autojump_clock: MockClock
) -> None:
    async with cluster_of(tmp_path) as cluster:

        async def kill(verifier: str) -> None:
            cluster.stop(verifier)

        whole(await stream(cluster, at, kill, speculation=speculation), epoch=2)
        records = await log_of(cluster)
        assert [record.epoch for record in records if isinstance(record, FenceRecord)] == [2]
        rounds = [record.round for record in records if isinstance(record, CommitRecord)]
        assert rounds == list(range(1, len(rounds) + 1))


async def test_a_verifier_restarted_at_once_at_the_same_address(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Decisions 93, 95: it forgot its sessions, and says so by another boot, or by 404 before that."""
    async with cluster_of(tmp_path, verifiers=1) as cluster:

        async def restart(verifier: str) -> None:
            cluster.stop(verifier)
            await cluster.start_verifier(verifier, b"second life here")

        started = trio.current_time()
        whole(await stream(cluster, 20, restart), epoch=2)
        assert trio.current_time() - started < 10
        assert cluster.engines[V1].free_pages == cluster.engines[V1].info.pages


async def test_a_zombie_keeps_computing_and_stops_by_itself(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Cut off from the router alone: "even if it is only partitioned, can no longer commit or release output"."""
    async with cluster_of(tmp_path, pass_s=0.2) as cluster:
        lost: list[str] = []

        async def cut(verifier: str) -> None:
            lost.append(verifier)
            router = f"{cluster.router._instance}"
            cluster.network.fault = lambda caller, to, *_: "cut" if {caller, to} == {verifier, router} else None

        whole(await stream(cluster, 20, cut, speculation=False), epoch=2)
        zombie = cluster.verifiers[lost[0]]
        with trio.fail_after(120):
            while cluster.engines[lost[0]].free_pages < cluster.engines[lost[0]].info.pages:
                await trio.sleep(0.1)
        (session,) = zombie.snapshot().sessions
        assert session.reason == "fenced"
        assert cluster.meters.counts["fenced_appends_total"] >= 1


async def test_a_false_alarm_costs_time_only(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Decision 95, and the zombie is told by the refusal of its events (it has nothing to append)."""
    async with cluster_of(tmp_path) as cluster:
        moved: list[str] = []

        async def fail_over(verifier: str) -> None:
            moved.append(verifier)
            await cluster.router.commands.fail_over(cluster.router.snapshot().sessions[0].session)

        whole(await stream(cluster, 20, fail_over), epoch=2)
        with trio.fail_after(20):
            while cluster.verifiers[moved[0]].snapshot().sessions[0].reason != "fenced":
                await trio.sleep(0.1)
        assert cluster.engines[moved[0]].free_pages == cluster.engines[moved[0]].info.pages


async def test_a_false_alarm_with_one_verifier_rebuilds_the_session_there(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Decision 29: "Higher epoch: [...] drop the old state and rebuild"."""
    async with cluster_of(tmp_path, verifiers=1) as cluster:

        async def fail_over(verifier: str) -> None:
            await cluster.router.commands.fail_over(cluster.router.snapshot().sessions[0].session)

        whole(await stream(cluster, 20, fail_over), epoch=2)
        assert cluster.engine.free_pages == cluster.engine.info.pages


async def test_two_verifiers_die_one_after_the_other(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, verifiers=3, pass_s=0.1) as cluster:

        async def kill_both(verifier: str) -> None:
            cluster.stop(verifier)

            async def second() -> None:
                while (now := home(cluster)) == verifier or cluster.router.snapshot().sessions[0].state == "recovering":
                    await trio.sleep(0.01)
                await trio.sleep(0.5)
                cluster.stop(now)

            cluster.nursery.start_soon(second)

        whole(await stream(cluster, 20, kill_both, speculation=False), epoch=3)


@pytest.mark.parametrize("what", ["PATCH", "GET"])
async def test_answers_of_the_log_are_lost_while_it_is_fenced(
    tmp_path: Path, what: str, autojump_clock: MockClock
) -> None:
    """Settled by reading: one fence, whatever was lost (decision 85)."""
    async with cluster_of(tmp_path) as cluster:
        losses = [3]

        def fault(caller: str, to: str, method: str, path: str) -> str | None:
            if "/router/" in caller and "/l/" in path and method == what and losses[0]:
                losses[0] -= 1
                return "lost"
            return None

        async def kill(verifier: str) -> None:
            cluster.network.fault = fault
            cluster.stop(verifier)

        whole(await stream(cluster, 20, kill), epoch=2)
        fences = [record for record in await log_of(cluster) if isinstance(record, FenceRecord)]
        assert [fence.epoch for fence in fences] == [2]


async def test_the_new_verifier_dies_between_fence_and_open(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, verifiers=3) as cluster:
        opened: list[str] = []

        def fault(caller: str, to: str, method: str, path: str) -> str | None:
            if (method, path) == ("POST", "sessions") and not opened:
                opened.append(to)
                cluster.stop(to)
            return "cut" if to in opened else None

        async def kill(verifier: str) -> None:
            cluster.network.fault = fault
            cluster.stop(verifier)

        whole(await stream(cluster, 20, kill), epoch=3)


async def test_the_open_of_the_new_verifier_is_answered_into_the_void(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Repeated with the identical body, it finds the session open (decision 29)."""
    async with cluster_of(tmp_path) as cluster:
        losses = [2]

        def fault(caller: str, to: str, method: str, path: str) -> str | None:
            if (method, path) == ("POST", "sessions") and losses[0]:
                losses[0] -= 1
                return "lost"
            return None

        async def kill(verifier: str) -> None:
            cluster.network.fault = fault
            cluster.stop(verifier)

        whole(await stream(cluster, 20, kill), epoch=2)


async def test_a_verifier_that_dies_before_it_answers_the_open(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The log may be empty, or not there at all (decision 86)."""
    async with cluster_of(tmp_path) as cluster:
        struck: list[str] = []

        def fault(caller: str, to: str, method: str, path: str) -> str | None:
            if (method, path) == ("POST", "sessions") and not struck:
                struck.append(to)
                cluster.nursery.start_soon(strike, to)
                return "cut"
            return "cut" if to in struck else None

        async def strike(verifier: str) -> None:
            cluster.stop(verifier)

        cluster.network.fault = fault
        tokens, final = await cluster.generate(PROMPT, LENGTH)
        whole((tokens, final), epoch=2)


async def test_many_sessions_survive_their_verifier(tmp_path: Path, autojump_clock: MockClock) -> None:
    prompts = [(9 + n, 4, 5 + n) for n in range(12)]
    async with cluster_of(tmp_path, drafters=2) as cluster:
        results: dict[int, list[int]] = {}

        async def one(number: int) -> None:
            tokens, final = await cluster.generate(prompts[number], 60, speculation=number % 4 != 0)
            assert final.finish is Action.FINISH
            results[number] = tokens

        async with trio.open_nursery() as nursery:
            for number in range(len(prompts)):
                nursery.start_soon(one, number)
            await trio.sleep(0.4)
            cluster.stop(V1)
        assert results == {number: greedy(prompt, 60) for number, prompt in enumerate(prompts)}
        assert cluster.engines[V2].free_pages == cluster.engines[V2].info.pages
