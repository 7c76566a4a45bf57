"""Rule 2 at the verifier role: rows come along, late, bad, or not at all (draft 6.3 step 5; decisions 53, 63, 99)."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from msgspec import UNSET
from trio.testing import MockClock

from sdcpd.protocol.draft_rows import DraftRow, dense, inline, one_hot, row_of
from sdcpd.protocol.messages import ContractSampling, InlineRow, Policy, Proposal, Sampling, SessionState, Verdict
from sdcpd.protocol.problems import (
    BadProposal,
    Conflict,
    IllFormed,
    LimitExceeded,
    NotAssigned,
    Problem,
    QUnavailable,
    StaleBase,
)
from sdcpd.protocol.terms import Action
from sdcpd.roles.ports import ReadOutcome, StoreRefused
from tests.roles.test_verifier import DRAFTER_PEER, ROUTER_PEER, Stand, next_proposal, running
from tests.support.messages import CACHE, SESSION, contract
from tests.support.toy_engine import VOCABULARY, greedy, next_token

COLD = contract(rule=2, stop=(), max_new=20, m_max=8, sampling=ContractSampling(temperature_milli=0))
"""Temperature 0 under rule 2: the outcome is certain, whatever is drawn (decision 13)."""
REF = f"{CACHE}v1/s/-/o/AAECAwQFBgcICQoLDA0ODw/1/1/q"


class SlowRows:
    """Objects whose fetch takes `fetch_s`; and how often it was asked."""

    def __init__(self, stand: Stand, monkeypatch: pytest.MonkeyPatch, fetch_s: float = 0.0) -> None:
        self.fetch_s = fetch_s
        self.asked = 0
        fetch = stand.logs.fetch

        async def slow(ref: str, *arguments: Any, **named: Any) -> ReadOutcome:
            self.asked += 1
            await trio.sleep(self.fetch_s)
            return await fetch(ref, *arguments, **named)

        monkeypatch.setattr(stand.logs, "fetch", slow)


def put(stand: Stand, rows: Sequence[DraftRow], octets: bytes | None = None) -> None:
    stand.logs.objects[REF] = dense(rows, VOCABULARY) if octets is None else octets


def sampled(state: SessionState | Verdict, tokens: Sequence[int], rows: Sequence[DraftRow] | None = None) -> Proposal:
    """A proposal under rule 2; with `rows` they go inline."""
    short = UNSET if rows is None else inline(rows)
    return next_proposal(state, tokens, q_rows=REF, q=UNSET if short is None else short)


async def start(stand: Stand) -> SessionState:
    state = await stand.open(COLD)
    await stand.draft(COLD)
    return state


async def test_rows_that_come_along_are_not_fetched(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as stand:
        state = await start(stand)
        rows = SlowRows(stand, monkeypatch)
        right = greedy((1, 1, 1), 3)
        verdict = await stand.verifier.propose(DRAFTER_PEER, sampled(state, right, list(map(one_hot, right))))
        assert (verdict.accepted, verdict.emitted) == (3, tuple(greedy((1, 1, 1), 4)))
        assert rows.asked == 0


@pytest.mark.parametrize("fetch_s", [0.0, 0.005, 0.5])
async def test_rows_are_fetched_while_scoring_runs(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, fetch_s: float
) -> None:
    """ "The verifier MAY fetch the rows concurrently with scoring." A pass takes 10 ms: rows come before its start, in
    its middle, or long after it; the round takes the longer of the two, and the pass is run once."""
    async with running() as stand:
        state = await start(stand)
        rows = SlowRows(stand, monkeypatch, fetch_s)
        tokens = [*greedy((1, 1, 1), 2), 4]
        put(stand, list(map(one_hot, tokens)))
        passes, began = len(stand.engine.passes), trio.current_time()
        verdict = await stand.verifier.propose(DRAFTER_PEER, sampled(state, tokens))
        assert (verdict.accepted, verdict.emitted) == (2, tuple(greedy((1, 1, 1), 3)))
        assert rows.asked == 1
        assert len(stand.engine.passes) == passes + 1
        assert trio.current_time() - began < max(fetch_s, 0.01) + 0.005


async def test_a_retry_joins_and_another_body_does_not(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as stand:
        state = await start(stand)
        SlowRows(stand, monkeypatch, 0.5)
        put(stand, [one_hot(7)])
        verdicts: list[Verdict] = []

        async def ask() -> None:
            verdicts.append(await stand.verifier.propose(DRAFTER_PEER, sampled(state, (7,))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await trio.sleep(0.1)
            with pytest.raises(StaleBase):  # sdcpd_q is part of what makes a proposal identical (46)
                await stand.verifier.propose(DRAFTER_PEER, sampled(state, (7,), [one_hot(7)]))
        assert verdicts[0] == verdicts[1]


GOOD = (next_token((1, 1, 1)),)


@pytest.mark.parametrize(
    ("octets", "problem"),
    [
        (None, QUnavailable),
        (b"", BadProposal),
        (dense([one_hot(GOOD[0])], VOCABULARY)[:-4], BadProposal),
        (dense([one_hot(GOOD[0])], VOCABULARY + 1), BadProposal),
        (dense([one_hot(GOOD[0] + 1)], VOCABULARY), BadProposal),
        (dense([row_of([(GOOD[0], 0.9)])], VOCABULARY), BadProposal),
        (dense([row_of([(GOOD[0], float("nan"))])], VOCABULARY), BadProposal),
        (dense([row_of([(GOOD[0], 1.5), (1, -0.5)])], VOCABULARY), BadProposal),
    ],
)
async def test_bad_rows_consume_nothing(
    autojump_clock: MockClock, octets: bytes | None, problem: type[Problem]
) -> None:
    """ "it rejects the round with problem type "sdcp-q-unavailable" and commits nothing": the same round may come
    again, with other tokens (63)."""
    async with running() as stand:
        state = await start(stand)
        if octets is not None:
            put(stand, [], octets)
        with pytest.raises(problem):
            await stand.verifier.propose(DRAFTER_PEER, sampled(state, GOOD))
        assert (await stand.verifier.session_state(ROUTER_PEER, SESSION)).round == 0
        wrong = (GOOD[0] + 1,)
        verdict = await stand.verifier.propose(DRAFTER_PEER, sampled(state, wrong, [one_hot(wrong[0])]))
        assert (verdict.round, verdict.accepted, verdict.emitted) == (1, 0, GOOD)


@pytest.mark.parametrize(
    "q",
    [
        (),
        (InlineRow(ids=(GOOD[0],), values=b"\x00\x00\x80"),),
        (InlineRow(ids=(VOCABULARY,), values=b"\x00\x00\x80\x3f"),),
        (InlineRow(ids=(GOOD[0], GOOD[0]), values=b"\x00\x00\x00\x3f" * 2),),
        (InlineRow(ids=(GOOD[0] + 1,), values=b"\x00\x00\x80\x3f"),),
    ],
)
async def test_bad_inline_rows_are_refused_at_once(autojump_clock: MockClock, q: tuple[InlineRow, ...]) -> None:
    async with running() as stand:
        state = await start(stand)
        with pytest.raises(BadProposal):
            await stand.verifier.propose(DRAFTER_PEER, next_proposal(state, GOOD, q_rows=REF, q=q))


async def test_rows_must_be_named(autojump_clock: MockClock) -> None:
    """ "The proposal MUST carry q_rows" (6.4), also one whose rows come along."""
    async with running() as stand:
        state = await start(stand)
        with pytest.raises(BadProposal, match="q_rows: missing"):
            await stand.verifier.propose(DRAFTER_PEER, next_proposal(state, GOOD, q=inline([one_hot(GOOD[0])])))


@pytest.mark.parametrize("ref", ["nonsense", REF.replace("/s/-/", "/s/AAECAwQFBgcICQoLDA0ODw/")])
async def test_references_out_of_place_are_refused(autojump_clock: MockClock, ref: str) -> None:
    async with running() as stand:
        state = await start(stand)
        with pytest.raises(BadProposal, match="q_rows"):
            await stand.verifier.propose(DRAFTER_PEER, next_proposal(state, GOOD, q_rows=ref))


async def test_three_refusals_in_a_row_end_the_assignment(autojump_clock: MockClock) -> None:
    """Decision 63: "Three in a row: treat the drafter as failed and send a switch event." """
    async with running() as stand:
        state = await start(stand)
        for _ in range(2):
            with pytest.raises(QUnavailable):
                await stand.verifier.propose(DRAFTER_PEER, sampled(state, GOOD))
        verdict = await stand.verifier.propose(DRAFTER_PEER, sampled(state, GOOD, [one_hot(GOOD[0])]))
        for _ in range(3):
            with pytest.raises(QUnavailable):
                await stand.verifier.propose(DRAFTER_PEER, sampled(verdict, (4,)))
        with pytest.raises(NotAssigned):
            await stand.verifier.propose(DRAFTER_PEER, sampled(verdict, (4,)))
        await trio.sleep(0.1)
        assert [event.kind for event in stand.peers.events] == [Action.SWITCH]


async def test_no_answer_in_time_is_unavailable(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(rows_timeout_s=0.3) as stand:
        state = await start(stand)
        put(stand, [one_hot(GOOD[0])])
        SlowRows(stand, monkeypatch, 10.0)
        began = trio.current_time()
        with pytest.raises(QUnavailable):
            await stand.verifier.propose(DRAFTER_PEER, sampled(state, GOOD))
        assert trio.current_time() - began == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(("status", "problem"), [(413, BadProposal), (403, QUnavailable), (503, QUnavailable)])
async def test_what_the_cache_refuses(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, status: int, problem: type[Problem]
) -> None:
    """An object longer than the rows can be is of a wrong length; all else is not to be had (53)."""
    async with running() as stand:
        state = await start(stand)

        async def refused(*arguments: object, **named: object) -> ReadOutcome:
            return StoreRefused(status=status, detail="as told")

        monkeypatch.setattr(stand.logs, "fetch", refused)
        with pytest.raises(problem):
            await stand.verifier.propose(DRAFTER_PEER, sampled(state, GOOD))


async def test_a_drafter_has_a_budget_of_rows(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision 99: what one drafter has under way over all its sessions."""
    monkeypatch.setattr("sdcpd.roles.row_supply.VALUE_BYTES", 1 << 20)  # rows of 50 MiB
    async with running(drafter_row_bytes=60 << 20) as stand:
        others = (SESSION, b"o" * 16)
        states = [await stand.open(COLD, session) for session in others]
        for session in others:
            await stand.draft(COLD, session)
        SlowRows(stand, monkeypatch, 0.5)
        put(stand, [one_hot(GOOD[0])])
        async with trio.open_nursery() as nursery:

            async def first() -> None:
                assert (await stand.verifier.propose(DRAFTER_PEER, sampled(states[0], GOOD))).accepted == 1

            nursery.start_soon(first)
            await trio.sleep(0.1)
            with pytest.raises(QUnavailable, match="too many"):
                await stand.verifier.propose(DRAFTER_PEER, sampled(states[1], GOOD))
        assert (await stand.verifier.propose(DRAFTER_PEER, sampled(states[1], GOOD))).accepted == 1


