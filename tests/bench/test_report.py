"""Charts from what `decode --json` prints: they are well-formed, name everything, and need no network."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench import report
from tests.bench.charts import Chart, ticks

FIGURES = {
    f"{family}.{method}.{name}": value
    for family in ("chat", "edit")
    for method, ratio in (("plain", 1.0), ("suffix", 2.5), ("transformers", 0.4))
    for name, value in (("ratio_to_plain", ratio), ("cycles_per_1k", 900 / ratio), ("ms_per_cycle", 30.0))
} | {
    "edit.suffix.acceptance_by_position.1": 0.9,
    "edit.suffix.acceptance_by_position.4": 0.5,
    "plain.bf16.tokens_per_s": 40.0,
}


def run_file(folder: Path, **said: object) -> Path:
    file = folder / "run.txt"
    found = {"bench": "decode", "method": {"model": "a < b"}, "figures": FIGURES} | said
    file.write_text(f"a table\n{json.dumps(found)}\n")
    return file


def test_a_page_of_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    report.main([str(run_file(tmp_path)), "--out", str(out)])
    page = out.read_text()
    assert capsys.readouterr().out.strip() == str(out)
    charts = page.split("<svg")[1:]
    assert len(charts) == 3, "speed-up, cycles, acceptance of the one method that proposes"
    for chart in charts:
        ElementTree.fromstring("<svg" + chart[: chart.index("</svg>")] + "</svg>")
    speed_up, cycles, acceptance = charts
    assert speed_up.count("<rect") == 1 + 6 + 3, "the ground, bars, the legend"
    assert "edit, suffix: 2.50" in speed_up
    assert cycles.count("<circle") == 6
    assert "Acceptance by position: suffix" in acceptance
    assert acceptance.count("<circle") == 2
    assert "model a &lt; b" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "the name space is no address"


def test_files_without_figures_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("nothing\n")
    for file, said in (
        (tmp_path / "empty.txt", "no line with what a bench says"),
        (run_file(tmp_path, bench="pass", figures={"bf16.rows_1.ms": 2.0}), "pass has no figures"),
    ):
        with pytest.raises(SystemExit) as ended:
            report.main([str(file), "--out", str(tmp_path / "page.html")])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 3.5) == [0, 1, 2, 3]
    assert ticks(0, 1.05) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]


def test_marks_stand_where_their_values_are() -> None:
    chart = Chart("t", "x", "y", x=(0, 10), y=(0, 10))
    before = len(chart.svg())
    chart.line([(0, 0), (10, 10)], "#000000")
    assert 'points="64.0,328.0 670.0,34.0"' in chart.svg()
    assert len(chart.svg()) > before
