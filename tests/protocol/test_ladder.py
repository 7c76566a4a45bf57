"""Ladders: what an operator writes becomes a contract that never runs out (draft 6.5.2; decision 103)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from sdcpd.protocol.ladder import (
    WRITTEN_ENTRIES_LIMIT,
    Ladder,
    LadderError,
    LadderMembers,
    contract_members,
    named,
    warnings,
)
from sdcpd.protocol.messages import LADDER_ENTRIES_LIMIT
from sdcpd.protocol.terms import LadderAction

REDUCE, SWITCH, SELF, FAIL = (
    LadderAction.REDUCE,
    LadderAction.SWITCH,
    LadderAction.SELF_DECODE,
    LadderAction.FAIL,
)


def escalations_at_most(members: LadderMembers, max_new: int) -> int:
    """The slow twin: play the worst session. Every round is low and gives one token, nothing is ever rewound."""
    tokens = entries = 0
    while True:
        tokens += members.low_rounds
        if tokens >= max_new:  # finish wins over the ladder (decision 76)
            return entries
        if members.fallback[entries] is LadderAction.SELF_DECODE:
            tokens += members.self_max
        entries += 1
        if tokens >= max_new:
            return entries


def test_the_shipped_ladder_is_that_of_decision_103() -> None:
    members = contract_members(Ladder(), max_new=1000)
    assert members.self_max == 64
    assert members.self_load == 100
    assert members.low_rounds == 4
    assert members.low_ratio is UNSET
    assert members.m_max == members.m_init == 32
    repeats = -(-1000 // (4 + 64)) + 16
    assert members.fallback == (REDUCE, SWITCH, *[SELF] * repeats)


def test_long_sessions_get_longer_periods() -> None:
    members = contract_members(Ladder(), max_new=960 * 100)
    assert members.self_max == 100
    assert len(members.fallback) <= LADDER_ENTRIES_LIMIT


@given(
    max_new=st.integers(0, 2_000_000),
    low_rounds=st.integers(1, 50),
    self_max=st.none() | st.integers(1, 100),
    head=st.lists(st.sampled_from(["reduce", "switch", "self_decode"]), max_size=10),
)
def test_a_repeating_ladder_never_runs_out(
    max_new: int, low_rounds: int, self_max: int | None, head: list[str]
) -> None:
    ladder = Ladder(
        fallback=(*head, "self_decode*"),
        low_rounds=low_rounds,
        self_max=UNSET if self_max is None else self_max,
    )
    members = contract_members(ladder, max_new)
    assert len(members.fallback) <= LADDER_ENTRIES_LIMIT
    assert escalations_at_most(members, max_new) <= len(members.fallback)
    assert self_max is None or members.self_max >= self_max
    assert warnings("x", ladder) == ()


def test_a_configured_self_max_is_kept_where_the_entries_suffice() -> None:
    assert contract_members(Ladder(self_max=8), max_new=1000).self_max == 8


def test_entries_without_star_are_taken_as_they_stand() -> None:
    ladder = Ladder(fallback=("self_decode", "reduce", "fail"), low_ratio=30, self_load=50, self_max=7, m_init=4)
    members = contract_members(ladder, max_new=10_000)
    assert members == LadderMembers(
        fallback=(SELF, REDUCE, FAIL), low_rounds=4, low_ratio=30, self_load=50, self_max=7, m_max=32, m_init=4
    )


def test_m_init_above_m_max_is_cut_and_told() -> None:
    ladder = Ladder(m_max=8, m_init=16)
    assert contract_members(ladder, 10).m_init == 8
    assert any("m_init" in text for text in warnings("x", ladder))


@pytest.mark.parametrize(
    ("fallback", "says"),
    [
        ((), "fallback: is empty"),
        (("self_decode*", "fail"), "fallback[0]"),
        (("reduce*",), 'only "self_decode*"'),
        (("reduce", "swich"), 'did you mean "switch"?'),
        (("zzz",), "use one of"),
    ],
)
def test_a_wrong_entry_is_named_with_its_remedy(fallback: tuple[str, ...], says: str) -> None:
    with pytest.raises(LadderError) as caught:
        Ladder(fallback=fallback)
    assert says in str(caught.value)


def test_settings_are_checked_when_read() -> None:
    assert msgspec.convert({"fallback": ["switch", "self_decode*"], "m_max": 8}, Ladder).m_max == 8
    for table in (
        {"fallback": ["switch", "sel_decode"]},
        {"fallback": ["reduce"] * (WRITTEN_ENTRIES_LIMIT + 1)},
        {"m_max": 65},
        {"low_rounds": 0},
        {"self_max": 0},
        {"unheard_of": 1},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(table, Ladder)


def test_warnings_name_what_can_end_a_session() -> None:
    (text,) = warnings("strict", Ladder(fallback=("reduce", "fail")))
    assert text.startswith("ladder.strict.fallback")
    (text,) = warnings("shy", Ladder(self_load=60))
    assert text.startswith("ladder.shy.self_load")


def test_named_ladders() -> None:
    own = Ladder(m_max=4)
    assert named({}, "default", "router.default_ladder") == Ladder()
    assert named({"default": own}, "default", "router.default_ladder") is own
    with pytest.raises(LadderError, match=r"models\.m\.ladder: there is no \[ladder\.fast\].*default, own"):
        named({"own": own}, "fast", "models.m.ladder")
