"""scripts/simulate: runs seeds of the simulation, one after the other, in this process.

Exit codes are those of the first run that failed: 0 none did, 1 wrong output (an invariant is broken), 2 no progress
(somebody is not served, or failed without a reason that the fault atlas allows), 3 crash (a role let an exception out).
"""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Final, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.sim import report
from tests.sim.options import FAULTS
from tests.sim.world import WORDS, Outcome, run_seed

USAGE_ERROR: Final = 64
"""As sysexits.h has it."""


class _Parser(argparse.ArgumentParser):
    """argparse ends with 2, which means something else here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    arguments = _Parser(
        prog="scripts/simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = arguments.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="run this one seed and say how it ended")
    what.add_argument("--count", type=int, help="run so many seeds")
    what.add_argument("--minutes", type=float, help="run seeds for so long")
    what.add_argument("--until-failure", action="store_true", help="run seeds until one fails")
    arguments.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    arguments.add_argument("--keep-going", action="store_true", help="go on after a failure (--count, --minutes)")
    arguments.add_argument("--trace", action="store_true", help="with --seed: print the end of the trace in any case")
    return arguments


def _seeds(arguments: argparse.Namespace) -> Iterator[int]:
    if arguments.seed is not None:
        yield arguments.seed
        return
    ends_at = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    count = arguments.count if arguments.count is not None else 50
    seed = arguments.first
    while True:
        if ends_at is not None:
            if time.monotonic() >= ends_at:
                return
        elif not arguments.until_failure and seed - arguments.first >= count:
            return
        yield seed
        seed += 1


def _table(tally: report.Tally, console: Console, took_s: float) -> None:
    faults = Table(title="faults injected")
    for heading in ("kind", "times", "runs"):
        faults.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in tally.rows(list(FAULTS)):
        faults.add_row(*row)
    console.print(faults)
    ends = Table(title="how answers ended")
    ends.add_column("end")
    ends.add_column("answers", justify="right")
    for end, times in sorted(tally.ends.items()):
        ends.add_row(end, str(times))
    console.print(ends)
    console.print(
        f"{tally.seeds} seeds, {tally.rounds} rounds, {tally.virtual_s:.0f} virtual seconds in {took_s:.0f} s; "
        f"failed: {', '.join(map(str, tally.failed)) or 'none'}"
    )


def main() -> int:
    arguments = parser().parse_args()
    console = Console()
    tally = report.Tally()
    first_failure: Outcome | None = None
    last: Outcome | None = None
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} seeds"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("simulating", total=1 if arguments.seed is not None else arguments.count)
        for seed in _seeds(arguments):
            outcome = last = run_seed(seed)
            tally.add(outcome)
            progress.update(bar, advance=1, description=f"seed {seed}, {len(tally.failed)} failed")
            if outcome.kind or (arguments.trace and arguments.seed is not None):
                console.print(report.failure(outcome), markup=False, highlight=False, soft_wrap=True)
            if outcome.kind and first_failure is None:
                first_failure = outcome
            if outcome.kind and not arguments.keep_going:
                break
    _table(tally, console, time.monotonic() - began)
    if last is not None and arguments.seed is not None:
        console.print(f"seed {arguments.seed}: {WORDS[last.kind]} (trace {last.trace_hash})", highlight=False)
    return 0 if first_failure is None else first_failure.kind


if __name__ == "__main__":
    sys.exit(main())
