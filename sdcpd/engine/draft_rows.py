"""From logits to a draft under rule 2: the row that is published, and the token that is sampled from just that row.

Exactness hangs on this (draft 6.4): whatever q a drafter uses, the target's distribution comes out, if x was drawn from
the very numbers the verifier gets. So the row is made first, as binary32 values of few entries (temperature, top-k and
top-p of the drafter's own, decision 54), and the token is then drawn from these values, by inverse CDF in increasing
token id with a random value of the drafter's.
"""

import math
import struct
from collections.abc import Sequence

import numpy
import torch
from msgspec.structs import replace
from torch import Tensor

from sdcpd.engine.spans import Row, Sampled
from sdcpd.protocol.distributions import Profile
from sdcpd.protocol.draft_rows import DraftRow, ids_of

Values = numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]


@torch.inference_mode()
def sample_drafts(logits: Tensor, judges: Sequence[Sampled]) -> list[Row]:
    """A row and its token for each row of `logits` [N, vocabulary]. Only the few entries come back to the host."""
    widest = min(logits.shape[-1], max(_entries(judge.profile) for judge in judges))
    best = logits.float().topk(widest, dim=-1)
    values = best.values.double().cpu().numpy()
    tokens = best.indices.cpu().numpy()
    return [_sample(values[place], tokens[place], judge) for place, judge in enumerate(judges)]


def in_full(row: Row, head_tokens: Sequence[int]) -> Row:
    """A row over the head's own numbering in that of the full vocabulary. Rising stays rising, so every rule about the
    order of tokens holds in both."""
    drafted = row.drafted
    if drafted is not None:
        drafted = DraftRow(
            ids=struct.pack(f"<{drafted.entries}I", *(head_tokens[i] for i in ids_of(drafted))), values=drafted.values
        )
    return replace(row, token=head_tokens[row.token], drafted=drafted)


def _entries(profile: Profile) -> int:
    assert profile.top_k, "a draft row has a bounded number of entries"
    return 1 if profile.temperature_milli == 0 else profile.top_k


def _sample(logits: Values, tokens: Values, judge: Sampled) -> Row:
    """`logits` falling, with their tokens."""
    profile = judge.profile
    if not math.isfinite(logits[0]):
        return Row(token=0, margin=0.0, finite=False)
    count = _entries(profile)
    masses = numpy.exp((logits[:count] - logits[0]) / (profile.temperature_milli / 1000 or 1.0))
    if profile.top_p_milli < 1000:
        reached = masses.cumsum()
        masses = masses[: int((reached < reached[-1] * profile.top_p_milli / 1000).sum()) + 1]
    row = (masses / masses.sum()).astype("<f4")
    kept = row.nonzero()[0]
    kept = kept[tokens[kept].argsort()]
    row, ids = row[kept], tokens[kept].astype("<u4")
    reached = row.astype(numpy.float64).cumsum()
    place = min(int(reached.searchsorted(judge.uniform * reached[-1], side="right")), len(row) - 1)
    published = DraftRow(ids=ids.tobytes(), values=row.tobytes())
    return Row(token=int(ids[place]), margin=math.inf, finite=True, drafted=published)
