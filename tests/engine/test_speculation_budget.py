"""The budget of proposed rows, by plays of passes on made-up machines (decisions 74, 82, 110)."""

import random
from collections.abc import Callable, Hashable

import pytest

from sdcpd.engine.cost_curve import CostCurve
from sdcpd.engine.row_allotment import gain
from sdcpd.engine.speculation_budget import (
    PROBE_TOKENS,
    Mode,
    Passed,
    SpeculationBudget,
    Standing,
)

Machine = Callable[[int], float]
DRAFT = 8
"""What a drafter proposes where nobody limits it."""


def gpu(rows: int) -> float:
    return 0.010 + 0.00002 * rows


def cpu(rows: int) -> float:
    return 0.004 + 0.003 * rows


def tiles(rows: int) -> float:
    return 0.008 * -(-rows // 32)


MACHINES = {"flat": gpu, "linear": cpu, "steps": tiles}


def curve(machine: Machine) -> CostCurve:
    return CostCurve([(rows, machine(rows)) for rows in (1, 2, 4, 8, 16, 32, 64, 128)])


class Play:
    """Sessions of the same acceptance that are all in every pass. A change between drafting and decoding alone costs
    its session `idle` passes."""

    def __init__(self, machine: Machine, sessions: int, alpha: float, seed: int = 0, idle: int = 2) -> None:
        self.budget = SpeculationBudget(curve(machine))
        self.alpha = alpha
        self.sessions = sessions
        self.changes = 0
        self.tokens = 0
        self.seconds = 0.0
        self._machine = machine
        self._chance = random.Random(seed)
        self._drafting = [True] * sessions
        self._away = [0] * sessions
        self._idle = idle

    @property
    def drafting(self) -> int:
        return sum(self._drafting)

    def run(self, passes: int) -> float:
        """Tokens a second over these passes."""
        self.tokens, self.seconds = 0, 0.0
        for _ in range(passes):
            self._pass()
        return self.tokens / self.seconds

    def _pass(self) -> None:
        rows, drafting, alone = 0, 0, 0
        for number in range(self.sessions):
            if self._away[number]:
                self._away[number] -= 1
            elif self._drafting[number]:
                drafting += 1
                proposed = min(DRAFT, self.budget.ceiling(number) or DRAFT)
                accepted = 0
                while accepted < proposed and self._chance.random() < self.alpha:
                    accepted += 1
                self.budget.judged(number, accepted, proposed)
                rows += 1 + proposed
                self.tokens += 1 + accepted
            else:
                alone += 1
                self.budget.decoded_alone(number)
                rows += 1
                self.tokens += 1
        if not rows:
            self.seconds += self._machine(1)
            return
        took = self._machine(rows)
        self.seconds += took
        on = self.drafting
        self.budget.passed(Passed(rows, took, 0.0, drafting, on, alone, self.sessions - on))
        if self.budget.due:
            self.review()

    def review(self) -> None:
        modes = [Mode.DRAFTING if one else Mode.ALONE for one in self._drafting]
        self.budget.review({number: Standing(mode, 32) for number, mode in enumerate(modes)})
        for number in range(self.sessions):
            if self.budget.pays(number) != self._drafting[number]:
                self._drafting[number] = not self._drafting[number]
                self._away[number] = self._idle
                self.changes += 1


def on(machine: Machine, sessions: int, alpha: float) -> float:
    return sessions * (1 + gain(alpha, DRAFT)) / machine(sessions * (1 + DRAFT))


def off(machine: Machine, sessions: int) -> float:
    return sessions / machine(sessions)


@pytest.mark.parametrize("name", list(MACHINES))
@pytest.mark.parametrize("sessions", [1, 3, 8, 24, 64])
def test_it_is_as_good_as_the_better_of_always_and_never(name: str, sessions: int) -> None:
    machine = MACHINES[name]
    for alpha in (0.0, 0.3, 0.6, 0.9, 1.0) if sessions < 64 else (0.2, 0.8):
        play = Play(machine, sessions, alpha)
        play.run(max(30, 120 // sessions))
        reached = play.run(max(120, 1200 // sessions))
        best = max(on(machine, sessions, alpha), off(machine, sessions))
        assert reached >= 0.97 * best, (alpha, reached / best, play.drafting, play.changes)


def test_it_does_not_flap() -> None:
    """Near the point where it makes no difference, over a long play."""
    for alpha in (0.3, 0.35, 0.4, 0.45):
        play = Play(cpu, 6, alpha)
        play.run(1500)
        assert play.changes <= 6 * 4, (alpha, play.changes)


def test_it_comes_back_when_the_others_are_gone() -> None:
    play = Play(cpu, 12, 0.8)
    play.run(150)
    assert play.drafting == 0
    play.sessions, play._drafting, play._away = 1, [False], [0]
    play.run(100)
    assert play.drafting == 1, "the machine is idle now, and the text is easy"


def test_who_decodes_alone_tries_again() -> None:
    """A hard text that becomes easy: found out by a try after `PROBE_TOKENS` tokens."""
    play = Play(lambda rows: 0.004 + 0.0016 * rows, 1, 0.0)
    play.run(100)
    assert play.drafting == 0
    play.alpha = 0.95
    play.run(PROBE_TOKENS + 200)
    assert play.drafting == 1
    assert (play.budget.ceiling(0) or 0) > 4


def test_tries_in_vain_become_rare() -> None:
    play = Play(lambda rows: 0.004 + 0.0016 * rows, 1, 0.0)
    play.run(100)
    before = play.changes
    play.run(8 * PROBE_TOKENS)
    tries = (play.changes - before) // 2
    assert 1 <= tries <= 4, "after 512, 1024, 2048 tokens, ..."


def test_nothing_is_tried_where_no_text_could_gain() -> None:
    play = Play(lambda rows: 0.01 * rows, 8, 0.0)
    play.run(1500)
    assert (play.drafting, play.changes) == (0, 8)


def test_a_limit_falls_at_once_and_rises_one_by_one() -> None:
    budget = SpeculationBudget(curve(cpu))
    few: dict[Hashable, Standing] = {0: Standing(Mode.DRAFTING, 16)}
    budget.review(few)
    first = budget.ceiling(0)
    assert first is not None
    budget.review({number: Standing(Mode.DRAFTING, 16) for number in range(32)})
    assert budget.ceiling(0) == 1
    seen = []
    for _ in range(first + 1):
        budget.review(few)
        seen.append(budget.ceiling(0))
    assert seen == [*range(2, first + 1), first, first]


def test_who_decodes_alone_for_another_reason_is_left_alone() -> None:
    budget = SpeculationBudget(curve(cpu))
    budget.review({0: Standing(Mode.OTHER, 16)})
    assert budget.ceiling(0) is None
    assert budget.pays(0)
    assert budget.pays("never seen")
    assert budget.ceiling("never seen") is None
