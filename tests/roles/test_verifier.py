"""The verifier role over a toy engine and a memory log, in virtual time (draft 6.1, 6.3, 6.7)."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sdcpd.protocol import digests
from sdcpd.protocol.commit_log import EndRecord, FenceRecord, read_records, write_record
from sdcpd.protocol.encoding import encode_tokens
from sdcpd.protocol.messages import Contract, Output, Proposal, SessionState, Verdict
from sdcpd.protocol.problems import (
    BadContract,
    Conflict,
    IllFormed,
    Overloaded,
    SessionClosed,
    StaleEpoch,
    UnknownResource,
)
from sdcpd.protocol.terms import Action, LadderAction, State
from sdcpd.roles.ports import Peer, Peers, Ports, Workers
from sdcpd.roles.verifier import Verifier
from sdcpd.roles.verifier_settings import VerifierSettings
from tests.support.messages import (
    CACHE,
    DRAFTER,
    LOG,
    ROUTER,
    SESSION,
    TARGET,
    TOKENIZER,
    VERIFIER,
    assignment,
    contract,
    proposal,
    session_open,
)
from tests.support.ports import (
    CountingMeters,
    InlineWorkers,
    MemoryLogs,
    RecordedPeers,
    SeededRandomness,
    TrioClock,
)
from tests.support.toy_engine import ToyEngine, greedy

ROUTER_PEER = Peer(uri=ROUTER, role="router")
DRAFTER_PEER = Peer(uri=DRAFTER, role="drafter")
PLAIN = contract(stop=(), max_new=20, m_max=8)


class Stand:
    """A running verifier with its fakes."""

    def __init__(self, verifier: Verifier, engine: ToyEngine, logs: MemoryLogs, peers: RecordedPeers) -> None:
        self.verifier = verifier
        self.engine = engine
        self.logs = logs
        self.peers = peers
        self.meters = CountingMeters()

    async def open(
        self, of: Contract = PLAIN, session: bytes = SESSION, prompt: tuple[int, ...] = (1, 1, 1), **changes: Any
    ) -> SessionState:
        message = session_open(contract=of, session=session, prompt=prompt, commit_log=log_of(session), **changes)
        return (await self.verifier.open_session(ROUTER_PEER, message))[0]

    async def draft(self, of: Contract = PLAIN, session: bytes = SESSION, drafter: str = DRAFTER, seq: int = 1) -> None:
        await self.verifier.name_drafter(
            ROUTER_PEER, session, assignment(session=session, contract=of, drafter=drafter, seq=seq)
        )

    async def propose(self, state: SessionState | Verdict, tokens: Sequence[int]) -> Verdict:
        return await self.verifier.propose(DRAFTER_PEER, next_proposal(state, tokens))

    async def read_all(self, session: bytes = SESSION) -> tuple[list[int], Output]:
        tokens: list[int] = []
        while True:
            page = await self.verifier.read_output(ROUTER_PEER, session, len(tokens), 20.0)
            tokens += page.tokens
            if page.final:
                return tokens, page


def log_of(session: bytes) -> str:
    return LOG if session == SESSION else f"{CACHE}v1/s/-/l/{session.hex()}"


def next_proposal(state: SessionState | Verdict, tokens: Sequence[int], **changes: Any) -> Proposal:
    values = {"session": state.session, "round": state.round + 1, "base": state.committed, "base_digest": state.digest}
    return proposal(tuple(tokens), **(values | changes))


@asynccontextmanager
async def running(
    engine_options: dict[str, Any] | None = None,
    *,
    kind: type[ToyEngine] = ToyEngine,
    workers: Workers | None = None,
    **settings: Any,
) -> AsyncIterator[Stand]:
    clock = TrioClock()
    engine = kind(clock, model=TARGET, tokenizer=TOKENIZER, **(engine_options or {}))
    logs, peers, meters = MemoryLogs(), RecordedPeers(), CountingMeters()
    ports = Ports(
        clock=clock,
        randomness=SeededRandomness(),
        workers=workers or InlineWorkers(),
        meters=meters,
        peers=cast(Peers, peers),
        objects=logs,
        engine=engine,
    )
    verifier = Verifier(
        VerifierSettings(**settings), ports, instance=VERIFIER, routers=(ROUTER,), caches=(CACHE,), boot=bytes(16)
    )
    with trio.fail_after(10_000):
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: verifier.run(task_status=task_status))
            stand = Stand(verifier, engine, logs, peers)
            stand.meters = meters
            yield stand
            nursery.cancel_scope.cancel()


async def drive(
    stand: Stand, state: SessionState | Verdict, wrong_at: int | None, session: bytes = SESSION
) -> list[int]:
    """A drafter that proposes the oracle's next tokens, with one wrong token in each proposal where asked."""
    oracle = greedy((1, 1, 1), 40)
    emitted: list[int] = []
    while True:
        tokens = list(oracle[state.committed : state.committed + 5])
        if wrong_at is not None:
            tokens[wrong_at] = (tokens[wrong_at] + 1) % 50
        verdict = await stand.propose(state, tokens)
        emitted += verdict.emitted
        if verdict.action is Action.FINISH:
            return emitted
        state = verdict


