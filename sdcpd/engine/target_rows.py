"""From logits to what rule 1 needs of them: the argmax, its margin, and whether the row can be trusted.

Among equal maxima the smallest token id wins (draft 6.4; decision 68). torch promises no index among ties, and in bf16
ties are common. numpy promises the first, and on CPU it is also the faster one, so there are two ways to the same rows:
one over the host's memory, one that keeps the logits on the device. A test holds them to each other.
"""

import math

import numpy
import torch
from torch import Tensor

from sdcpd.engine.spans import Row


def read_rows(logits: Tensor) -> list[Row]:
    """One Row for each row of `logits` [N, vocabulary], judged on the float32 value of what was computed."""
    if logits.device.type == "cpu":
        return _rows_on_host(logits)
    return rows_on_device(logits)


def _rows_on_host(logits: Tensor) -> list[Row]:
    values = logits.float().numpy()
    places = numpy.arange(len(values))
    tokens = values.argmax(axis=1)
    best = values[places, tokens]
    values[places, tokens] = -numpy.inf
    second = values.max(axis=1, initial=-numpy.inf)
    values[places, tokens] = best  # it may be the caller's own memory
    return _rows(tokens.tolist(), best.tolist(), second.tolist())


def rows_on_device(logits: Tensor) -> list[Row]:
    """The same by torch alone; only three numbers a row come back to the host."""
    values = logits.float()
    best = values.amax(-1, keepdim=True)
    vocabulary = values.shape[-1]
    ids = torch.arange(vocabulary, device=values.device)
    tokens = torch.where(values == best, ids, vocabulary).amin(-1)
    second = values.scatter(-1, tokens.clamp(max=vocabulary - 1)[:, None], -math.inf).amax(-1)
    return _rows(tokens.tolist(), best[:, 0].tolist(), second.tolist())


def _rows(tokens: list[int], best: list[float], second: list[float]) -> list[Row]:
    """A maximum that is NaN (NaN spreads to it), +Inf or -Inf (then all are) makes the row unusable."""
    return [
        Row(token=token, margin=first - other, finite=True)
        if math.isfinite(first)
        else Row(token=0, margin=0.0, finite=False)
        for token, first, other in zip(tokens, best, second, strict=True)
    ]
