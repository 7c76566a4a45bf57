"""Draft 6.5, Speculation Control and Escalation, on the verifier's machine. R is low_rounds."""

from typing import Any

import pytest

from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.escalation import is_low
from sdcpd.protocol.problems import NotAssigned, SessionClosed
from sdcpd.protocol.session_values import Replay
from sdcpd.protocol.terms import Action, LadderAction, State
from tests.support.messages import OTHER_DRAFTER, contract
from tests.support.verifying import Verifying

REDUCE, SWITCH, SELF_DECODE, FAIL = LadderAction


def ladder(*entries: LadderAction, **members: Any) -> Verifying:
    values: dict[str, Any] = {"low_rounds": 1, "fallback": entries, "max_new": 200}
    bench = Verifying(**(values | members))
    bench.assign()
    return bench


def actions(bench: Verifying, rounds: str, load: int = 0) -> list[Action]:
    """Play rounds, `l` low and `g` not."""
    return [(bench.low(load=load) if kind == "l" else bench.good()).action for kind in rounds]


# 6.5.1 Speculation Limit


def test_m_cap_is_between_1_and_m_max() -> None:
    """ "Each verdict carries m_cap ... with 1 <= m_cap <= m_max." """
    bench = ladder(*[REDUCE] * 9, m_max=8)
    caps = [bench.low().m_cap for _ in range(6)]
    assert caps == [4, 2, 1, 1, 1, 1]
    caps = [bench.good().m_cap for _ in range(9)]
    assert caps == [2, 3, 4, 5, 6, 7, 8, 8, 8]


def test_m_cap_is_restored_gradually() -> None:
    """ "It SHOULD restore m_cap gradually (for example by one per round) when rounds are no longer low and its load
    permits." """
    bench = ladder(REDUCE, FAIL, m_max=8)
    assert bench.low().m_cap == 4
    assert bench.round((20,), (20, 20), load=80).m_cap == 5
    assert bench.round((20,), (20, 20), load=81).m_cap == 5


# 6.5.2 Low rounds


@pytest.mark.parametrize(
    ("low_ratio", "accepted", "proposed", "low"),
    [
        (50, 3, 8, True),  # 300 < 400
        (50, 4, 8, False),  # 400 < 400 is false
        (100, 7, 8, True),
        (100, 8, 8, False),
        (1, 0, 8, True),
        (1, 1, 64, False),  # 100 < 64 is false
        (0, 0, 8, True),
        (0, 1, 64, False),
        (None, 0, 1, True),
        (None, 1, 64, False),
    ],
)
def test_when_a_round_is_low(low_ratio: int | None, accepted: int, proposed: int, low: bool) -> None:
    """ "A round is low if 100 * a < low_ratio * M, or, when low_ratio is zero or absent, if a = 0." """
    of = contract() if low_ratio is None else contract(low_ratio=low_ratio)
    assert is_low(of, accepted, proposed) is low


def test_c_counts_low_rounds_in_a_row() -> None:
    """ "After a low round, c is incremented and g reset; after a round that is not low, c is reset" """
    bench = ladder(REDUCE, FAIL, low_rounds=3)
    assert [bench.low().low, bench.low().low, bench.good().low, bench.low().low] == [1, 2, 0, 1]
    assert actions(bench, "ll") == [Action.CONTINUE, Action.REDUCE]


def test_at_r_the_ladder_is_applied_and_c_reset() -> None:
    """ "When c reaches R, the verifier applies entry j of the fallback list ... then resets c to zero." """
    bench = ladder(REDUCE, REDUCE, FAIL, low_rounds=2)
    verdicts = [bench.low() for _ in range(4)]
    assert [verdict.action for verdict in verdicts] == [0, 1, 0, 1]
    assert [verdict.low for verdict in verdicts] == [1, 0, 1, 0]


def test_otherwise_continue() -> None:
    """ "Otherwise it applies "continue"." """
    assert actions(ladder(FAIL, low_rounds=3), "llgllgll") == [Action.CONTINUE] * 8


def test_r_rounds_that_are_not_low_rewind_j() -> None:
    """ "when g reaches R, where R is low_rounds, j is reset to zero" """
    bench = ladder(REDUCE, FAIL, low_rounds=2)
    assert actions(bench, "ll") == [Action.CONTINUE, Action.REDUCE]
    assert actions(bench, "ggll") == [0, 0, 0, Action.REDUCE], "rewound"
    assert actions(bench, "gll") == [0, 0, Action.FAIL], "one good round is not two in a row"


def test_no_entry_left_is_fail() -> None:
    """ "If no entry remains, it applies "fail"." """
    bench = ladder(REDUCE)
    assert actions(bench, "ll") == [Action.REDUCE, Action.FAIL]


def test_j_survives_another_drafter() -> None:
    """ "j persists across a change of drafter" """
    bench = ladder(SWITCH, FAIL)
    assert actions(bench, "l") == [Action.SWITCH]
    bench.assign(OTHER_DRAFTER)
    sent = bench.next_proposal(30, drafter=OTHER_DRAFTER)
    bench.submit(sent, OTHER_DRAFTER)
    bench.score(20, 20)
    bench.append()
    verdict = bench.session.awaited(2)
    assert verdict is not None
    assert verdict.action is Action.FAIL


def test_j_survives_a_self_decoding_period() -> None:
    """ "and across a self-decoding period" """
    bench = ladder(SELF_DECODE, FAIL, self_load=50, self_max=3)
    assert actions(bench, "l") == [Action.SELF_DECODE]
    while bench.self_token():
        pass
    bench.assign()
    assert actions(bench, "l") == [Action.FAIL]


# The actions


