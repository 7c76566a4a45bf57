"""Seeds and values (draft 6.4; decisions 18, 69, 115)."""

import hashlib
import hmac
from itertools import count

import pytest

from sdcpd.protocol.draws import (
    SEED_LIMIT,
    Purpose,
    choice_seed,
    replay_draw,
    replayed_round,
    seeded_draw,
    seeded_round,
    unseeded_round,
)

SESSION = bytes(range(16))


def test_a_round_takes_its_values_by_position() -> None:
    """Position i of the proposal is one-based; the additional token after a accepted ones has a+1 (decision 69)."""
    draws = seeded_round(42, SESSION, 7, 2)
    assert draws.tests == tuple(seeded_draw(42, SESSION, 7, i, Purpose.ACCEPTANCE) for i in (1, 2))
    assert draws.tokens == tuple(seeded_draw(42, SESSION, 7, i, Purpose.ADDITIONAL) for i in (1, 2, 3))
    alone = seeded_round(42, SESSION, 7, 0)
    assert (alone.tests, alone.tokens) == ((), (seeded_draw(42, SESSION, 7, 1, Purpose.ADDITIONAL),))


def test_unseeded_values_come_from_the_source_each_once() -> None:
    source = count()
    draws = unseeded_round(lambda: next(source) / 100, 3)
    assert sorted((*draws.tests, *draws.tokens)) == [n / 100 for n in range(7)]


def test_replayed_values_belong_to_output_indices() -> None:
    """u(k) by the 1-based output index: where rounds begin makes no difference."""
    whole = replayed_round(5, 0, 9).tokens
    assert replayed_round(5, 3, 2).tokens == whole[3:6]
    octets = b"SDCPD-REPLAY-1\x00" + bytes([0, 0, 0, 4])
    result = int.from_bytes(hmac.new((5).to_bytes(8, "big"), octets, hashlib.sha256).digest(), "big")
    assert whole[3] == replay_draw(5, 4) == (result >> 203) / 2**53


def test_choices_have_seeds_of_their_own() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(-1, 0) == SEED_LIMIT - 1
    octets = b"SDCPD-CHOICE-1\x00" + (7).to_bytes(8, "big") + (3).to_bytes(4, "big")
    assert choice_seed(7, 3) == int.from_bytes(hashlib.sha256(octets).digest()[:8], "big")
    assert len({choice_seed(7, choice) for choice in range(100)}) == 100


@pytest.mark.parametrize("seed", [-1, SEED_LIMIT])
def test_a_seed_has_eight_octets(seed: int) -> None:
    with pytest.raises(AssertionError):
        replay_draw(seed, 1)
