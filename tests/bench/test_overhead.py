"""The bench's names and shapes, with counts so small that its figures say nothing."""

import json

import pytest

from tests.bench.overhead import main

ROUND = {"median_ms", "p99_ms", "rounds_per_s", "client_ms", "transport_ms", "server_ms", "append_ms"}
CPU = {"cpu_client_ms", "cpu_server_ms"}
RATIOS = {"median_ratio", "rate_ratio", "cpu_ratio"}


@pytest.mark.process
def test_every_set_up_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    main(["--json", "--blocks", "1", "--rounds", "8"])
    out, err = capfd.readouterr()
    lines = out.splitlines()
    result = json.loads(lines[-1])
    assert result["bench"] == "overhead"
    assert {"blocks", "rounds_a_block", "cores", "log_in_memory"} <= result["method"].keys()
    rows: dict[str, dict[str, float]] = {}
    for name, value in result["figures"].items():
        row, _, column = name.partition(".")
        rows.setdefault(row, {})[column] = value
    for sessions in ("alone", "sixteen"):
        for set_up in ("", "fsync_", "polls_"):
            assert rows.pop(set_up + sessions).keys() == ROUND | CPU
        for set_up in ("", "fsync_", "polls_", "remote_"):
            assert rows.pop(f"{set_up}{sessions}_to_echo").keys() == RATIOS
        assert rows.pop(f"echo_{sessions}").keys() == CPU | {"median_ms", "p99_ms", "rounds_per_s"}
        assert rows.pop(f"remote_{sessions}").keys() == ROUND | CPU | {"cpu_cache_ms"}
    assert {name: row.keys() for name, row in rows.items()} == {
        "python": {"median_ms", "p99_ms"},
        "fdatasync": {"median_ms", "p99_ms"},
        "fsync_over_fdatasync": {"median_ms"},
    }
    sixteen = [result["figures"][f"sixteen.{part}_ms"] for part in ("client", "transport", "server", "append")]
    assert all(part > 0 for part in sixteen)
    assert any("remote_sixteen" in line for line in lines)
    assert "block 1 of 1" in err


@pytest.mark.process
def test_one_set_up_alone(capfd: pytest.CaptureFixture[str]) -> None:
    main(["--json", "--blocks", "1", "--rounds", "2", "--only", "memory"])
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])["figures"]
    rows = {name.partition(".")[0] for name in figures}
    assert {"alone", "sixteen", "echo_alone", "echo_sixteen", "python", "fdatasync"} <= rows
    assert not any(row.startswith(("fsync_", "polls_", "remote_")) for row in rows)


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--blocks", "0"], ["--only", "nothing"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
        assert wrong[0] in capsys.readouterr().err
