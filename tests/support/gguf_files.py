"""A Hugging Face folder written as GGUF the way its converters do: other names, Llama's rows interleaved."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy
from safetensors.numpy import load_file

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def write_gguf(
    folder: Path,
    file: Path,
    more: dict[str, Any] | None = None,
    *,
    pre: str = "gpt-2",
    factors: list[float] | None = None,
) -> Path:
    """`folder` (with a tokenizer.json of the tiny model's kind) as `file`. `more`: further keys."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    added = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokenizer["model"]["vocab"]))
    writer.add_token_types([3 if number in added else 1 for number in range(len(tokenizer["model"]["vocab"]))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(297)
    writer.add_eos_token_id(299)
    for name, value in (more or {}).items():
        {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)](
            name, value
        )
    for name, values in _tensors(load_file(folder / "model.safetensors"), config).items():
        writer.add_tensor(name, numpy.ascontiguousarray(values))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", numpy.array(factors, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(weights: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, values in weights.items():
        expert = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name)
        if expert is not None:
            experts.setdefault(f"blk.{expert[1]}.ffn_{expert[3]}_exps.weight", {})[int(expert[2])] = values
            continue
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        theirs = f"blk.{layer[1]}.{NAMES[layer[2]]}.{layer[3]}" if layer is not None else NAMES[name]
        if config["model_type"] == "llama" and re.search(r"attn_[qk]\.", theirs):
            heads = config["num_attention_heads" if "attn_q" in theirs else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        found[theirs] = values
    return found | {name: numpy.stack([parts[n] for n in sorted(parts)]) for name, parts in experts.items()}
