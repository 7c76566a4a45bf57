"""The main way of a prompt through router, drafter, verifier and cache, in virtual time over a toy engine."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from sdcpd.cache.files import RealFiles
from sdcpd.drafting.lookup_source import LookupSource
from sdcpd.drafting.settings import LookupSettings
from sdcpd.drafting.source import DraftSource
from sdcpd.protocol.affinity import Affinity
from sdcpd.protocol.ladder import Ladder
from sdcpd.protocol.terms import Action
from sdcpd.roles.generation import GenerationRefused, GenerationRequest
from sdcpd.roles.router_settings import RouterSettings
from tests.support.cluster import MODEL, OracleSource, running_cluster
from tests.support.messages import TARGET, TOKENIZER
from tests.support.ports import SlowWorkers, TrioClock
from tests.support.toy_engine import VOCABULARY, ToyEngine, greedy

PROMPT = (5, 6, 7, 8)


def right(context: Sequence[int], limit: int) -> list[int]:
    return greedy(context, limit)


def wrong(context: Sequence[int], limit: int) -> list[int]:
    return [(token + 1) % VOCABULARY for token in greedy(context, limit)]


def half_right(context: Sequence[int], limit: int) -> list[int]:
    tokens = greedy(context, limit)
    return [*tokens[: limit // 2], *wrong(context, limit)[limit // 2 :]]


def random_tokens(context: Sequence[int], limit: int) -> list[int]:
    chance = random.Random(len(context))
    return [chance.randrange(VOCABULARY) for _ in range(limit)]


def lookup() -> DraftSource:
    return LookupSource(LookupSettings())


SOURCES: dict[str, list[Any]] = {
    "none": [],
    "right": [OracleSource(right)],
    "wrong": [OracleSource(wrong)],
    "half right": [OracleSource(half_right)],
    "random": [OracleSource(random_tokens)],
    "prompt lookup": [lookup()],
    "two": [OracleSource(wrong), OracleSource(right)],
}


@pytest.mark.parametrize("name", SOURCES)
async def test_the_text_does_not_depend_on_who_drafts(tmp_path: Path, name: str, autojump_clock: MockClock) -> None:
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, SOURCES[name]) as cluster:
            tokens, page = await cluster.generate(PROMPT, 120)
            assert tokens == greedy(PROMPT, 120)
            assert page.finish is Action.FINISH


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["wrong", "random"])
async def test_nothing_stands_still_on_the_shipped_one_machine_ladder(
    tmp_path: Path, name: str, seed: int, autojump_clock: MockClock
) -> None:
    """Self-decoding periods hand back at once, whether appends are faster than passes or slower.

    60 tokens of 4 sessions cost at most 60 passes of 10 ms and twice 60 batches of appends of up to 30 ms; a wait
    that only a timer ends would cost 5 s more.
    """
    ladder = Ladder(fallback=("self_decode*",), self_max=16)
    workers = SlowWorkers(seed, 0.03)
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, SOURCES[name], ladder=ladder, workers=workers) as cluster:
            started = trio.current_time()

            async def one(number: int) -> None:
                prompt = (*PROMPT, number)
                assert (await cluster.generate(prompt, 60))[0] == greedy(prompt, 60)

            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(one, number)
            assert trio.current_time() - started < 5.0


async def test_right_drafts_save_passes(tmp_path: Path, autojump_clock: MockClock) -> None:
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(right)]) as cluster:
            plain, page = await cluster.generate(PROMPT, 100, speculation=False)
            assert page.stats
            assert (page.stats.rounds, page.stats.drafts) == (100, 0)
            tokens, page = await cluster.generate(PROMPT, 100)
            assert tokens == plain
            assert page.stats
            assert page.stats.rounds < 25
            assert page.stats.accepted_tokens + page.stats.rounds >= 100


async def test_stop_tokens_end_the_text_inside_a_block(tmp_path: Path, autojump_clock: MockClock) -> None:
    expected = greedy(PROMPT, 60)
    stop = expected[41]
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(right)]) as cluster:
            tokens, page = await cluster.generate(PROMPT, 60, stop=(stop,))
            assert tokens == expected[: expected.index(stop) + 1]
            assert page.finish is Action.FINISH


async def test_many_sessions_at_once_equal_their_solo_runs(tmp_path: Path, autojump_clock: MockClock) -> None:
    prompts = [(9 + n, 4, 5 + n) for n in range(12)]
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [lookup(), OracleSource(half_right)]) as cluster:
            results: dict[int, list[int]] = {}

            async def one(number: int) -> None:
                results[number] = (await cluster.generate(prompts[number], 50, speculation=number % 4 != 0))[0]

            async with trio.open_nursery() as nursery:
                for number in range(len(prompts)):
                    nursery.start_soon(one, number)
            assert results == {number: greedy(prompt, 50) for number, prompt in enumerate(prompts)}
            assert isinstance(cluster.engine, ToyEngine)
            assert max(len(spans) for spans in cluster.engine.passes) >= 8
            assert cluster.engine.free_pages == cluster.engine.info.pages


async def test_a_drafter_that_dies_in_mid_answer_costs_time_only(tmp_path: Path, autojump_clock: MockClock) -> None:
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(half_right), OracleSource(half_right)]) as cluster:
            request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=100, stop=())
            tokens: list[int] = []
            async with cluster.router.generation(request) as generation:
                async for page in generation.pages():
                    tokens += page.tokens
                    if len(tokens) > 30 and len(cluster.network._handlers) == 5:
                        (session,) = [s for s in cluster.verifier.snapshot().sessions if s.drafter]
                        assert session.drafter is not None
                        cluster.stop(session.drafter)
            assert tokens == greedy(PROMPT, 100)


async def test_a_client_that_leaves_frees_its_session(tmp_path: Path, autojump_clock: MockClock) -> None:
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(half_right)]) as cluster:
            request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=200, stop=())
            async with cluster.router.generation(request) as generation:
                async for _ in generation.pages():
                    break
            left = trio.current_time()
            while cluster.engine.free_pages < cluster.engine.info.pages or any(
                drafter.snapshot().sessions for drafter in cluster.drafters.values()
            ):
                await trio.sleep(0.01)
            assert trio.current_time() - left < 2.0
            assert (await cluster.generate(PROMPT, 20))[0] == greedy(PROMPT, 20)


async def test_what_does_not_fit_is_refused_before_a_session_exists(tmp_path: Path, autojump_clock: MockClock) -> None:
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, []) as cluster:
            for prompt, max_new, reason in [
                ((), 4, "invalid"),
                ((VOCABULARY,), 4, "invalid"),
                ((1,) * 256, None, "context_length"),
                ((1,) * 250, 7, "context_length"),
            ]:
                with pytest.raises(GenerationRefused) as refused:
                    await cluster.generate(prompt, max_new)
                assert refused.value.reason == reason
            assert cluster.verifier.snapshot().sessions == ()
            tokens, _ = await cluster.generate((1,) * 255, None)
            assert len(tokens) == 1


async def test_an_answer_without_a_limit_does_not_take_the_whole_context(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    settings = RouterSettings(default_max_new_tokens=20)
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [], router=settings) as cluster:
            assert len((await cluster.generate(PROMPT, None))[0]) == 20
            assert len((await cluster.generate(PROMPT, 30))[0]) == 30


async def test_a_ladder_that_fails_ends_the_session_with_its_tokens(tmp_path: Path, autojump_clock: MockClock) -> None:
    ladder = Ladder(fallback=("fail",), low_rounds=2)
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(wrong)], ladder=ladder) as cluster:
            tokens, page = await cluster.generate(PROMPT, 60)
            assert tokens == greedy(PROMPT, 2)
            assert page.finish is Action.FAIL
            assert page.reason


async def test_logs_outlive_the_process(tmp_path: Path, autojump_clock: MockClock) -> None:
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(right)]) as cluster:
            await cluster.generate(PROMPT, 50)
            before = cluster.cache.snapshot().logs
        assert before == 1
        engine = ToyEngine(TrioClock(), model=TARGET, tokenizer=TOKENIZER)
        async with running_cluster(tmp_path, [OracleSource(right)], engine=engine) as cluster:
            assert cluster.cache.snapshot().logs == before
            assert cluster.cache.snapshot().damaged_logs == 0
        assert RealFiles(tmp_path).names()


async def test_a_conversation_stays_at_its_verifier_and_drafter(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The second turn begins with the first one and its answer, and meets the KV of both where they ran."""
    with trio.fail_after(200):
        async with running_cluster(
            tmp_path,
            [OracleSource(greedy), OracleSource(greedy)],
            verifiers=2,
            router=RouterSettings(affinity=Affinity(tokens=16)),
        ) as cluster:
            homes: list[tuple[str, str | None]] = []
            seen: set[str] = set()
            for conversation in range(6):
                prompt = (conversation, *range(16))
                answer, _ = await cluster.generate(prompt, 8)
                await cluster.generate((*prompt, *answer, 3, 4, 5), 8)
                first, second = (one for one in cluster.router.snapshot().sessions if one.session not in seen)
                seen |= {first.session, second.session}
                assert (first.verifier, first.drafter) == (second.verifier, second.drafter)
                homes.append((first.verifier, first.drafter))
                await trio.sleep(3)  # for reports of what runs: until then all that was placed counts as a queue
            assert len({verifier for verifier, _ in homes}) == 2
            assert len({drafter for _, drafter in homes}) == 2