@pytest.mark.parametrize("wrong_at", [None, 0, 2, 4])
async def test_output_is_greedy_whatever_is_proposed(autojump_clock: MockClock, wrong_at: int | None) -> None:
    async with running() as stand:
        of = contract(stop=(), max_new=20, low_rounds=100)
        state = await stand.open(of)
        await stand.draft(of)
        emitted = await drive(stand, state, wrong_at)
        assert emitted == greedy((1, 1, 1), 20)
        tokens, page = await stand.read_all()
        assert tokens == emitted
        assert page.finish is Action.FINISH
        assert [token for record in stand.logs.commits(LOG) for token in record.emitted] == emitted
        assert stand.engine.free_pages == stand.engine.info.pages, "KV is given back at the end"


async def test_a_proposal_takes_as_many_passes_as_rounds(autojump_clock: MockClock) -> None:
    async with running() as stand:
        state = await stand.open()
        await stand.draft()
        before = len(stand.engine.passes)
        await drive(stand, state, None)
        assert len(stand.engine.passes) - before == 4, "20 tokens in rounds of 5 + 1"


async def test_sessions_share_passes_and_do_not_mix(autojump_clock: MockClock) -> None:
    async with running() as stand:
        prompts = {bytes([n]) * 16: (1, n + 1, 7) for n in range(8)}
        results: dict[bytes, list[int]] = {}

        async def one(session: bytes, prompt: tuple[int, ...]) -> None:
            await stand.open(session=session, prompt=prompt)
            await stand.draft(session=session, drafter=VERIFIER)
            results[session] = (await stand.read_all(session))[0]

        await stand.open(session=b"w" * 16)
        before = len(stand.engine.passes)
        async with trio.open_nursery() as nursery:
            for session, prompt in prompts.items():
                nursery.start_soon(one, session, prompt)
        assert results == {session: greedy(prompt, 20) for session, prompt in prompts.items()}
        assert len(stand.engine.passes) - before < 8 * 20 / 4


async def test_a_long_prompt_is_run_in_chunks_and_does_not_stall_a_round(autojump_clock: MockClock) -> None:
    async with running({"context_tokens": 1024, "pages": 128}, prefill_chunk_tokens=16) as stand:
        await stand.open()
        await stand.draft(drafter=VERIFIER)
        before = len(stand.engine.passes)
        await stand.open(session=b"l" * 16, prompt=(1,) * 600)
        assert (await stand.read_all())[0] == greedy((1, 1, 1), 20)
        passes = stand.engine.passes[before:]
        prompt_tokens = [sum(len(span.tokens) for span in spans if not span.rows) for spans in passes]
        mixed = [tokens for tokens, spans in zip(prompt_tokens, passes, strict=True) if any(s.rows for s in spans)]
        assert len([tokens for tokens in mixed if tokens]) > 10, "prompt and tokens share passes"
        assert max(mixed) == 16
        assert sum(prompt_tokens) == 599, "all but the last token of the prompt"


