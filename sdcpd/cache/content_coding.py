"""The gzip content coding of object bodies (RFC 9110 8.4.1.3; decision 54): dense draft rows are nearly all zeros.

Pure functions over whole bodies, for a worker thread where they are large. What a peer sends expands at most to the
limit that the caller names, however small it came: no more than that is ever made of it.
"""

import zlib
from typing import Final

from sdcpd.protocol.problems import IllFormed, TooLarge

GZIP: Final = "gzip"
PACK_FROM_BYTES: Final = 4096
"""A smaller body fits a few packets either way."""
SAMPLE_BYTES: Final = 64 << 10
"""If the beginning of a large body does not shrink, the rest of it is not tried: KV is as good as random."""
LEVEL: Final = 1
"""Rows are zeros for the most part, which the fastest level finds as well as the slowest."""

_GZIP_FORMAT: Final = 31
"""zlib's `wbits` for a gzip header and trailer around the largest window."""


def pack(octets: bytes) -> bytes | None:
    """The body in gzip coding; None where that does not pay: a short body, or one that shrinks by less than a tenth."""
    if len(octets) < PACK_FROM_BYTES:
        return None
    if len(octets) > 2 * SAMPLE_BYTES and not _pays(zlib.compress(octets[:SAMPLE_BYTES], LEVEL), SAMPLE_BYTES):
        return None
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP_FORMAT)
    packed = packer.compress(octets) + packer.flush()
    return packed if _pays(packed, len(octets)) else None


def _pays(packed: bytes, length: int) -> bool:
    return 10 * len(packed) <= 9 * length


def unpack(packed: bytes, limit_bytes: int) -> bytes:
    """Inverse of `pack`, of a body by anybody. Raises IllFormed; TooLarge beyond `limit_bytes`."""
    unpacker = zlib.decompressobj(_GZIP_FORMAT)
    try:
        octets = unpacker.decompress(packed, limit_bytes + 1)
    except zlib.error as error:
        raise IllFormed(f"the body is not gzip, as its Content-Encoding says: {error}") from error
    if len(octets) > limit_bytes:
        raise TooLarge(f"the body may hold {limit_bytes} octets once its coding is undone")
    if not unpacker.eof or unpacker.unused_data:
        raise IllFormed("the body is not one whole gzip member")
    return octets
