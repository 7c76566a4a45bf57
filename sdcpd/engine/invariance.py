"""Whether a loaded model keeps its promise of batch-invariant numerics, tried once at start.

A text is run in one pass, then again in passes of other sizes beside a neighbour. A row must have the same bits. That
is a sample, not a proof: the proof over many prefixes, sizes and neighbours is among the tests, and
`scripts/device_check` runs it on the device at hand.
"""

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from sdcpd.engine.spans import EngineInfo, Span

P = TypeVar("P")

_TEXT_TOKENS: Final = 72
_CUTS: Final = (40, 1, 2, 5, 9, 15)
"""Passes into which the text is cut the second time: a prompt, then rounds."""


class Computing(Protocol[P]):
    """What of engine/forward.py is needed here."""

    @property
    def info(self) -> EngineInfo: ...
    def open_sequence(self) -> int: ...
    def close_sequence(self, sequence: int) -> None: ...
    def reserve(self, sequence: int, length: int) -> bool: ...
    def plan(self, spans: Sequence[Span]) -> P: ...
    def compute(self, batch: P) -> Tensor: ...


def rows_keep_their_bits(engine: Computing[P]) -> bool:
    """Blocks for a few passes. True also where the page pool is too small for the trial: nothing is shared there."""
    length = min(_TEXT_TOKENS, engine.info.session_tokens)
    tokens = [(7 * place * place + 3 * place) % engine.info.vocabulary for place in range(length)]
    whole, parts, neighbour = (engine.open_sequence() for _ in range(3))
    try:
        if not (engine.reserve(whole, length) and engine.reserve(parts, length) and engine.reserve(neighbour, length)):
            return True
        expected = engine.compute(engine.plan([_span(whole, tokens, 0, length)]))
        at = 0
        for wanted in _CUTS:
            if at == length:
                break
            count = min(wanted, length - at)
            beside = _span(neighbour, tokens[::-1], at, count)
            found = engine.compute(engine.plan([beside, _span(parts, tokens, at, count)]))[count:]
            if not torch.equal(found.nan_to_num(), expected[at : at + count].nan_to_num()):
                return False
            at += count
        return True
    finally:
        for sequence in (whole, parts, neighbour):
            engine.close_sequence(sequence)


def _span(sequence: int, tokens: Sequence[int], start: int, count: int) -> Span:
    return Span(sequence=sequence, tokens=tuple(tokens[start : start + count]), start=start, rows=count)
