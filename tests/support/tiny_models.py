"""Tiny random models: one factory for all families (by transformers), one complete folder without it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TINY: dict[str, Any] = {
    "bos_token_id": 297,
    "eos_token_id": 299,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 300,
}
"""Shape of the tiny models: 4 query heads over 2 kv heads, 300 tokens, a context of 256."""


def make_tiny_model(folder: Path, family: str, *, shard_size: str | None = None, **config: Any) -> Path:
    """Write a tiny random model of a model_type as transformers does. `config` overrides entries of `TINY`.

    Weights are random but the same each time. `shard_size` (such as "100KB") splits them into files with an index.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY | config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The usual initial values (norms 1, biases 0) would hide a norm or bias that is not applied.
            if parameter.dim() == 1:
                parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
            else:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    return folder


def make_tiny_llama(folder: Path) -> Path:
    """Write a tiny random Llama with everything a folder has: weights, tokenizer, chat template, generation config."""
    save_file(_llama_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    config = TINY | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}
    for file, content in {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 297, "eos_token_id": 299},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "model_max_length": 256},
    }.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return folder


def _llama_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, mlp, vocabulary = TINY["hidden_size"], TINY["intermediate_size"], TINY["vocab_size"]
    query = TINY["num_attention_heads"] * TINY["head_dim"]
    key_value = TINY["num_key_value_heads"] * TINY["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(TINY["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key_value, hidden),
            "self_attn.v_proj": (key_value, hidden),
            "self_attn.o_proj": (hidden, query),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {
        name: (1 + 0.3 * torch.randn(shape, generator=generator))
        if len(shape) == 1
        else 0.1 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def _tokenizer() -> dict[str, Any]:
    """A byte-level BPE tokenizer.json of 300 tokens that can encode any text."""
    from tokenizers import pre_tokenizers

    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = (
        "t h,Ġ a,i n,e r,r e,o n,a t,e n,o r,Ġ s,Ġ w,e s,i s,o u,Ġ c,Ġ o,a r,i t,l l,Ġ b,Ġ p,a n,l e,e d,Ġ f,i c,s t"
    )
    pairs += ",a l,Ġ m,v e,r o,Ġ d,m e,Ġ i,n d,Ġ h,c h,e l,Ġ t,th e,in g"
    merges = [pair.split(" ") for pair in pairs.split(",")]
    vocabulary += [left + right for left, right in merges]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": len(vocabulary) + i, "content": text, **plain} for i, text in enumerate(special)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(vocabulary + special)}, "merges": merges},
    }


def make_perturbed(folder: Path, whole: Path, scale: float) -> Path:
    """A copy of a model folder with noise of `scale` times each matrix's own spread added: a draft model that agrees
    with it the less, the more there is. The noise is the same each time."""
    from safetensors.torch import load_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(whole / "model.safetensors")
    for tensor in weights.values():
        if tensor.dim() == 2:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * scale
            tensor.copy_(tensor.float() + noise)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_bytes((whole / file).read_bytes())
    return folder
