"""Log-probabilities of what rows answered and of the likeliest tokens beside it (decision 114).

They are of the raw logits in float32: what the model says, not what a sampling profile makes of it. Which tokens stand
in a row's list does not hang on its neighbours or on the device: among equal logits the smaller ids go first, as for
the argmax, and torch's own order among ties is never looked at.
"""

from collections.abc import Sequence
from typing import Final

import numpy
import torch
from torch import Tensor

from sdcpd.protocol.logprobs import PAIR_BYTES

_ORDERED: Final = 0x7FFFFFFF
_IDS: Final = 0xFFFFFFFF

Told = numpy.ndarray[tuple[int, int], numpy.dtype[numpy.float64]]


def tell(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """float64 [N, 1 + 2 * K] for rows of logits [N, vocabulary]: the value of the row's token (int64 [N]), then the ids
    and the values of the K = min(most, vocabulary) likeliest ones. Everything is exact in float64."""
    values = logits.float()
    total = values.logsumexp(-1, keepdim=True)
    own = values.gather(-1, tokens[:, None])
    count = min(most, values.shape[-1])
    if not count:
        return (own - total).double()
    # Floats in the order of signed integers above, falling ids below: no two keys are equal. (+ 0.0 makes -0.0 a 0.0.)
    bits = (values + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ _ORDERED, bits).long() << 32
    keys |= _IDS - torch.arange(values.shape[-1], device=values.device)
    best = _IDS - (keys.topk(count, dim=-1).values & _IDS)
    return torch.cat(((own - total).double(), best.double(), (values.gather(-1, best) - total).double()), dim=-1)


def entries(told: Told, tokens: Sequence[int], counts: Sequence[int]) -> list[bytes]:
    """The entries (protocol/logprobs.py) of rows that `tell` told of: each with the `counts` likeliest it asked for."""
    count = (told.shape[1] - 1) // 2
    pairs = numpy.empty((len(tokens), 1 + count), dtype=[("token", "<u4"), ("value", "<f4")])
    pairs["token"][:, 0] = tokens
    pairs["value"][:, 0] = told[:, 0]
    pairs["token"][:, 1:] = told[:, 1 : 1 + count]
    pairs["value"][:, 1:] = told[:, 1 + count :]
    return [row.tobytes()[: PAIR_BYTES * (1 + wanted)] for row, wanted in zip(pairs, counts, strict=True)]


class Asking:
    """Which rows want their log-probabilities, of a run of rows; `counts` has how many likeliest tokens each wants
    beside its own, None where it wants nothing. An empty run: nobody asks, and nothing is computed."""

    def __init__(self, counts: Sequence[int | None] = ()) -> None:
        self._places = [place for place, count in enumerate(counts) if count is not None]
        self._counts = [count for count in counts if count is not None]

    def __bool__(self) -> bool:
        return bool(self._places)

    def told(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Of the rows that ask; flat, to go home with what else the pass answers."""
        at = torch.tensor(self._places, device=logits.device)
        return tell(logits[at], tokens[at], max(self._counts)).flatten()

    def entries(self, told: Sequence[float], tokens: Sequence[int], rows: int) -> list[bytes | None]:
        """For each of the `rows`, its entry or None; `tokens` are what the rows answered."""
        found: list[bytes | None] = [None] * rows
        if not self._places:
            return found
        table = numpy.array(told, dtype=numpy.float64).reshape(len(self._places), -1)
        asked = [tokens[place] for place in self._places]
        for place, entry in zip(self._places, entries(table, asked, self._counts), strict=True):
            found[place] = entry
        return found
