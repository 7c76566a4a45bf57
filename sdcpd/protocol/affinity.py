"""Where a conversation's prefix is: at the instances that its earlier turns were placed at (draft 6.1, router policy).

Theory. The next turn of a conversation begins with the tokens of the one before, and their KV lies where that one ran.
The router finds the place again without remembering anything: each pair of a prefix and an instance has a weight, a
hash of both, and a prefix is at home where its weight is highest (rendezvous hashing). So nothing has to be bounded,
kept over a restart or agreed on between routers, and when an instance goes only its own conversations move, each to
the one of second weight, where its later turns find it as well.

The prefix of a prompt is its first `tokens` tokens. A shorter prompt goes by its first `LEAST_TOKENS`, so that a young
conversation moves once at most, when it has grown; one that is shorter still leaves no full block of KV behind, and
has no home: load alone decides.

A home is worth a prefill, not a queue, nor drafts that are rejected (what acceptance lacks is a cost as well). So it
counts only while it is not overloaded, and while it is not both by a number and by a ratio busier than the least busy
one: gateways of the field use the same two limits.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct

from sdcpd.protocol.encoding import encode_tokens

LEAST_TOKENS: Final = 64
"""The smallest block of KV that is shared between sessions."""


class Affinity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a conversation's home counts, `[router.affinity]`.

    `tokens`              length of the prefix that names a conversation; 0: homes do not count, load alone decides
    `overload_percent`    an instance that reports this load or more is nobody's home
    `imbalance_percent`   a home that is busier than the least busy instance by more than this, in percent of load (a
                          session that queues weighs 5) ...
    `imbalance_ratio`     ... and by more than this factor, is passed over
    """

    tokens: Annotated[int, Meta(ge=0, le=65536)] = 256
    overload_percent: Annotated[int, Meta(ge=1, le=100)] = 90
    imbalance_percent: Annotated[int, Meta(ge=0, le=10000)] = 20
    imbalance_ratio: Annotated[float, Meta(ge=1, le=100)] = 1.5

    def prefix(self, prompt: Sequence[int]) -> bytes | None:
        """32 octets that name the conversation a prompt belongs to, None if it has no home."""
        length = self.tokens if len(prompt) >= self.tokens else min(LEAST_TOKENS, self.tokens)
        if length == 0 or len(prompt) < length:
            return None
        return hashlib.sha256(encode_tokens(tuple(prompt[:length]))).digest()

    def may_stay(self, *, load: int, cost: int, least: int) -> bool:
        """Whether an instance may be a home: its load in percent, its cost and the least cost of any in thousandths."""
        if load >= self.overload_percent:
            return False
        return cost - least <= 10 * self.imbalance_percent or cost <= self.imbalance_ratio * least


DEFAULT_AFFINITY: Final = Affinity()


def weight(prefix: bytes, instance: str) -> bytes:
    """How strongly a prefix belongs to an instance: the highest has it. The same at every router, and for ever."""
    return hashlib.sha256(prefix + instance.encode()).digest()
