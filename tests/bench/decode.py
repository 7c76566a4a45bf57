"""Decoding speed of one session by workload family and method of drafting, beside transformers on the same weights."""

import argparse
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import trio

from sdcpd.engine.forward import Engine
from sdcpd.frontend.text import ModelText, load_model_text
from tests.bench.decode_figures import acceptance_by_position, grid_for, method_figures
from tests.bench.decoding import METHODS, MODEL_METHODS, NotedEngine, Reference, Text, Way, way
from tests.bench.figures import Blocks, progress, quiet_logs, report
from tests.bench.passes import POOL_BYTES, PRECISIONS, Stopwatch, demo_model, run, with_prefix
from tests.bench.prompts import encoded, read_prompts, spread
from tests.support.real_node import LoadedModel

REFERENCES: Final = {"transformers": False, "transformers_lookup": True}
"""Name, and whether it looks prompts up."""
COST_REPEATS: Final = 3

Texts = dict[tuple[str, str], list[Text]]
"""By family and method, in the order of the prompts."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/bench decode",
        description=f"{__doc__} Methods take turns prompt by prompt; each repetition begins with an empty history.",
    )
    result.add_argument("--json", action="store_true", help="one object on the last line")
    result.add_argument("--model", type=Path, help="a Hugging Face folder (default: the demo model)")
    result.add_argument("--methods", type=_of(METHODS), default=list(METHODS), help=f"of {', '.join(METHODS)}")
    result.add_argument(
        "--precisions",
        type=_of(tuple(PRECISIONS)),
        help=f"of {', '.join(PRECISIONS)} (default bf16; with --methods plain bf16,int8)",
    )
    result.add_argument("--prompts", type=Path, help="a folder with files FAMILY.jsonl (default: the project's own)")
    result.add_argument("--families", type=lambda text: text.split(","), help="of the prompts' families (default: all)")
    result.add_argument("--count", type=int, default=4, help="prompts a family (default 4)")
    result.add_argument("--max-tokens", type=int, default=96, help="of an answer (default 96)")
    result.add_argument("--repetitions", type=int, default=1, help="times that everything is decoded (default 1)")
    result.add_argument("--no-template", action="store_true", help="prompts bare, without the chat template")
    result.add_argument("--no-references", action="store_true", help="leave transformers out")
    result.add_argument("--draft-model", type=Path, help="a folder (default: the target as its own drafter)")
    result.add_argument("--threads", type=int, default=os.cpu_count(), help="of the engine (default: all cores)")
    return result


def _of(known: tuple[str, ...]):  # type: ignore[no-untyped-def]  # argparse takes any callable
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
        return found

    return names


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if min(options.count, options.repetitions) < 1 or options.max_tokens < 2:
        parser().error("--count and --repetitions are at least 1, --max-tokens at least 2")
    try:
        prompts = read_prompts(options.prompts)
    except (OSError, ValueError, KeyError) as error:
        parser().error(f"--prompts: {error}")
    families = options.families or list(prompts)
    if unknown := [family for family in families if family not in prompts]:
        parser().error(f"--families: {', '.join(unknown)}: there are {', '.join(prompts)}")
    precisions = options.precisions or (["bf16", "int8"] if options.methods == ["plain"] else ["bf16"])
    folder = options.model or demo_model()
    blocks = Blocks()
    method: dict[str, object] = {
        "model": folder.name,
        "threads": options.threads,
        "cores": os.cpu_count(),
        "template": not options.no_template,
        "prompts_a_family": options.count,
        "max_tokens": options.max_tokens,
        "repetitions": options.repetitions,
    }
    for precision in precisions:
        bench = Bench(options, folder, precision, {name: spread(prompts[name], options.count) for name in families})
        for repetition in range(options.repetitions):
            with quiet_logs():
                texts, costs = trio.run(bench.repeat, repetition)
            # The first precision named is the one that figures without its name are of.
            _add(blocks, precision, texts, costs, prefix="" if precision == precisions[0] else f"{precision}.")
        method[f"numerics_{precision}"] = bench.numerics
    method["load_average"] = os.getloadavg()[0]
    report("decode", method, blocks.figures(), as_json=options.json)


class Bench:
    """One precision: loaded models, encoded prompts."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, precision: str, prompts: dict[str, list[str]]
    ) -> None:
        self._options = options
        self._precision = precision
        self._text: ModelText = load_model_text(folder.name, folder)
        if options.no_template:
            progress("prompts go without the chat template")
        self._prompts = {
            family: [encoded(self._text, prompt, template=not options.no_template) for prompt in texts]
            for family, texts in prompts.items()
        }
        progress(f"{precision}: loading")
        dtype, quantization = PRECISIONS[precision]
        shape = {"dtype": dtype, "quantization": quantization, "threads": options.threads}
        self._model = LoadedModel(folder, kv_cache_bytes=POOL_BYTES, kind=NotedEngine, **shape)
        self._drafts: LoadedModel | None = None
        if any(name in MODEL_METHODS for name in options.methods):
            # No cores are divided here, so its passes take turns with the target's in one thread, as in a node.
            small = options.draft_model or folder
            self._drafts = LoadedModel(small, kv_cache_bytes=POOL_BYTES, thread=self._model.thread, **shape)
        self._references: list[str] = []
        if not options.no_references:
            self._references = list(REFERENCES)[: 1 if options.methods == ["plain"] else 2]
            self._reference = Reference(folder, "bf16" if dtype == "auto" else dtype)

    @property
    def numerics(self) -> str:
        return self._model.engine.info.numerics

    async def repeat(self, number: int) -> tuple[Texts, dict[str, dict[int, float]]]:
        """Each prompt by each method, in turns; and for each family what a pass costs, ms by rows."""
        texts: Texts = {}
        costs: dict[str, dict[int, float]] = {}
        with TemporaryDirectory(prefix="sdcpd-bench-") as state:
            async with AsyncExitStack() as nodes:
                ways = [
                    await nodes.enter_async_context(way(name, self._model, self._drafts, Path(state) / name))
                    for name in self._options.methods
                ]
                for family, prompts in self._prompts.items():
                    for place, prompt in enumerate(prompts):
                        progress(f"{self._precision} {number + 1}: {family} {place + 1} of {len(prompts)}")
                        await self._turn(family, prompt, ways, texts)
                    costs[family] = await self._costs([one for key in texts if key[0] == family for one in texts[key]])
        return texts, costs

    async def _turn(self, family: str, prompt: tuple[int, ...], ways: Sequence[Way], texts: Texts) -> None:
        most, stop = self._options.max_tokens, self._text.stop
        for one in ways:
            texts.setdefault((family, one.method), []).append(await one.decode(prompt, most, stop))
        for name in self._references:
            decode = partial(self._reference.decode, prompt, most, stop, lookup=REFERENCES[name])
            # In the thread of the passes: another one would bring threads of its own and starve these.
            texts.setdefault((family, name), []).append(await self._model.thread.run(decode))

    async def _costs(self, texts: Sequence[Text]) -> dict[int, float]:
        """ms of a pass by its rows, after as many tokens as these texts have on average."""
        context = sum(text.context_tokens for text in texts) // len(texts)
        ours = [text for text in texts if text.drafts]
        return await self._model.thread.run(partial(_timed_passes, self._model.engine, context, grid_for(ours)))


