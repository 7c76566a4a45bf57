"""Pages run out: sessions wait in order, the youngest are preempted and computed anew, and none fails or is starved."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from sdcpd.engine.scheduler import Mix, Ready
from sdcpd.engine.spans import Span
from sdcpd.protocol.draft_rows import one_hot
from sdcpd.protocol.messages import Contract, ContractSampling, SessionState, Verdict
from sdcpd.protocol.problems import Overloaded
from sdcpd.protocol.terms import Action
from sdcpd.roles.kv_room import KvRoom
from sdcpd.roles.ports import Engine
from sdcpd.roles.session_kv import SessionKv
from tests.roles.test_verifier import DRAFTER_PEER, ROUTER_PEER, Stand, log_of, next_proposal, running
from tests.roles.test_verifier_rows import SlowRows, put, sampled
from tests.support.messages import VERIFIER, contract
from tests.support.ports import TrioClock
from tests.support.toy_engine import ToyEngine, greedy

SMALL = {"pages": 8, "page_tokens": 16, "context_tokens": 128}
LONG = contract(stop=(), max_new=60, m_max=8, low_rounds=100)


def sid(number: int) -> bytes:
    return bytes([number]) * 16


def prompt(number: int, length: int = 20) -> tuple[int, ...]:
    return tuple(1 + (number + place) % 40 for place in range(length))


async def decode(stand: Stand, number: int, of: Contract = LONG, length: int = 20) -> list[int]:
    """One session from open to end, without a drafter."""
    await stand.open(of, session=sid(number), prompt=prompt(number, length))
    await stand.draft(of, session=sid(number), drafter=VERIFIER)
    return (await stand.read_all(sid(number)))[0]


async def draft_all(stand: Stand, number: int, of: Contract, step: int) -> list[int]:
    """The same by proposals, the last token of each wrong."""
    await stand.open(of, session=sid(number), prompt=prompt(number))
    await stand.draft(of, session=sid(number))
    oracle = greedy(prompt(number), of.max_new + 10)
    emitted: list[int] = []
    state: SessionState | Verdict = await stand.verifier.session_state(ROUTER_PEER, sid(number))
    while True:
        tokens = oracle[state.committed : state.committed + step]
        tokens[-1] = (tokens[-1] + 1) % 50
        verdict = await stand.verifier.propose(DRAFTER_PEER, next_proposal(state, tokens))
        emitted += verdict.emitted
        if verdict.action is Action.FINISH:
            return emitted
        state = verdict


@pytest.mark.parametrize("drafted", [False, True])
async def test_more_sessions_than_pages_all_end_with_their_own_text(autojump_clock: MockClock, drafted: bool) -> None:
    """Six sessions of up to 80 tokens share 128 places."""
    async with running(SMALL) as stand:
        results: dict[int, list[int]] = {}

        async def one(number: int) -> None:
            results[number] = await (draft_all(stand, number, LONG, 4) if drafted else decode(stand, number))

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(one, number)
        assert results == {number: greedy(prompt(number), 60) for number in range(6)}
        assert stand.meters.counts["num_preemptions_total"] >= 1
        assert stand.engine.free_pages == stand.engine.info.pages
        assert stand.verifier.waiting_for_pages == 0


async def test_a_session_reserves_what_it_has_not_what_it_may_become(autojump_clock: MockClock) -> None:
    async with running(SMALL) as stand:
        for number in range(4):  # each would take 5 of the 8 pages at its longest
            await stand.open(LONG, session=sid(number), prompt=prompt(number))
        assert stand.engine.free_pages == 0
        assert stand.verifier.waiting_for_pages == 0


async def test_opens_that_do_not_fit_wait_in_order(autojump_clock: MockClock) -> None:
    """A big session waits; a small one that would fit stays behind it, and both come in when there is room."""
    async with running(SMALL) as stand:
        await stand.open(LONG, session=sid(0), prompt=prompt(0, 60))  # 68 places: 5 pages
        order: list[int] = []

        async def opened(number: int, length: int) -> None:
            await stand.open(LONG, session=sid(number), prompt=prompt(number, length))
            order.append(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(opened, 1, 60)
            await trio.sleep(1)
            nursery.start_soon(opened, 2, 5)
            await trio.sleep(5)
            assert order == []
            assert stand.verifier.waiting_for_pages == 2
            assert stand.verifier.load() == 100, "whoever places sessions should look elsewhere"
            await stand.verifier.cancel_session(ROUTER_PEER, sid(0))
        assert sorted(order) == [1, 2], "their prompts share a pass"
        assert stand.verifier.waiting_for_pages == 0


async def test_the_queue_for_pages_is_bounded(autojump_clock: MockClock) -> None:
    async with running(SMALL, max_waiting_sessions=1) as stand:
        await stand.open(LONG, session=sid(0), prompt=prompt(0, 60))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stand.open, LONG, sid(1), prompt(1, 60))
            await trio.sleep(1)
            with pytest.raises(Overloaded, match="KV pages") as full:
                await stand.open(LONG, session=sid(2), prompt=prompt(2, 5))
            assert full.value.retry_after_s == 1
            await stand.verifier.cancel_session(ROUTER_PEER, sid(0))
        await stand.open(LONG, session=sid(2), prompt=prompt(2, 5))


async def test_an_open_that_waits_can_be_cancelled(autojump_clock: MockClock) -> None:
    async with running(SMALL) as stand:
        await stand.open(LONG, session=sid(0), prompt=prompt(0, 60))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stand.open, LONG, sid(1), prompt(1, 60))
            await trio.sleep(1)
            await stand.verifier.cancel_session(ROUTER_PEER, sid(1))
        assert stand.verifier.waiting_for_pages == 0
        await stand.verifier.cancel_session(ROUTER_PEER, sid(0))
        assert stand.engine.free_pages == stand.engine.info.pages


async def test_a_round_of_a_preempted_session_waits_and_is_answered(autojump_clock: MockClock) -> None:
    """The young one proposes when its pages are gone: the verdict comes when the old one has ended."""
    of = contract(stop=(), max_new=90, m_max=8, low_rounds=100)
    async with running(SMALL) as stand:
        await stand.open(of, session=sid(0), prompt=prompt(0))
        state = await stand.open(LONG, session=sid(1), prompt=prompt(1))
        await stand.draft(LONG, session=sid(1))
        await stand.draft(of, session=sid(0), drafter=VERIFIER)
        while "num_preemptions_total" not in stand.meters.counts:
            await trio.sleep(0.05)
        oracle = greedy(prompt(1), 70)
        verdict = await stand.verifier.propose(DRAFTER_PEER, next_proposal(state, oracle[:4]))
        assert list(verdict.emitted) == oracle[:5]
        assert (await stand.read_all(sid(0)))[0] == greedy(prompt(0), 90)
        again = [spans for spans in stand.engine.passes if any(span.tokens == prompt(1)[:-1] for span in spans)]
        assert len(again) == 2, "its prompt was run twice"


async def test_tokens_on_their_way_to_the_log_are_part_of_what_is_computed_anew(autojump_clock: MockClock) -> None:
    """Self-decoding goes ahead of a slow log; a preemption in between loses none of it."""
    async with running(SMALL) as stand:
        for number in range(6):
            stand.logs.append_times[log_of(sid(number))] = [0.0, *([0.03, 0.2, 0.001] * 30)]
        results: dict[int, list[int]] = {}

        async def one(number: int) -> None:
            results[number] = await decode(stand, number)

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(one, number)
        assert results == {number: greedy(prompt(number), 60) for number in range(6)}
        assert stand.meters.counts["num_preemptions_total"] >= 1


async def test_rows_on_the_shelf_outlive_a_preemption(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under rule 2 a scored round may wait for its draft rows: its session loses its KV meanwhile, not its round."""
    of = contract(stop=(), max_new=100, m_max=8, low_rounds=100)
    cold = contract(rule=2, stop=(), max_new=60, m_max=8, sampling=ContractSampling(temperature_milli=0))
    oracle = greedy((1, 1, 1), 60)
    async with running(SMALL) as stand:
        await stand.open(of, session=sid(0), prompt=prompt(0))
        state = await stand.open(cold, prompt=(1, 1, 1))
        await stand.draft(cold)
        SlowRows(stand, monkeypatch, 1.8)
        put(stand, [one_hot(token) for token in oracle[:3]])
        await stand.draft(of, session=sid(0), drafter=VERIFIER)
        verdict = await stand.verifier.propose(DRAFTER_PEER, sampled(state, oracle[:3]))
        assert stand.meters.counts["num_preemptions_total"] == 1
        assert verdict.emitted == tuple(oracle[:4])
        assert (await stand.read_all(sid(0)))[0] == greedy(prompt(0), 100)
        verdict = await stand.verifier.propose(
            DRAFTER_PEER, sampled(verdict, oracle[4:6], [one_hot(token) for token in oracle[4:6]])
        )
        assert verdict.emitted == tuple(oracle[4:7])


