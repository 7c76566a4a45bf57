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
from sdcpd.engine.logprobs import Asking
from sdcpd.engine.spans import Drawn, Kept, Row, Sampled, Told, Weighed
from sdcpd.engine.target_rows import NOBODY, read_rows, target_masses
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
    asked = batch.logprobs or (None,) * len(spans)
    if all(judge is None for judge, _ in batch.judged):
        rows = read_rows(logits, _asking(asked, batch.row_counts)) if len(logits) else []
        return [tuple(rows[span]) for span in spans]
    answers: list[tuple[Row, ...]] = [()] * len(spans)
    judged: list[tuple[int, Judged]] = []
    sampled: list[tuple[int, Sampled]] = []
    for place, (judge, tokens) in enumerate(batch.judged):
        match judge:
            case None:
                if batch.row_counts[place]:
                    asking = _asking(asked[place : place + 1], batch.row_counts[place : place + 1])
                    answers[place] = tuple(read_rows(logits[spans[place]], asking))
            case Kept(shelf=shelf):
                shelf.logits, shelf.logprobs = logits[spans[place]].clone(), asked[place]
            case Told(tokens=following):
                asking = _asking(asked[place : place + 1], batch.row_counts[place : place + 1])
                answers[place] = _told(logits[spans[place]], following, asking)
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
        judged_part = judge_rows(rows_of_part, [one for _, one in part], [asked[place] for place, _ in part])
        for (place, _), answer in zip(part, judged_part, strict=True):
            answers[place] = answer
    return answers


def _asking(asked: Sequence[int | None], row_counts: Sequence[int]) -> Asking:
    if all(count is None for count in asked):
        return NOBODY  # also where `asked` is empty
    return Asking([count for count, rows in zip(asked, row_counts, strict=True) for _ in range(rows)])


def _told(logits: Tensor, tokens: tuple[int, ...], asking: Asking) -> tuple[Row, ...]:
    """Rows of known text: what the target says to the tokens that follow, None where the row cannot be trusted."""
    told = asking.told(logits, torch.tensor(tokens, device=logits.device)).tolist()
    found = asking.entries(told, tokens, len(tokens))
    own = told[:: len(told) // len(tokens)]
    return tuple(
        Row(token=token, margin=math.inf, finite=True, logprobs=entry if math.isfinite(value) else None)
        for token, entry, value in zip(tokens, found, own, strict=True)
    )


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
def judge_rows(logits: Tensor, spans: Sequence[Judged], asked: Sequence[int | None] = ()) -> list[tuple[Row, ...]]:
    """The rows of these spans. `logits` [N, vocabulary] holds a row for each of their tokens, span after span; `asked`
    is Span.logprobs of each, empty when none asks."""
    device = logits.device
    firsts = [0, *accumulate(len(tokens) for _, tokens in spans)]
    assert firsts[-1] == len(logits)
    masses, finite = target_masses(logits, [judge.profile for judge, tokens in spans for _ in tokens])
    totals = masses.sum(-1)
    uniforms = torch.tensor([u for judge, _ in spans for u in _uniforms(judge)], dtype=torch.float64, device=device)
    asking = _asking(asked, [len(tokens) for _, tokens in spans])
    answered, accepted = _answers(masses, totals, uniforms, firsts, spans)
    parts = torch.cat((finite.long(), answered, accepted))
    told: list[float] = []
    if asking:  # every token id, and every float32, is a float64 as it stands
        home: list[float] = torch.cat((parts.double(), asking.told(logits, answered))).tolist()  # the one transfer
        numbers, told = [int(number) for number in home[: len(parts)]], home[len(parts) :]
    else:
        numbers = parts.tolist()  # the one transfer
    usable, tokens_answered, passed = (
        numbers[: firsts[-1]],
        numbers[firsts[-1] : 2 * firsts[-1]],
        numbers[2 * firsts[-1] :],
    )
    entries = asking.entries(told, tokens_answered, firsts[-1])
    rows: list[tuple[Row, ...]] = []
    for number, (judge, tokens) in enumerate(spans):
        first = firsts[number]
        count = len(tokens) if isinstance(judge, Drawn) else passed[number] + 1
        good = all(usable[first : firsts[number + 1]])
        rows.append(
            tuple(
                Row(token=tokens_answered[row], margin=math.inf, finite=True, logprobs=entries[row])
                for row in range(first, first + count)
            )
            if good
            else UNUSABLE
        )
    return rows


def _answers(
    masses: Tensor, totals: Tensor, uniforms: Tensor, firsts: list[int], spans: Sequence[Judged]
) -> tuple[Tensor, Tensor]:
    """The token that each row answers, int64 [N], and a of each span, int64 [B].

    Of a span that was tested the first a+1 rows count: the proposed tokens that passed, then the additional one.
    """
    device = masses.device
    accepted = torch.zeros(len(spans), dtype=torch.int64, device=device)
    tested = [number for number, (judge, _) in enumerate(spans) if isinstance(judge, Weighed)]
    if not tested:
        return draw(masses, totals, uniforms), accepted
    answered = torch.tensor([token for _, tokens in spans for token in (*tokens[1:], 0)], device=device)
    drawn = [
        row
        for number, (judge, _) in enumerate(spans)
        if isinstance(judge, Drawn)
        for row in range(firsts[number], firsts[number + 1])
    ]
    if drawn:
        at = torch.tensor(drawn, device=device)
        answered[at] = draw(masses[at], totals[at], uniforms[at])
    first = [firsts[number] for number in tested]
    passed, additional = _test(masses, totals, uniforms, first, [spans[number] for number in tested])
    answered[torch.tensor(first, device=device) + passed] = additional
    accepted[torch.tensor(tested, device=device)] = passed
    return answered, accepted


def draw(masses: Tensor, totals: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF in increasing token id (decision 70): int64 [N] from masses [N, vocabulary], their totals and u."""
    targets = (uniforms * totals.double()).long().minimum(totals - 1)
    return torch.searchsorted(masses.cumsum(-1), targets[:, None], right=True)[:, 0]


def _uniforms(judge: Drawn | Weighed) -> tuple[float, ...]:
    return judge.uniforms if isinstance(judge, Drawn) else judge.draws.tokens


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