async def test_joined_and_repeated_proposals_get_the_same_verdict_once(autojump_clock: MockClock) -> None:
    async with running() as stand:
        state = await stand.open()
        await stand.draft()
        sent = next_proposal(state, (9, 9))
        verdicts: list[Verdict] = []

        async def send() -> None:
            verdicts.append(await stand.verifier.propose(DRAFTER_PEER, sent))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(send)
        await send()
        assert len(set(map(repr, verdicts))) == 1
        assert len(stand.logs.commits(LOG)) == 1


async def test_a_client_that_goes_away_does_not_stop_its_round(autojump_clock: MockClock) -> None:
    async with running() as stand:
        state = await stand.open()
        await stand.draft()
        with trio.move_on_after(0.001):
            await stand.propose(state, (9,))
        verdict = await stand.propose(state, (9,))
        assert verdict.round == 1
        assert len(stand.logs.commits(LOG)) == 1


@pytest.mark.parametrize("faults", [["lost"], ["unanswered"], ["lost", "lost", "unanswered"], ["507", "503", "lost"]])
async def test_lost_appends_neither_lose_nor_double_a_round(autojump_clock: MockClock, faults: list[str]) -> None:
    async with running() as stand:
        state = await stand.open()
        await stand.draft()
        stand.logs.faults = list(faults)
        assert await drive(stand, state, None) == greedy((1, 1, 1), 20)
        assert [record.round for record in stand.logs.commits(LOG)] == [1, 2, 3, 4]


async def test_a_fence_ends_serving(autojump_clock: MockClock) -> None:
    async with running() as stand:
        state = await stand.open()
        await stand.draft()
        stand.logs.logs[LOG] += write_record(FenceRecord(epoch=2))
        with pytest.raises(StaleEpoch):
            await stand.propose(state, (9,))
        with pytest.raises(StaleEpoch):
            await stand.verifier.read_output(ROUTER_PEER, SESSION, 0, 1.0)
        await trio.testing.wait_all_tasks_blocked()
        assert stand.engine.free_pages == stand.engine.info.pages
        assert stand.logs.commits(LOG) == []
        assert stand.meters.counts["fenced_appends_total"] == 1


async def test_an_open_repeated_at_a_verifier_that_lost_the_session_is_refused(autojump_clock: MockClock) -> None:
    """Decision 65: whoever was fenced answers nothing as if the session lived there, a late session-open neither."""
    async with running() as stand:
        await stand.open()
        stand.logs.logs[LOG] += write_record(FenceRecord(epoch=2))
        await stand.verifier.cancel_session(ROUTER_PEER, SESSION)  # its `end` record meets the fence
        with pytest.raises(StaleEpoch, match="no longer serves"):
            await stand.open()
        assert stand.verifier.snapshot().sessions[0].reason == "fenced"


async def test_a_log_that_the_store_refuses_for_good_ends_serving(autojump_clock: MockClock) -> None:
    """A damaged log answers 409 for ever: nothing more can be committed here, and nobody may wait for it."""
    async with running() as stand:
        state = await stand.open()
        await stand.draft()
        stand.logs.faults = ["409"]
        with pytest.raises(StaleEpoch, match="refuses the log"):
            await stand.propose(state, (9,))
        await trio.testing.wait_all_tasks_blocked()
        assert stand.engine.free_pages == stand.engine.info.pages


async def test_cancel_frees_and_ends_the_log(autojump_clock: MockClock) -> None:
    async with running() as stand:
        await stand.open()
        await stand.draft(drafter=VERIFIER)
        await stand.verifier.read_output(ROUTER_PEER, SESSION, 0, 20.0)
        started = trio.current_time()
        await stand.verifier.cancel_session(ROUTER_PEER, SESSION)
        assert trio.current_time() - started < 0.5
        assert stand.engine.free_pages == stand.engine.info.pages
        assert read_records(stand.logs.logs[LOG])[-1][0] == EndRecord(epoch=1, end=Action.FAIL, reason="cancelled")
        _, page = await stand.read_all()
        assert (page.finish, page.reason) == (Action.FAIL, "cancelled")
        await stand.verifier.cancel_session(ROUTER_PEER, SESSION)


