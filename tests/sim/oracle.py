"""What the output must be, written anew from the draft: the toy target, its distributions, and what is drawn from them.

The target's next token depends on every token before it, so that any wrong, missing or doubled one changes all that
follow. Nothing here calls sdcpd's own arithmetic: distributions are floats where the product has integers, draws are
made from their HMACs, so a comparison says something of both.
"""

import hashlib
import hmac
import math
import struct
import zlib
from collections.abc import Sequence

from msgspec import Struct

VOCABULARY = 16


class Sampled(Struct, frozen=True):
    """A sampling profile with nothing left out."""

    temperature_milli: int = 1000
    top_k: int = 0
    top_p_milli: int = 1000
    seed: int | None = None


GREEDY = Sampled(temperature_milli=0)


def next_token(prefix: Sequence[int]) -> int:
    return zlib.crc32(bytes(prefix)) % VOCABULARY


def logits(prefix: Sequence[int]) -> list[float]:
    """The target's row after `prefix`: `next_token` is the likeliest, the others have whatever the prefix says."""
    noise = zlib.crc32(b"row" + bytes(prefix)) | 1
    row = [((noise * (token + 3) >> 7) % 64) / 24 for token in range(VOCABULARY)]
    row[next_token(prefix)] = 3.5
    return row


def distribution(prefix: Sequence[int], profile: Sampled) -> list[float]:
    """p over the vocabulary: temperature, then top-k, then top-p (4.1, 6.4)."""
    row = logits(prefix)
    order = sorted(range(VOCABULARY), key=lambda token: (-row[token], token))
    if profile.temperature_milli == 0:
        return [float(token == order[0]) for token in range(VOCABULARY)]
    if profile.top_k:
        order = order[: profile.top_k]
    weights = {token: math.exp((row[token] - row[order[0]]) * 1000 / profile.temperature_milli) for token in order}
    if profile.top_p_milli < 1000:
        total, reached, kept = sum(weights.values()), 0.0, []
        for token in order:
            kept.append(token)
            reached += weights[token]
            if reached * 1000 >= profile.top_p_milli * total:
                break
        weights = {token: weights[token] for token in kept}
    total = sum(weights.values())
    return [weights.get(token, 0.0) / total for token in range(VOCABULARY)]


def drawn(row: Sequence[float], u: float) -> int:
    """Inverse CDF in increasing token id."""
    reached, total = 0.0, sum(row)
    for token, mass in enumerate(row):
        reached += mass
        if mass > 0.0 and reached > u * total:
            return token
    return max(token for token, mass in enumerate(row) if mass > 0.0)


def round_value(seed: int, session: bytes, round_: int, position: int, purpose: int) -> float:
    """6.4: the value for a position of a round, 0 for its test and 1 for the additional token."""
    return _unit(seed, b"SDCP-VERIFY-1\x00" + session + struct.pack(">IIB", round_, position, purpose))


def index_value(seed: int, index: int) -> float:
    """Rule 65281: the value for the output token with this 1-based index."""
    return _unit(seed, b"SDCPD-REPLAY-1\x00" + struct.pack(">I", index))


def _unit(seed: int, message: bytes) -> float:
    digest = hmac.new(struct.pack(">Q", seed), message, hashlib.sha256).digest()
    return float(struct.unpack(">Q", digest[:8])[0] >> 11) / float(1 << 53)


def replayed(prefix: Sequence[int], index: int, profile: Sampled) -> int:
    """Rule 65281: the token with this 1-based output index, after `prefix`."""
    assert profile.seed is not None
    return drawn(distribution(prefix, profile), index_value(profile.seed, index))


def output(prompt: Sequence[int], max_new: int, stop: Sequence[int], profile: Sampled = GREEDY) -> tuple[int, ...]:
    """All tokens of an undisturbed answer: greedy, or rule 65281's for a profile with a seed."""
    tokens = list(prompt)
    while (done := len(tokens) - len(prompt)) < max_new:
        greedy = profile.temperature_milli == 0
        tokens.append(next_token(tokens) if greedy else replayed(tokens, done + 1, profile))
        if tokens[-1] in stop:
            break
    return tuple(tokens[len(prompt) :])


def judged(
    prefix: Sequence[int],
    proposed: Sequence[int],
    rows: Sequence[Sequence[float]],
    profile: Sampled,
    *,
    session: bytes,
    round_: int,
) -> tuple[int, int]:
    """Rule 2 with a seed: (a, the additional token). `rows` are q, one for each proposed token; none is M = 0."""
    seed, context = profile.seed, list(prefix)
    assert seed is not None
    for place, token in enumerate(proposed):
        p, q = distribution(context, profile), [value / sum(rows[place]) for value in rows[place]]
        if not round_value(seed, session, round_, place + 1, 0) * q[token] < p[token]:
            left = [max(0.0, one - other) for one, other in zip(p, q, strict=True)]
            left = left if sum(left) > 1e-12 else p  # what rounding leaves is nothing
            return place, drawn(left, round_value(seed, session, round_, place + 1, 1))
        context.append(token)
    last = distribution(context, profile)
    return len(proposed), drawn(last, round_value(seed, session, round_, len(proposed) + 1, 1))
