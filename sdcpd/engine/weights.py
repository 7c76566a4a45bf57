"""Weights from safetensors files into the tensors the forward pass uses.

Each parameter has one place and must be put there exactly once: a missing, doubled, unknown or misshapen tensor is
refused by name. A loader that fills what it finds and says nothing gives a server that is healthy and talks garbage.

Projections that read the same input are stored as one matrix: q, k, v below each other, and gate and up. That is one
product instead of three or two, and nothing else changes.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sdcpd.engine.draft_vocabulary import BACK, MAP
from sdcpd.engine.linear import TILE_ROWS, Linear, can_halve, can_pack, int8_kernel, keeps_bits
from sdcpd.engine.mlp import GatedMlp, Mixture
from sdcpd.engine.model_config import Experts, ModelConfig, ModelRefused
from sdcpd.engine.model_digest import weight_files

_NO_PARAMETER: Final = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|original_inv_freq)")
"""Tensors that old checkpoints carry although they follow from config.json."""

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `qk_norm` [heads + kv_heads, head_dim] or None."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    mlp: GatedMlp | Mixture

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.o, *self.mlp.linears)


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model. `embedding` [vocabulary, hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.head, *(linear for layer in self.layers for linear in layer.linears))

    @property
    def read_octets(self) -> int:
        """What one pass reads of them: the linear layers, and of the embedding next to nothing."""
        return sum(one.numel() * one.element_size() for linear in self.linears for one in linear.tensors)

    @property
    def octets(self) -> int:
        """Memory that they take; a head that is the embedding counts once."""
        tensors = [self.embedding, self.norm, *(tensor for linear in self.linears for tensor in linear.tensors)]
        for layer in self.layers:
            tensors += [layer.input_norm, layer.post_norm, *([] if layer.qk_norm is None else [layer.qk_norm])]
        return sum(one.numel() * one.element_size() for one in {id(one): one for one in tensors}.values())


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a named tensor of the checkpoint goes, and the shape it must have. Copying may repeat it."""

    shape: tuple[int, ...]
    target: Tensor


class _Places:
    """All places of a model by name. Targets share memory with the fused tensors they are part of."""

    def __init__(self, device: torch.device, dtype: torch.dtype, linears: torch.device) -> None:
        """`linears`: where the weights of linear layers are read to."""
        self._device = device
        self._dtype = dtype
        self.linears = linears
        self.by_name: dict[str, _Place] = {}

    def single(self, name: str, *shape: int) -> Tensor:
        return self.stacked({name: shape[0]}, *shape[1:])

    def stacked(self, heights: dict[str, int], *rest: int, device: torch.device | None = None) -> Tensor:
        """One tensor [sum of heights, *rest]; the named ones lie in it from top to bottom."""
        shape = (sum(heights.values()), *rest)
        whole = torch.empty(shape, dtype=self._dtype, device=device or self._device)
        for (name, height), part in zip(heights.items(), torch.split(whole, list(heights.values())), strict=True):
            self.by_name[name] = _Place((height, *rest), part)
        return whole

    def repeated(self, times: dict[str, int], width: int) -> Tensor:
        """One tensor [sum of times, width]; each named vector of `width` fills as many rows as it says."""
        whole = torch.empty((sum(times.values()), width), dtype=self._dtype, device=self._device)
        for name, part in zip(times, torch.split(whole, list(times.values())), strict=True):
            self.by_name[name] = _Place((width,), part)
        return whole


def load_weights(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[float], None] | None = None,
    *,
    int8: bool = False,
    invariant: bool = False,
    head_tokens: Tensor | None = None,
) -> Weights:
    """Read, cast to `dtype` and place all weights; quantise or pack them where that is asked or possible.

    `invariant`: give linear layers that do not keep their bits in company tiles. `head_tokens` are those that
    the head has a row for, where these are not all (draft_vocabulary.py). Raises ModelRefused.
    """

    def fill(places: dict[str, _Place]) -> None:
        _fill(folder, config, places, progress, () if head_tokens is None else (MAP, BACK))

    return _made(config, device, dtype, fill, int8=int8, invariant=invariant, head_tokens=head_tokens)


def random_weights(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    int8: bool = False,
    invariant: bool = False,
    drawn_on: torch.device | None = None,
) -> Weights:
    """Weights of that shape that mean nothing: to measure passes with.

    Drawn in float32 on `drawn_on` (the device itself by default) and the same for the same shape there.
    """

    def fill(places: dict[str, _Place]) -> None:
        generators: dict[torch.device, torch.Generator] = {}
        for name, place in places.items():
            where = drawn_on or place.target.device
            generator = generators.setdefault(where, torch.Generator(where).manual_seed(0))
            if len(place.shape) == 1:
                place.target.fill_(1.0 if "norm" in name else 0.0)
            else:
                drawn = torch.empty(place.shape, dtype=torch.float32, device=where)
                place.target.copy_(drawn.normal_(std=place.shape[-1] ** -0.5, generator=generator))

    return _made(config, device, dtype, fill, int8=int8, invariant=invariant)


