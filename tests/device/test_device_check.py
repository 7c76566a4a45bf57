"""`scripts/device_check` on the CPU with tiny shapes: that it parses, proves what it says, and finds what is wrong."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdcpd.engine.linear import Linear
from tests.device import __main__ as command
from tests.device import check
from tests.device.shapes import EXACT, SHAPES

SMALL = ["--device", "cpu", "--shape", "tiny", "--trials", "8", "--json"]


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_the_proofs_hold_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*SMALL, "--only", "equality", "--only", "bits"]) == command.HOLDS
    found = figures(capsys)
    assert found["broken"] == []
    names = found["figures"].keys()
    assert {f"equality.{name}.cut_and_mixed" for name in EXACT} <= names
    assert {"bits.bf16.batch_invariant.passes_changed", "bits.int8.fast.passes_changed"} <= names
    assert all(found["figures"][name] == 0 for name in names if "pages_lost" in name)


def test_the_measurements_have_their_names(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "REPEATS", 1)
    assert command.main([*SMALL, "--only", "passes"]) == command.HOLDS
    names = figures(capsys)["figures"].keys()
    for kind in ("bf16", "int8"):
        assert {f"passes.{kind}.rows_{rows}_ratio_to_floor" for rows in check.ROWS} <= names
        assert {f"passes.{kind}.sessions_16_rows_9_ms", f"passes.{kind}.prefill_tokens_per_s"} <= names


def test_a_wrong_model_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that feel their neighbours: more than rounding, and other bits."""
    honest = Linear.__call__

    def mixing(self: Linear, rows: Tensor) -> Tensor:
        product = honest(self, rows)
        return product + 0.05 * product.mean(0)

    monkeypatch.setattr(Linear, "__call__", mixing)
    monkeypatch.setattr(check, "EXACT", {"plain": EXACT["plain"]})
    assert command.main([*SMALL, "--only", "equality"]) == command.BROKEN
    output = capsys.readouterr().out
    assert "does NOT hold" in output
    assert "equality.plain.cut_and_mixed" in json.loads(output.splitlines()[-1])["broken"]


def test_time_that_runs_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*SMALL, "--limit-s", "-1"]) == command.NO_TIME
    assert figures(capsys)["left_out"] == ["equality", "bits", "passes bf16", "text", "passes int8"]


@pytest.mark.model
def test_texts_of_the_demo_model(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*SMALL, "--only", "text", "--model", str(demo_model)]) == command.HOLDS
    assert figures(capsys)["figures"]["text.prompt_0.tokens_equal"] == 32


def test_no_gpu_has_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == command.NO_DEVICE
    assert "there is no GPU to check" in capsys.readouterr().err


def test_shapes_are_those_of_the_models_they_are_named_for() -> None:
    from sdcpd.engine.model_size import measure

    billions = {name: measure(shape).parameters / 1e9 for name, shape in SHAPES.items()}
    assert billions["qwen3-1.7b"] == pytest.approx(1.72, abs=0.01)
    assert billions["qwen3-4b"] == pytest.approx(4.02, abs=0.01)
    assert billions["qwen3-8b"] == pytest.approx(8.19, abs=0.01)


def test_the_script_parses() -> None:
    script = Path(__file__).parents[2] / "scripts" / "device_check"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert script.stat().st_mode & 0o111
