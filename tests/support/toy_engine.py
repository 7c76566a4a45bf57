"""A target whose next token is a pure function of all tokens before it, kept as a real KV would be.

Each sequence holds the token of every position that was run. A row is computed from what lies *there*, so a caller that
leaves a hole, keeps a rejected token or starts at the wrong position gets a wrong answer here as with a real model.
"""

import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from sdcpd.engine.spans import Drawn, EngineInfo, Kept, Row, Sampled, Shelf, Span, Told, Weighed
from sdcpd.protocol.acceptance import accept_speculative, draw_each
from sdcpd.protocol.distributions import target_masses
from sdcpd.protocol.draft_rows import ids_of, row_of, values_of
from sdcpd.protocol.draws import RoundDraws
from sdcpd.protocol.logprobs import pack_entry
from sdcpd.roles.ports import Clock

VOCABULARY = 50


def next_token(prefix: Sequence[int]) -> int:
    """The toy target: mostly predictable (so that drafts can be right), never a stop token below 3."""
    return 3 + (sum((place + 1) * token for place, token in enumerate(prefix[-3:])) + len(prefix)) % (VOCABULARY - 3)


def next_logits(prefix: Sequence[int]) -> list[float]:
    """The toy target for sampling: `next_token` is the likeliest, four others have a chance."""
    logits = [-9.0] * VOCABULARY
    best = next_token(prefix)
    for place, logit in enumerate((2.0, 1.5, 1.0, 0.5, 0.0)):
        logits[3 + (best - 3 + 7 * place) % (VOCABULARY - 3)] = logit
    return logits


