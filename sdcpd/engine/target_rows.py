"""From logits to what the acceptance rules need of them.

Rule 1: the argmax, its margin, and whether the row can be trusted. The sampling rules: p as integer masses, the same
numbers as those of protocol/distributions.py up to the last bit of an exponential; its text says why integers.

Among equal maxima the smallest token id wins (draft 6.4; decision 68). torch promises no index among ties, and in bf16
ties are common. numpy promises the first, and on CPU it is also the faster one, so there are two ways to the same rows:
one over the host's memory, one that keeps the logits on the device. A test holds them to each other.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy
import torch
from torch import Tensor

from sdcpd.engine.logprobs import Asking
from sdcpd.engine.spans import Row
from sdcpd.protocol.distributions import SCALE, VOCABULARY_LIMIT, Profile

SORTED_BY_TORCH: Final = 1024


NOBODY: Final = Asking()


def read_rows(logits: Tensor, asking: Asking = NOBODY) -> list[Row]:
    """One Row for each row of `logits` [N, vocabulary], judged on the float32 value of what was computed."""
    if logits.device.type == "cpu":
        return _rows_on_host(logits, asking)
    return rows_on_device(logits, asking)


def _rows_on_host(logits: Tensor, asking: Asking) -> list[Row]:
    values = logits.float().numpy()
    places = numpy.arange(len(values))
    tokens = values.argmax(axis=1)
    best = values[places, tokens]
    values[places, tokens] = -numpy.inf
    second = values.max(axis=1, initial=-numpy.inf)
    values[places, tokens] = best  # it may be the caller's own memory
    told = asking.told(logits, torch.from_numpy(tokens)).tolist() if asking else []
    return _rows(tokens.tolist(), best.tolist(), second.tolist(), asking, told)


def rows_on_device(logits: Tensor, asking: Asking = NOBODY) -> list[Row]:
    """The same by torch alone; only three numbers a row come back to the host, and what is asked for beside them."""
    values = logits.float()
    best = values.amax(-1, keepdim=True)
    vocabulary = values.shape[-1]
    ids = torch.arange(vocabulary, device=values.device)
    tokens = torch.where(values == best, ids, vocabulary).amin(-1)
    tokens.clamp_(max=vocabulary - 1)  # a row of NaN alone has no maximum
    second = values.scatter(-1, tokens[:, None], -math.inf).amax(-1)
    # One transfer: every token id and every float32 is a float64 as it stands.
    parts = [tokens.double(), best[:, 0].double(), second.double()]
    if asking:
        parts.append(asking.told(logits, tokens))
    found: list[float] = torch.cat(parts).tolist()
    count = len(values)
    chosen = [int(token) for token in found[:count]]
    return _rows(chosen, found[count : 2 * count], found[2 * count : 3 * count], asking, found[3 * count :])


def _rows(
    tokens: list[int], best: list[float], second: list[float], asking: Asking, told: Sequence[float]
) -> list[Row]:
    """A maximum that is NaN (NaN spreads to it), +Inf or -Inf (then all are) makes the row unusable."""
    return [
        Row(token=token, margin=first - other, finite=True, logprobs=entry)
        if math.isfinite(first)
        else Row(token=0, margin=0.0, finite=False)
        for token, first, other, entry in zip(
            tokens, best, second, asking.entries(told, tokens, len(tokens)), strict=True
        )
    ]


def target_masses(logits: Tensor, profiles: Sequence[Profile]) -> tuple[Tensor, Tensor]:
    """Masses int64 [N, vocabulary] of N rows of logits under their profiles, and which rows can be trusted, bool [N].

    Temperature, top-k and top-p in that order (draft 4.1). A row that cannot be trusted has masses all the same, so
    that it disturbs no other one.
    """
    vocabulary = logits.shape[-1]
    assert vocabulary < VOCABULARY_LIMIT, "totals stay below 2^63"
    values = logits.float()
    best = values.amax(-1, keepdim=True)
    finite = best.isfinite()
    values, best = values.where(finite, 0.0), best.where(finite, 0.0)
    device = logits.device
    # Temperature 0 is top-k 1: the argmax has all the mass there is, whatever it is divided by (decision 13).
    milli = [profile.temperature_milli or 1000 for profile in profiles]
    temperatures = torch.tensor(milli, dtype=torch.float64, device=device)[:, None] / 1000
    kept = [
        1 if profile.temperature_milli == 0 else min(profile.top_k or vocabulary, vocabulary) for profile in profiles
    ]
    places = [
        place
        for place, (count, profile) in enumerate(zip(kept, profiles, strict=True))
        if count < vocabulary or profile.top_p_milli < 1000
    ]
    if places:
        at = slice(None) if len(places) == len(profiles) else torch.tensor(places, device=device)
        rows = values[at]
        mask = _kept(
            rows,
            best[at],
            temperatures[at],
            torch.tensor([kept[place] for place in places], device=device)[:, None],
            torch.tensor([profiles[place].top_p_milli for place in places], device=device)[:, None],
            max(kept[place] for place in places),
        )
        values[at] = rows.where(mask, -math.inf)  # ours to write: `where` above made them
    return _masses(values, best, temperatures), finite[:, 0]


def _masses(values: Tensor, best: Tensor, temperatures: Tensor) -> Tensor:
    exact = values.double()  # one tensor for all steps: fresh memory costs more than the arithmetic
    return exact.sub_(best).div_(temperatures).exp_().mul_(SCALE).long()


def _kept(
    values: Tensor, best: Tensor, temperatures: Tensor, top_k: Tensor, top_p_milli: Tensor, longest: int
) -> Tensor:
    """Which tokens top-k and top-p leave, bool as `values`. The numbers are [N, 1]; no row keeps above `longest`.

    Only sorted values are looked at, never the order that a sort gives to equal ones: how many tokens are kept, and
    above which value, follows from the values; among those equal to it the smallest ids fill what is left.
    """
    sorted_values = _largest(values, longest)
    sorted_masses = _masses(sorted_values, best, temperatures)
    ranks = torch.arange(longest, device=values.device)
    reached = sorted_masses.where(ranks < top_k, 0).cumsum(-1)
    total = reached[:, -1:]
    # ceil(total * milli / 1000) without leaving 63 bits
    threshold = total // 1000 * top_p_milli + (total % 1000 * top_p_milli + 999) // 1000
    count = (reached < threshold).sum(-1, keepdim=True) + 1
    edge = sorted_values.gather(-1, count - 1)
    above, equal = values > edge, values == edge
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def _largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, falling. On CPU numpy sorts a whole row eight times as fast as torch."""
    if values.device.type == "cpu" and count > SORTED_BY_TORCH:
        ordered = numpy.sort(values.numpy(), axis=-1)[:, : -count - 1 : -1]
        return torch.from_numpy(ordered.copy())
    return values.topk(count).values
