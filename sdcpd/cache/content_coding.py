"""Content codings of object bodies (RFC 9110 8.4; decision 54): dense draft rows are nearly all zeros.

gzip, which everybody knows; and zstd (RFC 8878, 9659), for readers that ask for it, where this Python has it: rows of
1.6 MB took it 1.0 ms where gzip took 4.7, and came out a third smaller. A Python before 3.14 gets it from
backports.zstd, which is that Python's own module made for older ones; without it, zstd is neither offered nor taken.

Pure functions over whole bodies, for a worker thread where they are large. What a peer sends expands at most to the
limit that the caller names, however small it came: no more than that is ever made of it.
"""

import importlib
import sys
import zlib
from typing import Any, Final, Literal

from sdcpd.protocol.problems import IllFormed, TooLarge


def _find_zstd() -> Any:
    """The module `compression.zstd` under either name; None where there is no build of it for this machine."""
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError:
        return None


_zstd: Final[Any] = _find_zstd()

Coding = Literal["gzip", "zstd"]

GZIP: Final = "gzip"
ZSTD: Final = "zstd"
CODINGS: Final[tuple[Coding, ...]] = (GZIP,) if _zstd is None else (ZSTD, GZIP)
"""Those that are known here, the better one first."""
PACK_FROM_BYTES: Final = 4096
"""A smaller body fits a few packets either way."""
SAMPLE_BYTES: Final = 64 << 10
"""If the beginning of a large body does not shrink, the rest of it is not tried: KV is as good as random."""
LEVEL: Final = 1
"""Rows are zeros for the most part, which the fastest level finds as well as the slowest."""
WINDOW_LOG: Final = 23
"""Of zstd, 8 MiB: what a body in this coding may ask of its reader's memory (RFC 9659)."""

_GZIP_FORMAT: Final = 31
"""zlib's `wbits` for a gzip header and trailer around the largest window."""


def pack(octets: bytes, coding: Coding = GZIP) -> bytes | None:
    """The body in a coding; None where that does not pay: a short body, or one that shrinks by less than a tenth."""
    if len(octets) < PACK_FROM_BYTES:
        return None
    if len(octets) > 2 * SAMPLE_BYTES and not _pays(zlib.compress(octets[:SAMPLE_BYTES], LEVEL), SAMPLE_BYTES):
        return None
    packed = _gzip(octets) if coding == GZIP else _zstd.compress(octets, LEVEL)
    return packed if _pays(packed, len(octets)) else None


def unpack(packed: bytes, limit_bytes: int, coding: Coding = GZIP) -> bytes:
    """Inverse of `pack`, of a body by anybody. Raises IllFormed; TooLarge beyond `limit_bytes`."""
    unpacker: Any
    if coding == GZIP:
        unpacker, failure = zlib.decompressobj(_GZIP_FORMAT), zlib.error
    else:
        limits = {_zstd.DecompressionParameter.window_log_max: WINDOW_LOG}
        unpacker, failure = _zstd.ZstdDecompressor(options=limits), _zstd.ZstdError
    try:
        octets: bytes = unpacker.decompress(packed, limit_bytes + 1)
    except failure as error:
        raise IllFormed(f"the body is not {coding}, as its Content-Encoding says: {error}") from error
    if len(octets) > limit_bytes:
        raise TooLarge(f"the body may hold {limit_bytes} octets once its coding is undone")
    if not unpacker.eof or unpacker.unused_data:
        raise IllFormed(f"the body is not one whole {coding} member")
    return octets


def _gzip(octets: bytes) -> bytes:
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP_FORMAT)
    return packer.compress(octets) + packer.flush()


def _pays(packed: bytes, length: int) -> bool:
    return 10 * len(packed) <= 9 * length
