"""Draft 6.4, acceptance rules: each test quotes the sentence it proves. The reference and the tensors alike."""

import hashlib
import hmac
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from sdcpd.protocol.acceptance import Accepted, accept_equal, accept_speculative, argmax, draw_each, residual
from sdcpd.protocol.distributions import SCALE, Profile, draw, target_masses
from sdcpd.protocol.draft_rows import check_rows, dense, from_dense, one_hot, row_of
from sdcpd.protocol.draws import Purpose, RoundDraws, replayed_round, seeded_draw
from sdcpd.protocol.problems import BadProposal
from tests.support.chance import (
    SESSIONS,
    TOKENS,
    VOCABULARY,
    Copying,
    Drafter,
    Mislabelled,
    Round,
    Rule,
    Steering,
    Truncated,
    expected,
    logits_after,
    masses_after,
    reference,
    surprise,
    texts,
)
from tests.support.tensor_rules import on_tensors, replayed_on_tensors

PLAIN = Profile()
PROFILES = [
    PLAIN,
    Profile(temperature_milli=700),
    Profile(temperature_milli=1500, top_k=3),
    Profile(top_p_milli=800),
    Profile(temperature_milli=1200, top_k=4, top_p_milli=900),
    Profile(temperature_milli=0),
]
RULES = [pytest.param(reference, id="reference"), pytest.param(on_tensors, id="tensors")]

LIKELY = 4.0
"""Standard deviations that a right rule stays below (fixed seeds: always, once it has)."""
WRONG = 8.0


def drafters() -> list[Drafter]:
    return [Copying(), Truncated(seed=6, k=1), Truncated(seed=7, k=VOCABULARY)]


# Rule 1


def test_greedy_ties_go_to_the_smallest_token() -> None:
    """ "x[i] is accepted if it equals argmax p[i], where ties are broken in favor of the smallest token identifier.
    Evaluation stops at the first position that is not accepted. The additional token is argmax p[a+1]." """
    best = [argmax(row) for row in ([0.0, 5.0, 5.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0])]
    assert best == [1, 0, 3]
    assert accept_equal((2, 0), best) == Accepted(accepted=0, additional=1)
    assert accept_equal((1, 1), best) == Accepted(accepted=1, additional=0)
    assert accept_equal((1, 0), best) == Accepted(accepted=2, additional=3)


# Rule 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("profile", PROFILES, ids=repr)
def test_output_has_the_distribution_of_the_target(rule: Rule, profile: Profile) -> None:
    """ "With exact q values, the output has the distribution of the target model." Over 20,000 rounds, the joint
    distribution of the first tokens."""
    assert surprise(texts(rule, Truncated(seed=5), profile), expected(profile)) < LIKELY


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("number", range(3))
def test_and_so_it_is_for_every_honest_drafter(rule: Rule, number: int) -> None:
    profile = PROFILES[4]
    assert surprise(texts(rule, drafters()[number], profile), expected(profile)) < LIKELY


@pytest.mark.parametrize("m", [1, 5])
def test_the_distribution_does_not_depend_on_m(m: int) -> None:
    assert surprise(texts(on_tensors, Truncated(seed=8), PLAIN, m=m), expected(PLAIN)) < LIKELY


def _from_p(rounds: Sequence[Round]) -> list[Accepted]:
    """Wrong: the additional token comes from p although a token was rejected."""
    answers = []
    for one, right in zip(rounds, reference(rounds), strict=True):
        masses = masses_after(one.prefixes[right.accepted], one.profile)
        answers.append(Accepted(right.accepted, draw(masses, one.draws.tokens[right.accepted])))
    return answers


def _without_q(rounds: Sequence[Round]) -> list[Accepted]:
    """Wrong: r < p(x), whatever q."""
    answers = []
    for one in rounds:
        target = [masses_after(prefix, one.profile) for prefix in one.prefixes]
        for place, token in enumerate(one.proposed):
            if one.draws.tests[place] >= target[place][token] / sum(target[place]):
                left = residual(target[place], one.rows[place])
                answers.append(Accepted(place, draw(left, one.draws.tokens[place])))
                break
        else:
            answers.append(Accepted(len(one.proposed), draw(target[-1], one.draws.tokens[-1])))
    return answers


def _reused_draw(rounds: Sequence[Round]) -> list[Accepted]:
    """Wrong: the value of the acceptance test draws the additional token too."""
    return reference([one._replace(draws=RoundDraws(one.draws.tests, (*one.draws.tests, 0.5))) for one in rounds])


def _one_further(rounds: Sequence[Round]) -> list[Accepted]:
    """Wrong: the row after the right one judges each token."""
    return reference([one._replace(prefixes=(*one.prefixes[1:], one.prefixes[-1])) for one in rounds])


