"""Several answers to one request: n choices of several prompts, whole and streamed, and one that fails."""

from collections import Counter

import pytest
import trio
from trio.testing import MockClock

from sdcpd.frontend.choices import CHOICES_AT_ONCE
from sdcpd.protocol.draws import choice_seed
from sdcpd.protocol.terms import Action, session_path_id
from sdcpd.roles.generation import GenerationRefused
from tests.support.frontend import EOS, SESSION, Step, make_world, page, tokens_of

HELLO: list[Step] = [page(tokens_of("Hel")), 1.0, page([*tokens_of("lo"), EOS], final=True)]

BROKEN: list[Step] = [
    page(tokens_of("a")),
    1.0,
    page([], final=True, finish=Action.FAIL, reason="verifier_lost"),
]


async def test_whole(autojump_clock: MockClock) -> None:
    """Each prompt counts once, each choice by itself; sub-seeds as decision 115 has them, the same for each prompt."""
    world = make_world(HELLO)
    answer = await world.complete(prompt=["hi", "you"], n=2, temperature=1, seed=-7, speculation={"stats": True})
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer.json["choices"]} == {"Hello"}
    usage = answer.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 24, 29)
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 32
    assert answer.json["metrics"]["speculative_decoding"]["failovers"] == 4
    assert answer.headers["x-sdcp-session"] == ", ".join([session_path_id(SESSION)] * 4)
    requests = world.generations.requests
    assert Counter((request.prompt, request.seed) for request in requests) == Counter(
        (tokens_of(prompt), choice_seed(-7, choice)) for prompt in ("hi", "you") for choice in (0, 1)
    )


@pytest.mark.parametrize("chat", [False, True])
async def test_streamed(chat: bool, autojump_clock: MockClock) -> None:
    """Choices take turns under their index; each ends once, the stream once."""
    world = make_world(HELLO)
    options = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    answer = await (world.chat(**options) if chat else world.complete(**options))
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    texts = dict.fromkeys(range(3), "")
    ends: list[int] = []
    order: list[int] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in ends
        texts[index] += (choice["delta"].get("content") or "") if chat else choice["text"]
        order.append(index)
        if choice["finish_reason"]:
            ends.append(index)
    assert texts == {0: "Hello", 1: "Hello", 2: "Hello"}
    assert sorted(ends) == [0, 1, 2]
    assert order != sorted(order), "they take turns"
    if chat:
        assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 3


async def test_one_that_fails_ends_all(autojump_clock: MockClock) -> None:
    world = make_world(BROKEN)
    answer = await world.complete(n=3)
    assert (answer.status, answer.error["code"]) == (503, "verifier_lost")
    streamed = await world.complete(n=3, stream=True)
    assert streamed.status == 200
    assert [event["error"]["code"] for event in streamed.events if "error" in event] == ["verifier_lost"]
    assert "[DONE]" not in streamed.events
    assert world.generations.open == 0


async def test_one_that_is_refused_refuses_all() -> None:
    world = make_world(HELLO)
    world.generations.refusal = GenerationRefused("overloaded", "all are taken", retry_after_s=3)
    answer = await world.complete(n=3, stream=True)
    assert (answer.status, answer.headers["retry-after"]) == (503, "3")


async def test_a_few_at_a_time(autojump_clock: MockClock) -> None:
    world = make_world(["hang"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: world.complete(n=100))
        await world.generations.wait_open(CHOICES_AT_ONCE)
        await trio.sleep(10)
        assert world.generations.open == CHOICES_AT_ONCE
        nursery.cancel_scope.cancel()
    assert world.generations.open == 0
