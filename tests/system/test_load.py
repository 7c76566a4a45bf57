"""Speculation under load, by the real roles in virtual time over engines whose passes cost by rows (74, 82, 110)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import trio
from trio.testing import MockClock

from sdcpd.engine.spans import Row, Span
from sdcpd.protocol.ladder import Ladder
from sdcpd.protocol.messages import SpeculationStats
from sdcpd.protocol.terms import Action
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.verifier_settings import VerifierSettings
from tests.support.cluster import MODEL, Cluster, OracleSource, running_cluster
from tests.support.messages import TARGET, TOKENIZER
from tests.support.ports import TrioClock
from tests.support.toy_engine import ToyEngine, greedy

Machine = Callable[[int], float]
LADDER = Ladder(m_max=8, m_init=4, low_rounds=1000)


def gpu(rows: int) -> float:
    return 0.010 + 0.00002 * rows


def cpu(rows: int) -> float:
    return 0.004 + 0.003 * rows


class PricedEngine(ToyEngine):
    def __init__(self, machine: Machine) -> None:
        super().__init__(TrioClock(), model=TARGET, tokenizer=TOKENIZER, pages=1024, context_tokens=512)
        self._machine = machine

    async def run_pass(self, spans: Sequence[Span]) -> list[tuple[Row, ...]]:
        self._pass_s = self._machine(sum(len(span.tokens) for span in spans))
        answers = await super().run_pass(spans)
        self.passes.clear()
        return answers


def guessed(tenths: int) -> Callable[[Sequence[int], int], list[int]]:
    """Drafts whose tokens are right in `tenths` of ten places."""

    def draft(context: Sequence[int], limit: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(limit):
            (right,) = greedy((*context, *tokens), 1)
            place = (len(context) + len(tokens)) * 7919 + sum(context[:4])
            tokens.append(right if place % 10 < tenths else right ^ 1)
        return tokens

    return draft


async def rate(
    path: Path, machine: Machine, sessions: int, tenths: int, speculation: Literal["auto", "on", "off"], length: int
) -> float:
    """Tokens a virtual second, after a third of them."""
    times: list[tuple[int, float]] = []
    made = 0

    async def one(cluster: Cluster, number: int) -> None:
        nonlocal made
        prompt = (5, 6, 7, 3 + number)
        tokens: list[int] = []
        request = GenerationRequest(model=MODEL, prompt=prompt, max_new=length, stop=())
        async with cluster.router.generation(request) as generation:
            async for page in generation.pages():
                tokens += page.tokens
                made += len(page.tokens)
                times.append((made, trio.current_time()))
        assert page.finish is Action.FINISH, page.reason
        assert tokens == greedy(prompt, length)

    settings = VerifierSettings(speculation=speculation)
    async with running_cluster(
        path, [OracleSource(guessed(tenths))], engine=PricedEngine(machine), ladder=LADDER, verifier=settings
    ) as cluster:
        await cluster.ready()
        async with trio.open_nursery() as nursery:
            for number in range(sessions):
                nursery.start_soon(one, cluster, number)
        first = next(entry for entry in times if entry[0] >= sessions * length / 3)
        last = next(entry for entry in times if entry[0] >= sessions * length * 0.95)
        return (last[0] - first[0]) / (last[1] - first[1])


@pytest.mark.parametrize(
    ("machine", "tenths", "sessions", "length"),
    [(cpu, 9, 1, 200), (gpu, 6, 4, 90), (cpu, 6, 16, 72), (cpu, 9, 32, 36)],
)
async def test_automatic_is_as_good_as_the_better_of_on_and_off(
    tmp_path: Path, machine: Machine, tenths: int, sessions: int, length: int, autojump_clock: MockClock
) -> None:
    """With the whole way in between: events, new namings, assignments, drafts."""
    modes: tuple[Literal["auto", "on", "off"], ...] = ("on", "off", "auto")
    for mode in modes:
        (tmp_path / mode).mkdir()
    rates = [await rate(tmp_path / mode, machine, sessions, tenths, mode, length) for mode in modes]
    on, off, auto = rates
    assert auto >= 0.97 * max(on, off), rates
    assert (off > on) is (machine is cpu and sessions > 1), "else this shows nothing"


async def test_switched_off_every_session_decodes_alone(tmp_path: Path, autojump_clock: MockClock) -> None:
    settings = VerifierSettings(speculation="off")
    async with running_cluster(tmp_path, [OracleSource(guessed(9))], verifier=settings) as cluster:
        await cluster.ready()
        tokens, final = await cluster.generate((5, 6, 7), 60)
        assert tokens == greedy((5, 6, 7), 60)
        assert isinstance(final.stats, SpeculationStats)
        assert final.stats.drafts <= 3, "those until the router has heard of it"
        assert cluster.meters.by_labels["speculation_advice_total", "unprofitable"] == 1
        assert cluster.meters.by_labels["reassignments_total", "unprofitable"] == 1


async def test_drafting_comes_back_when_the_load_is_gone(tmp_path: Path, autojump_clock: MockClock) -> None:
    """One long answer among many short ones: it decodes alone while they last."""
    engine = PricedEngine(cpu)
    async with running_cluster(tmp_path, [OracleSource(guessed(7))], engine=engine, ladder=LADDER) as cluster:
        await cluster.ready()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.generate, (9, 9, 9), 400)
            for number in range(12):
                nursery.start_soon(cluster.generate, (5, 6, 7, 3 + number), 60)
        counts = cluster.meters.by_labels
        assert counts["speculation_advice_total", "unprofitable"] >= 1
        assert counts["speculation_advice_total", "profitable"] >= 1
        assert counts["reassignments_total", "profitable"] >= 1
