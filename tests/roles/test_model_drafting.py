"""Drafting with a model, over an engine that keeps its KV as a real one would: what it runs, and that it is right.

The draft model is the target itself, so every draft must be accepted whole. Whatever goes wrong with positions, the
rewind or the batch shows as a token that is not.
"""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.lowlevel
from msgspec.structs import replace
from trio.testing import MockClock

from sdcpd.drafting.length import Acceptance, LengthChooser, VerifyTime
from sdcpd.drafting.settings import DraftModelSettings, LengthSettings
from sdcpd.drafting.source import MODEL
from sdcpd.engine.spans import Drawn, Sampled
from sdcpd.protocol.distributions import Profile
from sdcpd.protocol.draft_rows import check_rows
from sdcpd.protocol.draws import replay_draw
from sdcpd.protocol.messages import Proposal
from sdcpd.protocol.terms import Action, Rule
from sdcpd.roles.drafting import DraftJob, Lengths, Order
from sdcpd.roles.model_drafting import ModelDrafting
from tests.support.drafter_world import PROMPT, World, idle, of_state, running
from tests.support.drafter_world import VOCABULARY as SMALL
from tests.support.messages import SESSION, TARGET, TOKENIZER
from tests.support.paged_toy import PagedToyEngine
from tests.support.ports import CountingMeters, SeededStream, TrioClock
from tests.support.tiny_verifier import TinyVerifier, toy_next
from tests.support.toy_engine import ToyEngine, greedy

OTHER = b"o" * 16
M = 4


def engine_of(**options: Any) -> ToyEngine:
    return ToyEngine(TrioClock(), model=TARGET, tokenizer=TOKENIZER, **options)


def model_drafting(engine: ToyEngine, **settings: Any) -> ModelDrafting:
    fixed: dict[str, Any] = {"model": "toy", "num_speculative_tokens": M} | settings
    return ModelDrafting(DraftModelSettings(**fixed), engine, TrioClock(), CountingMeters(), SeededStream("drafts"))


def lengths() -> Lengths:
    """Verification so dear that M is as large as it may be."""
    settings = LengthSettings()
    verify = VerifyTime(settings)
    for m in (1, 4, 8) * 10:
        verify.observe(m, 100.0)
    return Lengths(LengthChooser(settings), Acceptance(settings), verify, publishes=False)


def order(session: bytes = SESSION, **changes: Any) -> Order:
    values: dict[str, Any] = {
        "session": session,
        "assumed": (),
        "ahead": False,
        "limit": 32,
        "place": 0,
        "rule": Rule.GREEDY,
        "profile": Profile(),
        "stop": (),
        "lengths": lengths(),
    }
    return Order(**values | changes)


@asynccontextmanager
async def drafting_alone(engine: ToyEngine, **settings: Any) -> AsyncIterator[ModelDrafting]:
    drafting = model_drafting(engine, **settings)
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drafting.run)
            yield drafting
            nursery.cancel_scope.cancel()


def run_tokens(engine: ToyEngine) -> list[int]:
    """How many tokens each pass ran."""
    return [sum(len(span.tokens) for span in spans) for spans in engine.passes]


# The KV of a session (bugs: "Drafter's cache rewound by the wrong amount")


async def test_after_each_verdict_what_is_valid_is_the_committed_tokens_but_the_last(autojump_clock: MockClock) -> None:
    engine = engine_of()
    prompt = [5, 6, 7, 8]
    async with drafting_alone(engine) as drafting:
        await drafting.open(SESSION, prompt, None)
        context = list(prompt)
        for number in range(12):
            draft = await drafting.begin(order()).result()
            assert list(draft.tokens) == greedy(context, M)
            assert draft.matched == MODEL
            kept = number % (M + 1)  # 0..M of the proposed tokens are accepted
            added = greedy(context, M + 1)[kept] if kept == M else 3
            context += [*draft.tokens[:kept], added]
            drafting.extend(SESSION, [*draft.tokens[:kept], added])
            held = drafting._sequences[SESSION]
            valid = held.agreed
            assert held.kv[:valid] == context[:valid]
            assert valid == len(context) - 1 - (kept == M), "x[M] was sampled, and never run"
        # Each pass begins with what is missing, and nothing is run twice.
        assert run_tokens(engine)[0] == len(prompt)
        assert all(count <= 2 for count in run_tokens(engine)[1:])


