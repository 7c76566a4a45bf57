"""One way of decoding, measured: a whole node over an engine that notes its passes, or `transformers`.

A node is the product as `sdcpd` runs it on one machine: router, verifier, drafter and cache with a synced log, the
shipped ladder and defaults. Nothing is timed inside of it but the passes of its engine, which are noted as they run.

A text's time is told in two parts: until its first tokens are there (prompt and first round), and from then on to the
last. *Decoding* is the second part, here and for `transformers`; its cycles are the rounds after the first.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio
from msgspec import Struct

from sdcpd.engine.batch import Batch
from sdcpd.engine.forward import Engine
from sdcpd.engine.spans import Row
from sdcpd.roles.generation import GenerationRequest
from tests.support.real_node import GENERATE_LIMIT_S, LoadedModel, RunningNode, running_node

METHODS: Final = ("plain", "ngram", "suffix", "frequency_hybrid", "draft_model")
MODEL_METHODS: Final = ("frequency_hybrid", "draft_model")
POSITIONS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Positions of a proposal whose acceptance is told."""

_COUNTERS: Final = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")


class Text(Struct, frozen=True):
    """One prompt decoded. `rows` are those of each pass that had any: M + 1 of a round, 1 of a self-decoded token."""

    tokens: tuple[int, ...]
    context_tokens: int
    first_ms: float
    first_tokens: int
    decode_ms: float
    rows: tuple[int, ...] = ()
    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    lookup_drafts: int = 0
    lookup_accepted: int = 0
    settled_drafts: int = 0

    @property
    def decoded_tokens(self) -> int:
        return len(self.tokens) - self.first_tokens


class NotedEngine(Engine):
    """The engine; it also notes the wanted rows of each pass."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self.noted: list[int] = []

    def run(self, batch: Batch) -> list[tuple[Row, ...]]:
        rows = super().run(batch)
        if wanted := sum(batch.row_counts):
            self.noted.append(wanted)
        return rows


async def at_rest(node: RunningNode, engine: Engine) -> None:
    """Return once the drafter has heard the last verdict, and all sessions' pages are free."""
    drafter = node.node.drafter
    with trio.fail_after(GENERATE_LIMIT_S):
        while engine.free_pages < engine.info.pages or (drafter is not None and drafter.snapshot().sessions):
            await trio.sleep(0.002)


class Way:
    """One method in a node that runs."""

    def __init__(self, method: str, node: RunningNode, engine: NotedEngine) -> None:
        self.method = method
        self._node = node
        self._engine = engine

    async def decode(self, prompt: tuple[int, ...], max_tokens: int, stop: Sequence[int]) -> Text:
        request = GenerationRequest(
            model=self._node.model,
            prompt=prompt,
            max_new=max_tokens,
            stop=tuple(stop),
            speculation=self.method != "plain",
        )
        router = self._node.node.router
        assert router is not None
        self._engine.noted.clear()
        before = self._counts()
        tokens: list[int] = []
        first_tokens, first_at, last_at = 0, 0.0, 0.0
        began = time.perf_counter()
        with trio.fail_after(GENERATE_LIMIT_S):
            async with router.generation(request) as generation:
                async for page in generation.pages():
                    if page.tokens:
                        last_at = time.perf_counter()
                        tokens += page.tokens
                        if not first_tokens:
                            first_tokens, first_at = len(tokens), last_at
        await at_rest(self._node, self._engine)
        change = [after - earlier for after, earlier in zip(self._counts(), before, strict=True)]
        drafts, proposed, accepted, looked_up, lookup_accepted, settled, *accepted_at = change
        return Text(
            tokens=tuple(tokens),
            context_tokens=len(prompt) + len(tokens) // 2,
            first_ms=(first_at - began) * 1000,
            first_tokens=first_tokens,
            decode_ms=(last_at - first_at) * 1000,
            rows=tuple(self._engine.noted),
            drafts=drafts,
            proposed=proposed,
            accepted=accepted,
            accepted_at=tuple(accepted_at),
            lookup_drafts=looked_up,
            lookup_accepted=lookup_accepted,
            settled_drafts=settled,
        )

    def _counts(self) -> list[int]:
        sample, labelled = self._node.sample, self._node.labelled
        drafted = {name: labelled(f"sdcpd_{name}_total", "source") for name in _SETTLED}
        positions = labelled("sdcpd_spec_decode_num_accepted_tokens_per_pos_total", "position")
        counts = [sample(f"sdcpd_spec_decode_{name}") for name in _COUNTERS]
        counts += [drafted[name].get("lookup", 0) for name in _SETTLED]
        counts.append(sum(drafted["drafts_settled"].values()))
        counts += [positions.get(str(position - 1), 0) for position in POSITIONS]
        return [int(count) for count in counts]


_SETTLED: Final = ("drafts_settled", "drafted_tokens_accepted")


@asynccontextmanager
async def way(method: str, model: LoadedModel, drafts: LoadedModel | None, state: Path) -> AsyncIterator[Way]:
    """A node for one method, with a history of its own. `drafts` is the draft model, where the method has one."""
    settings = [] if method == "plain" else [f"drafter.method={method}"]
    if method in MODEL_METHODS:
        assert drafts is not None
        settings.append(f"drafter.draft_model.model={drafts.folder}")
    assert isinstance(model.engine, NotedEngine)
    async with running_node(model, state, *settings, drafter=method != "plain", drafts=drafts) as node:
        yield Way(method, node, model.engine)


class Reference:
    """`transformers` on the same weights: greedy, one token a pass, or with its prompt lookup of ten tokens."""

    LOOKUP_TOKENS: Final = 10

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()

    def decode(self, prompt: tuple[int, ...], max_tokens: int, stop: Sequence[int], *, lookup: bool) -> Text:
        import torch
        from transformers import GenerationConfig

        times: list[tuple[float, int]] = []
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(stop),
            pad_token_id=stop[0],
            prompt_lookup_num_tokens=self.LOOKUP_TOKENS if lookup else None,
        )
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=_Streamer(lambda count: times.append((time.perf_counter(), count))),
            )
        tokens = tuple(found[0, len(prompt) :].tolist())
        (first_at, first_tokens), (last_at, _) = times[0], times[-1]
        return Text(
            tokens=tokens,
            context_tokens=len(prompt) + len(tokens) // 2,
            first_ms=(first_at - began) * 1000,
            first_tokens=first_tokens,
            decode_ms=(last_at - first_at) * 1000,
            rows=(1,) * len(times),
        )


class _Streamer:
    """Told of the prompt first, then of new tokens as they come."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            self._tell(value.numel())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is kept."""
