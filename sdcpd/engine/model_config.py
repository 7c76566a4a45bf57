"""The shape of a model, read from the config.json of a Hugging Face folder (no torch here).

Known: the families llama, mistral, qwen2, qwen3 and qwen3_moe, whose decoders differ only in biases, q/k norms, rotary
scaling, windows of attention and experts. The rule of this reader is that a field which changes the forward pass is
either carried out or refused by name. A field that is skipped in silence gives a model that loads, answers, and is
wrong.

Sources: the fields as the `transformers` library writes them, in the spelling of version 4 (`rope_theta`,
`rope_scaling`) and of version 5 (`rope_parameters`).
"""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
QWEN3_HEAD_DIM: Final = 128
"""head_dim of a Qwen3 config that does not state it; the other families divide hidden_size by the heads."""

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


class ModelRefused(ValueError):
    """This model cannot be served right. The text names the file or field, its value, and what to do."""


class DefaultRope(Struct, frozen=True, tag="default", tag_field="type"):
    """Rotary embedding as it was first published."""

    theta: Positive


class LinearRope(Struct, frozen=True, tag="linear", tag_field="type"):
    """Positions divided by `factor`."""

    theta: Positive
    factor: Positive


class DynamicRope(Struct, frozen=True, tag="dynamic", tag_field="type"):
    """NTK-aware scaling that grows: beyond `original_context` a position turns by a base that grows with it."""

    theta: Positive
    factor: Positive
    original_context: Count


class Llama3Rope(Struct, frozen=True, tag="llama3", tag_field="type"):
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between."""

    theta: Positive
    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_context: Count


class YarnRope(Struct, frozen=True, tag="yarn", tag_field="type"):
    """YaRN (Peng et al. 2023): a ramp over the dimensions, and cosines and sines scaled by `attention_factor`."""

    theta: Positive
    factor: Positive
    original_context: Count
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    beta_fast: Positive
    beta_slow: Positive
    truncate: bool


Rope = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope


class Experts(Struct, frozen=True):
    """The layers whose MLP is a mixture: each token takes `chosen` of `count` experts of `intermediate` width.

    `normalised`: the weights of the chosen ones are scaled to a sum of 1. Other layers have an ordinary MLP.
    """

    layers: tuple[int, ...]
    count: Count
    chosen: Count
    intermediate: Count
    normalised: bool


class ModelConfig(Struct, frozen=True, kw_only=True):
    """All that the forward pass needs to know beside the weights. Sizes are numbers of elements.

    `context_tokens` is the limit in effect (the model's own or the operator's lower one). It does not enter the pass:
    the target digest is over the other fields. In the layers of `window_layers` a query sees the last `window` keys,
    its own included; in the others all.
    """

    family: Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
    vocabulary: Count
    hidden: Count
    intermediate: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    norm_epsilon: Positive
    rope: Rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    context_tokens: Count
    window: Count | None = None
    window_layers: tuple[int, ...] = ()
    experts: Experts | None = None

    @property
    def pass_fields(self) -> dict[str, Any]:
        """The fields that enter the forward pass, as plain values (decision 8)."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["context_tokens"]
        return fields


class _Raw(Struct):
    """The members of config.json that we look at; others do not touch these families' forward pass."""

    model_type: str
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | UnsetType | None = UNSET
    head_dim: Count | None = None
    rms_norm_eps: Positive = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Count | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None
    quantization_config: dict[str, Any] | None = None


class _RawRope(Struct):
    """The members of rope_scaling or rope_parameters that we look at."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    truncate: bool | None = None
    partial_rotary_factor: float | None = None
    mrope_section: list[int] | None = None


def read_model_config(folder: Path, context_tokens: int | None = None) -> ModelConfig:
    """Read `folder`/config.json. `context_tokens` lowers the model's own limit. Raises ModelRefused."""
    file = folder / "config.json"
    try:
        octets = file.read_bytes()
    except OSError as error:
        raise ModelRefused(
            f"{file} cannot be read ({error.strerror}). A model is a Hugging Face folder: config.json, safetensors "
            "weights, tokenizer.json."
        ) from error
    try:
        return _read(octets, context_tokens)
    except ModelRefused as error:
        raise ModelRefused(f"{file}: {error}") from None


