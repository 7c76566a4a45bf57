"""The acceptance rules on tensors: what the rows of one pass say to their spans (draft 6.4; decision 115).

The rules are those of protocol/acceptance.py, and a test holds the two to each other. Random values come along with the
spans. Sums over the vocabulary are sums of integers, hence the same in any order: what a row draws does not depend on
its neighbours in the pass. Nothing but tokens and counts comes back to the host, in one transfer for all judged spans
of a pass (or of a part of it, when it has very many rows).
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy
import torch
from torch import Tensor

from sdcpd.engine.batch import Batch
from sdcpd.engine.draft_rows import sample_drafts
from sdcpd.engine.spans import Drawn, Kept, Row, Sampled, Weighed
from sdcpd.engine.target_rows import read_rows, target_masses
from sdcpd.protocol.distributions import SCALE

ELEMENTS_AT_ONCE: Final = 1 << 25
"""Rows times vocabulary judged at once: a handful of 64-bit tensors of this size, 256 MiB each, exist meanwhile."""

UNUSABLE: Final = (Row(token=0, margin=0.0, finite=False),)

Judged = tuple[Drawn | Weighed, tuple[int, ...]]
"""How to judge a span, and its tokens."""


@torch.inference_mode()
def judge_pass(logits: Tensor, batch: Batch) -> list[tuple[Row, ...]]:
    """For each span of a pass, in order, its rows. `logits` is [wanted, vocabulary]."""
    ends = list(accumulate(batch.row_counts))
    spans = [slice(end - count, end) for count, end in zip(batch.row_counts, ends, strict=True)]
    if all(judge is None for judge, _ in batch.judged):
        rows = read_rows(logits) if len(logits) else []
        return [tuple(rows[span]) for span in spans]
    answers: list[tuple[Row, ...]] = [()] * len(spans)
    judged: list[tuple[int, Judged]] = []
    sampled: list[tuple[int, Sampled]] = []
    for place, (judge, tokens) in enumerate(batch.judged):
        match judge:
            case None:
                if batch.row_counts[place]:
                    answers[place] = tuple(read_rows(logits[spans[place]]))
            case Kept(shelf=shelf):
                shelf.logits = logits[spans[place]].clone()
            case Drawn() | Weighed():
                judged.append((place, (judge, tokens)))
            case Sampled():
                sampled.append((place, judge))
    if sampled:
        drafts = sample_drafts(logits[[ends[place] - 1 for place, _ in sampled]], [judge for _, judge in sampled])
        for (place, _), row in zip(sampled, drafts, strict=True):
            answers[place] = (row,)
    for part in _parts(judged, batch.row_counts, logits.shape[-1]):
        rows_of_part = torch.cat([logits[spans[place]] for place, _ in part])
        for (place, _), answer in zip(part, judge_rows(rows_of_part, [one for _, one in part]), strict=True):
            answers[place] = answer
    return answers


def _parts(
    judged: list[tuple[int, Judged]], row_counts: tuple[int, ...], vocabulary: int
) -> list[list[tuple[int, Judged]]]:
    """The judged spans, in runs that hold at most `ELEMENTS_AT_ONCE` logits (or one span)."""
    parts: list[list[tuple[int, Judged]]] = []
    left = 0
    for one in judged:
        needed = row_counts[one[0]] * vocabulary
        if not parts or needed > left:
            parts.append([])
            left = ELEMENTS_AT_ONCE
        parts[-1].append(one)
        left -= needed
    return parts


@torch.inference_mode()
def judge_rows(logits: Tensor, spans: Sequence[Judged]) -> list[tuple[Row, ...]]:
    """The rows of these spans. `logits` [N, vocabulary] holds a row for each of their tokens, span after span."""
    device = logits.device
    firsts = [0, *accumulate(len(tokens) for _, tokens in spans)]
    assert firsts[-1] == len(logits)
    masses, finite = target_masses(logits, [judge.profile for judge, tokens in spans for _ in tokens])
    totals = masses.sum(-1)
    uniforms = torch.tensor([u for judge, _ in spans for u in _uniforms(judge)], dtype=torch.float64, device=device)
    drawn = [
        row for number, (judge, _) in enumerate(spans) if isinstance(judge, Drawn) for row in _range(firsts, number)
    ]
    tested = [number for number, (judge, _) in enumerate(spans) if isinstance(judge, Weighed)]
    answers = [finite.long()]
    if len(drawn) == len(logits):
        answers.append(draw(masses, totals, uniforms))
    elif drawn:
        at = torch.tensor(drawn, device=device)
        answers.append(draw(masses[at], totals[at], uniforms[at]))
    if tested:
        answers += _test(masses, totals, uniforms, [firsts[number] for number in tested], [spans[n] for n in tested])
    numbers: list[int] = torch.cat(answers).tolist()  # the one transfer
    usable, tokens_drawn = numbers[: firsts[-1]], iter(numbers[firsts[-1] :])
    accepted = numbers[len(numbers) - 2 * len(tested) : len(numbers) - len(tested)]
    additional = numbers[len(numbers) - len(tested) :]
    rows: list[tuple[Row, ...]] = []
    for number, (judge, tokens) in enumerate(spans):
        if isinstance(judge, Drawn):
            chosen = [next(tokens_drawn) for _ in tokens]
        else:
            place = tested.index(number)
            chosen = [*tokens[1 : 1 + accepted[place]], additional[place]]
        good = all(usable[row] for row in _range(firsts, number))
        rows.append(tuple(Row(token=token, margin=math.inf, finite=True) for token in chosen) if good else UNUSABLE)
    return rows


def draw(masses: Tensor, totals: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF in increasing token id (decision 70): int64 [N] from masses [N, vocabulary], their totals and u."""
    targets = (uniforms * totals.double()).long().minimum(totals - 1)
    return torch.searchsorted(masses.cumsum(-1), targets[:, None], right=True)[:, 0]


