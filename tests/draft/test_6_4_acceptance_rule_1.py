"""Draft 6.4, rule 1 (greedy)."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from sdcpd.protocol.acceptance import accept_equal, argmax
from sdcpd.protocol.terms import LadderAction
from tests.support.cluster import OracleSource, running_cluster
from tests.support.toy_engine import VOCABULARY, greedy
from tests.support.verifying import Verifying


def test_the_argmax() -> None:
    """ "argmax p[i], where ties are broken in favor of the smallest token identifier" """
    assert argmax((0.1, 0.7, 0.2)) == 1
    assert argmax((0.1, 0.45, 0.45)) == 1
    assert argmax((0.5, 0.5)) == 0
    assert argmax((-1.0, float("-inf"), -1.0)) == 0


@pytest.mark.parametrize(
    ("proposed", "best", "accepted", "additional"),
    [
        ((7, 8, 9), (7, 8, 9, 5), 3, 5),
        ((7, 8, 9), (7, 8, 4, 5), 2, 4),
        ((7, 8, 9), (6, 8, 9, 5), 0, 6),  # later matches do not count
        ((7, 8, 9), (7, 6, 9, 5), 1, 6),
    ],
)
def test_evaluation_stops_at_the_first_that_differs(
    proposed: tuple[int, ...], best: tuple[int, ...], accepted: int, additional: int
) -> None:
    """ "x[i] is accepted if it equals argmax p[i] ... Evaluation stops at the first position that is not accepted.
    The additional token is argmax p[a+1]." """
    found = accept_equal(proposed, best)
    assert (found.accepted, found.additional) == (accepted, additional)


def next_of(context: Sequence[int]) -> int:
    """A small target: its most probable next token is a function of the last two."""
    return (3 * context[-1] + context[-2] + len(context)) % 7 + 3  # never the stop token 2


def target(start: Sequence[int], count: int) -> tuple[int, ...]:
    context = list(start)
    for _ in range(count):
        context.append(next_of(context))
    return tuple(context[len(start) :])


@given(st.lists(st.lists(st.integers(3, 9), min_size=1, max_size=8), min_size=24, max_size=24))
def test_the_output_is_greedy_decoding_whatever_is_proposed(proposals: list[list[int]]) -> None:
    """ "The output is identical to greedy decoding of the target model as computed by the verifier's scoring passes,
    whatever the drafter proposes." """
    bench = Verifying(max_new=24, m_max=8, low_rounds=100, fallback=(LadderAction.FAIL,))
    bench.assign()
    for proposed in proposals:
        if len(bench.output) == 24:
            break
        context = (1, 1, 1, *bench.output)
        best = [next_of((*context, *proposed[:place])) for place in range(len(proposed) + 1)]
        bench.round(tuple(proposed), tuple(best))
    assert bench.output == target((1, 1, 1), 24)[: len(bench.output)]
    assert len(bench.output) == 24, "each round commits at least one token"


@pytest.mark.parametrize("shift", [0, 1, 5])
async def test_the_same_in_a_cluster(tmp_path: Path, autojump_clock: MockClock, shift: int) -> None:
    """The same sentence, for the roles over a toy engine."""

    def shifted(context: Sequence[int], limit: int) -> list[int]:
        return [(token + shift * (place % 3 == 2)) % VOCABULARY for place, token in enumerate(greedy(context, limit))]

    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [OracleSource(shifted)]) as cluster:
            assert (await cluster.generate((5, 6, 7), 50))[0] == greedy((5, 6, 7), 50)