def _read(octets: bytes, context_tokens: int | None) -> ModelConfig:
    try:
        _check_family(msgspec.json.decode(octets, type=_Family).model_type)
        raw = msgspec.json.decode(octets, type=_Raw)
    except msgspec.DecodeError as error:
        raise ModelRefused(f"{error}. Use the config.json that came with the weights.") from error
    if raw.quantization_config is not None:
        raise ModelRefused(
            f"quantization_config names {_quantised_as(raw.quantization_config)}; quantised checkpoints are not "
            'supported. Use the model\'s bf16, fp16 or fp32 checkpoint; engine.quantization = "int8" makes it smaller.'
        )
    if raw.hidden_act != "silu":
        raise ModelRefused(f"hidden_act is {raw.hidden_act!r}; only 'silu' is supported. Use another model.")
    rope = _rope(raw)
    window, window_layers = _window(raw)
    return ModelConfig(
        family=raw.model_type,  # type: ignore[arg-type]  # _check_family was here
        vocabulary=raw.vocab_size,
        hidden=raw.hidden_size,
        intermediate=raw.intermediate_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=_kv_heads(raw),
        head_dim=_head_dim(raw),
        norm_epsilon=raw.rms_norm_eps,
        rope=rope,
        qkv_bias=raw.model_type == "qwen2" or (raw.attention_bias and raw.model_type != "mistral"),
        o_bias=raw.attention_bias and raw.model_type not in ("mistral", "qwen2"),
        mlp_bias=raw.mlp_bias and raw.model_type == "llama",
        qk_norm=raw.model_type in ("qwen3", "qwen3_moe"),
        tied=raw.tie_word_embeddings,
        context_tokens=_context(raw, rope, context_tokens),
        window=window,
        window_layers=window_layers,
        experts=_experts(raw) if raw.model_type == "qwen3_moe" else None,
    )


class _Family(Struct):
    """Looked at first: for a foreign family its name is the news, not the first member that differs."""

    model_type: str = ""


def _check_family(model_type: str) -> None:
    if model_type not in FAMILIES:
        raise ModelRefused(
            f"model_type is {model_type!r}; supported are {', '.join(FAMILIES)}. Use a model of one of these families."
        )


_QUANTISED: Final = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "mxfp4": "FP4 (mxfp4)",
    "nvfp4": "FP4 (nvfp4)",
    "modelopt": "ModelOpt",
}
"""How people call what quant_method says."""


def _quantised_as(members: dict[str, Any]) -> str:
    """The method by name. Some writers say only the number format: `fmt`, `quant_algo`, a bitsandbytes flag."""
    method = members.get("quant_method")
    formats = [str(members[key]) for key in ("quant_algo", "fmt", "format", "bnb_4bit_quant_type") if members.get(key)]
    named = _QUANTISED.get(str(method), str(method)) if method else "an unnamed method"
    return f"{named} ({', '.join(formats)})" if formats else named


