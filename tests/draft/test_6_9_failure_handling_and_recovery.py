"""Draft 6.9, Failure Handling and Recovery. Each test quotes the sentence it proves, on a cluster of real roles."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from sdcpd.protocol.commit_log import CommitRecord, FenceRecord
from sdcpd.protocol.terms import Action
from sdcpd.roles.generation import GenerationRequest
from tests.support.cluster import MODEL
from tests.support.toy_engine import greedy
from tests.system.test_failover import LENGTH, PROMPT, V1, cluster_of, home, log_of, pages, stream, whole


async def test_drafter_failure(tmp_path: Path, autojump_clock: MockClock) -> None:
    """ "when a drafter's status expires, the router reassigns its sessions. The new drafter starts from the committed
    prefix in the assignment." """
    async with cluster_of(tmp_path, verifiers=1, drafters=2, pass_s=0.1) as cluster:
        request = GenerationRequest(model=MODEL, prompt=PROMPT, max_new=LENGTH, stop=())
        async with cluster.router.generation(request) as generation:
            drafters: list[str] = []

            async def kill() -> None:
                drafter = cluster.router.snapshot().sessions[0].drafter
                assert drafter is not None
                drafters.append(drafter)
                cluster.stop(drafter)

            whole(await pages(generation, 5, kill), epoch=1)
        assert cluster.meters.counts["instance_expirations_total"] == 1
        assert cluster.meters.counts["reassignments_total"] >= 1


async def test_verifier_failure(tmp_path: Path, autojump_clock: MockClock) -> None:
    """ "the router first appends a fence record with the new epoch to the commit_log [...]; it then reads the last
    commit record and opens the session at a new verifier with that epoch and the "resume" member [...]. It then informs
    the verifier of the drafter and sends a new assignment." """
    calls: list[str] = []
    async with cluster_of(tmp_path) as cluster:

        def watch(caller: str, to: str, method: str, path: str) -> None:
            if "/router/" in caller:
                calls.append(f"{method} {path.split('/')[0]}" if "/l/" not in path else f"{method} log")

        async def kill(verifier: str) -> None:
            cluster.network.fault = watch
            cluster.stop(verifier)

        whole(await stream(cluster, 20, kill), epoch=2)
    order = [
        call for call in calls if call in ("GET log", "PATCH log", "POST sessions", "PUT sessions", "POST assignments")
    ]
    assert order[:6] == ["GET log", "PATCH log", "GET log", "POST sessions", "PUT sessions", "POST assignments"]


async def test_a_partitioned_verifier_can_no_longer_commit_or_release_output(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """ "so that the old verifier, even if it is only partitioned, can no longer commit or release output" """
    async with cluster_of(tmp_path, pass_s=0.2) as cluster:
        router = "http://127.0.0.1:8470/router/"

        async def cut(verifier: str) -> None:
            cluster.network.fault = lambda caller, to, *_: "cut" if {caller, to} == {verifier, router} else None

        whole(await stream(cluster, 20, cut, speculation=False), epoch=2)
        records = await log_of(cluster)
        fence = next(place for place, record in enumerate(records) if isinstance(record, FenceRecord))
        assert all(record.epoch == 2 for record in records[fence:])
        held = [one.committed_tokens for one in cluster.verifiers[V1].snapshot().sessions]
        before = sum(len(record.emitted) for record in records[:fence] if isinstance(record, CommitRecord))
        assert held == [before], "what it computed behind the fence never became output"


async def test_a_recovered_old_verifier_cannot_extend_the_session(tmp_path: Path, autojump_clock: MockClock) -> None:
    """ "Proposals carrying an older epoch are rejected, and front ends discard output carrying an older epoch, so a
    recovered old verifier cannot extend the session." """
    async with cluster_of(tmp_path, pass_s=0.2) as cluster:
        healed: list[str] = []

        async def cut(verifier: str) -> None:
            cluster.network.fault = lambda caller, to, *_: "cut" if verifier in (caller, to) else None

            async def heal() -> None:
                while home(cluster) == verifier or cluster.router.snapshot().sessions[0].state == "recovering":
                    await trio.sleep(0.05)
                cluster.network.fault = lambda *_: None
                healed.append(verifier)

            cluster.nursery.start_soon(heal)

        whole(await stream(cluster, 20, cut, speculation=False), epoch=2)
        assert healed
        records = await log_of(cluster)
        rounds = [record.round for record in records if isinstance(record, CommitRecord)]
        assert rounds == list(range(1, len(rounds) + 1))


@pytest.mark.parametrize("every", [2, 3])
async def test_lost_messages(tmp_path: Path, every: int, autojump_clock: MockClock) -> None:
    """ "proposals and their verdicts are idempotent per round, so a drafter retries a proposal whose verdict it did not
    receive" """
    async with cluster_of(tmp_path, verifiers=1) as cluster:
        count = [0]

        def lose(caller: str, to: str, method: str, path: str) -> str | None:
            if path != "proposals":
                return None
            count[0] += 1
            return "lost" if count[0] % every == 0 else None

        cluster.network.fault = lose
        tokens, final = await cluster.generate(PROMPT, LENGTH)
        assert (tokens, final.finish, final.epoch) == (greedy(PROMPT, LENGTH), Action.FINISH, 1)
        assert count[0] > every
        records = [record for record in await log_of(cluster) if isinstance(record, CommitRecord)]
        assert [record.round for record in records] == list(range(1, len(records) + 1))