@pytest.mark.parametrize("planted", [None, 3])
async def test_identity_drafter_m_accepted_in_every_round(autojump_clock: MockClock, planted: int | None) -> None:
    """200 rounds and more, through planted rejections and self-decoding periods."""
    engine = engine_of(
        target=lambda prefix: toy_next(tuple(prefix), SMALL), pages=256, context_tokens=2048, pass_s=0.0001
    )
    async with running(drafting=model_drafting(engine), draft_ahead=False) as world:
        verifier, message = world.cluster.add(max_new=1900, m_max=M)
        plant = Planting(world, verifier, planted)
        await world.assign(message)
        await trio.lowlevel.checkpoint()
        await idle(world)
        while not verifier.closed:
            verifier.decode_alone(7)
            again = of_state(verifier, seq=2 + plant.periods, committed_tokens=plant.publish(verifier))
            verifier.name(again)
            await world.assign(again)
            await idle(world)
        assert verifier.tokens == TinyVerifier(verifier.contract, PROMPT, session=SESSION, vocabulary=SMALL).truth(
            len(verifier.tokens)
        )
        assert len(verifier.verdicts) > 200
        assert plant.clean > (200 if planted is None else 130)
        assert (plant.planted > 60, plant.periods > 5) == (planted is not None, planted is not None)


class Planting:
    """Corrupts a token of every n-th proposal on its way, and sends every tenth such round into self-decoding.

    Every other round must be accepted whole."""

    def __init__(self, world: World, verifier: TinyVerifier, every: int | None) -> None:
        self.clean = self.planted = self.periods = 0
        self._world = world
        self._verifier = verifier
        self._every = every
        answer = verifier.answer

        def bent(sent: Proposal) -> Any:
            corrupt = every is not None and sent.round % every == 0
            if corrupt:
                self.planted += 1
                if self.planted % 10 == 0:
                    self.periods += 1
                    verifier.next_action = Action.SELF_DECODE
                at = sent.round % len(sent.tokens)
                wrong = (sent.tokens[at] + 1) % SMALL
                sent = replace(sent, tokens=(*sent.tokens[:at], wrong, *sent.tokens[at + 1 :]))
            verdict = answer(sent)
            if not corrupt:
                self.clean += 1
                assert verdict.accepted == len(sent.tokens), f"round {sent.round}"
                full = every is not None or verdict.committed >= verifier.contract.max_new - 1
                assert len(sent.tokens) == M or full
            return verdict

        verifier.answer = bent  # type: ignore[method-assign, assignment]  # a bent one

    def publish(self, verifier: TinyVerifier) -> str:
        from sdcpd.protocol.encoding import encode_tokens
        from tests.support.drafter_world import TOKENS

        self._world.objects.objects[TOKENS] = encode_tokens(verifier.tokens)
        return TOKENS


# Passes


async def test_jobs_of_many_sessions_share_passes_and_do_not_see_each_other(autojump_clock: MockClock) -> None:
    engine = engine_of()
    async with drafting_alone(engine) as drafting:
        prompts = {bytes([n]) * 16: [9 + n, 4, 5 + n] for n in range(8)}
        for session, prompt in prompts.items():
            await drafting.open(session, prompt, None)
        jobs = {session: drafting.begin(order(session)) for session in prompts}
        for session, job in jobs.items():
            assert list((await job.result()).tokens) == greedy(prompts[session], M)
        assert len(engine.passes) == M
        assert all(len(spans) == 8 for spans in engine.passes)