def greedy(prompt: Sequence[int], count: int, target: Callable[[Sequence[int]], int] = next_token) -> list[int]:
    """Plain greedy decoding by the toy target: the oracle."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(target(tokens))
    return tokens[len(prompt) :]


class ToyEngine:
    """Implements roles.ports.Engine. A pass costs `pass_s` of the clock it is given."""

    def __init__(
        self,
        clock: Clock,
        *,
        model: bytes,
        tokenizer: bytes,
        pages: int = 64,
        page_tokens: int = 16,
        context_tokens: int = 256,
        vocabulary: int = VOCABULARY,
        pass_s: float = 0.01,
        target: Callable[[Sequence[int]], int] = next_token,
        logits: Callable[[Sequence[int]], list[float]] = next_logits,
    ) -> None:
        """`target` answers rule 1; `logits` is what a judge judges."""
        self._logits = logits
        self._info = EngineInfo(
            model=model,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            context_tokens=context_tokens,
            page_tokens=page_tokens,
            pages=pages,
            dtype="toy",
            device="toy",
        )
        self._clock = clock
        self._pass_s = pass_s
        self._target = target
        self._kv: dict[int, list[int]] = {}
        self._held: dict[int, int] = {}
        self._handles = 0
        self.passes: list[list[Span]] = []
        self._poisoned: set[int] = set()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def free_pages(self) -> int:
        return self._info.pages - sum(self._held.values())

    def open_sequence(self) -> int:
        self._handles += 1
        self._kv[self._handles] = []
        self._held[self._handles] = 0
        return self._handles

    def poison_latest(self) -> None:
        """From now on the rows of the sequence opened last are not finite."""
        self._poisoned.add(self._handles)

    def close_sequence(self, sequence: int) -> None:
        del self._kv[sequence]
        del self._held[sequence]

    def reserve(self, sequence: int, length: int) -> bool:
        needed = -(-length // self._info.page_tokens) - self._held[sequence]
        if needed > self.free_pages:
            return False
        self._held[sequence] += max(0, needed)
        return True

    async def run_pass(self, spans: Sequence[Span]) -> list[tuple[Row, ...]]:
        assert spans
        assert len({span.sequence for span in spans}) == len(spans), "a sequence appears once in a pass"
        self.passes.append(list(spans))
        await self._clock.sleep_until(self._clock.now() + self._pass_s)
        return [self._run(span) for span in spans]

    def _run(self, span: Span) -> tuple[Row, ...]:
        kv = self._kv.get(span.sequence)
        if kv is None:  # closed while the pass ran
            return tuple(Row(token=0, margin=1.0, finite=True) for _ in range(span.rows))
        assert span.start <= len(kv), "a hole before the span"
        assert span.start + len(span.tokens) <= self._held[span.sequence] * self._info.page_tokens, "no page there"
        kv[span.start :] = span.tokens
        finite = span.sequence not in self._poisoned
        if span.judge is not None and not finite:
            return (Row(token=0, margin=0.0, finite=False),)
        first = len(kv) - span.rows
        logits = [self._logits(kv[: place + 1]) for place in range(first, len(kv))] if _needs_logits(span) else []
        if span.judge is not None:
            return _with_logprobs(self._judged(span, logits), logits, span.logprobs)
        rows = [Row(token=self._target(kv[: place + 1]), margin=1.0, finite=finite) for place in range(first, len(kv))]
        return _with_logprobs(rows, logits, span.logprobs)

    def _judged(self, span: Span, logits: list[list[float]]) -> tuple[Row, ...]:
        match span.judge:
            case Kept(shelf=shelf):
                shelf.logits, shelf.logprobs = logits, span.logprobs
                return ()
            case Told(tokens=following):
                return tuple(map(_sampled, following))
            case Drawn(profile=profile, uniforms=uniforms):
                masses = [target_masses(row, profile) for row in logits]
                return tuple(map(_sampled, draw_each(masses, RoundDraws((), uniforms))))
            case Weighed() as weighed:
                return _weigh(logits, span.tokens, weighed)
            case Sampled(profile=profile, uniform=uniform):
                return (_drafted(target_masses(logits[0], profile), uniform),)
            case None:
                raise AssertionError("asked only where there is a judge")

    async def judge(self, shelf: Shelf, tokens: tuple[int, ...], weighed: Weighed) -> tuple[Row, ...]:
        await self._clock.sleep_until(self._clock.now())
        assert isinstance(shelf.logits, list)
        return _with_logprobs(_weigh(shelf.logits, tokens, weighed), shelf.logits, shelf.logprobs)


def _needs_logits(span: Span) -> bool:
    return span.judge is not None or span.logprobs is not None


def entry_of(logits: Sequence[float], token: int, alternatives: int) -> bytes:
    """Log-probabilities of one token, the slow and obvious way (decision 114)."""
    total = math.log(sum(map(math.exp, logits)))
    best = sorted(range(len(logits)), key=lambda one: (-logits[one], one))[:alternatives]
    return pack_entry([(one, logits[one] - total) for one in (token, *best)])


def _with_logprobs(rows: Sequence[Row], logits: list[list[float]], alternatives: int | None) -> tuple[Row, ...]:
    if alternatives is None:
        return tuple(rows)
    return tuple(
        replace(row, logprobs=entry_of(values, row.token, alternatives))
        for row, values in zip(rows, logits, strict=False)
    )


def _drafted(masses: list[int], uniform: float) -> Row:
    """A row of q, and a token drawn from just that."""
    row = row_of([(token, mass / sum(masses)) for token, mass in enumerate(masses) if mass])
    values = values_of(row)
    reached, left = 0, uniform * sum(values)
    while left >= values[reached] and reached < len(values) - 1:
        left -= values[reached]
        reached += 1
    return Row(token=ids_of(row)[reached], margin=math.inf, finite=True, drafted=row)


def _weigh(logits: list[list[float]], tokens: tuple[int, ...], weighed: Weighed) -> tuple[Row, ...]:
    masses = [target_masses(row, weighed.profile) for row in logits]
    answer = accept_speculative(tokens[1:], masses, weighed.rows, weighed.draws)
    return tuple(map(_sampled, (*tokens[1 : 1 + answer.accepted], answer.additional)))


def _sampled(token: int) -> Row:
    return Row(token=token, margin=1.0, finite=True)
