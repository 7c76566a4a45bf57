"""The three steps on a tiny model: what they write can be read, goes on where it was, and learns at all."""

import json
from pathlib import Path

import pytest
import torch

from sdcpd.engine.model_config import read_model_config
from tests.distil.__main__ import main
from tests.distil.evaluation import best_ratio
from tests.distil.student import Student, frequent_tokens
from tests.distil.texts import KEPT, read_texts
from tests.distil.training import loss_of
from tests.support.tiny_models import TINY, make_tiny_llama


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A tiny Llama that ties its head to its embedding, as the demo model does."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "target"
    folder.mkdir()
    make_tiny_llama(folder)
    config = TINY | {"model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    folder = tmp_path / "prompts"
    folder.mkdir()
    lines = [json.dumps({"family": "chat", "prompt": f"the thing {number}"}) for number in range(8)]
    (folder / "chat.jsonl").write_text("\n".join(lines))
    return folder


def test_texts_training_evaluation(
    tmp_path: Path, target: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    common = ["--folder", str(work), "--model", str(target), "--threads", "1"]
    made = ["--prompts", str(prompts), "--texts", "4", "--answer", "12"]
    assert main(["train", *common]) == 1
    assert "make some first" in capsys.readouterr().err
    assert main(["texts", *common, *made, "--shards", "1"]) == 0
    first = (work / "texts" / "texts-00000.safetensors").read_bytes()
    assert main(["texts", *common, *made, "--shards", "2"]) == 0
    assert (work / "texts" / "texts-00000.safetensors").read_bytes() == first, "what is there is not made again"
    texts = read_texts(work / "texts")
    assert texts.best.shape == texts.weights.shape == (len(texts.tokens), KEPT)
    assert bool((texts.weights.sum(-1) <= 1.001).all())
    shape = ["--layers", "0,1", "--head", "128", "--windows", "2", "--length", "16", "--every", "2"]
    assert main(["train", *common, *shape, "--steps", "2"]) == 0
    assert main(["train", *common, *shape, "--steps", "4"]) == 0
    assert "step 4 of 4" in capsys.readouterr().err
    assert torch.load(work / "drafter" / "checkpoint.pt", weights_only=True)["step"] == 4
    assert main(["evaluate", *common, "--prompts", str(prompts), "--answer", "6", "--each", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert 0 <= figures["chat.agreement"] <= 1
    assert figures["chat.bound"] >= 1
    assert figures["cost.ratio"] > 0


def test_all_layers_and_tokens_are_the_target_itself(tmp_path: Path, target: Path) -> None:
    """The student's own pass against the engine's, and what it writes against what was read."""
    from safetensors.torch import load_file

    config = read_model_config(target)
    student = Student(target, config, (0, 1), torch.arange(config.vocabulary))
    student.save(tmp_path / "copy", target)
    ours, theirs = load_file(tmp_path / "copy" / "model.safetensors"), load_file(target / "model.safetensors")
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.to(torch.bfloat16)), name
    from sdcpd.engine.forward import Engine
    from sdcpd.engine.settings import EngineSettings
    from sdcpd.engine.spans import Span

    engine = Engine.load(EngineSettings(model=str(target), dtype="fp32", kv_cache_bytes=1 << 22, threads=1))
    tokens = tuple(range(5, 25))
    sequence = engine.open_sequence()
    assert engine.reserve(sequence, len(tokens))
    wanted = engine.compute(engine.plan([Span(sequence, tokens, 0, len(tokens))]))
    with torch.inference_mode():
        got = student(torch.tensor([tokens, tokens]))
    assert torch.allclose(got[0], wanted, atol=1e-3)
    assert torch.equal(got[0], got[1])


def test_the_head_has_the_tokens_that_are_used_most() -> None:
    best = torch.tensor([[7, 3, 9, 1], [7, 3, 9, 2], [7, 3, 8, 0]])
    assert frequent_tokens(best, (99,), 100, 4).tolist() == [3, 7, 9, 99]
    assert frequent_tokens(best, (), 100, 0).tolist() == list(range(100))


def test_the_loss_is_least_where_the_target_is_copied() -> None:
    places, weights = torch.tensor([[0, 1, -1]]), torch.tensor([[0.6, 0.2, 0.2]])
    exact, right = loss_of(torch.tensor([[0.75, 0.25, 1e-9]]).log(), places, weights)
    other, wrong = loss_of(torch.tensor([[0.25, 0.7, 0.05]]).log(), places, weights)
    assert exact < other
    assert (right.item(), wrong.item()) == (1.0, 0.0)


def test_what_a_drafter_could_gain() -> None:
    assert best_ratio(0.0, 0.1) == (1.0, 0)
    ratio, m = best_ratio(0.8, 0.1)
    assert m > 1
    assert ratio == pytest.approx(sum(0.8**place for place in range(m + 1)) / (1 + m * 0.1))
