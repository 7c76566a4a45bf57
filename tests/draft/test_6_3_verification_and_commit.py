"""Draft 6.3, Verification and Commit: the nine steps, on the verifier's machine. Step 5 is rule 2's."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.problems import LimitExceeded, NotAssigned, SessionClosed, StaleBase, StaleEpoch
from sdcpd.protocol.session_values import Begin, Join, Replay, Stopped
from sdcpd.protocol.terms import Action, LadderAction
from tests.support.cluster import OracleSource, running_cluster
from tests.support.draft_sessions import exchange, session, verifier
from tests.support.messages import DRAFTER, OTHER_DRAFTER, status
from tests.support.toy_engine import ToyEngine, greedy
from tests.support.verifying import PROMPT, Verifying, chain


def assigned(**members: Any) -> Verifying:
    bench = Verifying(**members)
    bench.assign()
    return bench


# 1. Authorization


def test_step_1_only_the_named_drafter() -> None:
    """ "the authenticated client MUST be the drafter named in the latest assignment the verifier received for the
    session; otherwise respond 403 with problem type "sdcp-not-assigned"" """
    bench = assigned()
    for peer, named in ((OTHER_DRAFTER, OTHER_DRAFTER), (OTHER_DRAFTER, DRAFTER), (DRAFTER, OTHER_DRAFTER)):
        with pytest.raises(NotAssigned) as caught:
            bench.propose(20, peer=peer, drafter=named)
        assert (caught.value.status, caught.value.suffix) == (403, "sdcp-not-assigned")


def test_step_1_comes_before_step_2() -> None:
    """ "the verifier performs these steps": a stranger with an old epoch is a stranger."""
    with pytest.raises(NotAssigned):
        assigned().propose(20, peer=OTHER_DRAFTER, drafter=OTHER_DRAFTER, epoch=7)


# 2. Fencing


@pytest.mark.parametrize("epoch", [0, 2])
def test_step_2_the_epoch(epoch: int) -> None:
    """ "if epoch differs from the session epoch, respond 409 with problem type "sdcp-stale-epoch"" """
    bench = assigned()
    bench.good()
    wrong: list[dict[str, Any]] = [{}, {"round": 1}, {"base": 9}]
    for members in wrong:  # before idempotency and before the base check
        with pytest.raises(StaleEpoch) as caught:
            bench.propose(20, epoch=epoch, **members)
        assert (caught.value.status, caught.value.suffix) == (409, "sdcp-stale-epoch")


# 3. Idempotency


def test_step_3_a_verdict_that_exists_is_returned_unchanged() -> None:
    """ "if a verdict for this round already exists, return it unchanged" """
    bench = assigned()
    octets = [encode(bench.good(2)), encode(bench.low()), encode(bench.good())]
    for round_, expected in enumerate(octets, 1):
        for sent in (bench.sent[round_], msgspec.structs.replace(bench.sent[round_], tokens=(9, 9), base=77)):
            answer = bench.submit(sent)
            assert isinstance(answer, Replay)
            assert encode(answer.verdict) == expected
    assert bench.state.round == 3


def test_step_3_an_identical_request_waits_for_that_verdict() -> None:
    """ "if the round is being verified for an identical earlier request, wait for that verdict and return it" """
    bench = assigned()
    bench.propose(20)
    assert bench.propose(20) == Join(round=1)
    assert bench.session.awaited(1) is None
    bench.score(20, 21)
    assert bench.propose(20) == Join(round=1), "scored is not decided: the append is open"
    assert bench.session.awaited(1) is None
    bench.append()
    verdict = bench.session.awaited(1)
    assert verdict is not None
    assert bench.submit(bench.sent[1]) == Replay(verdict=verdict)
    assert len(bench.log) == 1


# 4. Base check


def test_step_4_the_base() -> None:
    """ "if base is not the committed length or base_digest is not d[base], respond 409 with problem type
    "sdcp-stale-base" and the current session-state" """
    bench = assigned()
    bench.good()
    right = bench.digest()
    wrong: list[dict[str, Any]] = [
        {"base": 1},
        {"base": 3},
        {"base_digest": bytes(32)},
        {"base": 0, "base_digest": bench.digest(0)},
    ]
    for members in wrong:
        with pytest.raises(StaleBase) as caught:
            bench.propose(20, **members)
        assert (caught.value.status, caught.value.suffix) == (409, "sdcp-stale-base")
        state = caught.value.state
        assert state is not None
        assert (state.round, state.committed, state.digest) == (1, 2, right)