async def test_a_long_prompt_comes_in_pieces_and_does_not_hold_others_up(autojump_clock: MockClock) -> None:
    engine = engine_of(pages=64, context_tokens=512)
    async with drafting_alone(engine, prefill_chunk_tokens=64, max_batch_tokens=128) as drafting:
        await drafting.open(SESSION, [3] * 300, None)
        await drafting.open(OTHER, [5, 6], None)
        long, short = drafting.begin(order()), drafting.begin(order(OTHER))
        assert list((await short.result()).tokens) == greedy([5, 6], M)
        assert not long.finished
        assert len(engine.passes) <= M + 1
        assert list((await long.result()).tokens) == greedy([3] * 300, M)
        assert max(run_tokens(engine)) <= 128


async def test_idle_sessions_give_their_pages_up_and_come_back(autojump_clock: MockClock) -> None:
    engine = engine_of(pages=3, page_tokens=16, context_tokens=48)
    async with drafting_alone(engine) as drafting:
        for session in (SESSION, OTHER):
            await drafting.open(session, [7] * 20, None)
        for session in (SESSION, OTHER, SESSION):
            draft = await drafting.begin(order(session)).result()
            assert list(draft.tokens) == greedy([7] * 20, M)
        for session in (SESSION, OTHER):
            drafting.close(session)
        assert engine.free_pages == 3


async def test_without_room_or_context_there_is_nothing_to_say(autojump_clock: MockClock) -> None:
    engine = engine_of(pages=1, page_tokens=16, context_tokens=32)
    async with drafting_alone(engine) as drafting:
        await drafting.open(SESSION, [7] * 20, None)
        assert (await drafting.begin(order()).result()).tokens == (), "no page"
        await drafting.open(SESSION, [7] * 32, None)
        assert (await drafting.begin(order()).result()).tokens == (), "no position"
        await drafting.open(SESSION, [7] * 14, None)
        assert len((await drafting.begin(order(limit=2)).result()).tokens) == 2


async def test_a_draft_never_passes_the_end_of_the_models_context(autojump_clock: MockClock) -> None:
    engine = engine_of(context_tokens=16)
    async with drafting_alone(engine, num_speculative_tokens=8) as drafting:
        await drafting.open(SESSION, [7] * 13, None)
        assert len((await drafting.begin(order()).result()).tokens) == 3


async def test_rows_that_cannot_be_trusted_end_the_draft(autojump_clock: MockClock) -> None:
    engine = engine_of()
    async with drafting_alone(engine) as drafting:
        await drafting.open(SESSION, [5, 6], None)
        job = drafting.begin(order())
        await trio.sleep(0.025)
        engine.poison_latest()
        assert list((await job.result()).tokens) == greedy([5, 6], M)[:2]


async def test_nothing_is_drafted_behind_a_stop_token(autojump_clock: MockClock) -> None:
    truth = greedy([5, 6], M)
    async with drafting_alone(engine_of()) as drafting:
        await drafting.open(SESSION, [5, 6], None)
        draft = await drafting.begin(order(stop=(truth[1],))).result()
        assert list(draft.tokens) == truth[: truth.index(truth[1]) + 1]


# Drafting ahead


async def test_ahead_the_guess_comes_first_and_is_no_part_of_the_draft(autojump_clock: MockClock) -> None:
    engine = engine_of()
    prompt = [5, 6, 7]
    truth = greedy(prompt, 20)
    async with drafting_alone(engine) as drafting:
        await drafting.open(SESSION, prompt, None)
        draft = await drafting.begin(order()).result()
        job = drafting.begin(order(assumed=draft.tokens, ahead=True, place=M))
        await trio.sleep(0.015)
        assert (job.guess, job.finished) == (truth[M], False)
        ahead = await job.result()
        assert list(ahead.tokens) == truth[M + 1 : 2 * M + 1]
        drafting.extend(SESSION, truth[: M + 1])
        before = sum(run_tokens(engine))
        assert list((await drafting.begin(order()).result()).tokens) == truth[M + 1 : 2 * M + 1]
        assert sum(run_tokens(engine)) - before == M, "the last committed token anew, and M - 1 drafted ones"