async def test_rounds_wait_no_longer_than_the_scheduler_says(autojump_clock: MockClock) -> None:
    """16 sessions with rounds of 9 rows, a budget of 128 tokens, and long prompts all the while.

    W <= 15 * 9 tokens stand before a round; R = 96, M = 9: at most 135 // 88 + 1 = 2 passes, behind the one that runs
    when it becomes ready. Each verdict costs these 3 passes at most, and the log.
    """
    of = contract(stop=(), max_new=60, m_max=8, low_rounds=100)
    options = {"pages": 400, "page_tokens": 16, "context_tokens": 1024, "pass_s": 1.0}
    waits: list[float] = []
    async with running(options, max_batch_tokens=128, prefill_chunk_tokens=32) as stand:

        async def one(number: int) -> None:
            state: SessionState | Verdict = await stand.open(of, session=sid(number), prompt=prompt(number))
            await stand.draft(of, session=sid(number))
            oracle = greedy(prompt(number), 70)
            while True:
                began = trio.current_time()
                tokens = [(token + 1) % 50 for token in oracle[state.committed : state.committed + 8]]
                verdict = await stand.verifier.propose(DRAFTER_PEER, next_proposal(state, tokens))
                waits.append(trio.current_time() - began)
                if verdict.action is Action.FINISH:
                    return
                state = verdict

        async def prompts() -> None:
            for number in range(30):
                await stand.open(of, session=sid(100 + number), prompt=prompt(number, 600))
                await stand.verifier.cancel_session(ROUTER_PEER, sid(100 + number))

        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(one, number)
            nursery.start_soon(prompts)
    assert len(waits) == 16 * 60
    assert max(waits) <= 3 * 1.0 + 0.1
    mixed = [spans for spans in stand.engine.passes if any(span.rows for span in spans)]
    assert sum(any(not span.rows for span in spans) for spans in mixed) > 100, "prompts ran beside"
    assert max(sum(len(span.tokens) for span in spans if not span.rows) for spans in mixed) <= 32


