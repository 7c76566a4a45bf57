"""scripts/simulate: exit codes, when it stops, and what a failing seed prints."""

import sys

import pytest
from msgspec.structs import replace

from tests.sim import simulate
from tests.sim.options import FAULTS, SimOptions
from tests.sim.world import CRASH, NO_PROGRESS, OK, WRONG, Outcome


class Runs:
    """Stands for `run_seed`: seeds in `kinds` end as told, all others well."""

    def __init__(self, **kinds: int) -> None:
        self.kinds = {int(seed.removeprefix("seed")): kind for seed, kind in kinds.items()}
        self.seen: list[int] = []

    def __call__(self, seed: int) -> Outcome:
        self.seen.append(seed)
        return Outcome(
            options=SimOptions.from_seed(seed),
            kind=self.kinds.get(seed, OK),
            text="something does not hold",
            trace_hash="abcdef",
            lines=tuple(f"line {number}" for number in range(200)),
            injected={"request_lost": 2},
            ends={"finished": 1},
            rounds=7,
            virtual_s=12.0,
        )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Run":
    return Run(monkeypatch, capsys)


class Run:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, runs: Runs, *arguments: str) -> tuple[int, str]:
        self._monkeypatch.setattr(simulate, "run_seed", runs)
        self._monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
        code = simulate.main()
        return code, self._capsys.readouterr().out


@pytest.mark.parametrize("kind", [WRONG, NO_PROGRESS, CRASH])
def test_the_exit_code_says_how_it_failed(run: Run, kind: int) -> None:
    runs = Runs(seed3=kind)
    code, said = run(runs, "--count", "10")
    assert code == kind
    assert runs.seen == [0, 1, 2, 3]
    assert "seed 3: " in said
    assert "scripts/simulate --seed 3" in said
    assert all(f"line {number}\n" in said for number in range(200))
    assert '"waiting_limit_s"' in said


def test_all_seeds_of_a_count_are_run_when_asked_to(run: Run) -> None:
    runs = Runs(seed6=CRASH, seed8=WRONG)
    code, said = run(runs, "--count", "10", "--first", "5", "--keep-going")
    assert code == CRASH
    assert runs.seen == list(range(5, 15))
    assert "failed: 6, 8" in said


def test_one_seed_and_the_table(run: Run) -> None:
    code, said = run(Runs(), "--seed", "17")
    assert code == OK
    assert "seed 17: ok (trace abcdef)" in said
    assert all(name in said for name in FAULTS)
    assert "1 seeds, 7 rounds, 12 virtual seconds" in said


def test_until_failure(run: Run) -> None:
    runs = Runs(seed120=NO_PROGRESS)
    assert run(runs, "--until-failure")[0] == NO_PROGRESS
    assert len(runs.seen) == 121


def test_a_time_that_is_over_runs_nothing(run: Run) -> None:
    runs = Runs()
    assert run(runs, "--minutes", "0")[0] == OK
    assert runs.seen == []


def test_wrong_usage_is_none_of_the_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", "--count", "many"])
    with pytest.raises(SystemExit) as left:
        simulate.main()
    assert left.value.code == simulate.USAGE_ERROR


def test_options_are_a_function_of_the_seed_and_differ() -> None:
    drawn = [SimOptions.from_seed(seed) for seed in range(200)]
    assert drawn == [SimOptions.from_seed(seed) for seed in range(200)]
    assert len({replace(one, seed=0).pass_s for one in drawn}) > 1
    assert {name for one in drawn for name in one.faults} == set(FAULTS)
    assert any(not one.faults for one in drawn), "some runs are quiet"
    assert any(len(one.faults) > len(FAULTS) / 2 for one in drawn), "some are a storm"
