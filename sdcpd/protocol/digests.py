"""Contract digest and the committed-prefix digest chain (draft 4.1, 4.2)."""

import hashlib
import struct
from collections.abc import Sequence

from sdcpd.protocol.encoding import encode
from sdcpd.protocol.messages import Contract


def contract_digest(contract: Contract) -> bytes:
    """SHA-256("SDCP-CONTRACT-1" || 0x00 || deterministic_cbor(contract)), 32 octets (4.1)."""
    return hashlib.sha256(b"SDCP-CONTRACT-1\x00" + encode(contract)).digest()


def _uint32s(tokens: Sequence[int]) -> bytes:
    """uint32() of each token, network byte order. Raises struct.error for a token that does not fit (decision 22)."""
    return struct.pack(f">{len(tokens)}I", *tokens)


def prompt_digest(contract: bytes, prompt: Sequence[int]) -> bytes:
    """d[0] over a contract digest (32 octets) and the prompt's tokens (4.2)."""
    return hashlib.sha256(b"SDCP-PREFIX-1\x00" + contract + struct.pack(">I", len(prompt)) + _uint32s(prompt)).digest()


def extend(digest: bytes, tokens: Sequence[int]) -> bytes:
    """d[n + len(tokens)] from d[n] and the committed tokens that follow (4.2)."""
    for token in tokens:
        digest = hashlib.sha256(digest + struct.pack(">I", token)).digest()
    return digest
