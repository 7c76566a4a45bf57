"""Names of blocks: the formulas of the cache's design, by hand, and all that must tell two blocks apart."""

import struct
from hashlib import sha256
from typing import Any

import cbor2
import pytest
from msgspec.structs import replace

from sdcpd.cache.block_file import Damaged, read_block, read_head, write_block
from sdcpd.cache.blocks import BlockChain, extend, root
from tests.support.block_names import LAYOUT, content

SCOPE = bytes([9]) * 16


def test_names_are_those_of_the_formulas() -> None:
    layout = {
        "dtype": "fp32",
        "quantization": "none",
        "numerics": "fast",
        "layers": [0, 1],
        "kv_heads": 1,
        "head_dim": 2,
        "parts": [0, 1],
        "config": {"rope_theta": 1e4},
    }
    described: dict[str, Any] = {"model": LAYOUT.model, "tokenizer": LAYOUT.tokenizer, "block": 2, "layout": layout}
    origin = sha256(b"KVSP-BLOCK-1\x00" + cbor2.dumps(described, canonical=True)).digest()
    assert root(LAYOUT, None) == origin
    scoped = sha256(b"KVSP-BLOCK-1\x00" + cbor2.dumps(described | {"scope": SCOPE}, canonical=True)).digest()
    assert root(LAYOUT, SCOPE) == scoped
    first = sha256(origin + struct.pack(">2I", 5, 6)).digest()
    second = sha256(first + struct.pack(">2I", 7, 8)).digest()
    assert list(BlockChain(origin, 2).up_to(2, lambda: [5, 6, 7, 8, 9])) == [first, second]


@pytest.mark.parametrize(
    "changed",
    [
        {"model": bytes(32)},
        {"tokenizer": bytes(32)},
        {"block_tokens": 4},
        {"dtype": "bf16"},
        {"quantization": "int8"},
        {"numerics": "batch_invariant cpu"},
        {"layers": 2},
        {"first_layer": 1},
        {"kv_heads": 2},
        {"head_dim": 4},
        {"part": 1, "parts": 2},
        {"config": {"rope_theta": 2e4}},
    ],
)
def test_whatever_enters_keys_and_values_enters_the_name(changed: dict[str, Any]) -> None:
    other = replace(LAYOUT, **changed)
    assert root(other, None) != root(LAYOUT, None)
    name = extend(root(LAYOUT, None), (1, 2))
    assert isinstance(read_block(other, name, write_block(LAYOUT, name, None, content(name))), Damaged)


def test_an_absent_scope_is_unlike_any_value() -> None:
    assert len({root(LAYOUT, scope) for scope in (None, b"", bytes(16), SCOPE)}) == 4


def test_every_octet_of_a_file_is_guarded() -> None:
    name = extend(root(LAYOUT, SCOPE), (1, 2))
    octets = write_block(LAYOUT, name, SCOPE, content(name))
    found = read_block(LAYOUT, name, octets)
    assert not isinstance(found, Damaged)
    assert bytes(found) == content(name)
    head = read_head(LAYOUT, octets)
    assert not isinstance(head, Damaged)
    assert (head.name, head.scope, head.file_bytes) == (name, SCOPE, len(octets))
    for place in range(len(octets)):
        for mask in (1, 0x80):
            flipped = bytearray(octets)
            flipped[place] ^= mask
            answer = read_block(LAYOUT, name, bytes(flipped))
            assert isinstance(answer, Damaged) or bytes(answer) == content(name), "never other content"
    for length in range(len(octets)):
        assert isinstance(read_block(LAYOUT, name, octets[:length]), Damaged)
    assert isinstance(read_block(LAYOUT, name, octets + b"\x00"), Damaged)
    assert isinstance(read_block(LAYOUT, bytes(32), octets), Damaged)


def test_names_are_made_only_of_full_blocks() -> None:
    chain = BlockChain(bytes(32), 2)
    with pytest.raises(AssertionError):
        chain.up_to(2, lambda: [1, 2, 3])
    assert len(chain.up_to(1, lambda: [1, 2, 3])) == 1
    assert chain.up_to(1, lambda: pytest.fail("known already")) == chain.names
