"""Tokens a second of a whole node at 1 to 32 sessions: speculation on, off, and as the verifier decides."""

import argparse
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import trio
from msgspec import Struct

from sdcpd.engine.device import has_avx512
from sdcpd.engine.model_config import read_model_config
from sdcpd.engine.model_size import measure
from sdcpd.frontend.text import load_model_text
from sdcpd.protocol.terms import M_MAX_LIMIT, Action
from sdcpd.roles.generation import GenerationRequest
from tests.bench.decoding import NotedEngine, at_rest
from tests.bench.figures import Blocks, Figure, progress, quiet_logs, report
from tests.bench.passes import POOL_BYTES, PRECISIONS, Stopwatch, demo_model
from tests.bench.prompts import encoded, read_prompts
from tests.support.real_node import GENERATE_LIMIT_S, LoadedModel, RunningNode, running_node

MODES: Final = ("on", "off", "auto")
SESSIONS: Final = (1, 2, 4, 8, 16, 32)
SESSIONS_LIMIT: Final = 64
"""`max_sessions` of a verifier and of a drafter, by default: one more would be refused."""
LEAST_TEXTS: Final = 2
"""A turn decodes as many tokens as one text a session has, and so many at least: few sessions run for longer."""


def parser() -> argparse.ArgumentParser:
    precision = "bf16" if has_avx512() else "fp32"
    result = argparse.ArgumentParser(
        prog="scripts/bench batch",
        description=f"{__doc__} Drafts are n-grams; the three take turns at each number of sessions.",
    )
    result.add_argument("--json", action="store_true", help="one object on the last line")
    result.add_argument("--model", type=Path, help="a Hugging Face folder (default: the demo model)")
    result.add_argument(
        "--precisions",
        type=_precisions,
        default=[precision],
        help=f"of {', '.join(PRECISIONS)} (default {precision}, which is what an engine takes here by itself)",
    )
    result.add_argument("--sessions", type=_sessions, default=SESSIONS, help="at once (default 1,2,4,8,16,32)")
    result.add_argument("--prompts", type=Path, help="a folder with files FAMILY.jsonl (default: the project's own)")
    result.add_argument("--max-tokens", type=int, default=40, help="of an answer (default 40)")
    result.add_argument("--repetitions", type=int, default=2, help="times that everything is decoded (default 2)")
    result.add_argument("--no-template", action="store_true", help="prompts bare, without the chat template")
    result.add_argument("--threads", type=int, default=os.cpu_count(), help="of the engine (default: all cores)")
    return result


