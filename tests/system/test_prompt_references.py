"""Prompts that go as references: published once, kept alive, read by whoever takes part (draft 5.2; 25, 106, 117)."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from sdcpd.cache.refs import ObjectKind, ObjectName
from sdcpd.protocol.terms import Action
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.router_settings import RouterSettings
from tests.support.cluster import MODEL, Cluster, OracleSource, running_cluster, verifier_uri
from tests.support.toy_engine import greedy
from tests.system.test_cluster import half_right
from tests.system.test_router_restart import ROUTER, Reader

PROMPT = tuple(5 + number % 7 for number in range(100))
LENGTH = 60
SCOPE = b"t" * 16
V1 = verifier_uri(0)
SETTINGS = RouterSettings(inline_prompt_tokens=50, tokens_ttl_ms=60_000)
"""An object lives for a minute and is renewed every 20 s."""


class Wire:
    """What went over the links: the octets of each session-open, assignment and record."""

    def __init__(self, cluster: Cluster) -> None:
        self.bodies: list[tuple[str, str, bytes]] = []
        carry = cluster.network.carry

        async def noting(caller: Any, base_uri: str, request: Any) -> Any:
            self.bodies.append((request.method, request.path, request.body))
            return await carry(caller, base_uri, request)

        cluster.network.carry = noting  # type: ignore[method-assign]

    def sent(self, method: str, path: str) -> list[bytes]:
        return [body for how, where, body in self.bodies if how == method and path in where]


@asynccontextmanager
async def cluster_of(path: Path, pass_s: float = 0.05, **members: Any) -> AsyncIterator[Cluster]:
    with trio.fail_after(7200):
        sources = [OracleSource(half_right) for _ in range(2)]
        settings = members.pop("settings", SETTINGS)
        async with running_cluster(path, sources, router=settings, pass_s=pass_s, **members) as cluster:
            yield cluster


def request(prompt: Sequence[int] = PROMPT, **members: Any) -> GenerationRequest:
    return GenerationRequest(model=MODEL, prompt=tuple(prompt), max_new=LENGTH, stop=(), **members)


def whole(reader: Reader) -> None:
    assert reader.final is not None
    assert reader.final.finish is Action.FINISH, reader.final.reason
    assert reader.tokens == greedy(PROMPT, LENGTH)


def name_of(session: bytes, scope: bytes | None = None) -> str:
    return ObjectName(scope=scope, session=session, epoch=1, round=0, kind=ObjectKind.TOKENS).path


def forget(cluster: Cluster, session: bytes) -> None:
    """As a cache does that restarts: its logs are durable, its objects are not."""
    assert cluster.cache._objects.has(name_of(session), trio.current_time())
    cluster.cache._objects.remove(name_of(session), "", trio.current_time())


async def test_messages_carry_a_reference_and_the_answer_is_the_same(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path) as cluster:
        wire = Wire(cluster)
        async with cluster.router.generation(request(scope=SCOPE)) as generation:
            tokens = [token async for page in generation.pages() for token in page.tokens]
        assert tokens == greedy(PROMPT, LENGTH)
        name, inline = name_of(generation.session, SCOPE), bytes(PROMPT[:20])
        opens, assignments = wire.sent("POST", "sessions"), wire.sent("POST", "assignments")
        records, namings = wire.sent("PUT", "/d/"), wire.sent("PUT", "/drafter")
        assert min(map(len, (opens, assignments, records, namings))) > 0
        for body in (*opens, *assignments, *records, *namings):
            assert name.encode() in body
            assert inline not in body
        assert len(wire.sent("PUT", name)) == 1
        assert cluster.meters.counts["drafter_proposals_total"] > 0


async def test_a_short_prompt_goes_within_the_messages(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path) as cluster:
        wire = Wire(cluster)
        async with cluster.router.generation(request(PROMPT[:50])) as generation:
            tokens = [token async for page in generation.pages() for token in page.tokens]
        assert tokens == greedy(PROMPT[:50], LENGTH)
        assert not wire.sent("PUT", name_of(generation.session))
        assert bytes(PROMPT[:20]) in wire.sent("POST", "sessions")[0]


async def test_its_object_outlives_the_ttl_and_goes_after_the_session(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Renewed while the session lives: a verifier that dies after five lives of the object is replaced."""
    async with cluster_of(tmp_path, pass_s=12.0, verifiers=2) as cluster:
        async with cluster.router.generation(request(speculation=False)) as generation:
            reader = Reader(cluster, generation.session)
            await reader.read(until=25)
            cluster.stop(cluster.router.snapshot().sessions[0].verifier)
            await reader.read()
        whole(reader)
        assert reader.final is not None
        assert reader.final.epoch == 2
        await trio.sleep(120)
        assert cluster.cache.snapshot().objects == 0


async def test_a_cache_that_forgot_it_gets_it_again_with_the_next_open(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with cluster_of(tmp_path, verifiers=2) as cluster:
        async with cluster.router.generation(request()) as generation:
            reader = Reader(cluster, generation.session)
            await reader.read(until=20)
            forget(cluster, reader.session)
            cluster.stop(cluster.router.snapshot().sessions[0].verifier)
            await reader.read()
        whole(reader)


async def abandoned(cluster: Cluster) -> Reader:
    """A session whose router died."""
    async with cluster.router.generation(request()) as generation:
        reader = Reader(cluster, generation.session)
        await reader.read(until=20)
        cluster.stop(ROUTER)
    return reader


@pytest.mark.parametrize("verifier_dies", [False, True])
async def test_a_router_that_restarts_reads_it(tmp_path: Path, verifier_dies: bool, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, pass_s=0.2, verifiers=2) as cluster:
        reader = await abandoned(cluster)
        if verifier_dies:
            cluster.stop(V1)
        await cluster.start_router()
        await reader.read()
        whole(reader)
        (shown,) = cluster.router.snapshot().sessions
        assert shown.prompt_tokens == len(PROMPT)
        assert cluster.meters.counts["adopted_sessions_total"] == 1


async def test_a_restarted_router_without_it_ends_the_session_and_says_why(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with cluster_of(tmp_path, pass_s=1.0) as cluster:
        reader = await abandoned(cluster)
        forget(cluster, reader.session)
        await cluster.start_router()
        await reader.read()
        assert reader.final is not None
        assert (reader.final.finish, reader.final.reason) == (Action.FAIL, "prompt_lost")
        assert reader.tokens == greedy(PROMPT, LENGTH)[: len(reader.tokens)]
        (shown,) = cluster.router.snapshot().sessions
        assert (shown.state, shown.committed_tokens) == ("failed", len(reader.tokens))
        with trio.fail_after(60):
            while cluster.engines[V1].free_pages < cluster.engines[V1].info.pages:
                await trio.sleep(0.5)


async def test_a_session_that_ended_meanwhile_is_read_without_it(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, pass_s=0.2) as cluster:
        reader = await abandoned(cluster)
        await trio.sleep(100)
        assert cluster.verifiers[V1].snapshot().sessions[0].state == "finished"
        assert cluster.cache.snapshot().objects == 0
        await cluster.start_router()
        await reader.read()
        whole(reader)
        (shown,) = cluster.router.snapshot().sessions
        assert shown.state == "finished"
