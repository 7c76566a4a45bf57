"""Speculation of a class goes off and on again by what its sessions show: hysteresis, probes, comparison."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.drafting.speculation_guard import Mode, Sample, SpeculationGuard, Turned
from sdcpd.drafting.traffic_class import TrafficClass


def guard_of(**settings: object) -> SpeculationGuard:
    defaults = {"name": "c", "min_sessions": 2, "window_sessions": 4}
    return SpeculationGuard(msgspec.convert(defaults | settings, TrafficClass))


def session(
    mode: Mode = Mode.FOLLOWING,
    *,
    speculated: bool = True,
    acceptance: float = 0.5,
    ms: float = 10.0,
    looped: bool = False,
) -> Sample:
    return Sample(
        mode=mode,
        speculated=speculated,
        tokens=100,
        decode_ms=100 * ms,
        drafted=100 if speculated else 0,
        accepted=int(100 * acceptance) if speculated else 0,
        looped=looped,
    )


@pytest.mark.parametrize(
    ("setting", "band", "bad", "between", "good"),
    [
        ("acceptance", {"off": 0.2, "on": 0.4}, {"acceptance": 0.1}, {"acceptance": 0.3}, {"acceptance": 0.5}),
        ("ms_per_token", {"off": 50, "on": 40}, {"ms": 60.0}, {"ms": 45.0}, {"ms": 30.0}),
        ("repeated", {"off": 0.5, "on": 0.0}, {"looped": True}, None, {"looped": False}),
    ],
)
def test_evidence_turns_it_off_and_probes_turn_it_on_again(
    setting: str, band: dict[str, float], bad: dict[str, Any], between: dict[str, Any] | None, good: dict[str, Any]
) -> None:
    guard = guard_of(**{setting: band})
    assert guard.ended(session(**bad)) is None, "one session is too few"
    assert guard.ended(session(**bad)) == Turned(on=False, reason=setting)
    assert (guard.on, guard.reason) == (False, setting)
    for sample in (bad, between):
        if sample is not None:
            assert [guard.ended(session(Mode.PROBE, **sample)) for _ in range(4)] == [None] * 4
            assert not guard.on
    turns = [guard.ended(session(Mode.PROBE, **good)) for _ in range(4)]
    assert [turn for turn in turns if turn is not None] == [Turned(on=True, reason=setting)]
    assert (guard.on, guard.reason) == (True, None)


def test_between_off_and_on_it_stays_as_it_is() -> None:
    guard = guard_of(acceptance={"off": 0.2, "on": 0.4})
    assert all(guard.ended(session(acceptance=0.3)) is None for _ in range(20))
    assert guard.on


def test_old_evidence_does_not_count_after_a_turn() -> None:
    guard = guard_of(acceptance={"off": 0.2, "on": 0.4})
    for _ in range(2):
        guard.ended(session(acceptance=0.0))
    assert not guard.on
    assert guard.acceptance is None


def test_kv_pressure_turns_it_off_at_once_and_needs_no_probes() -> None:
    guard = guard_of(kv_usage={"off": 0.9, "on": 0.7})
    assert guard.pressure(0.9) is None
    assert guard.pressure(0.95) == Turned(on=False, reason="kv_usage")
    assert not guard.speculates(Mode.FOLLOWING)
    assert not guard.speculates(Mode.PROBE)
    assert guard.pressure(0.8) is None
    assert not guard.on
    assert guard.admit(0.99) is Mode.FOLLOWING, "pressure is seen without probes"
    assert guard.pressure(0.7) == Turned(on=True, reason="kv_usage")
    assert guard.speculates(Mode.FOLLOWING)


def test_without_the_setting_pressure_changes_nothing() -> None:
    guard = guard_of()
    assert guard.pressure(1.0) is None
    assert guard.on


def test_pressure_that_ends_does_not_undo_what_the_evidence_says() -> None:
    guard = guard_of(acceptance={"off": 0.2, "on": 0.4}, kv_usage={"off": 0.9, "on": 0.7})
    guard.pressure(1.0)
    for _ in range(2):
        assert guard.ended(session(acceptance=0.0)) is None, "it is off already"
    assert guard.reason == "kv_usage"
    assert guard.pressure(0.0) is None
    assert guard.reason == "acceptance"
    assert not guard.on


def test_the_aim_is_held_against_sessions_without_speculation() -> None:
    guard = guard_of(target_ms_per_token=20, compare_share=0.1)
    for _ in range(4):
        assert guard.ended(session(ms=30.0)) is None, "missed, but nobody knows whether plain decoding does better"
    for _ in range(2):
        guard.ended(session(Mode.COMPARED, ms=25.0, speculated=False))
    assert guard.ended(session(ms=30.0)) == Turned(on=False, reason="target_ms_per_token")
    for _ in range(4):
        guard.ended(session(Mode.PROBE, ms=24.5))
    assert not guard.on, "no better than plain by enough"
    turns = [guard.ended(session(Mode.PROBE, ms=23.0)) for _ in range(4)]
    assert any(turn == Turned(on=True, reason="target_ms_per_token") for turn in turns)


def test_the_aim_alone_keeps_it_on_where_speculation_is_the_faster() -> None:
    guard = guard_of(target_ms_per_token=20, compare_share=0.1)
    for _ in range(4):
        guard.ended(session(Mode.COMPARED, ms=40.0, speculated=False))
        assert guard.ended(session(ms=30.0)) is None
    assert guard.on


def test_shares_are_shares_of_the_draws() -> None:
    guard = guard_of(compare_share=0.25, probe_share=0.5, acceptance={"off": 0.2, "on": 0.4})
    draws = [place / 100 for place in range(100)]
    assert [guard.admit(draw) for draw in draws].count(Mode.COMPARED) == 25
    assert [guard.admit(draw) for draw in draws].count(Mode.PROBE) == 0
    for _ in range(2):
        guard.ended(session(acceptance=0.0))
    modes = [guard.admit(draw) for draw in draws]
    assert (modes.count(Mode.COMPARED), modes.count(Mode.PROBE), modes.count(Mode.FOLLOWING)) == (25, 50, 25)
    assert [guard.speculates(mode) for mode in Mode] == [False, False, True]


def test_the_ratio_is_plain_time_over_speculating_time() -> None:
    guard = guard_of(compare_share=0.5)
    guard.ended(session(ms=10.0))
    guard.ended(session(Mode.COMPARED, ms=30.0, speculated=False))
    assert guard.ratio is None, "too few sessions on each side"
    guard.ended(session(ms=20.0))
    guard.ended(session(Mode.COMPARED, ms=30.0, speculated=False))
    assert guard.ratio == pytest.approx(2.0)


def test_probes_and_fallen_back_sessions_are_in_neither_side() -> None:
    guard = guard_of(acceptance={"off": 0.2, "on": 0.4})
    guard.ended(session(Mode.PROBE))
    guard.ended(session(speculated=False))
    assert (guard.with_.sessions, guard.without.sessions) == (0, 0)


def test_a_session_without_time_is_no_evidence() -> None:
    guard = guard_of(ms_per_token={"off": 1, "on": 1}, min_sessions=1)
    assert guard.ended(Sample(mode=Mode.FOLLOWING, speculated=True, tokens=0, decode_ms=0.0)) is None
    assert guard.with_.sessions == 0


SAMPLES = st.builds(
    session,
    st.sampled_from(Mode),
    speculated=st.booleans(),
    acceptance=st.sampled_from([0.0, 0.3, 0.9]),
    ms=st.sampled_from([10.0, 45.0, 90.0]),
    looped=st.booleans(),
)


@given(st.lists(st.one_of(SAMPLES, st.floats(0, 1)), max_size=60))
def test_each_turn_is_told_once_and_changes_the_state(history: list[Sample | float]) -> None:
    guard = guard_of(
        acceptance={"off": 0.2, "on": 0.4},
        ms_per_token={"off": 60, "on": 40},
        repeated={"off": 0.6, "on": 0.3},
        kv_usage={"off": 0.9, "on": 0.5},
        target_ms_per_token=50,
        compare_share=0.1,
    )
    on = True
    for event in history:
        turned = guard.pressure(event) if isinstance(event, float) else guard.ended(event)
        if turned is not None:
            assert turned.on != on
            on = turned.on
        assert guard.on == on
        assert (guard.reason is None) == on
