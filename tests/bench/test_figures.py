"""Order statistics, and what a bench prints."""

import json

import pytest

from tests.bench.__main__ import benches, main
from tests.bench.figures import Blocks, Figure, percentile, report


def test_percentiles_are_samples() -> None:
    samples = [float(number) for number in range(1, 101)]
    assert [percentile(samples, percent) for percent in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert percentile([3.0, 1.0, 2.0], 99) == 3
    assert percentile([5.0], 50) == 5


def test_a_figure_is_the_median_over_blocks_with_its_spread(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = Blocks()
    for value in (3.0, 1.0, 200.0):
        blocks.add("alone", {"median_ms": value, "p99_ms": 7.0})
    assert blocks.last == {"alone.median_ms": 200, "alone.p99_ms": 7}
    assert blocks.figures()["alone.median_ms"] == Figure(value=3, low=1, high=200)
    report("any", {"blocks": 3}, blocks.figures(), as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert any("alone" in line and "3 (1-200)" in line and "7" in line for line in lines)
    figures = {"alone.median_ms": 3.0, "alone.p99_ms": 7.0}
    assert json.loads(lines[-1]) == {"bench": "any", "method": {"blocks": 3}, "figures": figures}


def test_without_a_name_the_benches_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert "overhead" in benches()
    for name, text in benches().items():
        assert f"  {name}" in listed
        assert text in listed
    assert main(["nothing"]) == 2
    assert "no bench is called 'nothing'" in capsys.readouterr().err