@pytest.mark.parametrize("rule", [_from_p, _without_q, _reused_draw, _one_further])
def test_a_wrong_rule_is_noticed(rule: Rule) -> None:
    assert surprise(texts(rule, Truncated(seed=5), PLAIN), expected(PLAIN)) > WRONG


@pytest.mark.parametrize("drafter", [Steering(seed=9), Mislabelled(seed=9)])
def test_a_dishonest_drafter_steers_rule_2(drafter: Drafter) -> None:
    """ "The drafter MUST sample each proposed token from exactly the row it publishes" (5.2): what happens otherwise is
    why drafters are trusted under rule 2, and audited (decision 67)."""
    assert surprise(texts(reference, drafter, PLAIN), expected(PLAIN)) > WRONG


def test_no_token_without_mass_is_accepted() -> None:
    """ "Accept x[i] if r < min(1, p[i](x[i]) / q[i](x[i]))": in the form r * q < p, which no r passes when p is 0."""
    rows = check_rows([one_hot(1)], (1,))
    answer = accept_speculative((1,), [[SCALE, 0], [SCALE, SCALE]], rows, RoundDraws((0.0,), (0.5, 0.5)))
    assert answer == Accepted(accepted=0, additional=0)


def test_tiny_q_accepts_without_overflow() -> None:
    tiny = row_of([(0, 1e-45), (1, 1.0)])  # the smallest binary32 there is
    rows = check_rows([tiny], (0,))
    answer = accept_speculative((0,), [[1, SCALE], [0, SCALE]], rows, RoundDraws((0.999999,), (0.5, 0.5)))
    assert answer == Accepted(accepted=1, additional=1)


def test_a_residual_without_mass_gives_way_to_p() -> None:
    """ "the normalized residual distribution max(0, p[i] - q[i])": where rounding leaves nothing, p (decision 71)."""
    even = [SCALE, SCALE]
    rows = check_rows([row_of([(0, 0.5), (1, 0.5)])], (0,))
    assert residual(even, rows[0]) == even
    uneven = check_rows([row_of([(0, 0.5000001), (1, 0.5)])], (0,))
    answer = accept_speculative((0,), [even, even], uneven, RoundDraws((0.9999999,), (0.1, 0.1)))
    assert answer.accepted == 0
    assert answer.additional in (0, 1)


@pytest.mark.parametrize(
    "row",
    [
        row_of([(0, 1.0)]),  # q(x) is zero
        row_of([(1, 0.998)]),
        row_of([(1, 1.002)]),
        row_of([(1, float("nan"))]),
        row_of([(1, float("inf"))]),
        row_of([(1, 1.5), (2, -0.5)]),
        row_of([]),
    ],
)
def test_bad_rows_are_refused_before_any_draw(row: object) -> None:
    """ "a proposal for which q[i](x[i]) is zero is rejected, before any random draw, with problem type
    "sdcp-bad-proposal"": check_rows knows no draw; what else makes a row bad is decision 53."""
    with pytest.raises(BadProposal):
        check_rows([row], (1,))  # type: ignore[list-item]


def test_rows_are_little_endian_binary32() -> None:
    """5.2: "a row of V IEEE 754 binary32 values in little-endian order [...] concatenated in position order" """
    rows = (row_of([(1, 0.25), (3, 0.75)]), one_hot(0))
    octets = dense(rows, 4)
    assert octets.hex() == "000000000000803e000000000000403f0000803f" + "00000000" * 3
    assert from_dense(octets, 2, 4) == rows
    with pytest.raises(BadProposal, match="not 4 \\* 2 positions \\* 5 tokens"):
        from_dense(octets, 2, 5)


def test_seeded_values_are_those_of_the_draft() -> None:
    """ "HMAC-SHA-256 keyed with the seed (as eight octets in network byte order) over "SDCP-VERIFY-1" || 0x00 ||
    session || uint32(round) || uint32(i) || uint8(purpose) [...] the first 53 bits of the result divided by 2^53" """
    session = bytes(range(16))
    octets = b"SDCP-VERIFY-1\x00" + session + bytes([0, 0, 1, 2]) + bytes([0, 0, 0, 3]) + b"\x01"
    result = int.from_bytes(hmac.new(bytes([0] * 7 + [42]), octets, hashlib.sha256).digest(), "big")
    assert seeded_draw(42, session, 258, 3, Purpose.ADDITIONAL) == (result >> (256 - 53)) / 2**53


def test_seeded_values_are_uniform_and_differ_by_all_their_inputs() -> None:
    values = {
        seeded_draw(seed, session, round_, i, purpose)
        for seed in (0, 1, 2**64 - 1)
        for session in (bytes(16), bytes(range(16)))
        for round_ in range(1, 30)
        for i in range(1, 30)
        for purpose in Purpose
    }
    assert len(values) == 3 * 2 * 29 * 29 * 2
    assert abs(sum(values) / len(values) - 0.5) < 0.01
    assert all(0.0 <= value < 1.0 for value in values)


