"""Draft 6.7, Output Delivery."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from sdcpd.protocol.messages import Output
from sdcpd.protocol.output_copy import OutputCopy, PageFault
from sdcpd.protocol.terms import Action
from sdcpd.roles.ports import Peer
from tests.support.cluster import BASE, OracleSource, running_cluster
from tests.support.messages import SESSION, contract, session_open
from tests.support.toy_engine import greedy
from tests.support.verifying import PROMPT, Verifying

ROUTER = Peer(uri=f"{BASE}router/", role="router")


def committed() -> Verifying:
    bench = Verifying()
    bench.assign()
    bench.round((20, 21), (20, 21, 22))
    return bench


@pytest.mark.parametrize(("from_", "tokens"), [(0, (20, 21, 22)), (1, (21, 22)), (2, (22,))])
def test_tokens_at_an_index_and_later(from_: int, tokens: tuple[int, ...]) -> None:
    """ "returns the tokens committed at output indices n and later" (zero-based, decision 23)."""
    page = committed().page(from_)
    assert (page.from_, page.tokens, page.final) == (from_, tokens, False)


@pytest.mark.parametrize("from_", [3, 4, 1000])
def test_none_available_is_waited_for(from_: int) -> None:
    """ "waiting up to a server-chosen time if none are available" """
    assert committed().session.output(from_) is None


async def test_how_long_it_waits(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The same sentence, for the role: a page without tokens that is not final, after the time asked for."""
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, []) as cluster:
            message = session_open(commit_log=f"{BASE}cache/v1/s/-/l/AAECAwQFBgcICQoLDA0ODw")
            await cluster.verifier.open_session(ROUTER, message)
            started = trio.current_time()
            page = await cluster.verifier.read_output(ROUTER, SESSION, 0, 5.0)
            assert (page.tokens, page.final) == ((), False)
            assert trio.current_time() - started == pytest.approx(5.0)


def test_only_written_tokens_are_returned() -> None:
    """ "Only tokens whose commit record has been written are returned." """
    bench = committed()
    bench.propose(23)
    bench.score(23, 24)
    seen = [bench.output]
    bench.append()
    assert [*seen, bench.output] == [(20, 21, 22), (20, 21, 22, 23, 24)]


def test_indices_are_stable() -> None:
    """ "Indices are stable": whatever is read later, what was read once stands."""
    bench = committed()
    seen = bench.output
    for token in (30, 31, 32):
        bench.round((token,), (token, token))
        assert bench.output[: len(seen)] == seen
        assert bench.page(len(seen)).tokens == bench.output[len(seen) :]
        seen = bench.output


def test_every_page_carries_the_epoch() -> None:
    """ "every output message carries the session epoch" """
    bench = committed()
    assert bench.page().epoch == 1
    bench.session.cancel("cancelled")
    bench.append()
    assert bench.page().epoch == 1


def test_a_retry_neither_duplicates_nor_loses() -> None:
    """ "so a front end that retries never duplicates or loses tokens" """
    copy = OutputCopy(SESSION, 1, contract(), PROMPT)
    bench = committed()
    for from_ in (0, 0, 1, 3, 2):  # repeats and overlaps
        page = bench.session.output(from_)
        assert page is None or copy.take(page, None) is None
    bench.round((23,), (23, 24))
    assert copy.take(bench.page(1), None) is None
    assert copy.tokens(0) == bench.output == (20, 21, 22, 23, 24)
    assert copy.digest == bench.digest()


def test_output_of_a_lower_epoch_is_discarded() -> None:
    """ "a front end that receives output with a lower epoch than one it has seen discards it" """
    copy = OutputCopy(SESSION, 2, contract(), PROMPT)
    old = Output(session=SESSION, epoch=1, from_=0, tokens=(20,), final=True, finish=Action.FINISH)
    assert copy.take(old, None) is PageFault.OLD_EPOCH
    assert (len(copy), copy.final) == (0, None)


def test_the_final_page_of_a_finished_session() -> None:
    """ "The final output message has final set to true and finish set to "finish" or "fail"." """
    bench = Verifying(stop=(22,))
    bench.assign()
    bench.round((20, 21), (20, 21, 22))
    page = bench.page(1)
    assert (page.tokens, page.final, page.finish) == ((21, 22), True, Action.FINISH)
    assert bench.page(3).final, "also for who has all tokens already"


def test_the_final_page_of_a_failed_session() -> None:
    """The same sentence."""
    bench = committed()
    bench.session.cancel("cancelled")
    assert not bench.page(0).final, "the end is not durable yet"
    bench.append()
    assert (bench.page().final, bench.page().finish) == (True, Action.FAIL)


async def test_a_reader_gets_each_token_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Through router and verifier: `generate` asserts that each page begins where the last ended."""
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(greedy)]) as cluster:
            tokens, last = await cluster.generate((5, 6, 7), 50)
    assert tokens == greedy((5, 6, 7), 50)
    assert (last.final, last.finish) == (True, Action.FINISH)
