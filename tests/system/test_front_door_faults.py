"""Faults that others met in the field, as a client would: requests at the client port over real roles.

Each kind is tested once more at the floor where it would arise; here is what all floors together make of it.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from tests.support.cluster import OracleSource, running_cluster
from tests.support.frontend import Answer
from tests.support.toy_engine import VOCABULARY, greedy
from tests.system.test_cluster import half_right, right
from tests.system.test_front_door import PROMPT, Door, text_of, words

CONTEXT = 256
LENGTH = 24
TRUTH = greedy(PROMPT, LENGTH)


@asynccontextmanager
async def door(path: Path, source: Any = right) -> AsyncIterator[Door]:
    with trio.fail_after(3600):
        async with running_cluster(path, [OracleSource(source)]) as cluster:
            yield Door(cluster)


async def both(one: Door, **fields: Any) -> tuple[str, str, int]:
    """Text, finish and tokens, which must be the same whole and streamed."""
    whole = await one.complete(**fields)
    assert whole.status == 200, whole.body
    choice, count = whole.json["choices"][0], whole.json["usage"]["completion_tokens"]
    streamed = await one.complete(stream=True, stream_options={"include_usage": True}, **fields)
    *chunks, usage, _ = streamed.events
    assert text_of(chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert usage["usage"]["completion_tokens"] == count
    return choice["text"], choice["finish_reason"], count


async def test_bug_1_stops_and_caps_inside_accepted_blocks(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Wherever in a block the stop token or the cap lies: cut there, and counted there."""
    async with door(tmp_path) as one:
        for length in range(1, 12):
            assert await both(one, max_tokens=length) == (words(TRUTH[:length]), "length", length)
        for place in (0, 1, 2, 3, 5, 8, 13):
            end = TRUTH.index(TRUTH[place])
            assert await both(one, max_tokens=LENGTH, stop_token_ids=[TRUTH[place]]) == (
                words(TRUTH[:end]),
                "stop",
                end + 1,
            )


async def test_bug_8_edges_of_top_p_and_top_k(tmp_path: Path, autojump_clock: MockClock) -> None:
    """top_p 0 and top_k 1 keep the best token only; top_k 0, -1 and beyond the vocabulary keep all."""
    async with door(tmp_path) as one:
        for edge in ({"top_p": 0}, {"top_k": 1}):
            text, _, count = await both(one, max_tokens=8, temperature=1, **edge)
            assert (text, count) == (words(TRUTH[:8]), 8)
        free = await both(one, max_tokens=8, temperature=1, seed=3)
        for edge in ({"top_k": 0}, {"top_k": -1}, {"top_k": 10**9}, {"top_p": 1}):
            assert await both(one, max_tokens=8, temperature=1, seed=3, **edge) == free


async def test_bug_9_a_seed_is_nobody_elses_business(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with door(tmp_path, half_right) as one:
        seeded = {"max_tokens": LENGTH, "temperature": 1, "seed": 42}
        alone = (await one.complete(**seeded)).json["choices"][0]["text"]
        texts: list[str] = []

        async def ask(**fields: Any) -> None:
            answer = await one.complete(**fields)
            texts.append(answer.json["choices"][0]["text"])

        async with trio.open_nursery() as nursery:
            for _ in range(7):
                nursery.start_soon(lambda: ask(max_tokens=LENGTH, temperature=1))
            nursery.start_soon(lambda: ask(**seeded))
        assert alone in texts
        other = (await one.complete(**seeded | {"seed": 43})).json["choices"][0]["text"]
        assert other != alone
        assert (await one.complete(**seeded, speculation="off")).json["choices"][0]["text"] == alone


async def test_bug_10_the_end_of_the_context(tmp_path: Path, autojump_clock: MockClock) -> None:
    """What is left is used to the last token; what cannot fit opens no session."""
    async with door(tmp_path) as one:
        for room, asked in ((4, 4), (1, None), (1, 1), (5, None)):
            prompt = [5] * (CONTEXT - room)
            _, finish, count = await both(one, prompt=prompt, **({} if asked is None else {"max_tokens": asked}))
            assert (finish, count) == ("length", room if asked is None else asked)
        ended = len(one.cluster.router.snapshot().sessions)
        for prompt, fields, code in (
            ([5] * CONTEXT, {}, "context_length_exceeded"),
            ([5] * (CONTEXT - 4), {"max_tokens": 5}, "context_length_exceeded"),
            ([], {}, None),
        ):
            refused = await one.complete(prompt=prompt, **fields)
            assert (refused.status, refused.error["code"]) == (400, code)
        assert len(one.cluster.router.snapshot().sessions) == ended


async def test_bug_11_ids_beyond_the_vocabulary(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with door(tmp_path) as one:
        for token in (VOCABULARY, 151_936, 2**32 - 1, 2**32):
            refused = await one.complete(prompt=[5, token])
            assert (refused.status, refused.error["param"]) == (400, "prompt")
        assert (await both(one, max_tokens=4, stop_token_ids=[VOCABULARY, 2**32 - 1]))[0] == words(TRUTH[:4])


async def test_bug_12_a_right_drafter_stays_right(tmp_path: Path, autojump_clock: MockClock) -> None:
    """All it proposes is accepted, to the end."""
    async with door(tmp_path) as one:
        answer = await one.complete(max_tokens=60, speculation={"stats": True, "m_max": 4})
    figures = answer.json["metrics"]["speculative_decoding"]
    assert figures["draft_acceptance_rate"] == 1.0
    details = answer.json["usage"]["completion_tokens_details"]
    assert details["rejected_prediction_tokens"] == 0
    assert details["accepted_prediction_tokens"] + figures["num_rounds"] >= 60


async def test_bug_14_stop_strings_over_every_border(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Of any length, anywhere, with blocks of any length: nothing of it is shown, and its last token is counted."""
    whole = words(TRUTH)
    places: Sequence[tuple[int, int]] = [(start, size) for start in (1, 4, 9) for size in (1, 2, 5)]
    async with door(tmp_path) as one:
        for start, size in places:
            stop = whole[start : start + size]
            end = whole.index(stop)
            for limit in (1, 3):
                found = await both(one, max_tokens=LENGTH, stop=[stop, "~"], speculation={"m_max": limit})
                assert found == (whole[:end], "stop", end + size)
        almost = whole[-2:] + "~"
        assert (await both(one, max_tokens=LENGTH, stop=almost))[:2] == (whole, "length")


async def test_bug_21_a_client_that_leaves_before_its_answer_begins(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with door(tmp_path) as one:
        leave = trio.Event()
        leave.set()
        answers = [Answer(), Answer()]
        for answer, stream in zip(answers, (False, True), strict=True):
            await one.complete(max_tokens=200, stream=stream, leave=leave, answer=answer)
        await trio.sleep(2)
        assert one.app.snapshot().requests_running == 0
        assert one.cluster.router.snapshot().in_care == 0
