"""Draft 6.1, Session Creation and Assignment: router and verifier over dispatch in virtual time, and the fleet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from sdcpd.protocol.encoding import decode
from sdcpd.protocol.fleet import DrafterNeed, Fleet, VerifierNeed
from sdcpd.protocol.messages import Assignment, SessionOpen, SessionState, Status
from sdcpd.protocol.problems import BadContract, NotAssigned
from sdcpd.roles.ports import Peer
from tests.support.cluster import BASE, Cluster, OracleSource, running_cluster
from tests.support.messages import DRAFTER, OTHER_DRAFTER, TARGET, TOKENIZER, contract, session_open
from tests.support.tap import Exchange, listen
from tests.support.toy_engine import greedy
from tests.support.verifying import PROMPT, Verifying, chain

VERIFIER_URI = f"{BASE}verifier/"
ROUTER = Peer(uri=f"{BASE}router/", role="router")


def right(context: Sequence[int], limit: int) -> list[int]:
    return greedy(context, limit)


def of(heard: list[Exchange], what: str) -> list[Exchange]:
    return [one for one in heard if one.what == what]


async def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(right)]) as cluster:
            heard = listen(monkeypatch)
            await cluster.generate((5, 6, 7), 20)
    return heard


async def open_at(cluster: Cluster, **members: Any) -> SessionState:
    message = session_open(contract=contract(**members), commit_log=f"{BASE}cache/v1/s/-/l/AAECAwQFBgcICQoLDA0ODw")
    return (await cluster.verifier.open_session(ROUTER, message))[0]


async def test_session_open_has_epoch_1_and_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """ "The router selects a verifier and sends session-open with epoch 1 and a commit_log reference in the MLC." """
    (opened,) = of(await generated(tmp_path, monkeypatch), "POST sessions")
    message = decode(opened.request.body, SessionOpen)
    assert (opened.base_uri, message.epoch) == (VERIFIER_URI, 1)
    assert message.commit_log.startswith(f"{BASE}cache/v1/s/-/l/")


@pytest.mark.parametrize("member", ["target", "tokenizer"])
async def test_a_contract_for_another_model_is_refused(tmp_path: Path, member: str, autojump_clock: MockClock) -> None:
    """ "it MUST refuse a contract whose target digest does not match its model" """
    async with running_cluster(tmp_path, []) as cluster:
        with pytest.raises(BadContract, match=member):
            await open_at(cluster, **{member: b"\xee" * 32})
        assert cluster.verifier.snapshot().sessions == ()


async def test_it_answers_with_round_0_and_d0(tmp_path: Path, autojump_clock: MockClock) -> None:
    """ "computes d[0], and answers with session-state (round 0, committed 0)" """
    async with running_cluster(tmp_path, []) as cluster:
        state = await open_at(cluster)
        assert (state.epoch, state.round, state.committed) == (1, 0, 0)
        assert state.digest == chain(contract(), PROMPT, ())[0]


async def test_the_verifier_is_informed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """ "It first informs the verifier with PUT sessions/{id}/drafter, and then sends the assignment" """
    heard = await generated(tmp_path, monkeypatch)
    order = [one.what for one in heard if one.what in ("PUT sessions/*/drafter", "POST assignments")]
    assert order == ["PUT sessions/*/drafter", "POST assignments"]


async def test_the_assignment_carries_where_the_session_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """ "carrying the current round, committed length, and digest": those that the verifier answered (decision 41)."""
    heard = await generated(tmp_path, monkeypatch)
    told = decode(of(heard, "PUT sessions/*/drafter")[0].response.body, SessionState)
    sent = decode(of(heard, "POST assignments")[0].request.body, Assignment)
    assert (sent.round, sent.committed, sent.digest) == (told.round, told.committed, told.digest)
    assert sent.contract == decode(of(heard, "POST sessions")[0].request.body, SessionOpen).contract


async def test_instances_report_more_often_than_their_ttl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """ "Each instance reports status at intervals shorter than its ttl_ms." """
    async with running_cluster(tmp_path, [OracleSource(right)]) as cluster:
        heard = listen(monkeypatch)
        started = trio.current_time()
        await trio.sleep(30)
        for uri in (VERIFIER_URI, *cluster.drafters):
            reports = [one for one in of(heard, "PUT instances/*/status") if one.caller.uri == uri]
            ttl_s = decode(reports[0].request.body, Status).ttl_ms / 1000
            assert len(reports) > (trio.current_time() - started) / ttl_s


def test_only_the_drafter_of_the_latest_assignment_may_propose() -> None:
    """ "The verifier accepts proposals only from the drafter named in the latest assignment it has received." """
    bench = Verifying()
    with pytest.raises(NotAssigned):
        bench.propose(20)
    bench.assign(DRAFTER)
    bench.good()
    bench.assign(OTHER_DRAFTER)
    with pytest.raises(NotAssigned):
        bench.propose(20)
    bench.propose(20, peer=OTHER_DRAFTER, drafter=OTHER_DRAFTER)


# The router's choice, on the fleet


def status(name: str, **members: Any) -> Status:
    fields: dict[str, Any] = {
        "instance": f"https://{name}.example/drafter/",
        "role": 1,
        "load": 10,
        "queue": 0,
        "ttl_ms": 3000,
        "tokenizer": TOKENIZER,
        "model": name.encode() * 32,
    }
    return Status(**(fields | members))


def choose(fleet: Fleet, now: float = 1.0, drafters: tuple[bytes, ...] | None = None) -> str | None:
    need = DrafterNeed(session=bytes(16), tokenizer=TOKENIZER, vocabulary=None, drafters=drafters)
    found = fleet.choose_drafter(need, now)
    return None if found is None else found.uri.split("/")[2].split(".")[0]


def fleet_of(*statuses: Status) -> Fleet:
    fleet = Fleet()
    for one in statuses:
        fleet.report(one, 0.0)
    return fleet


def test_only_permitted_models_are_selected() -> None:
    """ "The router then selects a drafter whose model is permitted by the contract." """
    fleet = fleet_of(status("a"), status("b", load=90))
    assert choose(fleet) == "a"
    assert choose(fleet, drafters=(b"b" * 32,)) == "b"
    assert choose(fleet, drafters=(b"c" * 32,)) is None


@pytest.mark.parametrize("worse", [{"load": 60}, {"queue": 9}, {"accept_milli": 10}])
def test_low_load_and_queue_and_high_acceptance_are_preferred(worse: dict[str, int]) -> None:
    """ "for example preferring drafters with low load and queue and high recent acceptance" """
    best: dict[str, Any] = {"load": 10, "queue": 0, "accept_milli": 900}
    assert choose(fleet_of(status("a", **(best | worse)), status("b", **best))) == "b"
    assert choose(fleet_of(status("a", **best), status("b", **(best | worse)))) == "a"


def test_an_expired_instance_is_never_assigned() -> None:
    """ "The router MUST NOT assign sessions to an instance whose status has expired." """
    fleet = fleet_of(status("a", ttl_ms=1000), status("b", ttl_ms=3000, load=90))
    verifier = status("v", role=2, model=TARGET, ttl_ms=1000)
    fleet.report(verifier, 0.0)
    need = VerifierNeed(tokenizer=TOKENIZER, target=TARGET, rule=1)
    now = 0.0
    for step in range(1, 40):  # a router that looks often enough is not taken for one that stood still (95)
        now = step / 10
        expected = "a" if now < 1.0 else "b" if now < 3.0 else None
        assert choose(fleet, now) == expected
        assert bool(fleet.verifiers(need, now)) == (now < 1.0)
