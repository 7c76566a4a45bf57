"""A run is a function of its seed: twice in one process, and in two processes whose hashes of strings differ."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.world import run_seed

ROOT = Path(__file__).parents[2]
SEEDS = (4, 11, 17)
PRINT_HASHES = f"""
from tests.sim.world import run_seed
for seed in {SEEDS}:
    outcome = run_seed(seed)
    print(outcome.kind, outcome.trace_hash, outcome.rounds, outcome.virtual_s)
"""


def hashes(hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PRINT_HASHES]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_two_processes_with_different_string_hashes_agree() -> None:
    first = hashes("1")
    assert first == hashes("2")
    assert len(first.splitlines()) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_replays_to_the_same_trace(seed: int) -> None:
    first, second = run_seed(seed), run_seed(seed)
    assert first.trace_hash == second.trace_hash
    assert first.lines == second.lines
    assert first.rounds > 0


def test_other_seeds_are_other_runs() -> None:
    assert len({run_seed(seed).trace_hash for seed in SEEDS}) == len(SEEDS)
