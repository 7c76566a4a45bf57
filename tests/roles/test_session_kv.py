"""Sessions share what they have computed: the tokens are those of a cold run, whatever was taken from where."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from sdcpd.cache.block_orders import Tier
from sdcpd.protocol.commit_log import FenceRecord, write_record
from sdcpd.protocol.encoding import encode_tokens
from sdcpd.protocol.log_history import read_history
from sdcpd.protocol.messages import Contract, Output
from sdcpd.protocol.terms import Action
from tests.cache.sim_disk import SimDisk
from tests.roles.test_takeover import TOKENS_REF, resume_of
from tests.roles.test_verifier import ROUTER_PEER, Stand, running
from tests.support.messages import LOG, SESSION, VERIFIER, assignment, contract
from tests.support.paged_toy import PagedToyEngine
from tests.support.toy_engine import entry_of, greedy, next_logits

SMALL: dict[str, Any] = {"pages": 16, "page_tokens": 16, "context_tokens": 128}
LARGE: dict[str, Any] = SMALL | {"pages": 64}
PLAIN = contract(stop=(), max_new=20, low_rounds=100)
SCOPED = contract(stop=(), max_new=20, low_rounds=100, scope=bytes([5]) * 16)


def sid(number: int) -> bytes:
    return bytes([number]) * 16


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple(1 + (first + place * place) % 40 for place in range(length))


def engine_of(stand: Stand) -> PagedToyEngine:
    assert isinstance(stand.engine, PagedToyEngine)
    return stand.engine


async def decode(stand: Stand, number: int, tokens: tuple[int, ...], of: Contract = PLAIN) -> tuple[list[int], Output]:
    """One session from open to end, without a drafter."""
    await stand.open(of, session=sid(number), prompt=tokens)
    await stand.draft(of, session=sid(number), drafter=VERIFIER)
    return await stand.read_all(sid(number))


def cached(page: Output) -> int:
    assert page.stats
    return page.stats.cached_tokens


def ran(stand: Stand, since: int = 0) -> int:
    """Tokens of prompts that were run: those of spans without rows."""
    return sum(len(span.tokens) for spans in stand.engine.passes[since:] for span in spans if not span.rows)


def settled(stand: Stand) -> None:
    engine = engine_of(stand)
    assert engine.free_pages == engine.info.pages
    engine.pool.check_integrity()
    engine.store.check_integrity()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48])
async def test_a_prompt_that_was_seen_is_not_run_again_but_for_its_last_token(
    autojump_clock: MockClock, length: int
) -> None:
    async with running(SMALL, kind=PagedToyEngine) as stand:
        cold, first = await decode(stand, 1, prompt(length))
        before = len(stand.engine.passes)
        warm, second = await decode(stand, 2, prompt(length))
        assert cold == warm == greedy(prompt(length), 20)
        assert cached(first) == 0
        assert cached(second) == (length - 1) // 16 * 16 < length
        assert ran(stand, before) == (length - 1) % 16
        settled(stand)


async def test_the_next_turn_of_a_conversation_finds_the_answer_too(autojump_clock: MockClock) -> None:
    async with running(SMALL, kind=PagedToyEngine) as stand:
        answer, _ = await decode(stand, 1, prompt(30))
        turn = (*prompt(30), *answer, 7, 8, 9)
        text, page = await decode(stand, 2, turn)
        assert text == greedy(turn, 20)
        assert cached(page) == 48, "49 of the first turn's 50 tokens have keys and values"


async def test_choices_of_one_prompt_compute_it_once_and_share_its_pages(autojump_clock: MockClock) -> None:
    async with running(SMALL, kind=PagedToyEngine, prefill_chunk_tokens=16, max_batch_tokens=64) as stand:
        texts: list[list[int]] = []

        async def one(number: int) -> None:
            texts.append((await decode(stand, number, prompt(100)))[0])

        async with trio.open_nursery() as nursery:
            for number in range(1, 5):
                nursery.start_soon(one, number)
        assert texts == [greedy(prompt(100), 20)] * 4
        assert ran(stand) == 99 + 3 * 3, "96 tokens once, and the 3 before the last of each"
        assert "num_preemptions_total" not in stand.meters.counts, "16 pages are enough for four sessions of 8"
        settled(stand)


async def test_scopes_do_not_share(autojump_clock: MockClock) -> None:
    async with running(SMALL, kind=PagedToyEngine) as stand:
        _, first = await decode(stand, 1, prompt(40), PLAIN)
        _, other = await decode(stand, 2, prompt(40), SCOPED)
        _, again = await decode(stand, 3, prompt(40), SCOPED)
        assert [cached(page) for page in (first, other, again)] == [0, 0, 32]


async def test_rejected_tokens_are_never_published(autojump_clock: MockClock) -> None:
    """P=14 and a proposal of 8, none right: the first block is full, but holds what was rejected."""
    async with running(SMALL, kind=PagedToyEngine) as stand:
        state = await stand.open(PLAIN, session=sid(1), prompt=prompt(14))
        await stand.draft(PLAIN, session=sid(1))
        right = greedy(prompt(14), 20)
        verdict = await stand.propose(state, [(token + 1) % 50 for token in right[:8]])
        assert verdict.emitted == (right[0],)
        assert engine_of(stand).store.entries(now=0.0) == [], "15 tokens are known, 14 have keys and values"
        await stand.propose(verdict, right[1:2])
        assert len(engine_of(stand).store.entries(now=0.0)) == 1, "17 are known: the block holds what was committed"
        text, _ = await decode(stand, 2, (*prompt(14), *right[:6]))
        assert text == greedy((*prompt(14), *right[:6]), 20)


async def test_a_session_that_fails_takes_its_blocks_along(autojump_clock: MockClock) -> None:
    async with running(SMALL, kind=PagedToyEngine) as stand:
        await stand.open(PLAIN, session=sid(1), prompt=prompt(40))
        stand.engine.poison_latest()
        await stand.draft(PLAIN, session=sid(1), drafter=VERIFIER)
        _, page = await stand.read_all(sid(1))
        assert page.finish is Action.FAIL
        assert engine_of(stand).store.entries(now=0.0) == []
        text, page = await decode(stand, 2, prompt(40))
        assert text == greedy(prompt(40), 20)
        assert cached(page) == 0


async def test_preempted_sessions_take_up_what_is_left_of_theirs(autojump_clock: MockClock) -> None:
    async with running(SMALL | {"pages": 9}, kind=PagedToyEngine) as stand:
        of = contract(stop=(), max_new=60, low_rounds=100)
        texts: dict[int, Sequence[int]] = {}

        async def one(number: int) -> None:
            texts[number] = (await decode(stand, number, prompt(40, number), of))[0]

        async with trio.open_nursery() as nursery:
            for number in range(1, 4):
                nursery.start_soon(one, number)
        assert texts == {number: greedy(prompt(40, number), 60) for number in range(1, 4)}
        assert stand.meters.counts["num_preemptions_total"] > 0
        settled(stand)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
async def test_blocks_come_back_from_lower_tiers(autojump_clock: MockClock, tier: Tier) -> None:
    below = {"host_blocks": 64} if tier is Tier.HOST else {"disk_blocks": 64, "files": SimDisk()}
    async with running(LARGE | below, kind=PagedToyEngine) as stand:
        for number in (1, 2):
            await decode(stand, number, prompt(100))
        for number in range(3, 15):
            await decode(stand, number, prompt(100, number))
        before = len(stand.engine.passes)
        known = stand.meters.counts["prefix_cache_hits_total"]
        text, page = await decode(stand, 22, prompt(100))
        assert text == greedy(prompt(100), 20)
        assert cached(page) == 96
        assert stand.meters.counts["prefix_cache_hits_total"] == known + 96
        assert ran(stand, before) == 3
        (stats,) = [stats for stats in engine_of(stand).store.stats() if stats.tier is tier]
        assert stats.hits > 0
        assert stats.promotions > 0
        assert stats.demotions > 0
        settled(stand)


async def test_a_restart_finds_its_files_and_another_configuration_does_not(autojump_clock: MockClock) -> None:
    disk = SimDisk()
    below = LARGE | {"disk_blocks": 64, "files": disk}
    async with running(below, kind=PagedToyEngine) as stand:
        for number in (1, 2):
            await decode(stand, number, prompt(100))
        for number in range(3, 15):
            await decode(stand, number, prompt(100, number))
    found: list[int] = []
    for config in ({}, {"rope": 2.0}, {}):
        async with running(below | {"config": config}, kind=PagedToyEngine) as stand:
            await trio.testing.wait_all_tasks_blocked()
            text, page = await decode(stand, 1, prompt(100))
            assert text == greedy(prompt(100), 20)
            found.append(cached(page))
    assert found[0] > 0
    assert found[1:] == [0, 0], "files of another configuration are removed"


async def test_a_session_that_leaves_while_its_blocks_come_disturbs_nobody(autojump_clock: MockClock) -> None:
    async with running(LARGE | {"host_blocks": 64}, kind=PagedToyEngine) as stand:
        for number in (1, 2):
            await decode(stand, number, prompt(100))
        for number in range(3, 15):
            await decode(stand, number, prompt(100, number))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode, stand, 20, prompt(50, 20))
            nursery.start_soon(stand.open, PLAIN, sid(21), prompt(100))
            with trio.fail_after(1.0):
                while not engine_of(stand).store._moves.unsettled:  # the fill waits for the pass that runs
                    await trio.sleep(0.001)
            nursery.start_soon(stand.verifier.cancel_session, ROUTER_PEER, sid(21))
        text, _ = await decode(stand, 22, prompt(100))
        assert text == greedy(prompt(100), 20)
        settled(stand)


@pytest.mark.parametrize("seen", [0, 50, 64, 65, 90])
async def test_a_session_taken_over_tells_of_tokens_whose_blocks_are_there(
    autojump_clock: MockClock, seen: int
) -> None:
    """The prompt's blocks are taken as they are. What is to be told of the output is run, whatever there is of it."""
    of = contract(stop=(), max_new=60, low_rounds=100)
    async with running(LARGE, kind=PagedToyEngine) as first, running(LARGE, kind=PagedToyEngine) as second:
        if seen:
            await decode(second, 9, (*prompt(50), *greedy(prompt(50), 60))[:seen])
        second.logs.logs, second.logs.objects = first.logs.logs, first.logs.objects
        await first.open(of, prompt=prompt(50), logprobs=2)
        await first.draft(of, drafter=VERIFIER)
        while (await first.verifier.session_state(ROUTER_PEER, SESSION)).committed < 40:
            await trio.sleep(0.005)
        first.logs.logs[LOG] += write_record(FenceRecord(epoch=2, by="r#n"))
        history = read_history(first.logs.logs[LOG], of, prompt(50))
        first.logs.objects[TOKENS_REF] = encode_tokens(history.tokens)
        before = len(second.engine.passes)
        await second.open(of, prompt=prompt(50), epoch=2, resume=resume_of(history), logprobs=2)
        page = await second.verifier.read_output(ROUTER_PEER, SESSION, 0, 1.0)
        known = (*prompt(50), *page.tokens)
        assert page.tokens == history.tokens
        assert page.logprobs == tuple(entry_of(next_logits(known[:at]), known[at], 2) for at in range(50, len(known)))
        assert second.engine.passes[before][0].start == (48 if seen else 0), "position 49 has something to tell"
        ordered = assignment(contract=of, drafter=VERIFIER, seq=1, epoch=2)
        await second.verifier.name_drafter(ROUTER_PEER, SESSION, ordered)
        tokens, page = await second.read_all()
        assert tokens == greedy(prompt(50), 60)