def _uniforms(judge: Drawn | Weighed) -> tuple[float, ...]:
    return judge.uniforms if isinstance(judge, Drawn) else judge.draws.tokens


def _range(firsts: list[int], number: int) -> range:
    return range(firsts[number], firsts[number + 1])


def _test(
    masses: Tensor, totals: Tensor, uniforms: Tensor, firsts: list[int], spans: Sequence[Judged]
) -> tuple[Tensor, Tensor]:
    """Rule 2 for B spans whose rows begin at `firsts`: a and the additional token of each, int64 [B] both."""
    device = masses.device
    judges = [judge for judge, _ in spans if isinstance(judge, Weighed)]
    proposed = [len(judge.rows) for judge in judges]
    first = torch.tensor(firsts, device=device)
    # The tests, one for each proposed token, laid out as [B, longest]; where nothing is proposed the test fails.
    passed = torch.zeros((len(spans), max(proposed)), dtype=torch.bool, device=device)
    span_of = torch.tensor([number for number, count in enumerate(proposed) for _ in range(count)], device=device)
    place_of = torch.tensor([place for count in proposed for place in range(count)], device=device)
    tokens = torch.tensor([token for _, span in spans for token in span[1:]], device=device)
    q = [row.chosen / row.total for judge in judges for row in judge.rows]
    r = [value for judge in judges for value in judge.draws.tests]
    rows = first[span_of] + place_of
    p = masses[rows, tokens].double() / totals[rows].double()
    bounds = torch.tensor([r, q], dtype=torch.float64, device=device).prod(0)
    passed[span_of, place_of] = bounds < p
    accepted = passed.long().cumprod(-1).sum(-1)
    # The additional token: from p after the last proposed one, else from what q leaves of it (decision 71).
    at = first + accepted
    own = masses[at]
    left = own.double() / totals[at].double()[:, None] - _draft(judges, accepted, own)
    left = left.clamp_(min=0.0).mul_(SCALE).long()
    complete = accepted == torch.tensor(proposed, device=device)
    left = torch.where((complete | (left.sum(-1) == 0))[:, None], own, left)
    return accepted, draw(left, left.sum(-1), uniforms[at])


def _draft(judges: Sequence[Weighed], accepted: Tensor, like: Tensor) -> Tensor:
    """For each span the row of q at its first rejected position, by its sum; zeros where nothing was rejected.

    float64 [B, vocabulary]. Entries of other positions add zero, so that nobody has to wait for `accepted`.
    """
    rows = [(number, place, row) for number, judge in enumerate(judges) for place, row in enumerate(judge.rows)]
    ids = numpy.frombuffer(b"".join(row.row.ids for _, _, row in rows), dtype="<u4").astype(numpy.int64)
    values = numpy.frombuffer(b"".join(row.row.values for _, _, row in rows), dtype="<f4").astype(numpy.float64)
    counts = [row.row.entries for _, _, row in rows]
    values /= numpy.repeat([row.total for _, _, row in rows], counts)
    device = like.device
    spans = torch.from_numpy(numpy.repeat([number for number, _, _ in rows], counts)).to(device)
    places = torch.from_numpy(numpy.repeat([place for _, place, _ in rows], counts)).to(device)
    weights = torch.from_numpy(values).to(device).where(places == accepted[spans], 0.0)
    q = torch.zeros(like.shape, dtype=torch.float64, device=device)
    return q.index_put_((spans, torch.from_numpy(ids).to(device)), weights, accumulate=True)
