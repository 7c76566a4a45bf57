"""Drafting ahead (decision 59): what is sent, what is given up, and what it saves, in virtual time.

A pass of the draft model takes 2 ms, verification 10 ms, and M is 4: drafting a round takes 8 ms.
"""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from sdcpd.protocol.messages import Proposal
from sdcpd.protocol.terms import Action
from sdcpd.roles.ahead import RETRY_ROUNDS
from tests.support.draft_models import DRAFT_S, M, draft_model, often_wrong, right
from tests.support.drafter_world import VOCABULARY, idle, running

VERIFY_S = 0.01


async def round_s(delay_s: float, *, ahead: bool) -> float:
    """Mean time of a round, with `delay_s` of network each way; the target drafts for itself."""
    async with running(drafting=draft_model(), draft_ahead=ahead) as world:
        world.cluster.round_s = VERIFY_S + 2 * delay_s
        verifier, message = world.cluster.add(max_new=600, m_max=M)
        truth = verifier.truth(600)
        await world.assign(message)
        await idle(world)
        assert verifier.tokens == truth
        assert {len(sent.tokens) for _, _, sent in world.cluster.sent[2:-1]} == {M}, "M as large as it may be"
        times = [at for at, _, _ in world.cluster.sent]
        return (times[-2] - times[10]) / (len(times) - 12)


@pytest.mark.parametrize("delay_ms", [0, 1, 5, 20])
async def test_with_full_acceptance_a_round_takes_no_longer_than_its_verification(
    autojump_clock: MockClock, delay_ms: int
) -> None:
    """Without: M passes, the network, and the verification, one after the other. With: the longer of the two sides."""
    exchange_s = VERIFY_S + 2 * delay_ms / 1000
    assert await round_s(delay_ms / 1000, ahead=False) == pytest.approx(M * DRAFT_S + exchange_s, rel=1e-6)
    assert await round_s(delay_ms / 1000, ahead=True) == pytest.approx(max(exchange_s, (M + 1) * DRAFT_S), rel=1e-6)


async def test_where_drafting_takes_longer_than_the_round_the_rest_of_it_is_waited_for(
    autojump_clock: MockClock,
) -> None:
    async with running(drafting=draft_model()) as world:
        world.cluster.round_s = 0.005
        verifier, message = world.cluster.add(max_new=300, m_max=M)
        await world.assign(message)
        await idle(world)
        assert len(verifier.tokens) == 300
        times = [at for at, _, _ in world.cluster.sent]
        gaps = {round(after - before, 6) for before, after in pairwise(times[10:-1])}
        assert all(gap < M * DRAFT_S + 0.005 for gap in gaps)


async def test_whatever_comes_back_the_text_is_the_targets(autojump_clock: MockClock) -> None:
    """Misses, refusals, lost answers, reductions and switches: no draft made for another prefix is ever sent."""
    answers = iter(range(10_000))

    def script(_: Proposal) -> str | None:
        number = next(answers)
        return {3: "lost", 7: "unanswered"}.get(number % 11)

    async with running(drafting=draft_model(often_wrong)) as world:
        verifier, message = world.cluster.add(max_new=400, m_max=M)
        truth = verifier.truth(400)
        world.cluster.script = script

        async def reduce_now_and_then() -> None:
            while True:
                await trio.sleep(0.3)
                verifier.next_action = Action.REDUCE
                await trio.sleep(0.1)
                verifier.m_cap = M

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reduce_now_and_then)
            await world.assign(message)
            await idle(world)
            nursery.cancel_scope.cancel()
        assert verifier.tokens == truth
        assert world.meters.counts["draft_ahead_total"] > 50
        assert world.meters.counts["draft_ahead_wasted_tokens_total"] > 0


async def test_a_lookup_is_never_drafted_ahead(autojump_clock: MockClock) -> None:
    async with running() as world:
        _, message = world.cluster.add(max_new=60)
        await world.assign(message)
        await idle(world)
        assert "draft_ahead_total" not in world.meters.counts


async def test_nothing_is_drafted_behind_the_end_of_the_text(autojump_clock: MockClock) -> None:
    """The last rounds: max_new is reached, or a stop token was proposed."""
    async with running(drafting=draft_model()) as world:
        verifier, message = world.cluster.add(max_new=M + 1, m_max=M)
        await world.assign(message)
        await idle(world)
        assert len(verifier.tokens) == M + 1
        assert "draft_ahead_total" not in world.meters.counts
    async with running(drafting=draft_model()) as world:
        verifier, message = world.cluster.add(max_new=100, m_max=M, stop=(verifier.tokens[2],))
        await world.assign(message)
        await idle(world)
        assert len(verifier.tokens) == 3
        assert "draft_ahead_total" not in world.meters.counts


async def test_a_hopeless_session_tries_every_eighth_round_only(autojump_clock: MockClock) -> None:
    def always_wrong(prefix: Sequence[int]) -> int:
        return (right(prefix) + 1) % VOCABULARY

    async with running(drafting=draft_model(always_wrong)) as world:
        verifier, message = world.cluster.add(max_new=200, m_max=M)
        await world.assign(message)
        await idle(world)
        rounds = len(verifier.verdicts)
        assert rounds > 190
        tries = world.meters.counts["draft_ahead_total"]
        at_first = 22  # until the share of hits, from 1, is below a tenth
        assert tries == pytest.approx(at_first + (rounds - at_first) / RETRY_ROUNDS, abs=2)