def test_step_4_the_round() -> None:
    """ "If round is not the last round plus one, respond 409 likewise." """
    bench = assigned()
    bench.good()
    for round_ in (3, 2**64 - 1):
        with pytest.raises(StaleBase) as caught:
            bench.propose(20, round=round_)
        assert caught.value.state == bench.state


def test_step_4_lets_the_drafter_resynchronize() -> None:
    """ "so that the drafter can resynchronize": it goes on from the state in the problem."""
    machine, peer = session(tokens=(7, 8), round=2), verifier()
    machine.propose((9,), status())
    exchange(machine, peer)  # the verifier holds nothing yet: stale base, round 0
    sent = machine.propose(peer.truth(2), status())
    assert (sent.round, sent.base, sent.base_digest) == (1, 0, peer.digest)
    exchange(machine, peer)
    assert machine.tokens_from(0) == peer.tokens


def test_table_2_the_limit() -> None:
    """Table 2: "sdcp-limit 422 Proposal violates m_cap or m_max"; nothing is consumed (decision 57)."""
    bench = assigned()
    for _ in range(4):
        with pytest.raises(LimitExceeded) as caught:
            bench.propose(*[20] * 9)
        assert (caught.value.status, caught.value.suffix, caught.value.m_cap) == (422, "sdcp-limit", 8)
    with pytest.raises(StaleBase):
        bench.propose(*[20] * 9, base=5)  # a stale drafter is told that first
    assert isinstance(bench.propose(*[20] * 8), Begin)


# 6. Scoring


def test_step_6_m_plus_1_positions_behind_the_prefix() -> None:
    """ "the target distributions p[1..M+1] for the positions following the committed prefix, normally by a single
    forward pass over the proposed tokens" """
    bench = assigned()
    answer = bench.propose(20, 21, 22)
    assert isinstance(answer, Begin)
    assert answer.work.tokens == (1, 20, 21, 22), "the row of the last prefix token is p[1]"
    assert answer.work.start == len(PROMPT) - 1
    bench.score(20, 21, 50, 51)
    bench.append()
    answer = bench.propose(60)
    assert isinstance(answer, Begin)
    assert (answer.work.start, answer.work.tokens) == (len(PROMPT) + 3 - 1, (50, 60))


async def test_step_6_sessions_share_a_pass(tmp_path: Path, autojump_clock: MockClock) -> None:
    """ "It MAY batch proposals of many sessions into one pass." """
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(greedy)]) as cluster:
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(cluster.generate, (5, 6, number), 40)
            assert isinstance(cluster.engine, ToyEngine)
            assert max(len(spans) for spans in cluster.engine.passes) > 1


# 7. Acceptance


@pytest.mark.parametrize(
    ("tokens", "best", "accepted", "emitted"),
    [
        ((20, 21, 22), (20, 21, 22, 23), 3, (20, 21, 22, 23)),
        ((20, 21, 22), (20, 50, 22, 23), 1, (20, 50)),
        ((20, 21, 22), (50, 21, 22, 23), 0, (50,)),
        ((20, 2, 22), (20, 2, 22, 23), 3, (20, 2)),  # stop token 2
        ((20, 21, 22), (20, 21, 2, 23), 2, (20, 21, 2)),
    ],
)
def test_step_7_a_tokens_and_one_more(
    tokens: tuple[int, ...], best: tuple[int, ...], accepted: int, emitted: tuple[int, ...]
) -> None:
    """ "yielding a accepted tokens and one additional token. It truncates the emitted tokens after the first stop
    token" """
    verdict = assigned().round(tokens, best)
    assert (verdict.accepted, verdict.emitted) == (accepted, emitted)


