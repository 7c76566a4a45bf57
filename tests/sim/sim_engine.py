"""The toy engine with a price: a pass costs a fixed part and a part for each row, some are slow, some come to nothing.

Tokens are tests/sim/oracle.py's, computed from what lies in each sequence's KV, so a caller that leaves a hole or keeps
a rejected token gets wrong ones.
"""

import random
from collections.abc import Sequence

from msgspec.structs import replace

from sdcpd.engine.spans import Row, Shelf, Span, Weighed
from sdcpd.roles.ports import Clock
from tests.sim import oracle
from tests.sim.injector import Injector
from tests.sim.row_checks import Draws
from tests.support.messages import TARGET, TOKENIZER
from tests.support.toy_engine import ToyEngine

SLOW_S = (0.5, 8.0)


class SimEngine(ToyEngine):
    """Implements roles.ports.Engine."""

    def __init__(
        self, clock: Clock, chance: random.Random, inject: Injector, draws: Draws, *, pages: int, pass_s: float
    ) -> None:
        """`draws` is told of every judgement before it is made."""
        super().__init__(
            clock,
            model=TARGET,
            tokenizer=TOKENIZER,
            vocabulary=oracle.VOCABULARY,
            pages=pages,
            context_tokens=128,
            pass_s=pass_s,
            target=oracle.next_token,
            logits=oracle.logits,
        )
        self._draws = draws
        self._chance = chance
        self._inject = inject
        self._base_s = pass_s
        if "rows_dear" in inject.rates:
            inject.note("rows_dear")

    async def run_pass(self, spans: Sequence[Span]) -> list[tuple[Row, ...]]:
        self._draws.judged([span.judge for span in spans])
        rows = sum(len(span.tokens) for span in spans)
        self._pass_s = self._base_s * (1.0 + self._inject.rates.get("rows_dear", 0.0) * rows)
        if self._inject.strikes("pass_slow"):
            self._pass_s += self._chance.uniform(*SLOW_S)
        answers = await super().run_pass(spans)
        self.passes.clear()
        judged = [place for place, span in enumerate(spans) if span.rows]
        if judged and self._inject.strikes("pass_not_finite"):
            struck = self._chance.choice(judged)
            answers[struck] = tuple(replace(row, finite=False, token=0) for row in answers[struck])
        return answers

    async def judge(self, shelf: Shelf, tokens: tuple[int, ...], weighed: Weighed) -> tuple[Row, ...]:
        self._draws.judged([weighed])
        return await super().judge(shelf, tokens, weighed)
