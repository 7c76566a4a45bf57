"""A GGUF file made into a Hugging Face folder: dequantised weights in bf16, config, tokenizer, chat template.

GGUF stores the rows of Llama's q and k projections interleaved, for rotary embeddings over neighbouring pairs. The
Hugging Face layout rotates the first half of a head against the second; `_unpermute` restores that. Other architectures
are stored as they are. Llama 3's rope scaling comes as a tensor of factors, one a frequency; the parameters that gave
them are found again, and checked.

The folder is built beside its place under a temporary name and renamed at the end. Needs the package `gguf` (extra
`demo`); no torch here.
"""

import importlib.util
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sdcpd.node.gguf_facts import GgufFacts, ImportRefused
from sdcpd.node.safetensors_file import write_bf16

if TYPE_CHECKING:
    import numpy

Progress = Callable[[str, float], None]
"""Called with the step ("convert") and the fraction of it that is done."""

_FACTORS: Final = "rope_freqs.weight"
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""Of all Llama 3.1, 3.2 and 3.3 models; only the factor differs."""

_NAMES: Final = (
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
    (r"blk\.(\d+)\.attn_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"blk\.(\d+)\.attn_([qkv])\.(weight|bias)", r"model.layers.\1.self_attn.\2_proj.\3"),
    (r"blk\.(\d+)\.attn_([qk])_norm\.weight", r"model.layers.\1.self_attn.\2_norm.weight"),
    (r"blk\.(\d+)\.attn_output\.(weight|bias)", r"model.layers.\1.self_attn.o_proj.\2"),
    (r"blk\.(\d+)\.ffn_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"blk\.(\d+)\.ffn_(gate|up|down)\.weight", r"model.layers.\1.mlp.\2_proj.weight"),
    (r"blk\.(\d+)\.ffn_gate_inp\.weight", r"model.layers.\1.mlp.gate.weight"),
    (r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight", r"model.layers.\1.mlp.experts.*.\2_proj.weight"),
)
"""GGUF's name of each tensor and the Hugging Face name, as patterns; a star stands for the expert's number."""


def need_gguf() -> None:
    """Raises ImportRefused when the reader of this form is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportRefused(
            "the Python package gguf is missing, which reads this form. Install it: pip install 'sdcpd[demo]'."
        )


def import_gguf(file: Path, folder: Path, progress: Progress) -> None:
    """Make `file` into `folder`, which must not be there yet. Raises ImportRefused."""
    need_gguf()
    if not file.is_file():
        raise ImportRefused(f"{file} is no file")
    if folder.exists():
        raise ImportRefused(f"{folder} is there already. Name a folder to be made.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.part-", dir=folder.parent))
        try:
            convert(file, part, progress)
            part.chmod(0o755)  # mkdtemp makes it private; a service under another user may read a model
            for written in (*part.iterdir(), part):
                sync(written)
            part.rename(folder)
            sync(folder.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ImportRefused(f"{folder} could not be written: {error}") from error


def sync(path: Path) -> None:
    """Make a file or a folder's names durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def convert(file: Path, folder: Path, progress: Progress) -> GgufFacts:
    """Write everything into `folder`, which is there and empty. Raises ImportRefused."""
    from gguf import GGUFReader  # here: only this needs it, and it is an optional dependency

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError) as error:
        raise ImportRefused(f"{file} cannot be read as GGUF: {error}. Fetch it again.") from error
    facts = GgufFacts(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = facts.config(
        tied="output.weight" not in tensors,
        biased="blk.0.attn_q.bias" in tensors,
        scaling=_llama3_scaling(facts, tensors.pop(_FACTORS, None)),
    )
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", facts.generation_config())
    _write_json(folder / "tokenizer.json", facts.tokenizer())
    _write_json(folder / "tokenizer_config.json", facts.tokenizer_config())
    if facts.chat_template is not None:
        (folder / "chat_template.jinja").write_text(facts.chat_template, encoding="utf-8")
    parts = _Parts(facts, tensors, progress)
    write_bf16(folder / "model.safetensors", parts.shapes, parts.values())
    progress("convert", 1.0)
    return facts


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


class _Parts:
    """The tensors by their Hugging Face names. Shapes are known before any is dequantised."""

    def __init__(self, facts: GgufFacts, tensors: dict[str, Any], progress: Progress) -> None:
        self._facts = facts
        self._tensors = tensors
        self._progress = progress
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in tensors.items():
            shape = tuple(int(extent) for extent in reversed(tensor.shape))  # GGUF counts from the innermost
            for part, index in _targets(name, shape):
                self.shapes[part] = shape if index is None else shape[1:]

    def values(self) -> "Iterator[tuple[str, numpy.ndarray[Any, Any]]]":
        from gguf.quants import dequantize

        for count, (name, tensor) in enumerate(self._tensors.items(), start=1):
            values: numpy.ndarray[Any, Any] = dequantize(tensor.data, tensor.tensor_type)
            if self._facts.architecture == "llama":
                if re.search(r"attn_q\.", name):
                    values = _unpermute(values, self._facts.heads)
                elif re.search(r"attn_k\.", name):
                    values = _unpermute(values, self._facts.kv_heads)
            for part, index in _targets(name, values.shape):
                yield part, values if index is None else values[index]
            self._progress("convert", count / (len(self._tensors) + 1))


def _targets(name: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """The Hugging Face names that a tensor becomes: one, or one an expert with its index in the stack."""
    for pattern, replacement in _NAMES:
        if (match := re.fullmatch(pattern, name)) is not None:
            found = match.expand(replacement)
            if "*" not in found:
                return [(found, None)]
            return [(found.replace("*", str(expert)), expert) for expert in range(shape[0])]
    raise ImportRefused(f"the file has a tensor {name!r} that is not known here. Take the model's Hugging Face folder.")


def _unpermute(rows: "numpy.ndarray[Any, Any]", heads: int) -> "numpy.ndarray[Any, Any]":
    """Rows [heads * head_dim, ...] with pairs (2i, 2i+1) side by side -> first halves, then second halves."""
    count, *rest = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, *rest).swapaxes(1, 2).reshape(count, *rest)


def _llama3_scaling(facts: GgufFacts, factors: Any) -> dict[str, Any] | None:  # gguf ships no types
    """rope_scaling of type llama3 whose factors are these. The largest of them is its `factor`."""
    if factors is None:
        return None
    found = [float(value) for value in factors.data]
    scaling = {
        "rope_type": "llama3",
        "factor": max(found),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
    expected = llama3_factors(facts.theta, facts.head_dim, max(found))
    if len(found) != len(expected) or not all(map(_near, found, expected)):
        raise ImportRefused(f"{_FACTORS} holds factors of an unknown scaling. Take the model's Hugging Face folder.")
    return scaling


def llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """By what Llama 3's scaling divides each frequency."""
    factors: list[float] = []
    for place in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (place / head_dim)
        smooth = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4)
