"""One pass over the model, planned: which tokens, where their keys and values go, who sees what (no torch here).

A pass is ragged. The tokens of all spans stand in one row, verification rows and prefill chunks alike, and the linear
layers see nothing else. Only attention must know where a sequence begins: that is a `Segment`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdcpd.engine.block_tables import BlockTable
from sdcpd.engine.spans import Drawn, Judge, Kept, Sampled, Span, Told, Weighed


@dataclass(frozen=True, slots=True)
class Segment:
    """A span's place in the pass: its `count` tokens stand at `first`, and the last of them sees `length` keys.

    `pages` are the sequence's pages up to there.
    """

    first: int
    count: int
    length: int
    pages: tuple[int, ...]

    @property
    def start(self) -> int:
        """Position of its first token."""
        return self.length - self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """A finished order for the worker. The first three lists are parallel: one entry a token of the pass.

    `wanted` holds the places of the tokens whose logits are asked for, span by span; `row_counts` how many of them each
    span has, `judged` what judges them, beside the tokens whose rows they are. `logprobs` is what each span asks for,
    empty when none does.
    """

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    segments: tuple[Segment, ...]
    wanted: list[int]
    row_counts: tuple[int, ...]
    judged: tuple[tuple[Judge | None, tuple[int, ...]], ...]
    logprobs: tuple[int | None, ...] = ()


def plan_batch(spans: Sequence[Span], tables: Mapping[int, BlockTable], vocabulary: int) -> Batch:
    """Plan one pass and count its positions as valid.

    A span that begins before the end of the valid positions overwrites what stands there: that is how the positions of
    rejected tokens (draft 6.3) are taken back, with the pages kept. Asserts what callers owe: known sequences, each at
    most once; no hole before a span; spans inside the reserved pages; token ids below `vocabulary`.
    """
    assert spans, "a pass runs something"
    assert len({span.sequence for span in spans}) == len(spans), "a sequence appears at most once in a pass"
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    wanted: list[int] = []
    for span in spans:
        table = tables[span.sequence]
        count = len(span.tokens)
        end = span.start + count
        assert count >= 1
        assert 0 <= span.rows <= count
        assert _wants(span.judge, span), "a judge needs a row for each value, of proposed tokens for each token"
        assert span.start <= table.length, "no hole before a span"
        assert end <= table.capacity_tokens, "pages are reserved before a pass"
        assert 0 <= min(span.tokens) <= max(span.tokens) < vocabulary, "token ids are checked where they come in"
        segments.append(Segment(first=len(tokens), count=count, length=end, pages=tuple(table.pages)))
        tokens += span.tokens
        positions += range(span.start, end)
        slots += table.slots(span.start, end)
        wanted += range(len(tokens) - span.rows, len(tokens))
        table.length = end
    return Batch(
        tokens,
        positions,
        slots,
        tuple(segments),
        wanted,
        tuple(span.rows for span in spans),
        tuple((span.judge, span.tokens[len(span.tokens) - span.rows :]) for span in spans),
        tuple(span.logprobs for span in spans) if any(span.logprobs is not None for span in spans) else (),
    )


def _wants(judge: Judge | None, span: Span) -> bool:
    match judge:
        case None:
            return True
        case Drawn(uniforms=uniforms):
            return span.rows == len(uniforms)
        case Told(tokens=tokens):
            return span.rows == len(tokens)
        case Sampled():
            return span.rows == 1
        case Weighed() | Kept():
            return span.rows == len(span.tokens)
