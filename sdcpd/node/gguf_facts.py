"""What a GGUF file says beside its tensors, as the JSON files of a Hugging Face folder.

Known are the architectures of the families that the engine runs, and tokenizers of the byte-level BPE kind with the
splitting rules of these families. All else is refused with its name: a tokenizer that splits a little differently gives
a model that answers a little worse, and nobody would know why.
"""

from typing import Any, Final

FAMILIES: Final = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""GGUF's name of the architecture and the model_type of Hugging Face. Mistral's files call themselves llama."""

CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

_CONTROL_TOKEN: Final = 3
"""GGUF's token type for tokens that steer the model and are no text."""
_USER_TOKEN: Final = 4
"""The one for tokens that were added by hand: matched whole, but text."""

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(digits: str) -> list[dict[str, Any]]:
    pattern = {"Regex": _WORDS.replace("DIGITS", digits)}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [split, _BYTE_LEVEL | {"use_regex": False}]


PRE_TOKENIZERS: Final[dict[str, list[dict[str, Any]]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL | {"use_regex": True}],
    "gpt-2": [_BYTE_LEVEL | {"use_regex": True}],
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}
"""How text is split before the merges, by tokenizer.ggml.pre."""


class ImportRefused(ValueError):
    """This file cannot be made into a folder. The text names what is in the way."""


