"""Names and shapes of `prefill`, on a tiny model: the figures say nothing."""

import json
from pathlib import Path

import pytest

from tests.bench import prefill


def test_prompts_alone_and_beside_others(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--json", "--model", str(tiny_llama), "--blocks", "1", "--threads", "1", "--others", "1", "--chunk", "16"]
    prefill.main([*small, "--lengths", "20,100,9999", "--precision", "fp32"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = found["figures"]
    for length in (20, 100):
        for figure in (
            "first_token_ms",
            "tokens_per_s",
            "beside_ms",
            "others_before_ms",
            "others_during_ms",
            "others_longest_before_ms",
            "others_longest_during_ms",
        ):
            assert names[f"tokens_{length}.{figure}"] > 0
    assert "tokens_9999.first_token_ms" not in names, "the model takes no more than 256 tokens"
    assert found["method"]["prefill_chunk_tokens"] == 16


@pytest.mark.parametrize("wrong", [["--lengths", "1"], ["--others", "0"], ["--precision", "fp8"]])
def test_nonsense_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prefill.main(wrong)
    assert ended.value.code == 2
