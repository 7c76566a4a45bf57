"""A verifier takes a session over, or loses it to itself at a higher epoch (draft 6.9; decisions 29, 65, 91, 93)."""

from contextlib import suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from sdcpd.engine.spans import Told
from sdcpd.protocol.commit_log import FenceRecord, write_record
from sdcpd.protocol.encoding import encode_tokens
from sdcpd.protocol.log_history import History, read_history
from sdcpd.protocol.messages import Resume, SessionState, Verdict
from sdcpd.protocol.problems import Conflict, IllFormed, Overloaded, StaleEpoch
from sdcpd.protocol.terms import State
from sdcpd.roles.told_rows import ROWS_AT_ONCE
from tests.roles.test_verifier import DRAFTER_PEER, PLAIN, ROUTER_PEER, Stand, drive, next_proposal, running
from tests.support.messages import CACHE, LOG, SESSION, VERIFIER, assignment, contract, session_open
from tests.support.toy_engine import entry_of, greedy, next_logits

PROMPT = (1, 1, 1)
TOKENS_REF = f"{CACHE}v1/s/-/o/AAECAwQFBgcICQoLDA0ODw/2/0/tokens"


def fence(stand: Stand, epoch: int) -> History:
    """What a router does before it resumes: fence, read, publish. Returns what it read."""
    stand.logs.logs[LOG] = stand.logs.logs.get(LOG, b"") + write_record(FenceRecord(epoch=epoch, by="r#n"))
    history = read_history(stand.logs.logs[LOG], PLAIN, PROMPT)
    stand.logs.objects[TOKENS_REF] = encode_tokens(history.tokens)
    return history


def resume_of(history: History, **changes: Any) -> Resume:
    values: dict[str, Any] = {
        "round": history.round,
        "committed": len(history.tokens),
        "digest": history.digest,
        "committed_tokens": TOKENS_REF,
    }
    return Resume(**values | changes)


async def half_way(stand: Stand) -> SessionState:
    """Epoch 1, some rounds committed by itself."""
    await stand.open()
    await stand.draft(drafter=VERIFIER)
    while (await stand.verifier.session_state(ROUTER_PEER, SESSION)).committed < 8:
        await trio.sleep(0.005)
    return await stand.verifier.session_state(ROUTER_PEER, SESSION)


async def finish(stand: Stand, state: SessionState, epoch: int) -> None:
    """Drafted to its end, the output is that of the undisturbed run."""
    await stand.verifier.name_drafter(ROUTER_PEER, SESSION, assignment(contract=PLAIN, epoch=epoch, seq=9))
    oracle = greedy(PROMPT, 20)
    at: SessionState | Verdict = state
    while at.committed < 20:
        sent = next_proposal(at, oracle[at.committed : at.committed + 4], epoch=epoch)
        at = await stand.verifier.propose(DRAFTER_PEER, sent)
        assert at.epoch == epoch
    tokens, final = await stand.read_all()
    assert tokens == oracle
    assert final.epoch == epoch


async def test_another_verifier_goes_on(autojump_clock: MockClock) -> None:
    async with running() as first, running() as second:
        second.logs.logs, second.logs.objects = first.logs.logs, first.logs.objects
        await half_way(first)
        history = fence(first, 2)
        state = await second.open(epoch=2, resume=resume_of(history))
        assert (state.epoch, state.round, state.committed) == (2, history.round, len(history.tokens))
        assert state.state == State.WAITING
        await finish(second, state, 2)
        # The first one, still at it, met the fence at its next append and stopped by itself.
        assert first.meters.counts["fenced_appends_total"] == 1
        assert first.engine.free_pages == first.engine.info.pages
        with pytest.raises(StaleEpoch):
            await first.verifier.read_output(ROUTER_PEER, SESSION, 0, 1.0)
        with pytest.raises(StaleEpoch):
            await first.verifier.session_state(ROUTER_PEER, SESSION)


async def test_a_higher_epoch_drops_the_old_state_and_rebuilds(autojump_clock: MockClock) -> None:
    async with running() as stand:
        await half_way(stand)
        waits: list[str] = []

        async def reader() -> None:
            with pytest.raises(StaleEpoch):
                while True:
                    await stand.verifier.read_output(ROUTER_PEER, SESSION, 1000, 60.0)
            waits.append("told")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            await trio.sleep(0.001)
            state = await stand.open(epoch=2, resume=resume_of(fence(stand, 2)))
        assert waits == ["told"]
        await finish(stand, state, 2)
        assert stand.engine.free_pages == stand.engine.info.pages
        assert [one.epoch for one in stand.verifier.snapshot().sessions] == [2]


async def test_an_open_that_is_repeated_answers_where_the_session_stands(autojump_clock: MockClock) -> None:
    """Decision 29, also when rounds were committed since, so that the resume is not the log's last any more."""
    async with running() as stand:
        await half_way(stand)
        resume = resume_of(fence(stand, 2))
        state = await stand.open(epoch=2, resume=resume)
        await stand.verifier.name_drafter(ROUTER_PEER, SESSION, assignment(contract=PLAIN, epoch=2, seq=9))
        tokens = greedy(PROMPT, 20)[state.committed : state.committed + 2]
        verdict = await stand.verifier.propose(DRAFTER_PEER, next_proposal(state, tokens, epoch=2))
        again = await stand.open(epoch=2, resume=resume)
        assert (again.round, again.committed) == (verdict.round, verdict.committed)
        with pytest.raises(Conflict):
            await stand.open(epoch=2, resume=resume_of(read_history(stand.logs.logs[LOG], PLAIN, PROMPT)))
        with pytest.raises(StaleEpoch):
            await stand.open(epoch=1)


