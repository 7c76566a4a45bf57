"""The target's own texts, and what it thought at each place: what a drafter learns from.

A *shard* is one batch of texts, decoded together by the engine. Half of them answer prompts from files of JSON lines
(`prompt`, and `family`), half begin with the opening of a chat alone, so that the target writes the question as well:
that costs no long prefill and never runs out. Of each place, those of the prompt included, the shard keeps the tokens
that the target held for most likely and their probabilities; a prompt's places cost one pass, an answer's one each.

A shard is a function of its number, and is written by renaming: an interrupted run goes on where it stopped. Prompts
with an index of 3 modulo 4 within their family are held out; evaluation uses these only.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

import torch
from msgspec import Struct
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdcpd.engine.forward import Engine
from sdcpd.engine.spans import Span
from sdcpd.frontend.chat_template import ChatMessage
from sdcpd.frontend.text import ModelText
from tests.bench.figures import progress

KEPT: Final = 12
"""Tokens kept of each distribution; the rest of it is little, and a drafter is asked for the best only."""
PREFILL_ROWS: Final = 64
"""Rows of logits at once: each is a whole vocabulary."""
HELD_OUT: Final = 4


class Prompt(Struct, frozen=True):
    """`forced` follows the first stop token instead of ending the text. Temperature 0: greedy."""

    family: str
    tokens: tuple[int, ...]
    temperature: float
    forced: tuple[int, ...] = ()


class Texts(Struct, frozen=True):
    """One shard, or many after one another: the target's `KEPT` best of the token after each place.

    `tokens` int64 [n]; `best` int64 [n, KEPT]; `weights` float32 [n, KEPT], probabilities, of which the rest is
    missing.
    """

    tokens: Tensor
    best: Tensor
    weights: Tensor


def prompts_of(folder: Path, text: ModelText, *, held_out: bool) -> dict[str, list[tuple[int, ...]]]:
    """Tokens of all prompts by family, through the chat template."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for index, line in enumerate(file.read_text().splitlines()):
            if (index % HELD_OUT == HELD_OUT - 1) == held_out:
                message = ChatMessage(role="user", content=json.loads(line)["prompt"])
                found.setdefault(file.stem, []).append(text.encode_chat((message,), {}, 0.0))
    return found


def openings(text: ModelText) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands before a user's words, and what between them and the answer (the stop token first)."""
    empty = text.encode_chat((ChatMessage(role="user", content=""),), {}, 0.0)
    last = max(place for place, token in enumerate(empty) if token in text.stop)
    return empty[:last], empty[last:]


def write_shards(
    folder: Path, engine: Engine, text: ModelText, prompts: Path, *, shards: int, texts: int, longest: int, answer: int
) -> None:
    """Write the shards that are missing. Prompts of more than `longest` tokens are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = prompts_of(prompts, text, held_out=False)
    short = {family: [one for one in known if len(one) <= longest] for family, known in asked.items()}
    families = [family for family, known in short.items() if known]
    opening, between = openings(text)
    for number in range(shards):
        file = folder / f"texts-{number:05}.safetensors"
        if file.exists():
            continue
        random = Random(number)
        batch = []
        for place in range(texts):
            if place % 2 and families:
                family = random.choice(families)
                batch.append(Prompt(family, random.choice(short[family]), 0.0 if number % 2 == 0 else 0.8))
            else:
                batch.append(Prompt("own", opening, 1.0, between))
        shard = decode(engine, batch, text.stop, answer, number)
        part = file.with_suffix(".part")
        save_file({"tokens": shard.tokens, "best": shard.best, "weights": shard.weights}, part)
        os.replace(part, file)
        progress(f"shard {number + 1} of {shards}: {len(shard.tokens)} places")


def read_texts(folder: Path) -> Texts:
    """All shards. Raises FileNotFoundError when there are none."""
    files = sorted(folder.glob("texts-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no texts; make some first: scripts/distil texts --folder {folder}")
    parts = [load_file(file) for file in files]
    return Texts(*(torch.cat([part[name] for part in parts]) for name in ("tokens", "best", "weights")))


@torch.inference_mode()
def decode(engine: Engine, batch: list[Prompt], stop: tuple[int, ...], answer: int, seed: int) -> Texts:
    """Decode the batch together, up to `answer` new tokens each."""
    draws = torch.Generator().manual_seed(seed)
    sequences = [engine.open_sequence() for _ in batch]
    written = [list(prompt.tokens) for prompt in batch]
    forced = [list(prompt.forced) for prompt in batch]
    pending: list[list[int]] = [[] for _ in batch]
    best: list[list[Tensor]] = [[] for _ in batch]
    weights: list[list[Tensor]] = [[] for _ in batch]
    active = list(range(len(batch)))
    for number, prompt in enumerate(batch):
        reserved = engine.reserve(sequences[number], len(prompt.tokens) + answer)
        assert reserved, "the pool holds a batch"
        last = torch.empty(0)
        for logits in _prefill(engine, sequences[number], prompt.tokens):
            _keep(logits, best[number], weights[number])
            last = logits[-1]
        pending[number].append(_chosen(last, prompt.temperature, draws))
    for _ in range(answer - 1):
        spans = []
        for number in active:
            written[number].append(pending[number].pop(0))
            spans.append(Span(sequences[number], (written[number][-1],), len(written[number]) - 1, 1))
        logits = engine.compute(engine.plan(spans)).float()
        for row, number in enumerate(active):
            _keep(logits[row : row + 1], best[number], weights[number])
            if written[number][-1] in stop and forced[number]:
                pending[number] += forced[number][1:]  # the stop token stands already
                forced[number] = []
            if not pending[number]:
                pending[number].append(_chosen(logits[row], batch[number].temperature, draws))
        active = [number for number in active if written[number][-1] not in stop or len(pending[number]) > 1]
        if not active:
            break
    for sequence in sequences:
        engine.close_sequence(sequence)
    return Texts(
        torch.tensor([token for one in written for token in one]),
        torch.cat([part for one in best for part in one]),
        torch.cat([part for one in weights for part in one]),
    )


def _prefill(engine: Engine, sequence: int, tokens: tuple[int, ...]) -> Iterator[Tensor]:
    for start in range(0, len(tokens), PREFILL_ROWS):
        part = tokens[start : start + PREFILL_ROWS]
        yield engine.compute(engine.plan([Span(sequence, part, start, len(part))])).float()


def _keep(logits: Tensor, best: list[Tensor], weights: list[Tensor]) -> None:
    values, ids = logits.topk(KEPT, dim=-1)
    best.append(ids)
    weights.append((values - logits.logsumexp(-1, keepdim=True)).exp())


def _chosen(logits: Tensor, temperature: float, draws: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws))