def _precisions(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [name for name in found if name not in PRECISIONS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(PRECISIONS)}")
    return found


def _sessions(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if not all(1 <= count <= SESSIONS_LIMIT for count in found):
        raise argparse.ArgumentTypeError(f"{text}: 1 to {SESSIONS_LIMIT} sessions, the limit of a verifier as shipped")
    return found


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.repetitions < 1 or options.max_tokens < 2:
        parser().error("--repetitions is at least 1, --max-tokens at least 2")
    try:
        prompts = _in_turn(read_prompts(options.prompts))
    except (OSError, ValueError, KeyError) as error:
        parser().error(f"--prompts: {error}")
    folder = options.model or demo_model()
    figures: dict[str, Figure] = {}
    method: dict[str, object] = {
        "model": folder.name,
        "drafter": "ngram",
        "threads": options.threads,
        "cores": os.cpu_count(),
        "template": not options.no_template,
        "max_tokens": options.max_tokens,
        "repetitions": options.repetitions,
    }
    for precision in options.precisions:
        bench = Bench(options, folder, precision, prompts)
        blocks = Blocks()
        with quiet_logs():
            trio.run(bench.run, blocks)
        # The first precision named is the one that figures without its name are of.
        prefix = "" if precision == options.precisions[0] else f"{precision}."
        figures |= {prefix + name: figure for name, figure in with_ratios(blocks, options.sessions).items()}
        method[f"numerics_{precision}"] = bench.numerics
    method["precisions"] = ",".join(options.precisions)
    method["load_average"] = os.getloadavg()[0]
    report("batch", method, figures, as_json=options.json)


def _in_turn(prompts: dict[str, list[str]]) -> list[str]:
    """One of each family after the other, so that a few sessions have some of each."""
    return [one for few in zip_longest(*prompts.values()) for one in few if one is not None]


def with_ratios(blocks: Blocks, sessions: Sequence[int]) -> dict[str, Figure]:
    """All figures, and for each number of sessions what automatic reaches of the better of on and off.

    Its value is of the medians: the better of two in each block would often be the luckier one. Its spread is over the
    blocks.
    """
    figures = blocks.figures()
    for count in sessions:
        name = f"sessions_{count}"
        medians = [figures[f"{name}.{mode}.tokens_per_s"].value for mode in MODES]
        each = [
            _of_best(*one) for one in zip(*(blocks.of(f"{name}.{mode}.tokens_per_s") for mode in MODES), strict=True)
        ]
        figures[f"{name}.auto_over_best"] = Figure(value=_of_best(*medians), low=min(each), high=max(each))
    return figures


def _of_best(on: float, off: float, auto: float) -> float:
    return auto / max(on, off)


class Bench:
    """One precision: one set of loaded weights for all three nodes, and encoded prompts."""

    def __init__(self, options: argparse.Namespace, folder: Path, precision: str, prompts: Sequence[str]) -> None:
        self._options = options
        self._precision = precision
        text = load_model_text(folder.name, folder)
        self._stop = text.stop
        self._prompts = [encoded(text, prompt, template=not options.no_template) for prompt in prompts]
        progress(f"{precision}: loading")
        dtype, quantization = PRECISIONS[precision]
        longest = max(map(len, self._prompts)) + options.max_tokens + M_MAX_LIMIT
        room_bytes = max(options.sessions) * longest * measure(read_model_config(folder)).kv_bytes_a_token("fp32")
        self._model = LoadedModel(
            folder,
            dtype=dtype,
            quantization=quantization,
            threads=options.threads,
            # All sessions have room at once and the prompts' blocks stay: no waiting is measured, and little prefill.
            kv_cache_bytes=POOL_BYTES + room_bytes,
            kind=NotedEngine,
        )

    @property
    def numerics(self) -> str:
        return self._model.engine.info.numerics

    async def run(self, blocks: Blocks) -> None:
        """All turns; each repetition takes the modes the other way round and begins with another prompt."""
        with TemporaryDirectory(prefix="sdcpd-bench-") as state:
            async with _nodes(self._model, Path(state)) as nodes:
                progress(f"{self._precision}: reading {len(self._prompts)} prompts")
                for prompt in self._prompts:
                    await nodes["off"].node.generate(prompt, 1, self._stop, speculation=False)
                for repetition in range(self._options.repetitions):
                    for sessions in self._options.sessions:
                        for mode in MODES if repetition % 2 == 0 else reversed(MODES):
                            figures = await self._turn(nodes[mode], sessions, repetition)
                            turn = f"{repetition + 1} of {self._options.repetitions}, {sessions} sessions, {mode}"
                            progress(f"{self._precision} {turn}: {figures['tokens_per_s']:.3g} tokens/s")
                            blocks.add(f"sessions_{sessions}.{mode}", figures)

    async def _turn(self, node: "ModeNode", sessions: int, repetition: int) -> dict[str, float]:
        texts = max(sessions, LEAST_TEXTS)
        first = repetition * texts % len(self._prompts)
        prompts = self._prompts[first:] + self._prompts[:first]
        engine, most = self._model.engine, self._options.max_tokens
        assert isinstance(engine, NotedEngine)
        crowd = Crowd(node, engine, prompts, max_tokens=most, stop=self._stop)
        return await crowd.run(sessions, texts * most)


class ModeNode(Struct, frozen=True):
    """A node that runs, and whether its requests ask for speculation."""

    node: RunningNode
    speculation: bool


@asynccontextmanager
async def _nodes(model: LoadedModel, state: Path) -> AsyncIterator[dict[str, ModeNode]]:
    """A node a mode. Where speculation is off, requests say so as well: no session begins with a drafter then."""
    async with AsyncExitStack() as stack:
        found = {}
        for mode in MODES:
            setting = f"verifier.speculation={mode}"
            node = await stack.enter_async_context(running_node(model, state / mode, setting))
            found[mode] = ModeNode(node, speculation=mode != "off")
        yield found


class Crowd:
    """Clients of a node, each with the next prompt as soon as its text is done.

    Tokens count from the moment at which every client has some, until enough have come: so what is measured has all
    sessions in it from first to last, and no prompts but those of texts that follow on others.
    """

    def __init__(
        self,
        node: ModeNode,
        engine: NotedEngine,
        prompts: Sequence[tuple[int, ...]],
        *,
        max_tokens: int,
        stop: Sequence[int],
    ) -> None:
        self._node = node
        self._engine = engine
        self._prompts = cycle(prompts)
        self._max_tokens = max_tokens
        self._stop = tuple(stop)
        self._silent: set[int] = set()
        self._missing = 0
        self._begun, self._done = trio.Event(), trio.Event()

    async def run(self, sessions: int, tokens: int) -> dict[str, float]:
        """Tokens a second, and what the passes had in them."""
        self._silent, self._missing = set(range(sessions)), tokens
        self._engine.noted.clear()
        with trio.fail_after(GENERATE_LIMIT_S):
            async with trio.open_nursery() as nursery:
                for number in range(sessions):
                    nursery.start_soon(self._client, number)
                await self._begun.wait()
                self._engine.noted.clear()
                with Stopwatch() as watch:
                    await self._done.wait()
                passes = list(self._engine.noted)
                nursery.cancel_scope.cancel()
        await at_rest(self._node.node, self._engine)
        came = tokens - self._missing
        return {
            "tokens_per_s": came / watch.wall_ms * 1000,
            "cpu_ms_a_token": watch.cpu_ms / came,
            "rows_a_pass": sum(passes) / len(passes),
            "tokens_a_pass": came / len(passes),
        }

    async def _client(self, number: int) -> None:
        router = self._node.node.node.router
        assert router is not None
        while True:
            request = GenerationRequest(
                model=self._node.node.model,
                prompt=next(self._prompts),
                max_new=self._max_tokens,
                stop=self._stop,
                speculation=self._node.speculation,
            )
            async with router.generation(request) as generation:
                async for page in generation.pages():
                    if page.finish == Action.FAIL:
                        raise RuntimeError(f"a session failed: {page.reason}")
                    if page.tokens and not self._done.is_set():
                        self._came(number, len(page.tokens))

    def _came(self, number: int, count: int) -> None:
        if self._begun.is_set():
            self._missing -= count
            if self._missing <= 0:
                self._done.set()
            return
        self._silent.discard(number)
        if not self._silent:
            self._begun.set()
