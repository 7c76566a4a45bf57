"""One block as octets: a safetensors file that says what it is, on disk and between nodes (decisions, cache part 5).

The header's metadata carry the name, the scope, the digests of model, tokenizer and layout, and a checksum over all of
these and the numbers. Whoever reads a block verifies it. A block that is torn, flipped, of another layout or under
another's name is no block: the answer is what is wrong with it, never its content.

Files come from disks and peers, and are read by hand, with every length held against a limit, so that a damaged header
cannot ask for memory. (No torch here: peers and tools read blocks as well.)
"""

import hashlib
import json
from typing import Final, Literal

import msgspec
from msgspec import Struct

from sdcpd.cache.blocks import BLOCK_TAG, KvLayout, root

HEADER_LIMIT_BYTES: Final = 4096
"""Ours takes under 700."""
TENSOR: Final = "kv"
_DTYPES: Final = {"bf16": ("BF16", 2), "fp32": ("F32", 4)}


class Damaged(Struct, frozen=True):
    """No block, or not the one that was asked for."""

    detail: str


class BlockHead(Struct, frozen=True):
    """What a block's file says of itself. `payload_at` is where its numbers begin."""

    name: bytes
    scope: bytes | None
    root: bytes
    sha256: bytes
    payload_at: int
    payload_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.payload_at + self.payload_bytes


class _Metadata(Struct, frozen=True):
    kvsp: Literal["KVSP-BLOCK-1"]
    name: str
    scope: str
    root: str
    sha256: str
    model: str
    tokenizer: str


class _Tensor(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Header(Struct, frozen=True, forbid_unknown_fields=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")
    kv: _Tensor


def payload_bytes(layout: KvLayout) -> int:
    """Octets of one block's numbers."""
    size = _DTYPES[layout.dtype][1]
    for number in layout.shape:
        size *= number
    return size


def write_block(layout: KvLayout, name: bytes, scope: bytes | None, payload: bytes) -> bytes:
    """The file of a block. `payload` holds its numbers in the order of `layout.shape`."""
    assert len(payload) == payload_bytes(layout)
    origin = root(layout, scope)
    header = {
        "__metadata__": {
            "kvsp": "KVSP-BLOCK-1",
            "name": name.hex(),
            "scope": "-" if scope is None else scope.hex(),
            "root": origin.hex(),
            "sha256": _checksum(name, origin, payload).hex(),
            "model": layout.model.hex(),
            "tokenizer": layout.tokenizer.hex(),
        },
        TENSOR: {"dtype": _DTYPES[layout.dtype][0], "shape": layout.shape, "data_offsets": [0, len(payload)]},
    }
    octets = json.dumps(header, separators=(",", ":")).encode()
    octets += b" " * (-len(octets) % 8)  # as the format's writers do, so that numbers lie aligned
    return b"".join((len(octets).to_bytes(8, "little"), octets, payload))


def read_head(layout: KvLayout, octets: bytes) -> BlockHead | Damaged:
    """The head of a file that begins with `octets` (HEADER_LIMIT_BYTES of it are enough), if it fits this layout."""
    length = int.from_bytes(octets[:8], "little")
    if len(octets) < 8 or not 2 <= length <= min(HEADER_LIMIT_BYTES, len(octets)) - 8:
        return Damaged("its header is cut off or too long")
    try:
        header = msgspec.json.decode(octets[8 : 8 + length], type=_Header)
        about = header.metadata
        name, sha256, origin = (bytes.fromhex(text) for text in (about.name, about.sha256, about.root))
        scope = None if about.scope == "-" else bytes.fromhex(about.scope)
    except (msgspec.DecodeError, ValueError):
        return Damaged("its header is not that of a block")
    if origin != root(layout, scope):
        return Damaged("it is of another model, tokenizer, layout or block size")
    size = payload_bytes(layout)
    if header.kv != _Tensor(_DTYPES[layout.dtype][0], layout.shape, (0, size)):
        return Damaged("its tensor has another shape or dtype")
    return BlockHead(name, scope, origin, sha256, 8 + length, size)


def read_block(layout: KvLayout, name: bytes, octets: bytes) -> memoryview | Damaged:
    """The numbers of a whole file, verified: that it is this block and as it was written."""
    head = read_head(layout, octets[:HEADER_LIMIT_BYTES])
    if isinstance(head, Damaged):
        return head
    if head.name != name:
        return Damaged("it is another block than its name says")
    if len(octets) != head.file_bytes:
        return Damaged(f"it has {len(octets)} octets instead of {head.file_bytes}")
    payload = memoryview(octets)[head.payload_at :]
    if _checksum(name, head.root, payload) != head.sha256:
        return Damaged("its checksum does not hold")
    return payload


def _checksum(name: bytes, origin: bytes, payload: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(BLOCK_TAG + name + origin)
    digest.update(payload)
    return digest.digest()
