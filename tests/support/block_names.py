"""Small blocks with names and contents of their own, for tests of those who keep them (no torch here)."""

from sdcpd.cache.block_file import payload_bytes, write_block
from sdcpd.cache.blocks import KvLayout, extend, root

LAYOUT = KvLayout(
    model=bytes([1]) * 32,
    tokenizer=bytes([2]) * 32,
    block_tokens=2,
    dtype="fp32",
    quantization="none",
    numerics="fast",
    layers=1,
    kv_heads=1,
    head_dim=2,
    config={"rope_theta": 1e4},
)
BLOCK_BYTES = payload_bytes(LAYOUT)


def content(name: bytes) -> bytes:
    """What the block of this name holds in these tests."""
    return name[:BLOCK_BYTES].ljust(BLOCK_BYTES, b"\x00")


def name_of(number: int, scope: bytes | None = None) -> bytes:
    """The name of some block of a scope."""
    return extend(root(LAYOUT, scope), (number, number))


def file_of(name: bytes, scope: bytes | None = None) -> bytes:
    """The file of this block."""
    return write_block(LAYOUT, name, scope, content(name))