def _timed_passes(engine: Engine, context: int, grid: Sequence[int]) -> dict[int, float]:
    context = min(context, engine.info.session_tokens - max(grid))
    (sequence,) = with_prefix(engine, 1, context)
    found: dict[int, list[float]] = {rows: [] for rows in grid}
    for _ in range(COST_REPEATS):
        for rows, times in found.items():
            with Stopwatch() as watch:
                run(engine, [sequence], context, rows)
            times.append(watch.wall_ms)
    engine.close_sequence(sequence)
    return {rows: min(times) for rows, times in found.items()}


def _add(blocks: Blocks, precision: str, texts: Texts, costs: dict[str, dict[int, float]], *, prefix: str) -> None:
    families = list(dict.fromkeys(family for family, _ in texts))
    methods = list(dict.fromkeys(method for _, method in texts))
    for family in families:
        for method in methods:
            plain, greedy = texts.get((family, "plain")), texts.get((family, "transformers"))
            figures = method_figures(texts[family, method], plain, greedy, costs[family])
            blocks.add(f"{prefix}{family}.{method}", figures)
    for family in families:
        for method in methods:
            if places := acceptance_by_position(texts[family, method]) if method not in REFERENCES else {}:
                blocks.add(f"{prefix}{family}.{method}.acceptance_by_position", places)
    for method in methods:
        every = {name: [one for family in families for one in texts.get((family, name), ())] for name in methods}
        figures = method_figures(every[method], every.get("plain"), every.get("transformers"), costs[families[0]])
        wanted = ("tokens_per_s", "ratio_to_plain", "ratio_to_transformers", "equal_texts")
        blocks.add(f"{method}.{precision}", {name: figures[name] for name in wanted if name in figures})
