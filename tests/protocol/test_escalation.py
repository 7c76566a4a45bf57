"""Low rounds, the ladder and m_cap (draft 6.5; decisions 74 to 80)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol.escalation import Counters, assigned, is_low, may_self_decode, step
from sdcpd.protocol.messages import Contract
from sdcpd.protocol.terms import Action, LadderAction
from tests.support.messages import contract

REDUCE, SWITCH, SELF, FAIL = LadderAction.REDUCE, LadderAction.SWITCH, LadderAction.SELF_DECODE, LadderAction.FAIL


def run(rounds: list[tuple[int, int]], of: Contract, load: int = 0, limit: int = 8) -> list[tuple[Action, int, Any]]:
    """Actions, m_cap and counters after each (a, M)."""
    counters = Counters(limit=limit)
    seen = []
    for accepted, proposed in rounds:
        done = step(counters, of, accepted=accepted, proposed=proposed, load=load, finished=False)
        counters = done.counters
        seen.append((done.action, min(counters.limit, of.m_max), (counters.c, counters.g, counters.j)))
    return seen


@pytest.mark.parametrize(
    ("ratio", "accepted", "proposed", "low"),
    [(None, 0, 4, True), (None, 1, 8, False), (0, 0, 1, True), (50, 1, 4, True), (50, 2, 4, False), (100, 3, 4, True)],
)
def test_low_rounds(ratio: int | None, accepted: int, proposed: int, low: bool) -> None:
    """ "A round is low if 100 * a < low_ratio * M, or, when low_ratio is zero or absent, if a = 0." """
    of = contract() if ratio is None else contract(low_ratio=ratio)
    assert is_low(of, accepted, proposed) is low


def test_the_ladder_is_walked_entry_by_entry_and_then_fails() -> None:
    """ "If no entry remains, it applies 'fail'." R = 2; the list is reduce, switch."""
    seen = run([(0, 4)] * 6, contract(fallback=(REDUCE, SWITCH)))
    assert [action for action, _, _ in seen] == [
        Action.CONTINUE,
        Action.REDUCE,
        Action.CONTINUE,
        Action.SWITCH,
        Action.CONTINUE,
        Action.FAIL,
    ]
    assert [counters[0] for _, _, counters in seen] == [1, 0, 1, 0, 1, 0], "c is cleared when it reaches R"
    assert [m_cap for _, m_cap, _ in seen] == [8, 4, 4, 4, 4, 4]


def test_r_good_rounds_in_a_row_rewind_the_ladder() -> None:
    """ "when g reaches R, where R is low_rounds, j is reset to zero" """
    of = contract(fallback=(REDUCE, SWITCH))
    seen = run([(0, 4), (0, 4), (1, 4), (0, 4), (1, 4), (1, 4)], of)
    assert [counters for _, _, counters in seen] == [(1, 0, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 1, 1), (0, 2, 0)]


def test_reduce_halves_and_good_rounds_restore_one_by_one() -> None:
    """ "max(1, floor(m_cap / 2))"; "SHOULD restore m_cap gradually (for example by one per round)" """
    seen = run([(0, 4), (0, 4), (1, 4), (1, 4), (4, 4), (5, 5), (6, 6)], contract())
    assert [m_cap for _, m_cap, _ in seen] == [8, 4, 5, 6, 7, 8, 8]
    assert run([(0, 1), (0, 1)], contract(), limit=1)[-1][:2] == (Action.REDUCE, 1), "at 1 it uses up its entry"


def test_no_restoration_above_80_percent_load() -> None:
    assert run([(4, 4)], contract(), load=81, limit=4)[-1][1] == 4
    assert run([(4, 4)], contract(), load=80, limit=4)[-1][1] == 5


@pytest.mark.parametrize(("load", "action", "j"), [(30, Action.SELF_DECODE, 1), (31, Action.SWITCH, 2)])
def test_self_decode_depends_on_load(load: int, action: Action, j: int) -> None:
    """ "otherwise the verifier skips it and applies the next entry of the fallback list" """
    of = contract(fallback=(SELF, SWITCH), self_load=30)
    last = run([(0, 4), (0, 4)], of, load=load)[-1]
    assert (last[0], last[2][2]) == (action, j)


def test_self_decode_without_self_load_is_always_skipped() -> None:
    assert not may_self_decode(contract(), 0)
    assert run([(0, 4), (0, 4)], contract(fallback=(SELF, FAIL)))[-1][0] is Action.FAIL
    assert run([(0, 4), (0, 4)], contract(fallback=(SELF,)))[-1][0] is Action.FAIL, "skipped to the end: no entry left"


def test_finish_beats_the_ladder() -> None:
    """Decision 76."""
    done = step(Counters(c=1, j=2, limit=8), contract(), accepted=0, proposed=4, load=0, finished=True)
    assert done.action is Action.FINISH
    assert done.counters.j == 2


def test_an_assignment_sets_the_cap_and_nothing_else() -> None:
    """Decision 42; "j persists across a change of drafter" (6.5.2)."""
    before = Counters(c=1, g=0, j=2, limit=2)
    assert assigned(before, contract(), 5) == Counters(c=1, g=0, j=2, limit=5)
    assert assigned(before, contract(), 64).limit == 8


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8), st.integers(0, 100)), max_size=40),
    st.integers(1, 4),
    st.integers(0, 100),
    st.lists(st.sampled_from([REDUCE, SWITCH, SELF, FAIL]), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(0, 100)),
)
def test_against_an_independent_recomputation(
    rounds: list[tuple[int, int, int]], low_rounds: int, ratio: int, fallback: list[LadderAction], self_load: int | None
) -> None:
    """c, g, j, m_cap and actions from the list of (a, M, load), computed the long way from the draft's words."""
    extra = {} if self_load is None else {"self_load": self_load}
    of = contract(low_rounds=low_rounds, low_ratio=ratio, fallback=tuple(fallback), **extra)
    counters = Counters(limit=8)
    c = g = j = 0
    m_cap = 8
    for a, proposed, load in rounds:
        a = min(a, proposed)
        done = step(counters, of, accepted=a, proposed=proposed, load=load, finished=False)
        counters = done.counters
        low = a == 0 if ratio == 0 else 100 * a < ratio * proposed
        c, g = (c + 1, 0) if low else (0, g + 1)
        if g >= low_rounds:
            j = 0
        if not low and load <= 80:
            m_cap = min(m_cap + 1, 8)
        action = Action.CONTINUE
        if c == low_rounds:
            c = 0
            action = Action.FAIL
            while j < len(fallback):
                entry, j = fallback[j], j + 1
                if entry is SELF and (self_load is None or load > self_load):
                    continue
                action = Action(entry)
                break
            if action is Action.REDUCE:
                m_cap = max(1, m_cap // 2)
        assert (done.action, counters.c, counters.g, counters.j, counters.limit) == (action, c, g, j, m_cap)


def test_the_load_lowers_m_cap_and_gives_it_back() -> None:
    """ "The verifier lowers m_cap when its own load makes long proposals costly" (74). The ladder goes on beneath."""
    of = contract(fallback=(REDUCE, SWITCH))
    low = step(Counters(limit=8), of, accepted=1, proposed=4, load=0, finished=False, ceiling=3).counters
    assert (low.m_cap, low.limit) == (3, 8)
    again = step(low, of, accepted=1, proposed=3, load=0, finished=False, ceiling=8).counters
    assert again.m_cap == 8
    assert step(low, of, accepted=1, proposed=3, load=0, finished=True, ceiling=2).counters.m_cap == 2
    assert assigned(low, of, 6).m_cap == 6, "decision 42: an assignment lifts it"


def test_reduce_halves_the_m_cap_that_the_drafter_knows() -> None:
    of = contract(fallback=(REDUCE, SWITCH), low_rounds=1)
    reduced = step(Counters(limit=8, ceiling=4), of, accepted=0, proposed=4, load=0, finished=False)
    assert (reduced.action, reduced.counters.m_cap) == (Action.REDUCE, 2)
