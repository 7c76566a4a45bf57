"""Log-probabilities end to end: from the verifier's rows to the front end's pages, across failovers (decision 114)."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import UNSET
from trio.testing import MockClock

from sdcpd.protocol.messages import Output
from sdcpd.protocol.terms import Action, session_from_path_id
from sdcpd.roles.generation import GenerationRefused, GenerationRequest
from sdcpd.roles.ports import Peer
from tests.support.cluster import MODEL, Cluster, OracleSource, running_cluster
from tests.support.toy_engine import entry_of, next_logits
from tests.system import test_router_restart as restarted
from tests.system.test_cluster import half_right
from tests.system.test_failover import LENGTH, PROMPT, cluster_of, home

FRONT = Peer(uri="x", role="client")


async def nothing(cluster: Cluster) -> None:
    pass


async def stream(
    cluster: Cluster, blow: Callable[[Cluster], Awaitable[None]] = nothing, **of: Any
) -> tuple[list[int], list[bytes], Output]:
    request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=LENGTH, stop=(), **of)
    tokens: list[int] = []
    entries: list[bytes] = []
    struck = False
    async with cluster.router.generation(request) as generation:
        async for page in generation.pages():
            assert page.from_ == len(tokens)
            assert isinstance(page.logprobs, tuple)
            assert len(page.logprobs) == len(page.tokens), "one entry a token, page by page"
            tokens += page.tokens
            entries += page.logprobs
            if page.final:
                return tokens, entries, page
            if len(tokens) >= 20 and not struck:
                struck = True
                await blow(cluster)
    raise AssertionError("no final page")


def wanted(tokens: list[int], alternatives: int) -> list[bytes]:
    return [entry_of(next_logits((*PROMPT, *tokens[:place])), one, alternatives) for place, one in enumerate(tokens)]


@pytest.mark.parametrize(
    "of",
    [
        {"speculation": True},
        {"speculation": False},
        {"temperature_milli": 900, "top_k": 3},
        {"temperature_milli": 700, "seed": 7},
    ],
)
async def test_each_token_has_the_targets_own_values(tmp_path: Path, of: Any, autojump_clock: MockClock) -> None:
    """Verified, corrected, additional and self-decoded ones, under each rule; of the raw logits (114)."""
    async with running_cluster(tmp_path, [OracleSource(half_right)]) as cluster:
        await cluster.ready()
        tokens, entries, final = await stream(cluster, logprobs=3, **of)
        assert len(tokens) == LENGTH
        assert final.finish is Action.FINISH
        assert entries == wanted(tokens, 3)


@pytest.mark.parametrize("speculation", [True, False])
async def test_a_failover_changes_no_value(tmp_path: Path, speculation: bool, autojump_clock: MockClock) -> None:
    """The new verifier computes anew what the lost one had told; no reader gets a token without its values."""

    async def kill(cluster: Cluster) -> None:
        cluster.stop(home(cluster))

    async with cluster_of(tmp_path) as cluster:
        await cluster.ready()
        tokens, entries, final = await stream(cluster, kill, logprobs=2, speculation=speculation)
        assert final.epoch == 2
        assert entries == wanted(tokens, 2)


async def test_a_reader_from_outside_and_one_that_comes_late(tmp_path: Path, autojump_clock: MockClock) -> None:
    """GET output at the router carries them; what is served from the log after the end does not (the log has none)."""
    async with cluster_of(tmp_path) as cluster:
        await cluster.ready()
        pages: list[Output] = []

        async def look(cluster: Cluster) -> None:
            (session,) = cluster.router.snapshot().sessions
            pages.append(await cluster.router.read_output(FRONT, session_from_path_id(session.session), 5, 1.0))

        tokens, entries, final = await stream(cluster, look, logprobs=0)
        (page,) = pages
        assert page.logprobs == tuple(entries[5 : 5 + len(page.tokens)])
        await trio.sleep(1)
        late = await cluster.router.read_output(FRONT, final.session, 5, 1.0)
        assert (late.tokens, late.logprobs) == (tuple(tokens[5:]), UNSET)


async def test_a_router_that_restarts_still_asks_for_them(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The directory keeps the first session-open; the verifier died meanwhile, so the next one owes all of them."""
    async with restarted.cluster_of(tmp_path) as cluster:
        reader = await restarted.abandoned(cluster, 20, logprobs=1)
        cluster.stop(restarted.V1)
        await cluster.start_router()
        await reader.read()
        reader.whole()
        assert reader.entries == wanted(reader.tokens, 1)


@pytest.mark.parametrize("logprobs", [-1, 21])
async def test_more_than_can_be_told_is_refused(tmp_path: Path, logprobs: int, autojump_clock: MockClock) -> None:
    async with running_cluster(tmp_path, []) as cluster:
        await cluster.ready()
        request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=4, stop=(), logprobs=logprobs)
        with pytest.raises(GenerationRefused) as refused:
            async with cluster.router.generation(request):
                pass
        assert (refused.value.reason, refused.value.param) == ("invalid", "top_logprobs")