def test_continue_and_reduce_let_the_drafter_go_on() -> None:
    """ "The verifier sets m_cap to max(1, floor(m_cap / 2)) and the drafter proceeds." """
    bench = ladder(*[REDUCE] * 3, m_max=7)
    assert [bench.low().m_cap, bench.low().m_cap, bench.low().m_cap] == [3, 1, 1]
    assert bench.state.state == State.DRAFTING
    assert bench.events() == []


def test_switch_sends_an_event_and_stops_the_drafter() -> None:
    """ "The verifier sends an event to the router, which assigns the session to another drafter with a permitted
    model; the current drafter MUST stop proposing for the session." """
    bench = ladder(SWITCH, FAIL)
    verdict = bench.low()
    (event,) = bench.events()
    assert (event.kind, event.committed, event.digest) == (Action.SWITCH, verdict.committed, verdict.digest)
    with pytest.raises(NotAssigned):
        bench.propose(20)
    assert bench.submit(bench.sent[1]) == Replay(verdict=verdict), "a lost verdict is still answered (79)"


def test_finish_has_ended_generation() -> None:
    """ "Generation has ended because of a stop token or max_new." """
    assert ladder(FAIL, stop=(20,)).low().action is Action.FINISH, "finish beats the ladder (76)"
    bench = ladder(REDUCE, max_new=2)
    assert actions(bench, "ll") == [Action.REDUCE, Action.FINISH]
    assert bench.page().finish is Action.FINISH


def test_fail_ends_the_session_with_an_error() -> None:
    """ "The verifier ends the session with an error." """
    bench = ladder(FAIL)
    verdict = bench.low()
    assert (verdict.action, verdict.emitted) == (Action.FAIL, (20,))
    page = bench.page()
    assert (page.tokens, page.final, page.finish) == ((20,), True, Action.FAIL)
    with pytest.raises(SessionClosed):
        bench.propose(20)


# Self-decoding


@pytest.mark.parametrize(("self_load", "load", "action"), [(50, 50, SELF_DECODE), (50, 51, SWITCH), (None, 0, SWITCH)])
def test_self_decode_is_conditional(self_load: int | None, load: int, action: LadderAction) -> None:
    """ "permitted only if the contract contains self_load and the verifier's current load does not exceed it;
    otherwise the verifier skips it and applies the next entry" """
    members = {} if self_load is None else {"self_load": self_load}
    bench = ladder(SELF_DECODE, SWITCH, FAIL, **members)
    assert bench.low(load=load).action.value == action.value


def test_j_advances_past_what_is_skipped() -> None:
    """ "advancing j past every entry it applies or skips" """
    bench = ladder(SELF_DECODE, REDUCE, SELF_DECODE, FAIL, self_load=50)
    assert actions(bench, "ll", load=90) == [Action.REDUCE, Action.FAIL]


def test_each_self_decoded_token_is_a_round_of_its_own() -> None:
    """ "Each token committed during self-decoding is recorded as a round of its own, with no proposal, so round
    numbers stay consecutive." """
    bench = ladder(SELF_DECODE, FAIL, self_load=50, self_max=3)
    bench.low()
    for token in (40, 41, 42):
        assert bench.self_token(token)
    records = [record for record in bench.records if isinstance(record, CommitRecord)]
    assert [(record.round, record.emitted) for record in records] == [(1, (20,)), (2, (40,)), (3, (41,)), (4, (42,))]
    bench.assign()
    assert bench.good().round == 5
    assert isinstance(bench.submit(bench.sent[5]), Replay)


def test_tokens_are_output_as_they_come() -> None:
    """ "the verifier commits tokens one at a time, publishes them as output" """
    bench = ladder(SELF_DECODE, FAIL, self_load=50, self_max=9)
    bench.low()
    for token, expected in ((40, (20, 40)), (41, (20, 40, 41))):
        bench.self_token(token)
        assert bench.output == expected


def test_it_stops_after_self_max_tokens() -> None:
    """ "and stops after self_max tokens (if present)"; "it then sends an event so that the router assigns a drafter
    again" """
    bench = ladder(SELF_DECODE, FAIL, self_load=50, self_max=3)
    bench.low()
    assert bench.events() == []
    assert [bench.self_token() for _ in range(4)] == [True, True, True, False]
    (event,) = bench.events()
    assert (event.kind, event.committed, event.digest) == (Action.SELF_DECODE, 4, bench.digest(4))
    assert bench.state.state == State.WAITING


def test_without_self_max_only_load_stops_it() -> None:
    """ "or when its load exceeds self_load" """
    bench = ladder(SELF_DECODE, FAIL, self_load=50)
    bench.low()
    assert all(bench.self_token(load=50) for _ in range(20))
    assert not bench.self_token(load=51)
    assert [event.kind for event in bench.events()] == [Action.SELF_DECODE]


def test_nobody_proposes_meanwhile() -> None:
    """ "The verifier decodes the session itself with the target model." """
    bench = ladder(SELF_DECODE, FAIL, self_load=50, self_max=3)
    bench.low()
    with pytest.raises(NotAssigned):
        bench.propose(20)


def test_a_stop_token_ends_a_period_and_the_session() -> None:
    """ "finish (4)" is reached while self-decoding as well."""
    bench = ladder(SELF_DECODE, FAIL, self_load=50, stop=(2,))
    bench.low()
    bench.self_token(2)
    assert bench.page().finish is Action.FINISH
    assert bench.output == (20, 2)


def test_one_list_two_behaviours() -> None:
    """ "the same fallback list leads to self-decoding on a lightly loaded verifier and to the next entry, such as
    switch, on a busy one" """
    found = [ladder(SELF_DECODE, SWITCH, self_load=30).low(load=load).action for load in (10, 90)]
    assert found == [Action.SELF_DECODE, Action.SWITCH]
