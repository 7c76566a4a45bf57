"""The drafter that learns: a few of the target's layers under the target's embedding, with a head over fewer tokens.

A plain causal Llama over windows of equal length, for training only; the engine reads what `save` writes. The embedding
stays as the target has it (it is most of the weights, and what learns on a few hundred thousand tokens must be small);
the head begins as the embedding's rows of the tokens that the texts use most, as FR-Spec chooses them.
"""

import json
import shutil
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from sdcpd.engine.draft_vocabulary import MAP
from sdcpd.engine.model_config import ModelConfig, ModelRefused
from sdcpd.engine.model_digest import weight_files
from sdcpd.engine.rope import Rotation

PARTS: Final = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
TEXT_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def frequent_tokens(best: Tensor, always: tuple[int, ...], vocabulary: int, count: int) -> Tensor:
    """The `count` tokens that a target most often holds for the best, rising, int64; all of them for count 0.

    `best` as in Texts. Where fewer occur, those with the lowest ids (bytes, and the merges made first) fill the rest.
    """
    if not count or count >= vocabulary:
        return torch.arange(vocabulary)
    uses = torch.bincount(best[:, :4].flatten(), minlength=vocabulary).double()
    uses[list(always)] += uses.max() + 1
    uses -= torch.arange(vocabulary, dtype=torch.float64) / (2 * vocabulary)  # no ties: the lower id first
    return uses.topk(count).indices.sort().values


class Student(nn.Module):
    """`layers` are numbers of the target's layers, from the first of the drafter to its last."""

    embedding: Tensor
    head_tokens: Tensor

    def __init__(self, target: Path, config: ModelConfig, layers: tuple[int, ...], head_tokens: Tensor) -> None:
        """Reads the target's weights. Raises ModelRefused for a family with other parts than a Llama's."""
        super().__init__()
        if config.family != "llama" or config.qkv_bias or config.o_bias or config.mlp_bias or not config.tied:
            raise ModelRefused(f"a target of the family {config.family!r} with these parts cannot be distilled here")
        tensors = _read(target)
        self._config = config
        self._rotation = Rotation(config.rope, config.head_dim, torch.device("cpu"), torch.float32)
        self.register_buffer("embedding", tensors["model.embed_tokens.weight"].float(), persistent=False)
        self.register_buffer("head_tokens", head_tokens)
        self.norm = nn.Parameter(tensors["model.norm.weight"].float())
        self.head = nn.Parameter(self.embedding[head_tokens].clone())
        self.parts = nn.ParameterDict(
            {
                _key(place, part): nn.Parameter(tensors[f"model.layers.{number}.{part}.weight"].float())
                for place, number in enumerate(layers)
                for part in PARTS
            }
        )
        self._layers = len(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [windows, length] -> logits over the head's tokens, [windows, length, head]."""
        config = self._config
        windows, length = tokens.shape
        heads, kv_heads = config.heads, config.kv_heads
        turning = heads + kv_heads
        cosines, sines = self._rotation.at(torch.arange(length).repeat(windows))
        states = self.embedding[tokens].view(windows * length, -1)
        for place in range(self._layers):
            layer = {part: self.parts[_key(place, part)] for part in PARTS}
            normed = self._normed(states, layer["input_layernorm"])
            projected = torch.cat([linear(normed, layer[f"self_attn.{part}_proj"]) for part in "qk"], -1)
            turned = self._rotation.turn(projected.float().view(-1, turning, config.head_dim), cosines, sines)
            values = linear(normed, layer["self_attn.v_proj"]).float()
            q, k, v = (
                part.reshape(windows, length, -1, config.head_dim).transpose(1, 2)
                for part in (turned[:, :heads], turned[:, heads:], values)
            )
            seen = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            seen = seen.transpose(1, 2).reshape(windows * length, -1)
            states = states + linear(seen, layer["self_attn.o_proj"])
            normed = self._normed(states, layer["post_attention_layernorm"])
            gated = silu(linear(normed, layer["mlp.gate_proj"])) * linear(normed, layer["mlp.up_proj"])
            states = states + linear(gated, layer["mlp.down_proj"])
        return linear(self._normed(states, self.norm), self.head).view(windows, length, -1)

    def _normed(self, values: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(values.float(), (values.shape[-1],), weight, self._config.norm_epsilon)

    def save(self, folder: Path, target: Path) -> None:
        """Write a Hugging Face folder in bf16 that the engine reads as a drafter of `target`."""
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((target / "config.json").read_text())
        config |= {"num_hidden_layers": self._layers, "tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        for name in TEXT_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, folder / name)
        tensors = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        tensors["lm_head.weight"] = self.head
        for place in range(self._layers):
            for part in PARTS:
                tensors[f"model.layers.{place}.{part}.weight"] = self.parts[_key(place, part)]
        written = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        if len(self.head_tokens) < self._config.vocabulary:
            written[MAP] = self.head_tokens - torch.arange(len(self.head_tokens))
        save_file(written, folder / "model.safetensors", metadata={"format": "pt"})


def _key(place: int, part: str) -> str:
    return f"{place}/{part}".replace(".", "/")  # names of parameters hold no dots


def _read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with safe_open(folder / file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  # not a dict
    return found
