"""What one pass of the target costs by rows and by sessions, beside the time to read its weights."""  # noqa: N999  # the name of the bench

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tests.bench.figures import Blocks, progress, report
from tests.bench.passes import (
    KERNELS,
    PRECISIONS,
    Floor,
    Stopwatch,
    demo_model,
    load,
    run,
    with_prefix,
)

ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
SESSIONS: Final = (1, 2, 4, 8, 16)
KNOWN: Final = (*PRECISIONS, *KERNELS)
ENOUGH_MS: Final = 300
"""A block repeats a pass until it has spent this long on it: long passes vary less, and the whole ends in time."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="scripts/bench pass", description=__doc__)
    result.add_argument("--json", action="store_true", help="one object on the last line")
    result.add_argument("--model", type=Path, help="a Hugging Face folder (default: the demo model)")
    result.add_argument("--precisions", type=_names, default=["bf16", "int8", "fp32"], help=f"of {', '.join(KNOWN)}")
    result.add_argument("--numerics", choices=("auto", "fast", "batch_invariant"), default="auto")
    result.add_argument("--threads", type=_count, default=os.cpu_count(), help="of the engine (default: all cores)")
    result.add_argument("--blocks", type=_count, default=2, help="times that everything is measured (default 2)")
    result.add_argument("--repeats", type=_count, default=5, help="most passes in a row of a block (default 5)")
    result.add_argument("--prefix", type=_count, default=256, help="tokens of context before the pass (default 256)")
    return result


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return count


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in KNOWN]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(KNOWN)}")
    return names


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    folder = options.model or demo_model()
    engines = {name: load(folder, name, options.threads, options.numerics) for name in options.precisions}
    floors = {name: Floor(engine.read_bytes) for name, engine in engines.items()}
    opened = {name: with_prefix(engine, max(SESSIONS), options.prefix) for name, engine in engines.items()}
    blocks = Blocks()
    for block in range(options.blocks):
        progress(f"block {block + 1} of {options.blocks}")
        for name, engine in engines.items():
            floor = _timed(floors[name].run, options.repeats)
            blocks.add(f"{name}.floor", {"ms": floor.wall_ms, "cpu_ms": floor.cpu_ms})
            for kind, counts in (("rows", ROWS), ("sessions", SESSIONS)):
                for count in counts:
                    sessions, rows = (1, count) if kind == "rows" else (count, 1)
                    sequences = opened[name][:sessions]
                    spent = _timed(lambda e=engine, s=sequences, r=rows: run(e, s, options.prefix, r), options.repeats)  # type: ignore[misc]  # bound now, called at once
                    blocks.add(
                        f"{name}.{kind}_{count}",
                        {
                            "ms": spent.wall_ms,
                            "cpu_ms": spent.cpu_ms,
                            "ratio_to_floor": spent.wall_ms / floor.wall_ms,
                            "cpu_ratio_to_floor": spent.cpu_ms / floor.cpu_ms,
                        },
                    )
    method = {
        "model": folder.name,
        "numerics": {name: engine.info.numerics for name, engine in engines.items()},
        "threads": options.threads,
        "cores": os.cpu_count(),
        "prefix_tokens": options.prefix,
        "blocks": options.blocks,
        "load_average": os.getloadavg()[0],
    }
    report("pass", method, blocks.figures(), as_json=options.json)


def _timed(function: Callable[[], object], repeats: int) -> Stopwatch:
    """The best of some in a row, after a warm one: what others do to the machine only ever adds."""
    function()
    watches = []
    for _ in range(repeats):
        with Stopwatch() as watch:
            function()
        watches.append(watch)
        if sum(one.wall_ms for one in watches) > ENOUGH_MS:
            break
    best = Stopwatch()
    best.wall_ms = min(watch.wall_ms for watch in watches)
    best.cpu_ms = min(watch.cpu_ms for watch in watches)
    return best