async def test_two_opens_at_once_make_one_session(autojump_clock: MockClock) -> None:
    async with running() as stand:
        await half_way(stand)
        resume = resume_of(fence(stand, 2))
        states: list[SessionState] = []

        async def one() -> None:
            states.append(await stand.open(epoch=2, resume=resume))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            nursery.start_soon(one)
        assert states[0] == states[1]


async def test_a_false_resume_leaves_the_running_session_alone(autojump_clock: MockClock) -> None:
    async with running() as stand:
        await half_way(stand)
        history = read_history(stand.logs.logs[LOG], PLAIN, PROMPT)
        stand.logs.objects[TOKENS_REF] = encode_tokens(history.tokens)
        with pytest.raises(Conflict, match="fence"):
            await stand.open(epoch=2, resume=resume_of(history))
        tokens, final = await stand.read_all()
        assert tokens == greedy(PROMPT, 20)
        assert final.epoch == 1


@pytest.mark.parametrize("what", ["tokens", "log", "digest"])
async def test_what_is_missing_or_differs_is_409(what: str, autojump_clock: MockClock) -> None:
    async with running() as stand:
        await half_way(stand)
        history = fence(stand, 2)
        resume = resume_of(history)
        match what:
            case "tokens":
                stand.logs.objects.clear()
            case "log":
                del stand.logs.logs[LOG]
            case _:
                resume = resume_of(history, digest=bytes(32))
        with pytest.raises(Conflict):
            await stand.open(epoch=2, resume=resume)


async def test_tokens_elsewhere_are_not_fetched(autojump_clock: MockClock) -> None:
    """Decision 21."""
    async with running() as stand:
        await half_way(stand)
        resume = resume_of(fence(stand, 2), committed_tokens="https://evil.example/cache/v1/s/-/o/x/2/0/tokens")
        with pytest.raises(IllFormed, match="committed_tokens"):
            await stand.open(epoch=2, resume=resume)


async def test_an_open_before_the_verifier_runs_is_put_off(autojump_clock: MockClock) -> None:
    async with running() as stand:
        stand.verifier._nursery = None
        with pytest.raises(Overloaded):
            await stand.verifier.open_session(ROUTER_PEER, session_open(contract=PLAIN))


async def test_a_displaced_session_may_be_in_any_stage(autojump_clock: MockClock) -> None:
    """Its append on the way, its prompt not yet run, its round being scored: nothing of it is left."""
    for delay in range(12):
        async with running() as stand:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_quiet, stand)
                await trio.sleep(delay * 0.0023)
                if LOG not in stand.logs.logs:
                    continue
                state = await stand.open(epoch=2, resume=resume_of(fence(stand, 2)))
                await finish(stand, state, 2)
            assert stand.engine.free_pages == stand.engine.info.pages


async def _quiet(stand: Stand) -> None:
    with suppress(StaleEpoch, Overloaded):
        state = await stand.open()
        await stand.draft()
        await drive(stand, state, wrong_at=None)


async def test_log_probabilities_of_what_others_committed_are_told_anew(autojump_clock: MockClock) -> None:
    """Decision 114: by the rows of the prefill, before the open is answered; more than one pass may have of them."""
    count = ROWS_AT_ONCE + 20
    long = contract(stop=(2,), max_new=count + 30)
    async with running() as first, running() as second:
        second.logs.logs, second.logs.objects = first.logs.logs, first.logs.objects
        await first.open(long, logprobs=2)
        ordered = assignment(contract=long, drafter=VERIFIER, seq=1)
        await first.verifier.name_drafter(ROUTER_PEER, SESSION, ordered)
        while (await first.verifier.session_state(ROUTER_PEER, SESSION)).committed < count:
            await trio.sleep(0.005)
        first.logs.logs[LOG] += write_record(FenceRecord(epoch=2, by="r#n"))
        history = read_history(first.logs.logs[LOG], long, PROMPT)
        first.logs.objects[TOKENS_REF] = encode_tokens(history.tokens)
        await second.open(long, epoch=2, resume=resume_of(history), logprobs=2)
        page = await second.verifier.read_output(ROUTER_PEER, SESSION, 0, 1.0)
        known = (*PROMPT, *page.tokens)
        assert len(page.tokens) == len(history.tokens) >= count
        assert page.logprobs == tuple(
            entry_of(next_logits(known[: len(PROMPT) + place]), token, 2) for place, token in enumerate(page.tokens)
        )
        told = [span.rows for spans in second.engine.passes for span in spans if isinstance(span.judge, Told)]
        assert (sum(told), max(told)) == (len(history.tokens), ROWS_AT_ONCE)
        with pytest.raises(Conflict, match="sdcpd_logprobs"):
            await second.open(long, epoch=2, resume=resume_of(history), logprobs=3)
