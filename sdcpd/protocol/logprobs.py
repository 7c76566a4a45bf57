"""Log-probabilities of committed tokens, beside the output (decision 114; an extension).

A router that opens a session with `sdcpd_logprobs` k gets, for each committed token, its own log-probability and those
of the k most probable tokens at its place. They are the target's: the log-softmax of its raw logits, before
temperature, top-k and top-p, whatever rule or profile chose the token. An *entry* is one token's list, packed into
8 * (1 + k) octets, 201 bytes of memory at k = 20 on 64-bit CPython: pairs of a token id and a binary32, both
little-endian; first the token itself, then the k most probable, falling, equal ones by rising id. An empty entry says
that the values are not to be had: its token comes from a commit log, which holds none.

They are no part of what is committed: neither digest nor log knows them, and a verifier that takes a session over
computes them anew with the keys and values of what was committed before it (equal up to what two passes differ by).
"""

import struct
from collections.abc import Sequence
from typing import Final

PAIR_BYTES: Final = 8
"""One token id and its value."""


def pack_entry(pairs: Sequence[tuple[int, float]]) -> bytes:
    """One token's entry: the token itself first."""
    return b"".join(struct.pack("<If", token, value) for token, value in pairs)


def unpack_entry(entry: bytes) -> tuple[tuple[int, float], ...]:
    """(token id, natural logarithm of its probability): the token itself, then the most probable ones, falling.

    Empty for a token whose values are not to be had.
    """
    return tuple(struct.iter_unpack("<If", entry))


def entries_of(known: Sequence[bytes], start: int, count: int) -> tuple[bytes, ...]:
    """The entries of the `count` tokens from index `start` on, empty ones behind those that are known."""
    entries = tuple(known[start : start + count])
    return entries + (b"",) * (count - len(entries))


def are_entries(entries: Sequence[bytes], tokens: Sequence[int], alternatives: int) -> bool:
    """Whether these may be the entries of these tokens: one each, empty or of the token itself and at most
    `alternatives` others (a vocabulary may hold fewer)."""
    return len(entries) == len(tokens) and all(
        not entry
        or (
            len(entry) % PAIR_BYTES == 0
            and len(entry) <= PAIR_BYTES * (1 + alternatives)
            and entry[:4] == struct.pack("<I", token)
        )
        for entry, token in zip(entries, tokens, strict=True)
    )
