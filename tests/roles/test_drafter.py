"""The drafter role in virtual time, against small verifiers that lose, refuse and hang (draft 6.1, 6.2; 36, 44, 45)."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import trio
from msgspec import UNSET
from structlog.testing import capture_logs
from trio.testing import MockClock

from sdcpd.drafting.lookup_source import LookupSource
from sdcpd.drafting.settings import LookupSettings
from sdcpd.drafting.source import Draft
from sdcpd.protocol.encoding import encode, encode_tokens
from sdcpd.protocol.messages import Assignment, Contract, Proposal, SessionState, Verdict
from sdcpd.protocol.problems import BadContract, Forbidden, IllFormed, Overloaded, Problem, StaleEpoch
from sdcpd.protocol.terms import Action
from sdcpd.roles.ports import Refusal
from tests.support.drafter_world import (
    IDENTITY,
    OTHER_VERIFIER,
    PROMPT,
    ROUTER_PEER,
    TOKENS,
    VOCABULARY,
    Answer,
    idle,
    of_state,
    running,
)
from tests.support.messages import (
    CACHE,
    DRAFTER,
    OTHER_DRAFTER,
    SESSION,
    TOKENIZER,
)
from tests.support.tiny_verifier import TinyVerifier

# Whole sessions


async def test_a_session_is_drafted_to_its_end(autojump_clock: MockClock) -> None:
    async with running() as world:
        verifier, message = world.cluster.add(max_new=200)
        truth = verifier.truth(200)
        await world.assign(message)
        assert not world.cluster.sent, "204 first, work later (44)"
        await idle(world)
        assert verifier.tokens == truth
        assert verifier.closed
        assert len(verifier.verdicts) < 120, "the toy text repeats, so lookup saves rounds"
        assert world.meters.counts["drafter_proposals_total"] == len(world.cluster.sent) == len(verifier.verdicts)
        assert world.declined() == ()
        await world.assign(message)
        await trio.sleep(1)
        assert len(world.cluster.sent) == len(verifier.verdicts), "a repetition after the end is no new session"


@pytest.mark.parametrize("seed", range(6))
async def test_many_sessions_at_once_through_faults(autojump_clock: MockClock, seed: int) -> None:
    draws = random.Random(seed)

    def script(message: Proposal) -> Answer | str | None:
        match draws.randrange(10):
            case 0:
                return "lost"
            case 1:
                return "unanswered"
            case 2:
                return Refusal(503, None, "busy", retry_after_s=draws.choice((None, 0, 1)))
            case 3:
                return "hang"
            case 4 if len(message.tokens) > 1:
                return Refusal(422, "sdcp-limit", "limit", m_cap=draws.choice((None, 1)))
            case _:
                return None

    async with running(verdict_timeout_s=2.0) as world:
        world.cluster.script = script
        expected = {}
        for k in range(8):
            verifier, message = world.cluster.add(bytes([k]) * 16, max_new=30 + k)
            expected[verifier.session] = verifier.truth(30 + k)
            await world.assign(message)
        await idle(world, 900)
        assert {session: verifier.tokens for session, verifier in world.cluster.verifiers.items()} == expected
        assert not any(world.cluster.out.values())
        assert world.declined() == ()


async def test_status_tells_what_the_drafter_is(autojump_clock: MockClock) -> None:
    """Decisions 10, 47, 48."""
    async with running(max_sessions=8) as world:
        world.cluster.script = lambda _: "hang"
        for k in range(3):
            await world.assign(world.cluster.add(bytes([k]) * 16)[1])
        await trio.sleep(0.5)
        status = world.cluster.sent[-1][2].status
        assert (status.instance, status.role, status.load, status.queue) == (DRAFTER, 1, 37, 3)
        assert (status.model, status.tokenizer, status.vocabulary) == (IDENTITY.model, TOKENIZER, VOCABULARY)
        assert (status.boot, status.ttl_ms, status.accept_milli) == (b"b" * 16, 3000, UNSET)
        snapshot = world.drafter.snapshot()
        assert (snapshot.load, len(snapshot.sessions)) == (37, 3)
        assert snapshot.sessions[0].outstanding_tokens == 8
        assert world.drafter.ready


async def test_acceptance_is_reported_as_a_moving_average(autojump_clock: MockClock) -> None:
    async with running() as world:
        await world.assign(world.cluster.add(max_new=300)[1])
        await idle(world)
        accept_milli = world.drafter.status().accept_milli
        assert accept_milli is not UNSET
        assert accept_milli > 500, "by the end the toy text is a loop"
        encode(world.drafter.status())


async def test_drafts_grow_on_a_text_that_repeats(autojump_clock: MockClock) -> None:
    async with running() as world:
        await world.assign(world.cluster.add(max_new=400, m_max=32)[1])
        await idle(world)
        lengths = [len(message.tokens) for _, _, message in world.cluster.sent]
        assert max(lengths) >= 5


# Assignments


async def test_what_is_not_for_this_drafter_is_refused(autojump_clock: MockClock) -> None:
    async with running(session_tokens=20) as world:
        for message, problem in (
            (world.cluster.add(tokenizer=b"\x09" * 32)[1], BadContract),
            (world.cluster.add(drafters=(b"\x09" * 32,))[1], BadContract),
            (world.cluster.add(rule=3)[1], BadContract),
            (of_state(world.cluster.add()[0], drafter=OTHER_DRAFTER), IllFormed),
            (of_state(world.cluster.add()[0], m_init=0), IllFormed),
            (of_state(world.cluster.add()[0], prompt=(1,) * 20), BadContract),
        ):
            with pytest.raises(problem):
                await world.assign(message)
        assert world.drafter.snapshot().sessions == ()


async def test_a_full_drafter_says_so_and_takes_more_when_one_ends(autojump_clock: MockClock) -> None:
    async with running(max_sessions=2) as world:
        messages = [world.cluster.add(bytes([k]) * 16)[1] for k in range(3)]
        await world.assign(messages[0])
        await world.assign(messages[1])
        with pytest.raises(Overloaded) as full:
            await world.assign(messages[2])
        assert full.value.retry_after_s == 1
        await world.assign(messages[1])  # a repetition needs no room
        await idle(world)
        await world.assign(messages[2])


async def test_late_assignments_are_refused_also_after_the_end(autojump_clock: MockClock) -> None:
    async with running() as world:
        verifier, _ = world.cluster.add()
        await world.assign(of_state(verifier, seq=7))
        with pytest.raises(StaleEpoch):
            await world.assign(of_state(verifier, seq=6))
        await idle(world)
        with pytest.raises(StaleEpoch):
            await world.assign(of_state(verifier, seq=6))


async def test_prompt_and_committed_tokens_by_reference(autojump_clock: MockClock) -> None:
    """Decision 25."""
    async with running() as world:
        verifier, _ = world.cluster.add()
        verifier.decode_alone(5)
        prompt_ref = TOKENS.replace("/3/", "/0/")
        message = of_state(verifier, prompt=prompt_ref, committed_tokens=TOKENS)
        with pytest.raises(Overloaded):
            await world.assign(message)
        world.objects.objects = {prompt_ref: encode_tokens(PROMPT), TOKENS: encode_tokens(verifier.tokens)}
        await world.assign(message)
        await idle(world)
        assert verifier.closed


async def test_what_happens_during_a_fetch_is_seen_after_it(autojump_clock: MockClock) -> None:
    async with running(max_sessions=1) as world:
        world.objects.objects = {TOKENS: encode_tokens(PROMPT)}
        world.objects.fetch_s = 1.0
        world.cluster.script = lambda _: "hang"
        first, _ = world.cluster.add()
        second, _ = world.cluster.add(b"2" * 16)
        ends: list[str] = []

        async def assign(message: Assignment) -> None:
            try:
                await world.assign(message)
            except Problem as problem:
                ends.append(type(problem).__name__)
            else:
                ends.append("taken")

        async with trio.open_nursery() as nursery:
            for message in (
                of_state(first, prompt=TOKENS),
                of_state(first, prompt=TOKENS),
                of_state(second, prompt=TOKENS),
            ):
                nursery.start_soon(assign, message)
                await trio.sleep(0.1)
        assert ends == ["taken", "taken", "Overloaded"]
        await trio.sleep(1)
        assert [message.session for _, _, message in world.cluster.sent] == [SESSION]


async def test_references_are_read_only_from_known_caches_within_the_scope(autojump_clock: MockClock) -> None:
    """Decision 21."""
    async with running() as world:
        verifier, _ = world.cluster.add()
        for ref, problem in (
            ("https://evil.example/cache/v1/s/-/o/AAECAwQFBgcICQoLDA0ODw/1/0/tokens", IllFormed),
            (TOKENS.replace("/s/-/", "/s/AAECAwQFBgcICQoLDA0ODw/"), Forbidden),
            (f"{CACHE}secret", IllFormed),
        ):
            with pytest.raises(problem):
                await world.assign(of_state(verifier, prompt=ref))
        world.objects.objects = {TOKENS: b"\xff"}
        with pytest.raises(IllFormed):
            await world.assign(of_state(verifier, prompt=TOKENS))


async def test_a_policy_in_mid_round_changes_nothing_that_is_out(autojump_clock: MockClock) -> None:
    async with running() as world:
        verifier, message = world.cluster.add()
        truth = verifier.truth(40)
        await world.assign(message)
        for seq in range(2, 8):
            await trio.sleep(0.015)
            await world.assign(of_state(verifier, seq=seq, round=0, committed=0, digest=message.digest))
        await idle(world)
        assert verifier.tokens == truth
        assert world.rounds_sent == list(range(1, verifier.round + 1)), "no round was sent twice"


async def test_a_new_epoch_cuts_the_call_to_a_dead_verifier_short(autojump_clock: MockClock) -> None:
    """6.9: a verifier that hangs must not hold the session up once another has it."""
    async with running() as world:
        world.cluster.script = lambda message: "hang" if message.epoch == 1 else None
        verifier, message = world.cluster.add()
        await world.assign(message)
        await trio.sleep(0.5)
        verifier.epoch = 2
        await world.assign(of_state(verifier, seq=2, verifier=OTHER_VERIFIER))
        await idle(world, 5)
        assert verifier.closed
        at, to, first = world.cluster.sent[1]
        assert (to, first.epoch) == (OTHER_VERIFIER, 2)
        assert at == pytest.approx(0.5)


async def test_a_dropped_session_is_gone_at_once(autojump_clock: MockClock) -> None:
    """Decision 45."""
    async with running() as world:
        world.cluster.script = lambda _: "hang"
        await world.assign(world.cluster.add()[1])
        await trio.sleep(0.5)
        await world.drafter.drop_assignment(ROUTER_PEER, SESSION)
        await world.drafter.drop_assignment(ROUTER_PEER, SESSION)
        await idle(world, 0.1)
        assert world.cluster.out == {SESSION: 0}
        await trio.sleep(2)
        assert world.declined() == ()


# Faults


async def test_a_lost_verdict_is_asked_for_with_the_same_octets_and_growing_waits(autojump_clock: MockClock) -> None:
    async with running() as world:
        lost = iter(["unanswered"] + ["lost"] * 6)
        world.cluster.script = lambda _: next(lost, None)
        verifier, message = world.cluster.add()
        truth = verifier.truth(40)
        await world.assign(message)
        await idle(world)
        assert verifier.tokens == truth
        first = world.cluster.sent[:8]
        assert len({encode(message) for _, _, message in first}) == 1
        waits = [after[0] - before[0] - 0.01 for before, after in pairwise(first)]
        for wait, expected in zip(waits, (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2), strict=True):
            assert wait == pytest.approx(expected, rel=0.11)


async def test_an_overloaded_verifier_is_left_alone_for_as_long_as_it_asks(autojump_clock: MockClock) -> None:
    async with running() as world:
        answers = iter([Refusal(503, None, "busy", retry_after_s=7)])
        world.cluster.script = lambda _: next(answers, None)
        await world.assign(world.cluster.add()[1])
        await idle(world)
        assert world.cluster.sent[1][0] - world.cluster.sent[0][0] >= 7.0
        assert world.cluster.sent[1][2] == world.cluster.sent[0][2]


async def test_an_overloaded_verifier_that_names_no_time_is_not_asked_in_a_tight_loop(
    autojump_clock: MockClock,
) -> None:
    for named in (0, None):
        async with running(silence_limit_s=30.0) as world:
            world.cluster.always(Refusal(503, None, "busy", retry_after_s=named))
            await world.assign(world.cluster.add()[1])
            await idle(world, 31)
            assert len(world.cluster.sent) < 20


async def test_a_silent_verifier_loses_its_session_and_the_router_hears_at_once(autojump_clock: MockClock) -> None:
    """Decisions 45 and 102."""
    async with running(silence_limit_s=30.0) as world:
        world.cluster.script = lambda _: "hang"
        await world.assign(world.cluster.add()[1])
        await idle(world, 31)
        assert trio.current_time() == pytest.approx(30.0, abs=0.1)
        assert len(world.cluster.sent) == 3, "10 s a call"
        await trio.sleep(0.06)
        assert world.declined() == (SESSION,)


async def test_a_session_out_of_reach_is_declined_until_it_is_assigned_again(autojump_clock: MockClock) -> None:
    async with running() as world:
        verifier, message = world.cluster.add()
        verifier.decode_alone(4)
        await world.assign(message)
        await idle(world, 1)
        await trio.sleep(0.1)
        assert world.declined() == (SESSION,)
        world.objects.objects = {TOKENS: encode_tokens(verifier.tokens)}
        await world.assign(of_state(verifier, seq=2, committed_tokens=TOKENS))
        await idle(world)
        assert verifier.closed
        await trio.sleep(1.1)
        assert world.declined() == ()


async def test_a_verdict_that_does_not_verify_is_an_error_line_without_tokens(autojump_clock: MockClock) -> None:
    with capture_logs() as lines:
        async with running() as world:
            message = world.cluster.add()[1]
            world.cluster.script = lambda sent: Verdict(
                session=SESSION,
                epoch=1,
                round=sent.round,
                accepted=0,
                emitted=(11,),
                committed=1,
                digest=b"\x00" * 32,
                action=Action.CONTINUE,
                m_cap=8,
                low=0,
                load=0,
            )
            await world.assign(message)
            await idle(world)
    errors = [line for line in lines if line["log_level"] == "error"]
    assert len(errors) == 1
    assert errors[0]["reason"] == "bad-verdict"
    assert {"session", "epoch", "round"} <= errors[0].keys()
    assert "11" not in str({k: v for k, v in errors[0].items() if k != "session"})


async def test_a_confused_verifier_is_not_asked_in_a_tight_loop(autojump_clock: MockClock) -> None:
    async with running() as world:
        verifier, message = world.cluster.add()

        def script(sent: Proposal) -> Refusal:
            state = SessionState(session=SESSION, epoch=1, round=sent.round, committed=0, digest=verifier.digest)
            return Refusal(409, "sdcp-stale-base", "moved on", state=state)

        world.cluster.script = script
        await world.assign(message)
        await idle(world, 61)
        assert len(world.cluster.sent) < 30
        await trio.sleep(0.1)
        assert world.declined() == (SESSION,)


async def test_actions_end_the_session_here(autojump_clock: MockClock) -> None:
    for action in (Action.SWITCH, Action.SELF_DECODE, Action.FAIL):
        async with running() as world:
            verifier, message = world.cluster.add()
            verifier.next_action = action
            await world.assign(message)
            await idle(world, 1)
            assert world.rounds_sent == [1]
            await trio.sleep(1.1)
            assert world.declined() == ()


class Mute:
    """A source that never has anything to say."""

    def open(self, session: bytes, prompt: Any, scope: bytes | None = None) -> None: ...
    def extend(self, session: bytes, committed: Any) -> None: ...
    def close(self, session: bytes) -> None: ...
    def propose(self, session: bytes, limit: int, assumed: Any = ()) -> Draft:
        return Draft(tokens=(), matched=0)


async def test_a_drafter_with_nothing_to_say_declines(autojump_clock: MockClock) -> None:
    """Decision 102."""
    async with running(Mute()) as world:
        await world.assign(world.cluster.add()[1])
        await idle(world, 1)
        await trio.sleep(0.1)
        assert (world.declined(), world.cluster.sent) == ((SESSION,), [])
    async with running(session_tokens=20) as world:
        verifier, message = world.cluster.add()
        await world.assign(message)
        await idle(world, 1)
        assert 17 <= len(verifier.tokens) <= 18
        await trio.sleep(0.1)
        assert world.declined() == (SESSION,)


class Recording(LookupSource):
    """Keeps what it was told: one list of tokens a context."""

    def __init__(self) -> None:
        super().__init__(LookupSettings())
        self.contexts: list[list[int]] = []

    def open(self, session: bytes, prompt: Sequence[int], scope: bytes | None = None) -> None:
        self.contexts.append(list(prompt))
        super().open(session, prompt, scope)

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        self.contexts[-1] += committed
        super().extend(session, committed)

    def check(self, verifier: TinyVerifier) -> None:
        """Each committed token once and in order, but for those of the last verdict, which nothing follows."""
        told, committed = self.contexts[-1], [*PROMPT, *verifier.tokens]
        assert told == committed[: len(told)]
        assert len(committed) - len(told) == len(verifier.verdicts[verifier.round].emitted)


async def test_the_source_is_told_each_committed_token_once(autojump_clock: MockClock) -> None:
    source = Recording()
    async with running(source) as world:
        verifier, message = world.cluster.add()
        await world.assign(message)
        await idle(world)
        assert len(source.contexts) == 1
        source.check(verifier)


async def test_the_source_follows_a_session_that_loses_tokens(autojump_clock: MockClock) -> None:
    source = Recording()
    async with running(source) as world:
        verifier, message = world.cluster.add()
        world.cluster.script = lambda sent: "hang" if sent.epoch == 1 and sent.round > 4 else None
        await world.assign(message)
        await trio.sleep(1)
        kept = 2
        verifier.tokens = verifier.tokens[:kept]
        verifier.round, verifier.epoch, verifier.verdicts = 2, 2, {}
        world.objects.objects = {TOKENS: encode_tokens(verifier.tokens)}
        await world.assign(of_state(verifier, seq=2, committed_tokens=TOKENS))
        await idle(world)
        assert verifier.tokens == verifier_truth(verifier.contract)
        assert len(source.contexts) == 2
        source.check(verifier)


def verifier_truth(terms: Contract) -> tuple[int, ...]:
    return TinyVerifier(terms, PROMPT, session=SESSION, vocabulary=VOCABULARY).truth(terms.max_new)