class Visitor:
    """A guest of the room without a session around it."""

    def __init__(self, engine: Engine, number: int, known: int, end: int) -> None:
        self.kv = SessionKv(engine)
        self.id = sid(number)
        self.known = known
        self.end = end
        self.preempted = 0

    @property
    def wanted_tokens(self) -> int:
        return min(self.known + 8, self.end)

    def preempt(self) -> None:
        self.preempted += 1
        self.kv.drop()


def mix_of(visitors: Sequence[Visitor]) -> Mix:
    rounds = []
    for visitor in visitors:
        if visitor.kv.reserved_tokens:
            tokens = (0,) * min(9, visitor.end - visitor.known + 1)
            span = Span(sequence=visitor.kv.sequence, tokens=tokens, start=visitor.known - 1, rows=len(tokens))
            rounds.append(Ready(key=visitor.id, span=span))
    return Mix(rounds=tuple(rounds), prefills=())


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=12), st.data())
@settings(max_examples=200, deadline=None)
def test_all_end_whatever_they_ask_for(sizes: list[tuple[int, int]], data: Any) -> None:
    """Any sessions that fit the pool alone: each pass moves the oldest, and pages are never given twice."""
    engine = ToyEngine(TrioClock(), model=bytes(32), tokenizer=bytes(32), pages=10, page_tokens=16, context_tokens=160)
    visitors = [Visitor(engine, n, known, min(known + new, 160)) for n, (known, new) in enumerate(sizes)]
    room = KvRoom(lambda: visitors)
    for _ in range(3000):
        if not visitors:
            break
        room.let_in()
        assert visitors[0].kv.reserved_tokens, "the oldest is always in"
        asked = mix_of(visitors)
        granted = room.grant(asked)
        assert {ready.key for ready in granted.rounds} <= {ready.key for ready in asked.rounds}
        assert visitors[0].id in {ready.key for ready in granted.rounds}, "the oldest always goes on"
        held = 0
        for visitor in visitors:
            held += -(-visitor.kv.reserved_tokens // 16)
        assert held + engine.free_pages == 10
        for ready in granted.rounds:
            visitor = next(one for one in visitors if one.id == ready.key)
            assert ready.span.start + len(ready.span.tokens) <= visitor.kv.reserved_tokens
            visitor.known = min(visitor.end + 1, visitor.known + data.draw(st.integers(1, 9)))
        for visitor in [one for one in visitors if one.known > one.end]:
            visitor.kv.close()
            visitors.remove(visitor)
    assert not visitors
    assert engine.free_pages == 10


@pytest.mark.parametrize("pass_s", [0.2, 1.0])
async def test_neither_waiting_for_pages_nor_computing_counts_as_waiting_for_a_drafter(
    autojump_clock: MockClock, pass_s: float
) -> None:
    """82: a session that cannot be opened yet, since others have the pages or its prompt takes long, is not late."""
    of = contract(stop=(), max_new=20, m_max=8)
    async with running({**SMALL, "pass_s": pass_s}, waiting_limit_s=5.0, prefill_chunk_tokens=16) as stand:
        results: dict[int, list[int]] = {}

        async def one(number: int) -> None:
            results[number] = await decode(stand, number, of, length=100)

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(one, number)
        assert trio.current_time() - began > 2 * 5.0, "else nobody had to wait for longer than the limit"
        assert results == {number: greedy(prompt(number, 100), 20) for number in range(3)}
