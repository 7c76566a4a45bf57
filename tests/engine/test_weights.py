"""Loading: every parameter exactly once, everything else refused by name (bug 25)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdcpd.engine.model_config import ModelRefused
from tests.support.engines import load, some_tokens, whole
from tests.support.tiny_models import make_tiny_llama

TOKENS = some_tokens(9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path)


def change(folder: Path, changed: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    changed(weights)
    save_file(weights, file, metadata={"format": "pt"})


def configure(folder: Path, **members: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | members))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        load(folder)
    return str(caught.value)


def test_a_tied_head_is_the_embedding_with_or_without_a_tensor_for_it(folder: Path) -> None:
    untied = whole(load(folder), TOKENS)
    configure(folder, tie_word_embeddings=True)
    tolerated = whole(load(folder), TOKENS)
    assert not torch.allclose(untied, tolerated, atol=1e-2), "an extra lm_head is not used"
    change(folder, lambda weights: weights.pop("lm_head.weight"))
    assert torch.equal(whole(load(folder), TOKENS), tolerated)
    # And it is the embedding: an untied model whose lm_head equals it gives the same logits.
    configure(folder, tie_word_embeddings=False)
    change(folder, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    assert torch.equal(whole(load(folder), TOKENS), tolerated)


def test_an_untied_head_that_is_missing_is_refused(folder: Path) -> None:
    change(folder, lambda weights: weights.pop("lm_head.weight"))
    text = refusal(folder)
    assert "lack lm_head.weight" in text
    assert "tie_word_embeddings" in text


def test_missing_tensors_are_named(folder: Path) -> None:
    change(folder, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))
    assert "lack model.layers.1.self_attn.k_proj.weight" in refusal(folder)


def test_unknown_tensors_are_named(folder: Path) -> None:
    change(folder, lambda weights: weights.update({f"model.layers.{n}.lora_A": torch.ones(1) for n in range(9)}))
    text = refusal(folder)
    assert "model.layers.0.lora_A" in text
    assert "4 more" in text


def test_a_layer_too_many_is_unknown(folder: Path) -> None:
    configure(folder, num_hidden_layers=1)
    assert "model.layers.1." in refusal(folder)


def test_buffers_of_old_checkpoints_are_tolerated(folder: Path) -> None:
    before = whole(load(folder), TOKENS)
    change(folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(whole(load(folder), TOKENS), before)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    change(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(65)}))
    assert "model.norm.weight has the shape [65]" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused(folder: Path, dtype: torch.dtype) -> None:
    change(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(64).to(dtype)}))
    assert "model.norm.weight is torch." in refusal(folder)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "a.safetensors")
    save_file({"model.norm.weight": weights["model.norm.weight"]}, folder / "b.safetensors")
    weight_map = dict.fromkeys(weights, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model.norm.weight is in two files" in refusal(folder)


def test_a_file_cut_short_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "Fetch the model again" in refusal(folder)


def test_other_precisions_are_cast(folder: Path) -> None:
    before = whole(load(folder), TOKENS)
    change(folder, lambda weights: weights.update({name: tensor.half() for name, tensor in weights.items()}))
    after = whole(load(folder), TOKENS)
    assert after.dtype == torch.float32
    assert torch.allclose(after, before, atol=5e-2)
