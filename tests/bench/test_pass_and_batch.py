"""Names and shapes of the engine's benches, on a tiny model: the figures say nothing."""

import importlib
import json
from pathlib import Path

import pytest

from tests.bench import batch, prefix
from tests.bench.__main__ import benches
from tests.bench.batch import with_ratios
from tests.bench.figures import Blocks, Figure

pass_bench = importlib.import_module("tests.bench.pass")  # a word that `import` does not take


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    found: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    return found


def test_pass(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--json", "--model", str(tiny_llama), "--blocks", "1", "--repeats", "1", "--threads", "1"]
    pass_bench.main([*small, "--prefix", "20", "--precisions", "fp32,bf16,int8,int8_pack_bf16"])
    names = figures(capsys)
    for precision in ("fp32", "bf16", "int8", "int8_pack_bf16"):
        assert names[f"{precision}.floor.ms"] > 0
        for row in (*(f"rows_{count}" for count in pass_bench.ROWS), *(f"sessions_{n}" for n in pass_bench.SESSIONS)):
            for column in ("ms", "cpu_ms", "ratio_to_floor", "cpu_ratio_to_floor"):
                assert f"{precision}.{row}.{column}" in names


def test_batch(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "echo.jsonl").write_text(
        "".join(f'{{"family": "echo", "prompt": "{word} of the rest of the rest of the"}}\n' for word in ("all", "one"))
    )
    small = ["--json", "--model", str(tiny_llama), "--prompts", str(tmp_path), "--threads", "1", "--no-template"]
    few = ["--sessions", "1,3", "--max-tokens", "12", "--repetitions", "1"]
    batch.main([*small, *few, "--precisions", "fp32,int8"])
    names = figures(capsys)
    for row in ("sessions_1", "sessions_3", "int8.sessions_3"):
        assert names[f"{row}.auto_over_best"] > 0
        for mode in ("on", "off", "auto"):
            assert names[f"{row}.{mode}.tokens_per_s"] > 0
            assert names[f"{row}.{mode}.rows_a_pass"] >= 1
    assert names["sessions_1.off.rows_a_pass"] == 1, "a row a token"
    assert 1 < names["sessions_3.off.rows_a_pass"] <= 3
    assert names["sessions_1.on.rows_a_pass"] > 1, "proposals"


def test_automatic_is_held_against_the_better_of_on_and_off() -> None:
    blocks = Blocks()
    for on, off, auto in ((10.0, 20.0, 19.0), (30.0, 20.0, 27.0), (12.0, 22.0, 22.0)):
        for mode, speed in (("on", on), ("off", off), ("auto", auto)):
            blocks.add(f"sessions_4.{mode}", {"tokens_per_s": speed})
    found = with_ratios(blocks, [4])["sessions_4.auto_over_best"]
    assert found == Figure(value=22 / 20, low=0.9, high=1.0)


def test_prefix(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--json", "--model", str(tiny_llama), "--blocks", "1", "--threads", "1"]
    prefix.main([*small, "--prompt", "200", "--tokens", "8"])
    names = figures(capsys)
    assert names["cold.ttft_ms"] > 0
    for tier in ("device", "host", "disk"):
        assert names[f"{tier}.same_tokens"] == 1
        assert names[f"{tier}.ttft_ms"] > 0


def test_they_are_listed_and_refuse_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"pass", "batch", "prefix"} <= benches().keys()
    for bench, wrong in ((pass_bench, ["--precisions", "fp8"]), (batch, ["--sessions", "0,4"])):
        with pytest.raises(SystemExit) as ended:
            bench.main(wrong)
        assert ended.value.code == 2
    assert "1 to 64 sessions" in capsys.readouterr().err
