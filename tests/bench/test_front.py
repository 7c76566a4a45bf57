"""The bench's names and shapes, and what it asserts, with a few clients of a tiny model."""

import json
from pathlib import Path

import pytest

from tests.bench.front import main


@pytest.mark.process
def test_a_few_clients_do_not_hear_each_other(tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["--json", "--model", str(tiny_llama), "--clients", "8", "--requests", "3", "--tokens", "6"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["bench"] == "front"
    figures = result["figures"]
    assert (figures["all.answers"], figures["all.errors"], figures["all.crossed"]) == (24, 0, 0)
    for name in ("first_token_ms", "piece_gap_ms", "token_ms"):
        assert 0 <= figures[f"{name}.p50"] <= figures[f"{name}.p90"] <= figures[f"{name}.p99"]
    assert figures["memory.before_mb"] > 0


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--clients", "0"], ["--tokens", "1"], ["--seconds", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
        assert wrong[0] in capsys.readouterr().err
