"""The audit of decision 67 on honest and dishonest rows."""

import random

import pytest

from sdcpd.protocol.draft_audit import ROWS_REMEMBERED, ROWS_REQUIRED, DraftAudit, moments
from sdcpd.protocol.draft_rows import CheckedRow, check_rows, ids_of, one_hot, row_of, values_of


def rows(count: int, seed: int, chosen: str = "sampled") -> list[CheckedRow]:
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        weights = [chance.random() ** 3 for _ in range(6)]
        row = row_of([(token, weight / sum(weights)) for token, weight in enumerate(weights)])
        token = chance.choices(ids_of(row), values_of(row))[0]
        if chosen == "best":
            token = max(ids_of(row), key=lambda one: values_of(row)[one])
        elif chosen == "least":
            token = min(ids_of(row), key=lambda one: values_of(row)[one])
        made.append(check_rows([row], (token,))[0])
    return made


def audited(seen: list[CheckedRow]) -> DraftAudit:
    audit = DraftAudit()
    for one in seen:
        row = moments(one)
        if row is not None:
            audit.observe(row)
    return audit


@pytest.mark.parametrize("seed", range(20))
def test_an_honest_drafter_stays_below_the_alarm(seed: int) -> None:
    audit = audited(rows(2000, seed))
    assert audit.z is not None
    assert abs(audit.z) < 4
    assert not audit.alarming


@pytest.mark.parametrize("chosen", ["best", "least"])
def test_a_dishonest_one_does_not(chosen: str) -> None:
    audit = audited(rows(200, 1, chosen))
    assert audit.alarming
    assert audit.z is not None
    assert (audit.z > 0) == (chosen == "least")


def test_certain_rows_say_nothing() -> None:
    assert moments(check_rows([one_hot(3)], (3,))[0]) is None
    even = moments(check_rows([row_of([(0, 0.5), (1, 0.5)])], (1,))[0])
    assert even is not None
    assert even.variance == pytest.approx(0.0, abs=1e-15)
    thirds = check_rows([row_of([(0, 1 / 3), (1, 1 / 3), (2, 1 / 3)])], (1,))
    assert audited([*thirds] * 10_000).z is None
    audit = audited([check_rows([one_hot(3)], (3,))[0]] * 1000)
    assert (audit.rows, audit.z, audit.alarming) == (0, None, False)


def test_few_rows_are_no_proof() -> None:
    assert audited(rows(ROWS_REQUIRED - 1, 2, "least")).z is None


def test_an_honest_past_does_not_cover_for_ever() -> None:
    honest, late = rows(int(3 * ROWS_REMEMBERED), 3), rows(400, 4, "least")
    assert audited([*honest, *late]).alarming
