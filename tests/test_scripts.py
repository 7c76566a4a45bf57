"""scripts/env with a stand-in for Python: what it installs, when it does not, and what it says when it cannot."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAND_IN = """#!/bin/bash
# $DIR is where calls are noted; $FAIL what is to fail.
case "$*" in
    *"sys.version_info"*) exit 0 ;;
    "-VV") echo "Python stand-in" ;;
    "-m venv"*)
        [ "$FAIL" = venv ] && exit 1
        mkdir -p "${@: -1}/bin"
        cp "$0" "${@: -1}/bin/python"
        echo venv >>"$DIR/calls" ;;
    *"pip --version"*) exit 0 ;;
    *" install "*)
        all="$*"
        echo "pip ${all#*install }" >>"$DIR/calls"
        [ "$FAIL" = pip ] && exit 1
        exit 0 ;;
esac
"""


class Machine:
    """A folder with a stand-in for Python, and how scripts/env fares with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "python3"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def env(self, extra: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        environment = os.environ | {
            "DIR": str(self.folder),
            "FAIL": "",
            "SDCPD_PYTHON": str(self.python),
            "SDCPD_VENV": str(self.folder / "venv"),
        }
        environment.pop("SDCPD_TORCH_INDEX", None)
        return subprocess.run(
            ["bash", "-c", f". '{ROOT}/scripts/env' {extra} && echo ready"],
            env=environment | variables,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_second_run_installs_nothing(machine: Machine) -> None:
    first = machine.env("demo")
    assert (first.returncode, first.stdout) == (0, "ready\n"), first.stderr
    venv, torch, rest = machine.calls()
    assert venv == "venv"
    assert torch == "pip -qq torch==2.13.0"
    assert "torch==2.13.0" in rest
    assert f"{ROOT}[demo]" in rest
    assert "--constraint" in rest
    assert machine.env("demo").returncode == 0
    assert machine.calls() == []


def test_dev_holds_demo_but_not_the_reverse(machine: Machine) -> None:
    machine.env("demo")
    machine.calls()
    assert machine.env("dev").returncode == 0
    assert any("[dev]" in call for call in machine.calls())
    (machine.folder / "venv" / ".stamp-demo").unlink()
    assert machine.env("demo").returncode == 0
    assert machine.calls() == []


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="with an NVIDIA device the plain build is taken")
def test_an_index_of_cpu_builds_is_for_torch_alone(machine: Machine) -> None:
    machine.env("demo", SDCPD_TORCH_INDEX="https://index.example.org/cpu")
    _, torch, rest = machine.calls()
    assert torch == "pip -qq --index-url https://index.example.org/cpu torch==2.13.0"
    assert "index.example.org" not in rest


def test_another_index_means_another_environment(machine: Machine) -> None:
    machine.env("demo")
    machine.calls()
    machine.env("demo", SDCPD_TORCH_INDEX="https://index.example.org/cpu")
    assert Path("/dev/nvidiactl").exists() or len(machine.calls()) == 2


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SDCPD_PYTHON": "no-such-python"}, "no Python 3.11 or newer was found"),
        ({"FAIL": "venv"}, "apt-get install python3-venv"),
        ({"FAIL": "pip"}, "Is this machine online"),
    ],
)
def test_what_it_says_when_it_cannot(machine: Machine, variables: dict[str, str], words: str) -> None:
    result = machine.env("demo", **variables)
    assert result.returncode == 1
    assert result.stdout == ""
    assert words in result.stderr
    assert not (machine.folder / "venv" / ".stamp-demo").exists()


def test_a_failed_installation_is_taken_up_again(machine: Machine) -> None:
    machine.env("demo", FAIL="pip")
    machine.calls()
    assert machine.env("demo").returncode == 0
    assert len(machine.calls()) == 2  # the environment itself was there


@pytest.mark.parametrize("script", ["quickstart", "test", "check", "bench", "simulate"])
def test_scripts_can_be_run_from_anywhere(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", path], check=True)