async def test_more_rows_than_are_fetched_is_a_limit(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decision 99; the answer names how many are."""
    limit = 4 << 20
    monkeypatch.setattr("tests.roles.test_verifier.VerifierSettings.session_limits", _two_rows)
    async with running(round_row_bytes=limit) as stand:
        state = await start(stand)
        with pytest.raises(LimitExceeded) as refused:
            await stand.verifier.propose(DRAFTER_PEER, sampled(state, (7, 8, 9)))
        assert refused.value.m_cap == 2
        tokens = (7, 8, 9)
        verdict = await stand.verifier.propose(DRAFTER_PEER, sampled(state, tokens, list(map(one_hot, tokens))))
        assert verdict.round == 1


def _two_rows(settings: object) -> object:
    from sdcpd.protocol.session_values import SessionLimits

    return SessionLimits(round_row_bytes=2 * 4 * VOCABULARY)


async def test_a_cancelled_session_leaves_no_round_behind(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as stand:
        state = await start(stand)
        put(stand, [one_hot(GOOD[0])])
        SlowRows(stand, monkeypatch, 0.5)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(Problem):
                    await stand.verifier.propose(DRAFTER_PEER, sampled(state, GOOD))

            nursery.start_soon(ask)
            await trio.sleep(0.1)
            await stand.verifier.cancel_session(ROUTER_PEER, SESSION)
        await trio.sleep(1)
        assert stand.engine.free_pages == stand.engine.info.pages


async def test_non_finite_rows_fail_the_session(autojump_clock: MockClock) -> None:
    async with running() as stand:
        state = await start(stand)
        stand.engine.poison_latest()
        with pytest.raises(Problem):
            await stand.verifier.propose(DRAFTER_PEER, sampled(state, GOOD, [one_hot(GOOD[0])]))
        assert (await stand.read_all())[1].finish is Action.FAIL


async def test_policy_over_the_role(autojump_clock: MockClock) -> None:
    """POST sessions/{id}/policy answers with the session-state; path and body must agree."""
    async with running() as stand:
        await start(stand)
        policy = Policy(session=SESSION, from_round=1, sampling=Sampling(temperature_milli=500))
        assert (await stand.verifier.set_policy(ROUTER_PEER, SESSION, policy)).round == 0
        with pytest.raises(IllFormed):
            await stand.verifier.set_policy(ROUTER_PEER, b"z" * 16, policy)
        with pytest.raises(Conflict):
            late = Policy(session=SESSION, from_round=0, sampling=Sampling())
            await stand.verifier.set_policy(ROUTER_PEER, SESSION, late)
