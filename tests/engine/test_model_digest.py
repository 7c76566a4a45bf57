"""Digests of target and tokenizer (decision 8): they change with what is computed and with nothing else."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdcpd.engine import model_digest as module
from sdcpd.engine.model_config import ModelRefused, read_model_config
from sdcpd.engine.model_digest import target_digest, tokenizer_digest, weight_files
from tests.support.tiny_models import make_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return make_tiny_llama(tmp_path / "model")


def digest(folder: Path, dtype: str = "fp32", cache: Path | None = None, context: int | None = None) -> bytes:
    return target_digest(folder, read_model_config(folder, context), dtype, cache)


def change_config(folder: Path, **members: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | members))


def change_weight(folder: Path) -> None:
    """One weight of one layer, by one step."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    place = weights["model.layers.1.mlp.up_proj.weight"]
    place[3, 5] = torch.nextafter(place[3, 5], torch.tensor(9.0))
    save_file(weights, file, metadata={"format": "pt"})


def test_it_names_the_model_not_the_place(folder: Path, tmp_path: Path) -> None:
    before = digest(folder)
    assert len(before) == 32
    os.utime(folder / "model.safetensors", ns=(0, 0))
    assert digest(folder) == before, "file times are not the model"
    assert digest(Path(shutil.copytree(folder, tmp_path / "copy"))) == before
    change_config(folder, transformers_version="9", use_cache=False, eos_token_id=[1, 2])
    assert digest(folder) == before, "members that do not enter the pass"
    assert digest(folder, context=100) == before, "an operator's lower limit"


def test_one_weight_or_the_dtype_makes_another_model(folder: Path) -> None:
    before = digest(folder)
    assert digest(folder, "bf16") != before
    change_weight(folder)
    assert digest(folder) != before


def test_what_enters_the_pass_makes_another_model(folder: Path) -> None:
    seen = {digest(folder)}
    for members in (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": None, "rope_theta": 500_000.0},
        {"rms_norm_eps": 1e-6},
        {"tie_word_embeddings": True},
    ):
        change_config(folder, **members)
        seen.add(digest(folder))
    assert len(seen) == 6


def test_two_spellings_of_one_meaning_are_one_model(folder: Path) -> None:
    change_config(folder, rope_scaling={"type": "linear", "factor": 2.0})
    old = digest(folder)
    change_config(folder, rope_scaling={"rope_type": "linear", "factor": 2})
    assert digest(folder) == old


def test_kept_hashes_give_the_same_answer_and_spare_the_reading(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = digest(folder, cache=cache)
    assert first == digest(folder)
    kept: list[Path] = []

    def spying(record: Path, *args: object) -> None:
        kept.append(record)

    monkeypatch.setattr(module, "_write_record", spying)
    assert digest(folder, cache=cache) == first
    assert kept == [], "a hash that is kept is not made again"
    change_weight(folder)
    os.utime(folder / "model.safetensors", ns=(0, 0))
    assert digest(folder, cache=cache) != first, "same size, another time"
    assert kept == list(cache.iterdir()), "and is kept in place of the old one"


def test_a_replaced_file_is_noticed_even_if_its_mtime_is_kept(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = digest(folder, cache=cache)
    times = (folder / "model.safetensors").stat()
    change_weight(folder)
    os.utime(folder / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest(folder, cache=cache) != first


@pytest.mark.parametrize("content", [b"", b"{", b'{"path": "elsewhere"}', b"\xff" * 40])
def test_a_spoilt_record_is_no_record(folder: Path, tmp_path: Path, content: bytes) -> None:
    cache = tmp_path / "cache"
    first = digest(folder, cache=cache)
    (record,) = cache.iterdir()
    record.write_bytes(content)
    assert digest(folder, cache=cache) == first


def test_a_cache_that_cannot_be_written_is_no_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert digest(folder, cache=tmp_path / "cache") == digest(folder)


def test_progress_ends_at_one(folder: Path) -> None:
    fractions: list[float] = []
    target_digest(folder, read_model_config(folder), "fp32", None, fractions.append)
    assert fractions[-1] == 1.0
    assert fractions == sorted(fractions)


def test_tokenizer_digest(folder: Path) -> None:
    before = tokenizer_digest(folder)
    os.utime(folder / "tokenizer.json", ns=(0, 0))
    assert tokenizer_digest(folder) == before
    file = folder / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    assert tokenizer_digest(folder) != before
    file.unlink()
    with pytest.raises(ModelRefused, match=r"tokenizer\.json"):
        tokenizer_digest(folder)


def test_weight_files(folder: Path) -> None:
    assert weight_files(folder) == ("model.safetensors",)
    index = folder / "model.safetensors.index.json"
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    with pytest.raises(ModelRefused, match=r"neither model\.safetensors nor"):
        weight_files(folder)
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}))
    with pytest.raises(ModelRefused, match=r"b\.safetensors"):
        weight_files(folder)
    (folder / "b.safetensors").touch()
    assert weight_files(folder) == ("a.safetensors", "b.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "../model/a.safetensors"}}))
    with pytest.raises(ModelRefused, match="not a file beside it"):
        weight_files(folder)
    index.write_text("[]")
    with pytest.raises(ModelRefused, match="Fetch the model again"):
        weight_files(folder)