async def test_a_session_can_be_cancelled_while_its_prompt_is_run(autojump_clock: MockClock) -> None:
    async with running({"context_tokens": 1024, "pages": 128, "pass_s": 1.0}, max_batch_tokens=128) as stand:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: stand.open(prompt=(1,) * 900))
            await trio.sleep(2.5)
            started = trio.current_time()
            await stand.verifier.cancel_session(ROUTER_PEER, SESSION)
            assert trio.current_time() - started < 0.5
            assert stand.engine.free_pages == stand.engine.info.pages


async def test_non_finite_logits_fail_their_session_alone(autojump_clock: MockClock) -> None:
    async with running() as stand:
        await stand.open()
        await stand.open(session=b"x" * 16, prompt=(1, 1, 1))
        stand.engine.poison_latest()
        await stand.draft(drafter=VERIFIER)
        await stand.draft(session=b"x" * 16, drafter=VERIFIER)
        assert (await stand.read_all())[0] == greedy((1, 1, 1), 20)
        bad, page = await stand.read_all(b"x" * 16)
        assert bad == []
        assert page.finish is Action.FAIL
        assert "non-finite" in str(page.reason)
        (end,) = [entry for entry, _ in read_records(stand.logs.logs[log_of(b"x" * 16)])]
        assert isinstance(end, EndRecord)


async def test_output_waits_and_then_says_nothing(autojump_clock: MockClock) -> None:
    async with running() as stand:
        await stand.open()
        started = trio.current_time()
        page = await stand.verifier.read_output(ROUTER_PEER, SESSION, 0, 7.0)
        assert (page.tokens, page.final) == ((), False)
        assert trio.current_time() - started == pytest.approx(7.0)


async def test_repeated_opens(autojump_clock: MockClock) -> None:
    """Decision 29."""
    async with running() as stand:
        first = await stand.open()
        assert await stand.open() == first
        with pytest.raises(Conflict):
            await stand.open(prompt=(1, 1))
        with pytest.raises(Conflict):
            await stand.open(contract(max_new=3))
        with pytest.raises(StaleEpoch):
            await stand.open(epoch=0)
        with pytest.raises(IllFormed, match="resume"):
            await stand.open(epoch=2)
        assert len(stand.engine.passes) < 40


async def test_two_opens_at_once_make_one_session(autojump_clock: MockClock) -> None:
    async with running() as stand:
        states: list[SessionState] = []

        async def one() -> None:
            states.append(await stand.open())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            nursery.start_soon(one)
        assert states[0] == states[1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"of": contract(target=bytes(32))}, BadContract),
        ({"of": contract(tokenizer=bytes(32))}, BadContract),
        ({"of": contract(rule=65281)}, BadContract),
        ({"of": contract(rule=77)}, BadContract),
        ({"prompt": ()}, IllFormed),
        ({"prompt": (50,)}, IllFormed),
        ({"prompt": (2**32,)}, IllFormed),
        ({"prompt": (1,) * 225}, IllFormed),
        ({"of": contract(max_new=2**40)}, IllFormed),
        ({"epoch": 3}, IllFormed),
    ],
)
async def test_what_cannot_be_served_is_refused_before_anything_is_made(
    autojump_clock: MockClock, changes: dict[str, Any], problem: type[Exception]
) -> None:
    async with running() as stand:
        with pytest.raises(problem):
            await stand.open(**({"of": contract()} | changes))
        assert stand.logs.logs == {}
        assert stand.engine.free_pages == stand.engine.info.pages
        await stand.open()


async def test_the_last_position_of_the_context_is_used(autojump_clock: MockClock) -> None:
    """A prompt of 60 and max_new 4 fit a context of 64, however long the proposals are."""
    async with running({"context_tokens": 64}) as stand:
        of = contract(stop=(), max_new=4)
        state = await stand.open(of, prompt=(1,) * 60)
        await stand.draft(of)
        verdict = await stand.propose(state, greedy((1,) * 60, 8))
        assert verdict.emitted == tuple(greedy((1,) * 60, 4))
        assert verdict.action is Action.FINISH


