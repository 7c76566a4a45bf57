"""Operator commands on a cluster of real roles: the same steps as after a failure, and clear refusals."""

from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from sdcpd.protocol.commit_log import FenceRecord
from sdcpd.protocol.problems import Conflict, IllFormed, UnknownResource
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.generation import GenerationRequest
from tests.support.cluster import MODEL, Cluster
from tests.system.test_failover import LENGTH, PROMPT, V1, V2, V3, cluster_of, log_of, stream, whole


def only(cluster: Cluster) -> str:
    return cluster.router.snapshot().sessions[0].session


async def test_failover_to_a_named_verifier(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, verifiers=3) as cluster:

        async def move(verifier: str) -> None:
            to = V3 if verifier != V3 else V2
            done = await cluster.router.commands.fail_over(only(cluster), to.removesuffix("/"))
            assert (done.command, done.session) == ("failover", only(cluster))
            while cluster.router.snapshot().sessions[0].state == "recovering":
                await trio.sleep(0.01)
            assert cluster.router.snapshot().sessions[0].verifier == to

        whole(await stream(cluster, 20, move), epoch=2)


async def test_switch(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, verifiers=1, drafters=2, pass_s=0.1) as cluster:

        async def switch(verifier: str) -> None:
            while (before := cluster.router.snapshot().sessions[0]).state != "drafting":
                await trio.sleep(0.01)
            await cluster.router.commands.switch(only(cluster))
            after = cluster.router.snapshot().sessions[0]
            assert after.drafter != before.drafter

        whole(await stream(cluster, 5, switch), epoch=1)


async def test_cancel(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, verifiers=1) as cluster:

        async def cancel(verifier: str) -> None:
            await cluster.router.commands.cancel(only(cluster))

        _, final = await stream(cluster, 5, cancel)
        assert final.reason == "cancelled"


async def test_fence(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The verifier can commit nothing more; the router finds out, stands back and takes the session again."""
    async with cluster_of(tmp_path, pass_s=0.1) as cluster:

        async def fence(verifier: str) -> None:
            assert (await cluster.router.commands.fence(only(cluster))).epoch == 2

        whole(await stream(cluster, 20, fence, speculation=False), epoch=3)
        fences = [record for record in await log_of(cluster) if isinstance(record, FenceRecord)]
        assert [fence.epoch for fence in fences] == [2, 3]
        assert "#operator-" in str(fences[0].by)
        assert cluster.meters.counts["fenced_appends_total"] == 1


async def test_what_cannot_be_done_is_said(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with cluster_of(tmp_path, verifiers=1) as cluster:
        commands, unknown = cluster.router.commands, session_path_id(b"?" * 16)
        for command in (commands.fail_over, commands.switch, commands.cancel, commands.fence):
            with pytest.raises(UnknownResource):
                await command(unknown)
            with pytest.raises(IllFormed):
                await command("x")
        request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=LENGTH, stop=(), speculation=False)
        async with cluster.router.generation(request) as generation:
            session = session_path_id(generation.session)
            with pytest.raises(Conflict, match="speculation is off"):
                await commands.switch(session)
            with pytest.raises(IllFormed, match="--to"):
                await commands.fail_over(session, "nonsense")
            with pytest.raises(UnknownResource, match="sdcpctl instances"):
                await commands.fail_over(session, "http://nobody/verifier/")
            other = cluster.verifiers[V1].status()
            cluster.router._fleet.report(
                replace(other, instance="http://w.example/verifier/", model=b"?" * 32), trio.current_time()
            )
            with pytest.raises(Conflict, match="another model"):
                await commands.fail_over(session, "http://w.example/verifier/")
            cluster.stop(V1)
            await trio.sleep(4)
            with pytest.raises(Conflict, match="expired"):
                await commands.fail_over(session, V1)