def _made(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    fill: Callable[[dict[str, _Place]], None],
    *,
    int8: bool,
    invariant: bool,
    head_tokens: Tensor | None = None,
) -> Weights:
    """All places, filled, then brought into the form that passes use."""
    # Int8 weights are made on the host: the device never has to hold the model twice.
    places = _Places(device, dtype, torch.device("cpu") if int8 else device)
    embedding = places.single("model.embed_tokens.weight", config.vocabulary, config.hidden)
    rows = config.vocabulary if head_tokens is None else len(head_tokens)
    head = embedding
    if not config.tied:
        head = places.stacked({"lm_head.weight": rows}, config.hidden, device=places.linears)
    layers = tuple(_layer(places, config, number) for number in range(config.layers))
    norm = places.single("model.norm.weight", config.hidden)
    fill(places.by_name)
    if config.tied and head_tokens is not None:
        head = embedding[head_tokens.to(device)]
    weights = Weights(embedding=embedding, layers=layers, norm=norm, head=Linear(head, None))
    if int8:
        kernel = int8_kernel(device, dtype)
        for linear in weights.linears:
            linear.quantise(device, kernel)
    elif can_halve(device, dtype) and all(linear.fits_half for linear in weights.linears):
        for linear in weights.linears:
            linear.halve()
    elif can_pack(device, dtype):
        for linear in weights.linears:
            linear.pack()
    if invariant:
        _tile(weights.linears, device, dtype)
    return weights


def _tile(linears: Sequence[Linear], device: torch.device, dtype: torch.dtype) -> None:
    """Where a shape does not keep its bits in company, take its rows in tiles; at worst in tiles of one row."""
    for shape in dict.fromkeys(linear.shape for linear in linears):
        alike = [linear for linear in linears if linear.shape == shape]
        for rows in (TILE_ROWS, 1):
            if keeps_bits(alike[0], device, dtype):
                break
            for linear in alike:
                linear.tile(rows)


def _layer(places: _Places, config: ModelConfig, number: int) -> LayerWeights:
    prefix = f"model.layers.{number}"
    attention = f"{prefix}.self_attn"
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    fused = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    norms = {f"{attention}.q_norm.weight": config.heads, f"{attention}.k_norm.weight": config.kv_heads}
    return LayerWeights(
        input_norm=places.single(f"{prefix}.input_layernorm.weight", config.hidden),
        qkv=_linear(places, attention, fused, config.hidden, config.qkv_bias),
        qk_norm=places.repeated(norms, config.head_dim) if config.qk_norm else None,
        o=_linear(places, attention, {"o_proj": config.hidden}, query, config.o_bias),
        post_norm=places.single(f"{prefix}.post_attention_layernorm.weight", config.hidden),
        mlp=_mixture(places, f"{prefix}.mlp", config.hidden, config.experts)
        if config.experts is not None and number in config.experts.layers
        else _mlp(places, f"{prefix}.mlp", config.hidden, config.intermediate, config.mlp_bias),
    )


def _mixture(places: _Places, parent: str, hidden: int, experts: Experts) -> Mixture:
    return Mixture(
        router=_linear(places, parent, {"gate": experts.count}, hidden, False),
        experts=tuple(
            _mlp(places, f"{parent}.experts.{number}", hidden, experts.intermediate, False)
            for number in range(experts.count)
        ),
        chosen=experts.chosen,
        normalised=experts.normalised,
    )


def _mlp(places: _Places, parent: str, hidden: int, intermediate: int, biased: bool) -> GatedMlp:
    return GatedMlp(
        gate_up=_linear(places, parent, {"gate_proj": intermediate, "up_proj": intermediate}, hidden, biased),
        down=_linear(places, parent, {"down_proj": hidden}, intermediate, biased),
    )


def _linear(places: _Places, parent: str, heights: dict[str, int], width: int, biased: bool) -> Linear:
    names = {f"{parent}.{name}.weight": height for name, height in heights.items()}
    weight = places.stacked(names, width, device=places.linears)
    if not biased:
        return Linear(weight, None)
    names = {f"{parent}.{name}.bias": height for name, height in heights.items()}
    return Linear(weight, places.stacked(names, device=places.linears))


def _fill(
    folder: Path,
    config: ModelConfig,
    places: dict[str, _Place],
    progress: Callable[[float], None] | None,
    read_elsewhere: tuple[str, ...],
) -> None:
    """Copy every tensor of the checkpoint to its place."""
    filled: set[str] = set()
    unknown: list[str] = []
    for file in weight_files(folder):
        try:
            with safe_open(folder / file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # not a dict: it has no iterator
                    if name in filled:
                        raise ModelRefused(f"{folder / file}: {name} is in two files. Fetch the model again.")
                    if name in places:
                        _put(folder / file, name, tensors.get_tensor(name), places[name])
                        filled.add(name)
                    elif not (_NO_PARAMETER.fullmatch(name) or (config.tied and name == "lm_head.weight")):
                        unknown += [name] if name not in read_elsewhere else []
                    if progress is not None:
                        progress(len(filled) / len(places))
        except (SafetensorError, OSError) as error:
            raise ModelRefused(f"{folder / file} cannot be read: {error}. Fetch the model again.") from error
    if unknown:
        raise ModelRefused(
            f"{folder}: the weights hold tensors that a {config.family} model does not have: {_some(unknown)}. Is "
            "config.json that of these weights? (Adapters must be merged first.)"
        )
    if missing := [name for name in places if name not in filled]:
        hint = " config.json says tie_word_embeddings = false." if "lm_head.weight" in missing else ""
        raise ModelRefused(f"{folder}: the weights lack {_some(missing)}.{hint} Fetch the model again.")


def _put(file: Path, name: str, tensor: Tensor, place: _Place) -> None:
    if tensor.dtype not in _DTYPES:
        raise ModelRefused(f"{file}: {name} is {tensor.dtype}; use the model's bf16, fp16 or fp32 checkpoint.")
    if tuple(tensor.shape) != place.shape:
        raise ModelRefused(
            f"{file}: {name} has the shape {list(tensor.shape)}, but config.json asks for {list(place.shape)}. Is "
            "config.json that of these weights?"
        )
    place.target.copy_(tensor)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