async def test_limits_answer_at_once(autojump_clock: MockClock) -> None:
    async with running(max_sessions=1) as stand:
        await stand.open()
        with pytest.raises(Overloaded) as full:
            await stand.open(session=b"x" * 16)
        assert full.value.retry_after_s == 1
    async with running({"pages": 2}, max_waiting_sessions=0) as stand:
        await stand.open()
        await stand.open(session=b"y" * 16)
        with pytest.raises(Overloaded, match="KV pages"):
            await stand.open(session=b"x" * 16)


async def test_a_pool_smaller_than_the_context_bounds_a_session(autojump_clock: MockClock) -> None:
    """What can never fit is refused up front, not put off for ever."""
    async with running({"pages": 4, "page_tokens": 16, "context_tokens": 256}) as stand:
        assert stand.verifier.status().context_tokens == 64
        with pytest.raises(IllFormed, match="64 tokens"):
            await stand.open(contract(max_new=62))
        await stand.open(contract(max_new=61))


async def test_a_full_store_holds_sessions_and_lets_them_go_on(autojump_clock: MockClock) -> None:
    async with running() as stand:
        state = await stand.open()
        await stand.draft()
        stand.logs.full = "507"
        async with trio.open_nursery() as nursery:

            async def refill() -> None:
                await trio.sleep(30)
                stand.logs.full = ""

            nursery.start_soon(refill)
            assert (await stand.propose(state, greedy((1, 1, 1), 4))).committed == 5
            assert 30 <= trio.current_time() < 40


async def test_a_session_cancelled_while_the_store_is_full_is_freed_at_once(autojump_clock: MockClock) -> None:
    async with running() as stand:
        await stand.open()
        await stand.draft(drafter=VERIFIER)
        stand.logs.full = "507"
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stand.verifier.cancel_session, ROUTER_PEER, SESSION)
            await trio.testing.wait_all_tasks_blocked()
            assert stand.engine.free_pages == stand.engine.info.pages
        with pytest.raises(StaleEpoch):
            await stand.verifier.read_output(ROUTER_PEER, SESSION, 0, 1.0)
        stand.logs.full = ""
        await stand.open(session=b"x" * 16)


async def test_a_store_that_stays_full_ends_the_session_here(autojump_clock: MockClock) -> None:
    async with running(append_give_up_s=20.0) as stand:
        state = await stand.open()
        await stand.draft()
        stand.logs.full = "503"
        with pytest.raises(StaleEpoch, match="too long"):
            await stand.propose(state, (9,))
        assert stand.engine.free_pages == stand.engine.info.pages


async def test_prompts_by_reference(autojump_clock: MockClock) -> None:
    async with running() as stand:
        ref = f"{CACHE}v1/s/-/o/x/1/0/tokens"
        stand.logs.objects[ref] = encode_tokens((1, 1, 1))
        assert (await stand.open(prompt=ref)).digest == digests.prompt_digest(  # type: ignore[arg-type]
            digests.contract_digest(PLAIN), (1, 1, 1)
        )
        with pytest.raises(IllFormed, match="cache"):
            await stand.open(session=b"x" * 16, prompt="https://evil.example/x")  # type: ignore[arg-type]


async def test_an_existing_log_is_a_conflict_but_an_empty_one_is_ours(autojump_clock: MockClock) -> None:
    """Decisions 64, 86."""
    async with running() as stand:
        stand.logs.logs[LOG] = b""
        await stand.open()
        stand.logs.logs[log_of(b"x" * 16)] = write_record(EndRecord(epoch=1, end=Action.FAIL))
        with pytest.raises(Conflict):
            await stand.open(session=b"x" * 16)
        stand.logs.logs[log_of(b"y" * 16)] = write_record(FenceRecord(epoch=1))
        with pytest.raises(Conflict):
            await stand.open(session=b"y" * 16)


