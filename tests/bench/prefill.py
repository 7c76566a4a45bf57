"""Time to first token by length of the prompt, and what a prompt's prefill does to the tokens of others."""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import trio

from sdcpd.roles.generation import GenerationRequest
from tests.bench.figures import Blocks, median, progress, quiet_logs, report
from tests.bench.passes import POOL_BYTES, PRECISIONS, demo_model
from tests.support.real_node import GENERATE_LIMIT_S, LoadedModel, RunningNode, eventually, running_node

LENGTHS: Final = (128, 1024, 4096)
OTHER_PROMPT_TOKENS: Final = 32
OTHERS_TOKENS: Final = 2048
"""More than they decode while a prompt is read; they are cancelled then."""
STEADY_TOKENS: Final = 8
"""Tokens that the others decode before the prompt comes: their ordinary pace."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/bench prefill",
        description=f"{__doc__} A whole node without a drafter; each prompt once alone, and once while others decode.",
    )
    result.add_argument("--json", action="store_true", help="one object on the last line")
    result.add_argument("--model", type=Path, help="a Hugging Face folder (default: the demo model)")
    result.add_argument("--precision", choices=PRECISIONS, default="bf16")
    result.add_argument("--lengths", type=_lengths, default=LENGTHS, help="of the prompts (default 128,1024,4096)")
    result.add_argument("--others", type=int, default=2, help="sessions that decode meanwhile (default 2)")
    result.add_argument("--chunk", type=int, default=256, help="verifier.prefill_chunk_tokens (default 256)")
    result.add_argument("--blocks", type=int, default=3, help="times that everything is measured (default 3)")
    result.add_argument("--threads", type=int, default=os.cpu_count(), help="of the engine (default: all cores)")
    return result


def _lengths(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 2:
        raise argparse.ArgumentTypeError("a prompt has at least 2 tokens")
    return found


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if min(options.others, options.blocks) < 1:
        parser().error("--others and --blocks are at least 1")
    folder = options.model or demo_model()
    dtype, quantization = PRECISIONS[options.precision]
    progress(f"{options.precision}: loading")
    model = LoadedModel(
        folder, dtype=dtype, quantization=quantization, threads=options.threads, kv_cache_bytes=POOL_BYTES
    )
    room = model.engine.info.session_tokens - 2
    lengths = [length for length in options.lengths if length <= room]
    if not lengths:
        parser().error(f"--lengths: the model takes up to {room} tokens")
    blocks = Blocks()
    with quiet_logs(), TemporaryDirectory(prefix="sdcpd-bench-") as state:
        trio.run(_measure, options, model, Path(state), lengths, blocks)
    method: dict[str, object] = {
        "model": folder.name,
        "precision": options.precision,
        "numerics": model.engine.info.numerics,
        "threads": options.threads,
        "cores": os.cpu_count(),
        "prefill_chunk_tokens": options.chunk,
        "others": options.others,
        "blocks": options.blocks,
        "load_average": os.getloadavg()[0],
    }
    report("prefill", method, blocks.figures(), as_json=options.json)


async def _measure(
    options: argparse.Namespace, model: LoadedModel, state: Path, lengths: Sequence[int], blocks: Blocks
) -> None:
    settings = (f"verifier.prefill_chunk_tokens={options.chunk}",)
    others_max = min(model.engine.info.session_tokens - OTHER_PROMPT_TOKENS, OTHERS_TOKENS)
    async with running_node(model, state, *settings, drafter=False) as node:
        for block in range(options.blocks):
            for length in lengths:
                progress(f"block {block + 1} of {options.blocks}: {length} tokens")
                prompt = tuple((5 * place * place + place + block) % 256 for place in range(length))
                alone_ms = await _first_token_ms(node, prompt)
                figures = {"first_token_ms": alone_ms, "tokens_per_s": length / alone_ms * 1000}
                blocks.add(f"tokens_{length}", figures | await _beside(node, prompt, options.others, others_max))


def _request(node: RunningNode, prompt: tuple[int, ...], max_new: int) -> GenerationRequest:
    return GenerationRequest(model=node.model, prompt=prompt, max_new=max_new, stop=(), speculation=False)


async def _first_token_ms(node: RunningNode, prompt: tuple[int, ...]) -> float:
    """From the request to its first committed token."""
    assert node.node.router is not None
    began = time.perf_counter()
    async with node.node.router.generation(_request(node, prompt, 1)) as generation:
        async for page in generation.pages():
            assert page.tokens
            return (time.perf_counter() - began) * 1000
    raise AssertionError("no page")


class _Other:
    """A session that decodes: when each of its pages came, and the tokens of it."""

    def __init__(self, number: int) -> None:
        self._prompt = tuple((3 * place + number) % 256 for place in range(OTHER_PROMPT_TOKENS))
        self.pages: list[tuple[float, int]] = []

    @property
    def steady(self) -> bool:
        return sum(tokens for _, tokens in self.pages) >= STEADY_TOKENS

    async def run(self, node: RunningNode, max_new: int) -> None:
        assert node.node.router is not None
        async with node.node.router.generation(_request(node, self._prompt, max_new)) as generation:
            async for page in generation.pages():
                self.pages.append((time.perf_counter(), len(page.tokens)))

    def gaps(self, began: float, ended: float) -> Iterator[tuple[float, int]]:
        """ms before each page that came between the two times, and its tokens."""
        for (earlier, _), (at, tokens) in pairwise(self.pages):
            if began < at <= ended and tokens:
                yield (at - earlier) * 1000, tokens


async def _beside(node: RunningNode, prompt: tuple[int, ...], others: int, max_new: int) -> dict[str, float]:
    """The prompt while `others` decode: the time between their tokens before it came, and while it was read.

    One page may hold several tokens: its time is shared out among them; the longest is a page's.
    """
    sessions = [_Other(number) for number in range(others)]
    with trio.fail_after(GENERATE_LIMIT_S):
        async with trio.open_nursery() as nursery:
            for session in sessions:
                nursery.start_soon(session.run, node, max_new)
            await eventually(lambda: all(session.steady for session in sessions), GENERATE_LIMIT_S)
            came = time.perf_counter()
            first_ms = await _first_token_ms(node, prompt)
            # The page under way when the first token came waited for the prompt as well.
            seen = [len(session.pages) for session in sessions]
            await eventually(
                lambda: all(len(one.pages) > count for one, count in zip(sessions, seen, strict=True)),
                GENERATE_LIMIT_S,
            )
            ended = time.perf_counter()
            nursery.cancel_scope.cancel()
    before = [gap for session in sessions for gap in session.gaps(0.0, came)]
    during = [gap for session in sessions for gap in session.gaps(came, ended)]
    each = [[ms / tokens for ms, tokens in gaps for _ in range(tokens)] for gaps in (before, during)]
    return {
        "beside_ms": first_ms,
        "others_before_ms": median(each[0]),
        "others_during_ms": median(each[1]),
        "others_longest_before_ms": max(ms for ms, _ in before),
        "others_longest_during_ms": max(ms for ms, _ in during),
    }