# Rule 65281 (decision 115)


def _replayed_on_lists(rounds: Sequence[Round]) -> list[Accepted]:
    return [
        accept_equal(one.proposed, draw_each([masses_after(prefix, one.profile) for prefix in one.prefixes], one.draws))
        for one in rounds
    ]


def _replay_texts(rule: Rule, drafter: Drafter, profile: Profile, m: int, sessions: int) -> list[tuple[int, ...]]:
    outputs: list[tuple[int, ...]] = [()] * sessions
    while open_ := [number for number, output in enumerate(outputs) if len(output) < TOKENS]:
        rounds = []
        for number in open_:
            prefix = outputs[number]
            proposed: tuple[int, ...] = ()
            for _ in range(m):
                proposed += (drafter.draft(prefix + proposed)[0],)
            prefixes = tuple(prefix + proposed[:count] for count in range(m + 1))
            draws = replayed_round(1_000_003 * number, len(prefix), m)
            rounds.append(Round(proposed, prefixes, profile, (), draws))
        for number, one, accepted in zip(open_, rounds, rule(rounds), strict=True):
            outputs[number] += (*one.proposed[: accepted.accepted], accepted.additional)
    return [output[:TOKENS] for output in outputs]


REPLAYS = [pytest.param(_replayed_on_lists, id="reference"), pytest.param(replayed_on_tensors, id="tensors")]


@pytest.mark.parametrize("rule", REPLAYS)
@pytest.mark.parametrize("profile", PROFILES, ids=repr)
def test_replayable_sampling_has_the_distribution_of_the_target(rule: Rule, profile: Profile) -> None:
    seen = _replay_texts(rule, Truncated(seed=5), profile, 2, SESSIONS)
    assert surprise(Counter(seen), expected(profile)) < LIKELY


@pytest.mark.parametrize("rule", REPLAYS)
def test_replayable_text_is_the_same_whatever_is_drafted(rule: Rule) -> None:
    """The text is a function of target, prompt, profile and seed alone: any drafter, liars too, any M."""
    profile = PROFILES[4]
    alone = _replay_texts(rule, Copying(), profile, 0, 100)
    for m in (1, 2, 5):
        for drafter in (*drafters(), Steering(seed=9)):
            assert _replay_texts(rule, drafter, profile, m, 100) == alone


def test_the_two_versions_agree_round_by_round() -> None:
    chance = random.Random(11)
    rounds = []
    for number in range(400):
        prefix = tuple(chance.randrange(VOCABULARY) for _ in range(3))
        proposed = tuple(chance.randrange(VOCABULARY) for _ in range(4))
        rows = [row_of([(token, 0.5), ((token + 1) % VOCABULARY, 0.5)]) for token in proposed]
        prefixes = tuple(prefix + proposed[:count] for count in range(5))
        draws = RoundDraws(tuple(chance.random() for _ in range(4)), tuple(chance.random() for _ in range(5)))
        profile = PROFILES[number % len(PROFILES)]
        rounds.append(Round(proposed, prefixes, profile, check_rows(rows, proposed), draws))
    assert on_tensors(rounds) == reference(rounds)
    assert replayed_on_tensors(rounds) == _replayed_on_lists(rounds)


# The profile (4.1)


def test_the_profile_applies_in_order() -> None:
    """4.1: "after applying temperature, top-k, and top-p in that order; a temperature of zero selects the most probable
    token (ties broken in favor of the smallest token identifier)" """
    logits = [2.0, 1.0, 3.0, 3.0]
    assert target_masses(logits, Profile(temperature_milli=0)) == [0, 0, SCALE, 0]
    assert target_masses(logits, Profile(top_k=1)) == [0, 0, SCALE, 0]
    assert target_masses(logits, Profile(top_k=2)) == [0, 0, SCALE, SCALE]
    assert target_masses(logits, Profile(top_k=2, top_p_milli=500)) == [0, 0, SCALE, 0]
    assert target_masses(logits, Profile(top_k=2, top_p_milli=501)) == [0, 0, SCALE, SCALE]
    assert target_masses(logits, Profile(top_p_milli=0)) == [0, 0, SCALE, 0]
    assert target_masses(logits, Profile(top_k=10**9)) == target_masses(logits, PLAIN)
    hot, cold = (target_masses(logits, Profile(temperature_milli=milli)) for milli in (10_000, 100))
    assert hot[1] / sum(hot) > 0.2 > 1e-6 > cold[1] / sum(cold)


def test_toy_logits_are_tied_here_and_there() -> None:
    """The statistics above would not meet a tie otherwise."""
    rows = [logits_after(()), *(logits_after((token,)) for token in range(VOCABULARY))]
    assert any(len(set(row)) < VOCABULARY for row in rows)
