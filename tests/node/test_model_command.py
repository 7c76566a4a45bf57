"""sdcpctl model: from folder to facts, without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdcpd.node import ctl, model_command
from tests.support.engines import load
from tests.support.gguf_files import write_gguf


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = ctl.main(["model", *map(str, arguments)])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_inspect_says_what_the_engine_would_load(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = run(capsys, "inspect", tiny_llama, "--json")
    assert status == model_command.OK
    facts = json.loads(output)
    assert facts["shape"]["family"] == "llama"
    assert facts["kv_bytes_a_token"] == {"bf16": 256, "fp32": 512}
    for row in facts["precisions"]:
        info = load(tiny_llama, dtype=row["dtype"], quantization=row["quantization"]).info
        assert row["target"] == info.model.hex()
        assert row["least_weights_bytes"] <= info.weights_bytes <= row["weights_bytes"]
        assert facts["tokenizer"] == info.tokenizer.hex()


def test_inspect_for_people(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = run(capsys, "inspect", tiny_llama)
    assert status == model_command.OK
    for words in ("parameters", "family", "llama", "int8", "256 B", "theta 10000.0", "KiB to "):
        assert words in output


def test_refusals_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run(capsys, "inspect", tmp_path)
    assert status == model_command.REFUSED
    assert error.startswith("sdcpctl: ")
    assert "Hugging Face folder" in error
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "'gpt2'" in run(capsys, "inspect", tmp_path)[2]
    status, _, error = run(capsys, "import", tmp_path / "x.gguf", tmp_path / "made")
    assert status == model_command.REFUSED
    assert "is no file" in error


def test_import_then_inspect(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tiny_llama, tmp_path / "model.gguf")
    status, output, _ = run(capsys, "import", file, tmp_path / "made")
    assert status == model_command.OK
    assert str(tmp_path / "made") in output
    assert run(capsys, "inspect", tmp_path / "made")[0] == model_command.OK


@pytest.mark.parametrize("verb", ["inspect", "import"])
def test_torch_is_not_loaded(tiny_llama: Path, tmp_path: Path, verb: str) -> None:
    arguments: list[Any] = [tiny_llama]
    if verb == "import":
        arguments = [write_gguf(tiny_llama, tmp_path / "model.gguf"), tmp_path / "made"]
    script = (
        "import sys; from sdcpd.node import ctl\n"
        f"assert ctl.main(['model', {verb!r}, *sys.argv[1:]]) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