@pytest.mark.parametrize(("max_new", "emitted"), [(2, (20, 21)), (3, (20, 21, 22)), (4, (20, 21, 22, 23))])
def test_step_7_at_max_new(max_new: int, emitted: tuple[int, ...]) -> None:
    """ "and at max_new" """
    verdict = assigned(max_new=max_new).round((20, 21, 22), (20, 21, 22, 23))
    assert (verdict.emitted, verdict.action) == (emitted, Action.FINISH)


# 8. Commit


def test_step_8_the_commit_record() -> None:
    """ "appends the emitted tokens to the committed prefix, updates n and d[n], and appends a commit record (epoch,
    round, emitted tokens, n, and d[n])" """
    bench = assigned()
    verdict = bench.round((20, 30), (20, 21, 22))
    (record,) = bench.records
    assert isinstance(record, CommitRecord)
    d2 = chain(bench.contract, PROMPT, (20, 21))[2]
    assert (record.epoch, record.round, record.emitted, record.committed, record.digest) == (1, 1, (20, 21), 2, d2)
    assert (verdict.round, verdict.emitted, verdict.committed, verdict.digest) == (1, (20, 21), 2, d2)


def test_step_8_nothing_is_visible_before_the_append_succeeds() -> None:
    """ "only after that append succeeds does it send the verdict and make the tokens available as output" """
    bench = assigned()
    bench.propose(20)
    bench.score(20, 21)
    assert bench.session.awaited(1) is None
    assert bench.session.output(0) is None
    assert (bench.state.round, bench.state.committed) == (0, 0)
    bench.append("lost")
    assert bench.session.awaited(1) is None
    bench.append()
    assert bench.output == (20, 21)
    assert bench.session.awaited(1) is not None


def test_step_8_a_fenced_append_discards_the_round() -> None:
    """ "If the append fails because the log has been fenced, the verifier MUST discard the round, release no output,
    and stop serving the session." """
    bench = assigned()
    bench.good()
    bench.propose(20)
    bench.score(20, 21)
    bench.fence()
    assert isinstance(bench.append(), Stopped)
    assert [record.round for record in bench.records if isinstance(record, CommitRecord)] == [1]
    for what in (lambda: bench.propose(20), lambda: bench.session.output(0), lambda: bench.session.awaited(2)):
        with pytest.raises(StaleEpoch):
            what()
    with pytest.raises(StaleEpoch):
        bench.assign()
    assert bench.events() == [], "it neither finished nor failed: it lives elsewhere (65)"


def test_step_8_commit_and_verdict_are_one() -> None:
    """ "The commit and the recording of the verdict MUST be atomic with respect to concurrent proposals": at each
    point between two calls, a proposal sees both or neither."""
    bench = assigned()
    sent = bench.next_proposal(20)
    bench.submit(sent)
    seen = []
    for step in (lambda: bench.score(20, 21), bench.append):
        seen.append((bench.state.round, isinstance(bench.submit(sent), Replay)))
        step()
    seen.append((bench.state.round, isinstance(bench.submit(sent), Replay)))
    assert seen == [(0, False), (0, False), (1, True)]


# After the verdict


def test_the_drafter_discards_what_was_not_accepted() -> None:
    """ "the drafter MUST discard its draft state for proposed positions beyond the accepted ones" """
    machine, peer = session(), verifier()
    truth = peer.truth(2)
    wrong = (truth[1] + 1) % 50
    machine.propose((truth[0], wrong, 9, 9), status())
    exchange(machine, peer)
    assert machine.tokens_from(0) == truth
    assert machine.propose((9,), status()).base == 2


@pytest.mark.parametrize("end", [Action.FINISH, Action.FAIL])
def test_table_2_a_closed_session(end: Action) -> None:
    """Table 2: "sdcp-session-closed 410 Session has finished or failed"; a decided round keeps its verdict (60)."""
    bench = assigned(max_new=1 if end is Action.FINISH else 9, fallback=(LadderAction.FAIL,), low_rounds=1)
    verdict = bench.low()
    assert verdict.action is end
    with pytest.raises(SessionClosed) as caught:
        bench.propose(20)
    assert (caught.value.status, caught.value.suffix) == (410, "sdcp-session-closed")
    assert bench.submit(bench.sent[1]) == Replay(verdict=verdict)