async def test_a_cancelled_job_costs_the_pass_that_runs_and_no_more(autojump_clock: MockClock) -> None:
    engine = engine_of()
    async with drafting_alone(engine) as drafting:
        await drafting.open(SESSION, [5, 6, 7], None)
        job = drafting.begin(order())
        await trio.sleep(0.015)
        job.cancel()
        assert (await job.result()).tokens == ()
        drafting.extend(SESSION, [9])
        assert list((await drafting.begin(order()).result()).tokens) == greedy([5, 6, 7, 9], M)
        assert len(engine.passes) == 2 + M


async def test_a_session_may_be_closed_while_it_is_drafted(autojump_clock: MockClock) -> None:
    engine = engine_of()
    async with drafting_alone(engine) as drafting:
        await drafting.open(SESSION, [5, 6, 7], None)
        job = drafting.begin(order())
        await trio.sleep(0.015)
        drafting.close(SESSION)
        drafting.close(SESSION)
        assert (await job.result()).tokens == ()
        await trio.sleep(0.1)
        assert engine.free_pages == engine.info.pages
        assert len(engine.passes) == 2


# Rules


async def judged(drafting: ModelDrafting, **changes: Any) -> DraftJob:
    await drafting.open(SESSION, [5, 6, 7], None)
    job = drafting.begin(order(**changes))
    await job.result()
    return job


async def test_under_rule_2_each_token_comes_with_the_row_it_was_drawn_from(autojump_clock: MockClock) -> None:
    engine = engine_of()
    async with drafting_alone(engine, top_k=3, temperature_milli=700) as drafting:
        job = await judged(drafting, rule=Rule.SPECULATIVE_SAMPLING, profile=Profile(top_k=40, top_p_milli=900))
        draft = await job.result()
        assert draft.rows is not None
        assert len(draft.rows) == len(draft.tokens) == M
        check_rows(draft.rows, draft.tokens)
        assert all(1 <= row.entries <= 3 for row in draft.rows)
        judges = [span.judge for spans in engine.passes for span in spans]
        assert all(isinstance(judge, Sampled) for judge in judges)
        own = Profile(temperature_milli=700, top_k=3, top_p_milli=900)
        assert {judge.profile for judge in judges if isinstance(judge, Sampled)} == {own}
        assert len({judge.uniform for judge in judges if isinstance(judge, Sampled)}) == M


async def test_the_guess_under_rule_2_is_no_draw_and_has_no_row(autojump_clock: MockClock) -> None:
    engine = engine_of()
    async with drafting_alone(engine) as drafting:
        job = await judged(drafting, rule=Rule.SPECULATIVE_SAMPLING, assumed=(3, 4), ahead=True)
        draft = await job.result()
        assert draft.rows is not None
        assert len(draft.rows) == len(draft.tokens) == M
        assert engine.passes[0][0].judge is None


@pytest.mark.parametrize(("assumed", "place"), [((), 10), ((3, 4), 12)])
async def test_under_rule_65281_the_targets_own_value_of_each_place_is_used(
    autojump_clock: MockClock, assumed: Sequence[int], place: int
) -> None:
    engine = engine_of()
    profile = Profile(temperature_milli=900, seed=7)
    async with drafting_alone(engine) as drafting:
        job = await judged(
            drafting,
            rule=Rule.REPLAYABLE_SAMPLING,
            profile=profile,
            assumed=tuple(assumed),
            ahead=bool(assumed),
            place=place,
        )
        assert (await job.result()).rows is None
        judges = [span.judge for spans in engine.passes for span in spans]
        expected = [Drawn(profile, (replay_draw(7, place + k),)) for k in range(1, len(judges) + 1)]
        assert judges == expected


