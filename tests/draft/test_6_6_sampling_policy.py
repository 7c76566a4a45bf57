"""Draft 6.6, sampling policy updates: each test quotes the sentence it proves (decisions 11, 50, 51, 85, 115)."""

import pytest
from msgspec import UNSET

from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.distributions import Profile, profile_of
from sdcpd.protocol.messages import Contract, ContractSampling, Policy, Sampling
from sdcpd.protocol.problems import Conflict, IllFormed, Overloaded, SessionClosed, StaleEpoch
from sdcpd.protocol.sampling import POLICIES_LIMIT, Profiles
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Begin, SessionLimits
from sdcpd.protocol.terms import State
from tests.support.messages import DRAFTER, SESSION, VERIFIER, assignment, contract, proposal, session_open

HOT, COLD = Sampling(temperature_milli=2000, seed=1), Sampling(temperature_milli=0)
SAMPLED = contract(rule=65281, sampling=ContractSampling(temperature_milli=700, seed=5), stop=())


def session(of: Contract = SAMPLED) -> Session:
    machine = Session(
        session_open(contract=of),
        instance=VERIFIER,
        prompt=(1, 1, 1),
        vocabulary=50,
        limits=SessionLimits(),
        log_tag='"0"',
        now=0.0,
    )
    machine.assign(assignment(contract=of), 0.0)
    return machine


def policy(from_round: int, sampling: Sampling = HOT) -> Policy:
    return Policy(session=SESSION, from_round=from_round, sampling=sampling)


def begin(machine: Session, tokens: tuple[int, ...] = (7, 8)) -> Begin:
    at = machine.prefix.at
    message = proposal(tokens, round=at.round + 1, base=at.committed, base_digest=at.digest)
    answer = machine.propose(DRAFTER, message, 1.0)
    assert isinstance(answer, Begin)
    return answer


def settle(machine: Session, begun: Begin) -> CommitRecord:
    assert machine.scored(begun.work.ticket, (9,) * len(begun.work.tokens), load=0)
    record = machine.appended('"1"', 2.0).record
    assert isinstance(record, CommitRecord)
    return record


def changed(record: CommitRecord) -> Sampling | None:
    assert record.ctl is not UNSET
    return None if record.ctl.sampling is UNSET else record.ctl.sampling


def test_the_new_profile_applies_from_its_round_on() -> None:
    """ "The verifier applies the new profile to rounds numbered from_round and later"; its record says so (85)."""
    machine = session()
    machine.policy(policy(2))
    profiles, marks = [], []
    for _ in range(3):
        begun = begin(machine)
        profiles.append(begun.work.profile)
        marks.append(changed(settle(machine, begun)))
    assert profiles == [profile_of(SAMPLED.sampling), profile_of(HOT), profile_of(HOT)]
    assert marks == [None, profile_of(HOT).message(), None]


def test_from_round_must_be_ahead() -> None:
    """ "It sends a policy message with from_round greater than the current round": current is the last decided one or
    the one in flight; too late is 409 with the session-state (decision 50)."""
    machine = session()
    settle(machine, begin(machine))
    with pytest.raises(Conflict, match="from_round: 1 is not above the current round 1") as late:
        machine.policy(policy(1))
    assert late.value.status == 409
    assert late.value.state == machine.session_state()
    begin(machine)
    with pytest.raises(Conflict, match="current round 2"):
        machine.policy(policy(2))
    assert machine.policy(policy(3)).round == 1


def test_a_round_being_appended_is_current() -> None:
    machine = session()
    begun = begin(machine)
    machine.scored(begun.work.ticket, (9, 9, 9), load=0)
    with pytest.raises(Conflict):
        machine.policy(policy(1))


def test_repeats_of_an_applied_policy_are_fine() -> None:
    """Decision 50: "an identical repeat of an applied one is 200"; another one for its round is not."""
    machine = session()
    machine.policy(policy(1))
    settle(machine, begin(machine))
    assert machine.policy(policy(1)).round == 1
    with pytest.raises(Conflict):
        machine.policy(policy(1, Sampling(temperature_milli=2000, seed=2)))


def test_pending_policies_are_sorted_and_the_last_write_wins() -> None:
    profiles = Profiles(contract())
    state = session().session_state()
    for from_round, sampling in ((9, HOT), (3, COLD), (6, HOT), (6, COLD), (9, Sampling(top_k=4))):
        profiles.accept(policy(from_round, sampling), current=0, state=state)
    in_force = [profiles.in_force(round_) for round_ in (2, 3, 5, 6, 8, 9, 1000)]
    cold = Profile(temperature_milli=0)
    assert in_force == [Profile(), cold, cold, cold, cold, Profile(top_k=4), Profile(top_k=4)]
    assert [round_ for round_ in range(1, 12) if profiles.changed_with(round_) is not UNSET] == [3, 9]


def test_a_policy_replaces_the_whole_profile() -> None:
    """Decision 51: missing members take the defaults, the seed included."""
    of = contract(rule=2, sampling=ContractSampling(temperature_milli=500, top_k=3, top_p_milli=900))
    profiles = Profiles(of)
    profiles.accept(policy(1, Sampling(top_k=7)), current=0, state=session().session_state())
    assert profiles.in_force(1) == Profile(top_k=7)


def test_replayable_sampling_needs_its_seed() -> None:
    """Decision 18: under rule 65281 a policy without a seed is 400."""
    with pytest.raises(IllFormed, match=r"sampling\.seed"):
        session().policy(policy(5, COLD))


def test_the_contract_stays() -> None:
    """ "the contract in those assignments is unchanged. The acceptance rule cannot be changed. Committed output is
    never changed by a policy update." """
    machine = session()
    settle(machine, begin(machine))
    output = list(machine.prefix.output)
    machine.policy(policy(2))
    assert machine.contract == SAMPLED
    assert machine.prefix.output == output
    assert machine.state is State.DRAFTING


def test_a_takeover_goes_on_under_the_profile_of_the_log() -> None:
    machine = session()
    machine.policy(policy(2))
    records = [settle(machine, begin(machine)) for _ in range(3)]
    taken = Profiles(SAMPLED)
    taken.take_over(records)
    assert taken.in_force(4) == profile_of(HOT)
    assert taken.changed_with(4) is UNSET


def test_pending_policies_are_bounded() -> None:
    profiles, state = Profiles(contract()), session().session_state()
    for round_ in range(1, POLICIES_LIMIT + 1):
        profiles.accept(policy(round_), current=0, state=state)
    with pytest.raises(Overloaded):
        profiles.accept(policy(100), current=0, state=state)
    for current in range(1, 200):
        profiles.accept(policy(current + 200, COLD if current % 2 else HOT), current=current + 199, state=state)
        assert profiles.in_force(current + 200) == profile_of(COLD if current % 2 else HOT)
    assert len(profiles._rounds) <= 2 * POLICIES_LIMIT


def test_a_session_that_is_over_or_lost_takes_none() -> None:
    machine = session()
    machine.cancel("cancelled")
    with pytest.raises(SessionClosed):
        machine.policy(policy(5))
    lost = session()
    lost.lost("fenced")
    with pytest.raises(StaleEpoch):
        lost.policy(policy(5))
