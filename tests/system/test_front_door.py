"""The client port over real roles, in virtual time: what a client sees of failovers, and what is left when it leaves.

The toy engine's 50 tokens are letters, so that answers are texts.
"""

import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tokenizers import Tokenizer, decoders, models
from trio.testing import MockClock

from sdcpd.cache.refs import LogName, parse_path
from sdcpd.frontend.api import FrontendApp
from sdcpd.frontend.keys import Caller, KeyRing, key_digest
from sdcpd.frontend.settings import FrontendSettings
from sdcpd.frontend.text import ModelText
from sdcpd.roles.router_settings import RouterSettings
from tests.support.cluster import MODEL, Cluster, OracleSource, running_cluster, verifier_uri
from tests.support.frontend import Answer, call, make_ports
from tests.support.toy_engine import VOCABULARY, greedy
from tests.system.test_cluster import half_right, right

LETTERS = string.ascii_letters[:VOCABULARY]
PROMPT = (5, 6, 7, 8)
KEY = "key-of-ann-0123456"


def words(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


class Door:
    """A client port in front of a cluster."""

    def __init__(self, cluster: Cluster, keys: KeyRing | None = None, **settings: Any) -> None:
        tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(LETTERS)}, []))
        tokenizer.decoder = decoders.ByteLevel()
        texts = {MODEL: ModelText(MODEL, tokenizer, stop=())}
        self.cluster = cluster
        self.app = FrontendApp(FrontendSettings(**settings), make_ports(), cluster.router, texts, keys)

    async def complete(self, **fields: Any) -> Answer:
        options = {name: fields.pop(name) for name in ("leave", "answer", "headers") if name in fields}
        body = {"model": MODEL, "prompt": list(PROMPT), **fields}
        return await call(self.app, "POST", "/v1/completions", json_body=body, **options)


@asynccontextmanager
async def door_of(path: Path, *, keys: KeyRing | None = None, **options: Any) -> AsyncIterator[Door]:
    with trio.fail_after(3600):
        async with running_cluster(path, [OracleSource(half_right)], **options) as cluster:
            yield Door(cluster, keys)


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event != "[DONE]" and event["choices"])


async def test_a_failover_is_a_pause_and_nothing_else(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with door_of(tmp_path, verifiers=2) as door:
        answer = Answer()

        async def blow() -> None:
            while len(answer.chunks) < 5:
                await trio.sleep(0.01)
            (session,) = [one for one in door.cluster.router.snapshot().sessions if one.state == "drafting"]
            door.cluster.stop(session.verifier)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(blow)
            await door.complete(stream=True, max_tokens=40, speculation={"stats": True}, logprobs=1, answer=answer)
        *chunks, usage, done = answer.events
        assert done == "[DONE]"
        assert text_of(chunks) == words(greedy(PROMPT, 40))
        assert usage["usage"]["completion_tokens"] == 40
        figures = usage["metrics"]["speculative_decoding"]
        assert (figures["failovers"], figures["num_rounds"] > 0) == (1, True)
        told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        assert sum(len(piece["tokens"]) for piece in told) == 40
        pauses = [after - before for (before, _), (after, _) in zip(answer.chunks, answer.chunks[1:], strict=False)]
        assert max(pauses) > 1
        assert b": keep-alive" in answer.body or max(pauses) < 10


async def test_clients_that_leave_leave_nothing_behind(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Bug 21: 50 requests, half of them streamed, dropped after 0.2 s; 2 s later nothing is held for them."""
    router = RouterSettings(max_sessions=64)
    async with door_of(tmp_path, router=router) as door:
        cluster, leave = door.cluster, trio.Event()
        engine = cluster.engine
        free = engine.free_pages

        async def ask(stream: bool) -> None:
            await door.complete(stream=stream, max_tokens=200, leave=leave)

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(ask, number % 2 == 0)
            await trio.sleep(0.2)
            assert cluster.router.snapshot().in_care > 0
            leave.set()
        assert door.app.snapshot().requests_running == 0
        await trio.sleep(2)
        assert cluster.router.snapshot().in_care == 0
        assert engine.free_pages == free
        (drafter,) = cluster.drafters.values()
        assert drafter.snapshot().sessions == ()
        assert (await door.complete(max_tokens=5)).json["choices"][0]["text"] == words(greedy(PROMPT, 5))


async def test_more_than_there_is_room_for_is_refused_at_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with door_of(tmp_path, router=RouterSettings(max_sessions=2)) as door:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await door.complete(max_tokens=30))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        assert sorted(answer.status for answer in answers) == [200, 200, 503, 503, 503]
        for answer in answers:
            if answer.status == 503:
                assert (answer.error["code"], int(answer.headers["retry-after"]) > 0) == ("overloaded", True)
            else:
                assert answer.json["choices"][0]["text"] == words(greedy(PROMPT, 30))


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_proposals_are_no_longer_than_was_asked(tmp_path: Path, limit: int, autojump_clock: MockClock) -> None:
    with trio.fail_after(3600):
        async with running_cluster(tmp_path, [OracleSource(right)]) as cluster:
            answer = await Door(cluster).complete(max_tokens=24, speculation={"m_max": limit, "stats": True})
    figures = answer.json["metrics"]["speculative_decoding"]
    assert len(figures["acceptance_histogram"]) == limit + 1
    assert answer.json["choices"][0]["text"] == words(greedy(PROMPT, 24))
    details = answer.json["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == figures["num_accepted_draft_tokens"] > 0


async def test_a_class_that_does_not_exist_is_refused(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with door_of(tmp_path) as door:
        answer = await door.complete(speculation={"class": "gold"})
        assert (answer.status, answer.error["param"]) == (400, "speculation.class")


async def test_a_groups_sessions_lie_in_its_scope(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Log and objects of the session; with a drafter that reads committed tokens from there, and a failover."""
    caller = Caller(name="ann", group="lab")
    keys = KeyRing({key_digest(KEY): caller})
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    async with door_of(tmp_path, keys=keys, verifiers=2) as door:
        answer = Answer()

        async def blow() -> None:
            while len(answer.chunks) < 3:
                await trio.sleep(0.01)
            (session,) = [one for one in door.cluster.router.snapshot().sessions if one.state == "drafting"]
            door.cluster.stop(session.verifier)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(blow)
            await door.complete(stream=True, max_tokens=30, headers=headers, answer=answer)
        assert text_of(answer.events) == words(greedy(PROMPT, 30))
        store = door.cluster.cache._store
        assert store is not None
        logs = [parse_path(log.name) for log in store._index if "/l/" in log.name]
        assert [log.scope for log in logs if isinstance(log, LogName)] == [caller.scope]
    assert verifier_uri(0) != verifier_uri(1)
