"""Names and shapes of `decode`, on a tiny model: the figures say nothing."""

import json
from pathlib import Path

import pytest

from tests.bench import decode
from tests.bench.decode_figures import acceptance_by_position, at_rows, method_figures
from tests.bench.decoding import POSITIONS, Text
from tests.bench.prompts import read_prompts, spread


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    found: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    return found


def test_every_method_in_a_whole_node(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "echo.jsonl").write_text('{"family": "echo", "prompt": "the rest of the rest of the"}\n')
    small = ["--json", "--model", str(tiny_llama), "--prompts", str(tmp_path), "--threads", "1", "--no-template"]
    decode.main([*small, "--max-tokens", "24", "--precisions", "fp32", "--count", "1"])
    names = figures(capsys)
    for method in ("plain", "ngram", "suffix", "frequency_hybrid", "draft_model", "transformers"):
        for figure in ("tokens_per_s", "ratio_to_plain", "ratio_to_transformers", "cycles_per_1k", "ms_per_cycle"):
            assert names[f"echo.{method}.{figure}"] > 0
    for method in ("plain", "ngram", "suffix", "frequency_hybrid", "draft_model"):
        assert names[f"echo.{method}.equal_texts"] == 1
        assert names[f"{method}.fp32.ratio_to_transformers"] > 0
    assert names["echo.draft_model.acceptance_by_position.1"] == 1, "the target as its own drafter"
    assert names["echo.draft_model.mean_acceptance_length"] > 1
    assert names["echo.draft_model.ratio_of_ceiling"] > 0
    assert names["echo.draft_model.cache_draft_share"] == 0
    assert names["echo.plain.cycles_per_1k"] == 1000
    assert "echo.transformers_lookup.tokens_per_s" in names


def test_plain_alone_in_two_precisions(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--json", "--model", str(tiny_llama), "--families", "chat", "--threads", "1", "--no-template"]
    decode.main([*small, "--methods", "plain", "--max-tokens", "4", "--count", "1", "--no-references"])
    names = figures(capsys)
    assert names["plain.bf16.tokens_per_s"] > 0
    assert names["plain.int8.tokens_per_s"] > 0
    assert names["int8.chat.plain.tokens_per_s"] > 0
    assert "chat.transformers.tokens_per_s" not in names


def text(**fields: object) -> Text:
    some = {"tokens": tuple(range(9)), "context_tokens": 20, "first_ms": 5.0, "first_tokens": 1, "decode_ms": 8.0}
    return Text(**some | fields)  # type: ignore[arg-type]  # as they are declared


def test_the_figures_of_a_text() -> None:
    plain = text(decode_ms=80.0, rows=(1,) * 9)
    places = tuple(2 if position <= 3 else 0 for position in POSITIONS)
    drafted = text(decode_ms=40.0, rows=(1, 5, 5), drafts=2, proposed=8, accepted=6, accepted_at=places)
    found = method_figures([drafted], [plain], [plain], {1: 10.0, 4: 13.0, 6: 15.0})
    assert found["ratio_to_plain"] == found["ratio_to_transformers"] == 2
    assert found["tokens_per_s"] == pytest.approx(200)
    assert found["mean_acceptance_length"] == 4
    assert found["cycles_per_1k"] == pytest.approx(3000 / 9)
    assert found["ms_per_cycle"] == 20
    assert found["equal_texts"] == 1
    assert found["ceiling"] == pytest.approx(3 * 10 / ((10 + 14 + 14) / 3))
    assert found["ratio_of_ceiling"] == pytest.approx(2 / found["ceiling"])
    assert acceptance_by_position([drafted]) == {"1": 1, "2": 1, "3": 1, "4": 0}


def test_a_pass_between_two_that_were_timed() -> None:
    assert at_rows({1: 10.0, 3: 20.0}, 2) == 15
    assert at_rows({1: 10.0, 3: 20.0}, 3) == 20
    assert at_rows({1: 10.0, 3: 20.0}, 9) == 20


def test_prompts_of_its_own() -> None:
    own = read_prompts(None)
    assert list(own) == ["chat", "code", "edit", "qa", "structured"]
    assert all(len(prompts) == 4 for prompts in own.values())
    assert spread(["a", "b", "c", "d"], 2) == ["a", "c"]
    assert spread(["a"], 5) == ["a"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--methods", "eagle"], "there are plain"),
        (["--families", "poems"], "there are chat"),
        (["--max-tokens", "1"], "at least 2"),
        (["--prompts", "/nowhere"], "no file FAMILY.jsonl"),
    ],
)
def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str], wrong: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        decode.main(wrong)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