async def test_a_log_that_was_fenced_before_its_session_began(autojump_clock: MockClock) -> None:
    """Decision 30: the router is told that its epoch is over, and looks (89)."""
    async with running() as stand:
        stand.logs.logs[LOG] = write_record(FenceRecord(epoch=2))
        with pytest.raises(StaleEpoch):
            await stand.open()


async def test_ended_sessions_are_served_then_gone(autojump_clock: MockClock) -> None:
    """Decision 39: ten minutes of output after the end, then 410."""
    async with running() as stand:
        await stand.open()
        await stand.draft(drafter=VERIFIER)
        tokens, _ = await stand.read_all()
        await trio.sleep(500)
        assert (await stand.read_all())[0] == tokens
        await trio.sleep(120)
        with pytest.raises(SessionClosed):
            await stand.verifier.read_output(ROUTER_PEER, SESSION, 0, 1.0)
        with pytest.raises(UnknownResource):
            await stand.verifier.read_output(ROUTER_PEER, b"?" * 16, 0, 1.0)


async def test_events_reach_the_router(autojump_clock: MockClock) -> None:
    async with running() as stand:
        await stand.open()
        await stand.draft(drafter=VERIFIER)
        await stand.read_all()
        await trio.testing.wait_all_tasks_blocked()
        (event,) = stand.peers.events
        assert (event.kind, event.committed, event.round, event.seq) == (Action.FINISH, 20, 20, 1)


async def test_a_silent_drafter_is_reported_and_the_session_ends_in_time(autojump_clock: MockClock) -> None:
    async with running(first_proposal_deadline_ms=1000, waiting_limit_s=20.0) as stand:
        await stand.open()
        await stand.draft()
        _, page = await stand.read_all()
        assert page.reason == "no drafter for too long"
        await trio.testing.wait_all_tasks_blocked()
        kinds = [event.kind for event in stand.peers.events]
        assert kinds[0] is Action.SWITCH
        assert kinds[-1] is Action.FAIL


async def test_a_period_that_ends_between_two_passes_is_handed_back_at_once(autojump_clock: MockClock) -> None:
    """The first of two tokens takes long to the log, so that both are durable only after the loop has looked."""
    async with running() as stand:
        other = b"o" * 16
        await stand.open(contract(stop=(), max_new=200), session=other)
        await stand.draft(contract(stop=(), max_new=200), session=other, drafter=VERIFIER)
        of = contract(stop=(), low_rounds=1, fallback=(LadderAction.SELF_DECODE,), self_load=100, self_max=2)
        state = await stand.open(of)
        await stand.draft(of)
        stand.logs.append_times[LOG] = [0.001, 0.014, 0.001]
        verdict = await stand.propose(state, (0,))
        assert verdict.action is Action.SELF_DECODE
        await trio.sleep(0.2)
        assert [(event.session, event.kind) for event in stand.peers.events] == [(SESSION, Action.SELF_DECODE)]


async def test_a_pass_that_does_not_end_is_a_standstill(autojump_clock: MockClock) -> None:
    """What the service manager's watchdog is told."""
    async with running({"pass_s": 100.0}) as stand:
        assert stand.verifier.moves(1.0), "idle is no standstill"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stand.open)
            await trio.sleep(30)
            assert stand.verifier.moves(60.0)
            await trio.sleep(40)
            assert not stand.verifier.moves(60.0)
            nursery.cancel_scope.cancel()


async def test_snapshot_and_status(autojump_clock: MockClock) -> None:
    async with running() as stand:
        await stand.open()
        await stand.draft()
        (session,) = stand.verifier.snapshot().sessions
        assert (session.state, session.drafter, session.max_new) == (State.DRAFTING.name.lower(), DRAFTER, 20)
        assert b"tokens=(" not in msgspec.json.encode(stand.verifier.snapshot())
        status = stand.verifier.status()
        assert (status.instance, status.role, status.model, status.rules) == (VERIFIER, 2, TARGET, (1, 2, 65281))
        assert status.load == 100 * (64 - stand.engine.free_pages) // 64
