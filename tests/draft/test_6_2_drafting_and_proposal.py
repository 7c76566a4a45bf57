"""Draft 6.2, Drafting and Proposal: the drafter's machine. Choice of M: tests/drafting/test_length."""

from itertools import pairwise
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from sdcpd.protocol.draft_session import DraftSession
from sdcpd.protocol.draft_steps import Proceed, Resend
from sdcpd.protocol.encoding import decode
from sdcpd.protocol.messages import Proposal, Verdict
from sdcpd.protocol.terms import Action
from tests.support.cluster import OracleSource, running_cluster
from tests.support.draft_sessions import exchange, session, verifier
from tests.support.messages import contract, status
from tests.support.tap import listen
from tests.support.toy_engine import greedy
from tests.support.verifying import chain


def played(machine: DraftSession, tokens: tuple[int, ...], m_cap: int = 8) -> Verdict:
    """One round whose tokens are all accepted, and one more token 9."""
    sent = machine.propose(tokens, status())
    emitted = (*sent.tokens, 9)
    output = (*machine.tokens_from(0), *emitted)
    verdict = Verdict(
        session=sent.session,
        epoch=sent.epoch,
        round=sent.round,
        accepted=len(sent.tokens),
        emitted=emitted,
        committed=len(output),
        digest=chain(machine.contract, machine.prompt, output)[-1],
        action=Action.CONTINUE,
        m_cap=m_cap,
        low=0,
        load=0,
    )
    assert isinstance(machine.verdict(verdict, now=1.0), Proceed)
    return verdict


@pytest.mark.parametrize(("m_max", "m_init", "limit"), [(8, 3, 3), (4, 30, 4), (8, 8, 8), (1, 1, 1)])
def test_m_is_within_m_max_and_m_init_before_the_first_verdict(m_max: int, m_init: int, limit: int) -> None:
    """ "1 <= M <= min(m_max, m_cap), where m_cap is the limit from the last verdict (m_init before the first)" """
    machine = session(contract=contract(max_new=24, m_max=m_max), m_init=m_init)
    assert machine.limit == limit
    for count in (0, limit + 1):
        with pytest.raises(AssertionError):
            machine.propose((7,) * count, status())
    assert len(machine.propose((7,) * limit, status()).tokens) == limit


@pytest.mark.parametrize(("m_cap", "limit"), [(1, 1), (5, 5), (8, 8), (99, 8)])
def test_m_is_within_the_last_verdicts_m_cap(m_cap: int, limit: int) -> None:
    """The same sentence, after a verdict."""
    machine = session(m_init=2)
    played(machine, (7,), m_cap)
    assert machine.limit == limit


def test_base_and_digest_are_those_last_learned_and_rounds_count_up() -> None:
    """ "with base and base_digest equal to the committed length and digest it last learned, and round equal to the
    last verdict's round plus one" """
    machine = session()
    start = chain(machine.contract, machine.prompt, ())[0]
    first = machine.propose((7, 8), status())
    assert (first.round, first.base, first.base_digest) == (1, 0, start)
    machine = session()
    verdict = played(machine, (7, 8))
    second = machine.propose((7,), status())
    assert (second.round, second.base, second.base_digest) == (2, 3, verdict.digest)


def test_an_assignment_in_mid_session_is_where_to_go_on() -> None:
    """The same sentence, for a drafter whose knowledge is its assignment: round 5, two tokens committed."""
    machine = session(tokens=(7, 8), round=5)
    sent = machine.propose((9,), status())
    assert (sent.round, sent.base) == (6, 2)
    assert sent.base_digest == chain(machine.contract, machine.prompt, (7, 8))[2]


def test_one_outstanding_proposal() -> None:
    """ "A drafter MUST NOT have more than one outstanding proposal per session." """
    machine = session()
    sent = machine.propose((7,), status())
    with pytest.raises(AssertionError, match="outstanding"):
        machine.propose((8,), status())
    again = machine.unanswered()
    assert again == Resend(sent), "a retry is the same proposal"
    with pytest.raises(AssertionError, match="outstanding"):
        machine.propose((8,), status())


async def test_one_outstanding_proposal_in_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The same sentence, for the role: rounds come one after the other, each on the verdict of the one before."""
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(greedy)]) as cluster:
            heard = listen(monkeypatch)
            await cluster.generate((5, 6, 7), 60)
    rounds = [
        (decode(one.request.body, Proposal), decode(one.response.body, Verdict))
        for one in heard
        if one.what == "POST proposals"
    ]
    assert len(rounds) > 2
    for (_, verdict), (proposal, _) in pairwise(rounds):
        assert (proposal.round, proposal.base, proposal.base_digest) == (
            verdict.round + 1,
            verdict.committed,
            verdict.digest,
        )
        assert len(proposal.tokens) <= verdict.m_cap


def test_whole_conversations_stay_within_the_rules() -> None:
    """All of the above against a small verifier, to the end of generation."""
    machine, peer = session(), verifier()
    while machine.stopped is None:
        sent = machine.propose(peer.truth(machine.limit), status())
        assert (sent.round, sent.base, sent.base_digest) == (peer.round + 1, len(peer.tokens), peer.digest)
        exchange(machine, peer)
    assert machine.tokens_from(0) == peer.tokens
    assert len(peer.tokens) == 24
