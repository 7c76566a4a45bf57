"""A head over a part of the vocabulary: the same choices as the whole head would make among those tokens."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdcpd.engine.draft_vocabulary import read_draft_vocabulary
from sdcpd.engine.forward import Engine
from sdcpd.engine.model_config import ModelRefused
from sdcpd.engine.settings import EngineSettings
from sdcpd.engine.spans import Row, Sampled, Span
from sdcpd.protocol.distributions import Profile
from sdcpd.protocol.draft_rows import ids_of
from tests.support.engines import POOL_BYTES, load, some_tokens

KEPT = torch.tensor([0, 3, 4, 17, 40, 41, 99, 150, 233, 299])


def reduced(whole: Path, folder: Path, offsets: torch.Tensor, *, tied: bool = False, extra: bool = True) -> Path:
    """The model of `whole` with a head over `KEPT`, in `folder`."""
    folder.mkdir()
    weights = load_file(whole / "model.safetensors")
    head = weights.pop("lm_head.weight")
    if not tied:
        weights["lm_head.weight"] = head[KEPT].clone()
    weights["d2t"] = offsets
    if extra:
        mask = torch.zeros(300, dtype=torch.bool)
        mask[KEPT] = True
        weights["t2d"] = mask
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((whole / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((whole / "tokenizer.json").read_bytes())
    return folder


def drafting_engine(folder: Path) -> Engine:
    settings = EngineSettings(model=str(folder), device="cpu", dtype="fp32", kv_cache_bytes=POOL_BYTES, threads=1)
    return Engine.load(settings, drafts=True)


def rows_of(engine: Engine, tokens: list[int], judge: Sampled | None = None) -> tuple[Row, ...]:
    sequence = engine.open_sequence()
    assert engine.reserve(sequence, len(tokens))
    rows = len(tokens) if judge is None else 1
    span = Span(sequence=sequence, tokens=tuple(tokens), start=0, rows=rows, judge=judge)
    return engine.run(engine.plan([span]))[0]


@pytest.mark.parametrize("tied", [False, True])
def test_its_choices_are_those_of_the_whole_head_among_its_tokens(tiny_llama: Path, tmp_path: Path, tied: bool) -> None:
    folder = reduced(tiny_llama, tmp_path / "reduced", KEPT - torch.arange(len(KEPT)), tied=tied)
    engine = drafting_engine(folder)
    assert engine.info.vocabulary == 300
    tokens = some_tokens(40)
    whole = load(tiny_llama)
    if not tied:
        batch = whole.plan([Span(sequence=open_with(whole, 40), tokens=tuple(tokens), start=0, rows=40)])
        expected = KEPT[whole.compute(batch)[:, KEPT].argmax(-1)]
        assert [row.token for row in rows_of(engine, tokens)] == expected.tolist()
    (row,) = rows_of(engine, tokens, Sampled(Profile(top_k=4), 0.7))
    assert row.drafted is not None
    assert row.token in ids_of(row.drafted)
    assert set(ids_of(row.drafted)) <= set(KEPT.tolist())


def open_with(engine: Engine, length: int) -> int:
    sequence = engine.open_sequence()
    assert engine.reserve(sequence, length)
    return sequence


def test_a_target_with_a_reduced_head_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    folder = reduced(tiny_llama, tmp_path / "reduced", KEPT - torch.arange(len(KEPT)))
    with pytest.raises(ModelRefused, match="lm_head"):
        load(folder)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        (KEPT - torch.arange(len(KEPT)) + 1, "leads to tokens 1 to 300"),
        (torch.full((10,), -1), "leads to tokens -1"),
        (torch.arange(10).flip(0) - torch.arange(10), "rising"),
        (-torch.arange(10), "rising"),
        ((KEPT - torch.arange(len(KEPT))).int(), "int64"),
        (torch.zeros((2, 5), dtype=torch.int64), "int64"),
        (torch.zeros(0, dtype=torch.int64), "int64"),
    ],
)
def test_a_map_that_cannot_be_is_refused(tiny_llama: Path, tmp_path: Path, offsets: torch.Tensor, words: str) -> None:
    folder = reduced(tiny_llama, tmp_path / "reduced", offsets)
    with pytest.raises(ModelRefused, match=words):
        drafting_engine(folder)


def test_a_whole_head_has_no_map(tiny_llama: Path) -> None:
    assert read_draft_vocabulary(tiny_llama, 300) is None
    assert drafting_engine(tiny_llama).info == load(tiny_llama).info
