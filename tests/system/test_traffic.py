"""Traffic classes through the whole cluster, in virtual time: what their sessions get, when they stop to speculate."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sdcpd.drafting.traffic_class import RequestFacts, TrafficClass
from sdcpd.protocol.ladder import Ladder, LadderError
from sdcpd.protocol.messages import Output
from sdcpd.roles.generation import GenerationRefused
from tests.support.cluster import Cluster, OracleSource, running_cluster
from tests.support.toy_engine import ToyEngine, greedy, next_token

PROMPT = (5, 6, 7)


def right(prefix: Sequence[int], limit: int) -> list[int]:
    found = list(prefix)
    for _ in range(limit):
        found.append(next_token(found))
    return found[len(prefix) :]


def wrong(prefix: Sequence[int], limit: int) -> list[int]:
    return [3 + (token - 3 + 1) % 47 for token in right(prefix, limit)]


class Moody:
    """A drafter that is right or wrong as the test says."""

    def __init__(self) -> None:
        self.draft: Callable[[Sequence[int], int], list[int]] = right

    def source(self) -> OracleSource:
        return OracleSource(lambda prefix, limit: self.draft(prefix, limit))


def class_of(**settings: Any) -> TrafficClass:
    return msgspec.convert({"name": "c", "min_sessions": 2, "window_sessions": 4} | settings, TrafficClass)


def drafts_of(page: Output) -> int:
    assert not isinstance(page.stats, msgspec.UnsetType)
    return page.stats.drafts


async def generate(cluster: Cluster, length: int = 40, asked: str | None = None, **facts: Any) -> int:
    """One session, which must give the target's text; how many of its rounds were drafted."""
    tokens, page = await cluster.generate(PROMPT, length, traffic_class=asked, facts=RequestFacts(**facts))
    assert tokens == greedy(PROMPT, length)
    while cluster.router.snapshot().in_care:  # it counts once the router is done with it
        await trio.sleep(0.01)
    return drafts_of(page)


async def test_what_a_class_sets_reaches_its_sessions_and_no_others(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Preferred methods, and the shorter of the ladder's and the class's m_max."""
    narrow = class_of(name="narrow", match={"metadata": {"tag": "code"}}, m_max=2, methods=["suffix"])
    with trio.fail_after(1000):
        async with running_cluster(
            tmp_path, [OracleSource(right), OracleSource(right)], classes=[narrow], methods=["ngram", "suffix"]
        ) as cluster:
            assert await generate(cluster) <= 6
            assert [one.traffic_class for one in cluster.router.snapshot().sessions] == [None]
            assert await generate(cluster, metadata=(("tag", "code"),)) >= 13
            session = cluster.router.snapshot().sessions[-1]
            assert session.traffic_class == "narrow"
            assert session.drafter is not None
            assert session.drafter == sorted(cluster.drafters)[1]
            await generate(cluster, asked="narrow")
            with pytest.raises(GenerationRefused, match="there is no class 'wide'"):
                await generate(cluster, asked="wide")


async def test_lost_acceptance_turns_a_class_off_and_probes_turn_it_on_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    drafter = Moody()
    guarded = class_of(acceptance={"off": 0.2, "on": 0.5}, probe_share=0.3, match={"user": "u"})
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [drafter.source()], classes=[guarded]) as cluster:

            async def until(speculation: bool) -> list[int]:
                drafted = []
                while cluster.router.snapshot().classes[0].speculation is not speculation:
                    drafted.append(await generate(cluster, user="u"))
                    assert len(drafted) < 60
                return drafted

            await generate(cluster, user="u")
            drafter.draft = wrong
            assert 0 not in await until(False)
            view = cluster.router.snapshot().classes[0]
            assert (view.speculation, view.reason) == (False, "acceptance")
            assert await generate(cluster) > 0, "others go on"
            drafter.draft = right
            drafted = await until(True)
            assert 0 in drafted, "most do without"
            assert any(drafted), "probes speculate"
            assert await generate(cluster, user="u") > 0
            assert cluster.meters.counts["class_turns_total"] == 2


async def test_running_sessions_follow_the_pressure_on_kv(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Decision 110 and back, within one session, whose text does not show it."""
    pressed = class_of(kv_usage={"off": 0.8, "on": 0.5})
    one_by_one = OracleSource(lambda prefix, limit: right(prefix, min(limit, 1)))
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [one_by_one], classes=[pressed], pass_s=0.05) as cluster:
            engine = cluster.engine
            assert isinstance(engine, ToyEngine)
            seen: list[tuple[bool, bool]] = []

            def look() -> None:
                view = cluster.router.snapshot()
                seen.append((view.classes[0].speculation, view.sessions[0].drafter is not None))

            async def crowd() -> None:
                await trio.sleep(1)
                look()
                sequences = []
                while engine.free_pages > 0.15 * engine.info.pages:
                    sequences.append(engine.open_sequence())
                    assert engine.reserve(sequences[-1], engine.info.page_tokens)
                await trio.sleep(2)
                look()
                for sequence in sequences:
                    engine.close_sequence(sequence)
                await trio.sleep(2)
                look()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(crowd)
                drafted = await generate(cluster, 240)
            assert seen == [(True, True), (False, False), (True, True)]
            assert 0 < drafted < 120, "some rounds of one token"
            assert cluster.meters.counts["class_turns_total"] == 2
            assert cluster.meters.counts["class_sessions_total"] == 1


async def test_a_share_is_compared_and_the_ratio_is_the_gain(tmp_path: Path, autojump_clock: MockClock) -> None:
    compared = class_of(compare_share=0.5, target_ms_per_token=1)
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(right)], classes=[compared]) as cluster:
            assert cluster.router.snapshot().classes[0].ratio is None
            drafted = [await generate(cluster, 80) for _ in range(12)]
            view = cluster.router.snapshot().classes[0]
            assert drafted.count(0) == view.without_sessions
            assert view.with_sessions + view.without_sessions == 12
            assert view.ratio is not None
            assert view.ratio > 3, "drafts of many tokens that are all right"
            assert cluster.meters.counts["class_target_missed_total"] >= view.without_sessions


async def test_classes_are_taken_anew_while_it_runs(tmp_path: Path, autojump_clock: MockClock) -> None:
    """As ladders are; a class whose settings stand keeps what it knows."""
    first, second = class_of(name="a"), class_of(name="b", match={"user": "u"}, ladder="short")
    short = {"short": Ladder(m_max=1)}
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(right)], classes=[first]) as cluster:
            await generate(cluster)
            with pytest.raises(LadderError, match=r"class\.b\.ladder: there is no \[ladder\.short\]"):
                cluster.router.take_ladders({}, "default", classes=[second, first])
            assert [one.name for one in cluster.router.snapshot().classes] == ["a"]
            cluster.router.take_ladders(short, "default", classes=[second, first])
            assert await generate(cluster, user="u") >= 19, "one token a proposal"
            assert [(one.name, one.with_sessions) for one in cluster.router.snapshot().classes] == [("b", 1), ("a", 1)]
