"""Names and shapes of the engine's benches, on a tiny model: the figures say nothing."""

import importlib
import json
from pathlib import Path

import pytest

from tests.bench import batch, prefix
from tests.bench.__main__ import benches

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


def test_batch(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--json", "--model", str(tiny_llama), "--blocks", "1", "--tokens", "12", "--threads", "1"]
    batch.main([*small, "--sessions", "4", "--acceptance", "1"])
    names = figures(capsys)
    assert names["off.sessions_4.passes"] == 12
    assert names["on.sessions_4.passes"] == 2, "six tokens a round"
    assert names["on.sessions_1.tokens_per_s"] > 0


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
    for bench, wrong in ((pass_bench, ["--precisions", "fp8"]), (batch, ["--tokens", "0"])):
        with pytest.raises(SystemExit) as ended:
            bench.main(wrong)
        assert ended.value.code == 2
    assert "--tokens" in capsys.readouterr().err