@pytest.mark.parametrize("chunk_tokens", [16, 50, 256])
async def test_a_session_that_leaves_while_its_prompt_runs_disturbs_nobody(
    autojump_clock: MockClock, chunk_tokens: int
) -> None:
    """Its pages go while the pass still writes them; what the pass computed is nobody's."""
    async with running(SMALL, kind=PagedToyEngine, prefill_chunk_tokens=chunk_tokens) as stand:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode, stand, 1, prompt(50, 9))
            for number in (2, 3):
                with trio.CancelScope() as leaving:
                    nursery.start_soon(_leave, stand, number, leaving)
                    await stand.open(PLAIN, session=sid(number), prompt=prompt(100, number))
        for number in (2, 3):
            text, page = await decode(stand, 10 + number, prompt(100, number))
            assert text == greedy(prompt(100, number), 20)
            assert cached(page) % 16 == 0
        settled(stand)


async def _leave(stand: Stand, number: int, opening: trio.CancelScope) -> None:
    """In the middle of the first pass that runs some of the session's prompt."""
    first = prompt(1, number)[0]
    while not any(span.tokens[0] == first and not span.start for spans in stand.engine.passes[-1:] for span in spans):
        await trio.sleep(0.001)
    opening.cancel()
    await stand.verifier.cancel_session(ROUTER_PEER, sid(number))