def _kv_heads(raw: _Raw) -> int:
    """null means one a head, for all families; absent means that for llama only (the others have defaults of old)."""
    if raw.num_key_value_heads is UNSET and raw.model_type != "llama":
        raise ModelRefused("num_key_value_heads is missing. Use the config.json that came with the weights.")
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % kv_heads:
        raise ModelRefused(
            f"num_attention_heads {raw.num_attention_heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return kv_heads


def _head_dim(raw: _Raw) -> int:
    """An explicit head_dim wins over hidden_size / heads; rotary embedding needs it even."""
    if raw.head_dim is not None:
        head_dim = raw.head_dim
    elif raw.model_type == "qwen3":
        head_dim = QWEN3_HEAD_DIM
    else:
        head_dim = raw.hidden_size // raw.num_attention_heads
        if head_dim * raw.num_attention_heads != raw.hidden_size:
            raise ModelRefused(
                f"hidden_size {raw.hidden_size} is not a multiple of num_attention_heads {raw.num_attention_heads}, "
                "and head_dim is not given"
            )
    if head_dim % 2:
        raise ModelRefused(f"head_dim is {head_dim}; rotary embedding needs an even one")
    return head_dim


def _context(raw: _Raw, rope: Rope, limit: int | None) -> int:
    """The model's own limit, or the lower one asked for. Dynamic scaling is there to go `factor` times beyond it."""
    own, source = raw.max_position_embeddings, f"max_position_embeddings is {raw.max_position_embeddings}"
    if isinstance(rope, DynamicRope):
        own = max(own, int(own * rope.factor))
        source += f" (with dynamic scaling by {rope.factor}: {own})"
    if limit is None:
        return own
    if limit > own:
        raise ModelRefused(f"{source}, but context_tokens asks for {limit}. Lower context_tokens or leave it out.")
    return limit


def _window(raw: _Raw) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers it is in force in; (None, ()) where no text that the model takes outgrows it."""
    if raw.model_type == "llama":
        return None, ()
    for layer_type in raw.layer_types or ():
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ModelRefused(f"layer_types names {layer_type!r}, which is not supported. Use another model.")
    in_force = raw.model_type == "mistral" or raw.use_sliding_window
    if not in_force or raw.sliding_window is None:
        return None, ()
    if raw.sliding_window < 1:
        raise ModelRefused(f"sliding_window is {raw.sliding_window}; a query sees at least itself (1), null is all")
    layers = tuple(range(raw.num_hidden_layers))
    if raw.model_type in ("qwen2", "qwen3"):
        if raw.layer_types is None:
            layers = layers[raw.max_window_layers :]
        elif "sliding_attention" not in raw.layer_types:
            return None, ()
        elif len(raw.layer_types) != raw.num_hidden_layers:
            raise ModelRefused(
                f"layer_types has {len(raw.layer_types)} entries, but num_hidden_layers is {raw.num_hidden_layers}"
            )
        else:
            layers = tuple(layer for layer in layers if raw.layer_types[layer] == "sliding_attention")
    if not layers or raw.sliding_window >= raw.max_position_embeddings:
        return None, ()
    return raw.sliding_window, layers


def _experts(raw: _Raw) -> Experts | None:
    """None when all layers are ordinary ones."""
    count = raw.num_experts or raw.num_local_experts
    if count is None:
        raise ModelRefused("num_experts is missing. Use the config.json that came with the weights.")
    chosen, intermediate = raw.num_experts_per_tok, raw.moe_intermediate_size
    if chosen is None or intermediate is None:
        missing = "num_experts_per_tok" if chosen is None else "moe_intermediate_size"
        raise ModelRefused(f"{missing} is missing. Use the config.json that came with the weights.")
    if chosen > count:
        raise ModelRefused(f"num_experts_per_tok is {chosen}, more than the {count} experts there are")
    ordinary = raw.mlp_only_layers or ()
    step = raw.decoder_sparse_step
    layers = tuple(layer for layer in range(raw.num_hidden_layers) if (layer + 1) % step == 0 and layer not in ordinary)
    if not layers:
        return None
    return Experts(layers=layers, count=count, chosen=chosen, intermediate=intermediate, normalised=raw.norm_topk_prob)


def _rope(raw: _Raw) -> Rope:
    """Both spellings of the type, both places of theta. An unknown type is refused, never read as the default."""
    member = "rope_scaling" if raw.rope_scaling else "rope_parameters"
    values = raw.rope_scaling or raw.rope_parameters or {}
    nested = [key for key, value in values.items() if isinstance(value, dict)]
    if nested:
        raise ModelRefused(f"{member} differs by layer type ({', '.join(nested)}), which is not supported")
    try:
        rope = msgspec.convert(values, _RawRope)
    except msgspec.ValidationError as error:
        raise ModelRefused(f"{member}: {error}") from error
    for name, factor in (
        ("partial_rotary_factor", raw.partial_rotary_factor),
        (f"{member}.partial_rotary_factor", rope.partial_rotary_factor),
    ):
        if factor is not None and factor != 1.0:
            raise ModelRefused(f"{name} is {factor}; only whole heads are rotated here (1.0). Use another model.")
    if rope.mrope_section is not None:
        raise ModelRefused(f"{member}.mrope_section (multimodal positions) is not supported. Use a text model.")
    theta = rope.rope_theta or raw.rope_theta or 10_000.0
    original = (
        raw.original_max_position_embeddings or rope.original_max_position_embeddings or raw.max_position_embeddings
    )
    match rope.rope_type or rope.type or "default":
        case "default":
            return DefaultRope(theta=theta)
        case "linear":
            return LinearRope(theta=theta, factor=_need(member, "factor", rope.factor))
        case "llama3":
            return Llama3Rope(
                theta=theta,
                factor=_need(member, "factor", rope.factor),
                low_freq_factor=_need(member, "low_freq_factor", rope.low_freq_factor),
                high_freq_factor=_need(member, "high_freq_factor", rope.high_freq_factor),
                original_context=original,
            )
        case "yarn":
            return YarnRope(
                theta=theta,
                factor=rope.factor or raw.max_position_embeddings / original,
                original_context=original,
                attention_factor=rope.attention_factor,
                mscale=rope.mscale,
                mscale_all_dim=rope.mscale_all_dim,
                beta_fast=rope.beta_fast or 32.0,
                beta_slow=rope.beta_slow or 1.0,
                truncate=rope.truncate is not False,
            )
        case "dynamic":
            return DynamicRope(
                theta=theta,
                factor=_need(member, "factor", rope.factor),
                original_context=raw.max_position_embeddings,  # as published: no other member counts here
            )
        case other:
            raise ModelRefused(
                f"{member} has the rope type {other!r}; supported are default, linear, dynamic, llama3 and yarn. Use "
                "another model."
            )


def _need(member: str, name: str, value: float | None) -> float:
    if value is None:
        raise ModelRefused(f"{member} lacks {name}. Use the config.json that came with the weights.")
    return value
