"""Names of KV blocks: what two sessions must have in common to share keys and values (decisions, cache part 5.2; 108).

    root   = SHA-256("KVSP-BLOCK-1" || 00 || deterministic_cbor({model, tokenizer, layout, block, ? scope}))
    h[k]   = SHA-256(h[k-1] || uint32 of each token of block k)          h[-1] = root, full blocks only

A name says all that its content depends on: the weights and the text from its first token on, the format that the
numbers are in, and every field of the configuration that enters a key or a value. What differs in any of it has another
name, so a block that is found is the right one; there is nothing to compare afterwards. The scope stands in the root,
and an absent one is unlike any value: tenants cannot even ask for each other's prefixes.

Generated tokens continue the chain of their prompt, so the next turn of a conversation finds the answer's blocks too.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import cbor2
from msgspec import Struct

BLOCK_TAG: Final = b"KVSP-BLOCK-1\x00"
NAME_BYTES: Final = 32


class KvLayout(Struct, frozen=True, kw_only=True):
    """What a model's blocks are like. `config`: the fields that enter its passes; `numerics`: how they are run.

    `layers` counts from `first_layer`; `part` of `parts` is the share of the heads where a model is split over devices.
    """

    model: bytes
    tokenizer: bytes
    block_tokens: int
    dtype: str
    quantization: str
    numerics: str
    layers: int
    kv_heads: int
    head_dim: int
    config: dict[str, Any]
    first_layer: int = 0
    part: int = 0
    parts: int = 1

    @property
    def described(self) -> dict[str, Any]:
        """The map under the root, without a scope."""
        return {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "block": self.block_tokens,
            "layout": {
                "dtype": self.dtype,
                "quantization": self.quantization,
                "numerics": self.numerics,
                "layers": [self.first_layer, self.layers],
                "kv_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "parts": [self.part, self.parts],
                "config": self.config,
            },
        }

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of one block: layers, keys of all heads and then values, tokens, the numbers of a head."""
        return self.layers, 2 * self.kv_heads, self.block_tokens, self.head_dim


def root(layout: KvLayout, scope: bytes | None) -> bytes:
    """h[-1] of all texts of a scope under this layout, 32 octets."""
    described = layout.described if scope is None else layout.described | {"scope": scope}
    return hashlib.sha256(BLOCK_TAG + cbor2.dumps(described, canonical=True)).digest()


def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
    """h[k] from h[k-1] and the tokens of block k."""
    return hashlib.sha256(parent + struct.pack(f">{len(tokens)}I", *tokens)).digest()


class BlockChain:
    """The names of one text's blocks, made as they are asked for. The text only ever grows."""

    __slots__ = ("_block_tokens", "_root", "names")

    def __init__(self, root: bytes, block_tokens: int) -> None:
        self._root = root
        self._block_tokens = block_tokens
        self.names: list[bytes] = []

    def up_to(self, count: int, text: Callable[[], Sequence[int]]) -> Sequence[bytes]:
        """The first `count` names. `text` is called only if some of them are new, and holds at least their tokens."""
        if count > len(self.names):
            tokens, size = text(), self._block_tokens
            assert count * size <= len(tokens), "full blocks only"
            for place in range(len(self.names), count):
                parent = self.names[-1] if self.names else self._root
                self.names.append(extend(parent, tokens[place * size : (place + 1) * size]))
        return self.names[:count]