class GgufFacts:
    """The key-value part of a GGUF file. `scaling` is the rope scaling for config.json, None without one."""

    def __init__(self, reader: Any) -> None:  # gguf ships no types
        self._fields = reader.fields
        self.architecture = self.text("general.architecture")
        if self.architecture not in FAMILIES:
            raise ImportRefused(
                f"general.architecture is {self.architecture!r}; known are {', '.join(FAMILIES)}. Use another model."
            )
        self.family = FAMILIES[self.architecture]
        for key, known in (("tokenizer.ggml.model", ("gpt2",)), ("tokenizer.ggml.pre", tuple(PRE_TOKENIZERS))):
            if self.text(key) not in known:
                raise ImportRefused(
                    f"{key} is {self.text(key)!r}; known are {', '.join(known)}. Take the model's Hugging Face folder."
                )
        if self.architecture == "llama" and self._optional("llama.expert_count"):
            raise ImportRefused("llama.expert_count: mixtures of this architecture are not supported. Use another.")
        if self._optional(f"{self.architecture}.attention.sliding_window"):
            raise ImportRefused(
                f"{self.architecture}.attention.sliding_window: which layers it is for is not said in this form. Take "
                "the model's Hugging Face folder."
            )
        self._tokens: list[str] = self._get("tokenizer.ggml.tokens")
        self._types: list[int] = self._get("tokenizer.ggml.token_type")

    def _optional(self, key: str) -> Any:  # one of GGUF's value types, by key
        return self._fields[key].contents() if key in self._fields else None

    def _get(self, key: str) -> Any:
        if key not in self._fields:
            raise ImportRefused(f"the file lacks {key}. Fetch it again, or take the model's Hugging Face folder.")
        return self._fields[key].contents()

    def text(self, key: str) -> str:
        return str(self._get(key))

    def _of_model(self, name: str) -> int:
        return int(self._get(f"{self.architecture}.{name}"))

    @property
    def chat_template(self) -> str | None:
        found = self._optional("tokenizer.chat_template")
        return None if found is None else str(found)

    @property
    def heads(self) -> int:
        return self._of_model("attention.head_count")

    @property
    def kv_heads(self) -> int:
        return int(self._optional(f"{self.architecture}.attention.head_count_kv") or self.heads)

    @property
    def hidden(self) -> int:
        return self._of_model("embedding_length")

    @property
    def theta(self) -> float:
        return float(self._optional(f"{self.architecture}.rope.freq_base") or 10_000.0)

    @property
    def head_dim(self) -> int:
        """Of a key; only whole heads are turned by rotary embedding."""
        own = self._optional(f"{self.architecture}.attention.key_length")
        turned = self._optional(f"{self.architecture}.rope.dimension_count")
        head_dim = int(own or turned or self.hidden // self.heads)
        if turned is not None and int(turned) != head_dim:
            raise ImportRefused(f"{self.architecture}.rope.dimension_count is {turned}, but a head has {head_dim}")
        return head_dim

    def _special(self, name: str) -> int | None:
        found = self._optional(f"tokenizer.ggml.{name}_token_id")
        return None if found is None else int(found)

    def config(self, *, tied: bool, biased: bool, scaling: dict[str, Any] | None) -> dict[str, Any]:
        """config.json. The stored binary32 of 1e-5 prints as 9.99...e-06; rounding gives the number that was meant."""
        epsilon = self._get(f"{self.architecture}.attention.layer_norm_rms_epsilon")
        return {
            "architectures": [CLASSES[self.family]],
            "attention_bias": biased and self.family != "qwen2",
            "attention_dropout": 0.0,
            "bos_token_id": self._special("bos"),
            "dtype": "bfloat16",
            "eos_token_id": self._special("eos"),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self._of_model("feed_forward_length"),
            "max_position_embeddings": self._of_model("context_length"),
            "mlp_bias": False,
            "model_type": self.family,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self._of_model("block_count"),
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": self._special("padding"),
            "rms_norm_eps": float(f"{epsilon:.6g}"),
            "rope_scaling": scaling if scaling is not None else self._scaling(),
            "rope_theta": self.theta,
            "tie_word_embeddings": tied,
            "use_cache": True,
            "vocab_size": len(self._tokens),
        } | (self._experts() if self.family == "qwen3_moe" else {})

    def _experts(self) -> dict[str, Any]:
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": self._of_model("expert_feed_forward_length"),
            "norm_topk_prob": True,  # what the form's own runtime does for this architecture
            "num_experts": self._of_model("expert_count"),
            "num_experts_per_tok": self._of_model("expert_used_count"),
        }

    def _scaling(self) -> dict[str, Any] | None:
        prefix = f"{self.architecture}.rope.scaling"
        kind = self._optional(f"{prefix}.type")
        match kind:
            case None | "none":
                return None
            case "linear":
                return {"rope_type": "linear", "factor": float(self._get(f"{prefix}.factor"))}
            case "yarn":
                return {
                    "rope_type": "yarn",
                    "factor": float(self._get(f"{prefix}.factor")),
                    "original_max_position_embeddings": int(self._get(f"{prefix}.original_context_length")),
                }
            case _:
                raise ImportRefused(f"{prefix}.type is {kind!r}; known are none, linear and yarn")

    def generation_config(self) -> dict[str, Any]:
        found = {"bos": self._special("bos"), "eos": self._special("eos"), "pad": self._special("padding")}
        return {f"{name}_token_id": value for name, value in found.items() if value is not None}

    def tokenizer(self) -> dict[str, Any]:
        """tokenizer.json: the family's way of splitting, GPT-2's way of writing octets, then BPE."""
        pre = self.text("tokenizer.ggml.pre")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [self._added_token(index) for index in self._added_tokens()],
            "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
            "post_processor": self._post_processor(),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": pre == "llama-bpe",
                "vocab": {token: index for index, token in enumerate(self._tokens)},
                "merges": [merge.split(" ", 1) for merge in self._get("tokenizer.ggml.merges")],
            },
        }

    def _post_processor(self) -> dict[str, Any] | None:
        """The first token of every text, where the file asks for one."""
        bos = self._special("bos")
        if not self._optional("tokenizer.ggml.add_bos_token") or bos is None:
            return None
        token = self._tokens[bos]
        first = {"SpecialToken": {"id": token, "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
        }

    def _added_tokens(self) -> list[int]:
        return [index for index, kind in enumerate(self._types) if kind in (_CONTROL_TOKEN, _USER_TOKEN)]

    def _added_token(self, index: int) -> dict[str, Any]:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {
            "id": index,
            "content": self._tokens[index],
            **plain,
            "special": self._types[index] == _CONTROL_TOKEN,
        }

    def tokenizer_config(self) -> dict[str, Any]:
        named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        tokens = {
            name: self._tokens[number] for name, key in named.items() if (number := self._special(key)) is not None
        }
        whole = {
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._of_model("context_length"),
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        return dict(sorted((whole | tokens).items()))
