"""Every *.txt beside this file, played on the machine that its name begins with: verifier, drafter or router.

`pytest tests/scenarios --rewrite` writes the answers as they are now into the files; read the difference before you
keep it.
"""

from pathlib import Path

import pytest

from tests.scenarios import trace
from tests.scenarios.drafter_player import DrafterPlayer
from tests.scenarios.router_player import RouterPlayer
from tests.scenarios.trace import Entry, Player
from tests.scenarios.verifier_player import VerifierPlayer

FILES = sorted(Path(__file__).parent.glob("*.txt"))


def player(path: Path) -> Player:
    match path.name.split("_")[0]:
        case "verifier":
            return VerifierPlayer()
        case "drafter":
            return DrafterPlayer()
        case "router":
            return RouterPlayer()
        case other:
            raise ValueError(f"{path.name}: nobody plays {other!r}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    entries = trace.read(path)
    played = trace.write(trace.play(entries, player(path)))
    if request.config.getoption("--rewrite"):
        path.write_text(played, "utf-8")
    assert path.read_text("utf-8") == played


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 10


def test_what_is_written_is_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "scenario.txt"
    entries = [Entry(["# why"], "assign d seq=2", ["one", "two"]), Entry([], "state", ["three"])]
    path.write_text(trace.write(entries))
    assert trace.read(path) == entries
    assert trace.command("propose 20,21 by=e base=3").members == {"by": "e", "base": 3}


@pytest.mark.parametrize("text", ["state\nanswer\n", "state\n\n----\n"])
def test_a_command_without_its_rule_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scenario.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"scenario.txt:2: ---- must follow"):
        trace.read(path)