async def test_what_a_token_takes_is_measured_without_the_prompt(autojump_clock: MockClock) -> None:
    engine = engine_of(pages=64, context_tokens=512, pass_s=0.01)
    async with drafting_alone(engine, prefill_chunk_tokens=32, max_batch_tokens=32) as drafting:
        await drafting.open(SESSION, [3] * 300, None)
        job = drafting.begin(order())
        await job.result()
        assert job.token_s == pytest.approx(0.01)


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_to_a_session_its_drafts_are_right(autojump_clock: MockClock, seed: int) -> None:
    """Sessions beside each other in a pool too small for all: verdicts of any kind, jobs given up at any moment, drafts
    ahead that fit and that do not, contexts opened anew. The twin is greedy decoding of the whole context."""
    chance = random.Random(seed)
    engine = engine_of(pages=10, page_tokens=8, context_tokens=64)
    right = 0

    async def live(session: bytes, drafting: ModelDrafting) -> None:
        nonlocal right
        context = [chance.randrange(3, 40) for _ in range(chance.randrange(1, 20))]
        await drafting.open(session, context, None)
        while len(context) < 50:
            assumed = tuple(greedy(context, chance.randrange(1, 4))) if chance.random() < 0.3 else ()
            if assumed and chance.random() < 0.3:
                assumed = (*assumed[:-1], 3)
            job = drafting.begin(order(session, assumed=assumed, ahead=bool(assumed), limit=chance.randrange(1, 6)))
            if chance.random() < 0.3:
                await trio.sleep(chance.choice((0, 0.004, 0.01, 0.025)))
                job.cancel()
            draft = await job.result()
            whole = [*context, *assumed]
            truth = greedy(whole, 1 + len(draft.tokens))
            if draft.tokens:
                right += 1
                assert list(draft.tokens) == truth[bool(assumed) :][: len(draft.tokens)]
            if job.guess is not None and not job.cancelled:
                assert job.guess == truth[0]
            if chance.random() < 0.1 and len(context) > 1:
                del context[-chance.randrange(1, len(context)) :]
                await drafting.open(session, context, None)
            else:
                new = [*draft.tokens[: chance.randrange(len(draft.tokens) + 1)], chance.randrange(3, 40)]
                context += new
                drafting.extend(session, new)
        drafting.close(session)

    async with drafting_alone(engine, max_batch_tokens=24, prefill_chunk_tokens=16) as drafting:
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(live, bytes([number]) * 16, drafting)
        assert engine.free_pages == engine.info.pages
    assert right > 50


async def test_a_context_that_was_drafted_for_is_not_run_again(autojump_clock: MockClock) -> None:
    """Blocks of committed tokens are taken by the scope's next session; drafts stay those of a cold run."""
    engine = PagedToyEngine(TrioClock(), model=TARGET, tokenizer=TOKENIZER, pages=32)
    prompt = [4 + place % 20 for place in range(30)]
    async with drafting_alone(engine) as drafting:
        await drafting.open(SESSION, prompt, None)
        context = list(prompt)
        for number in range(12):
            draft = await drafting.begin(order()).result()
            assert list(draft.tokens) == greedy(context, M)
            kept = number % (M + 1)
            added = [*draft.tokens[:kept], greedy(context, M + 1)[kept] if kept == M else 3]
            context += added
            drafting.extend(SESSION, added)
        before = len(engine.passes)
        await drafting.open(OTHER, context, None)
        draft = await drafting.begin(order(OTHER)).result()
        assert list(draft.tokens) == greedy(context, M)
        blocks = (len(context) - 1) // 16
        assert run_tokens(engine)[before] < len(context) - 16 * (blocks - 1)
        await drafting.open(b"s" * 16, context, b"a scope of its o")
        before = len(engine.passes)
        await drafting.begin(order(b"s" * 16)).result()
        assert run_tokens(engine)[before] == len(context), "another scope"
        for session in (SESSION, OTHER, b"s" * 16):
            drafting.close(session)
        assert engine.free_pages == 32
        engine.pool.check_integrity()
        engine.store.check_integrity()
