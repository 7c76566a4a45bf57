"""What all benches share: order statistics, the readable table, and one JSON object on the last line.

A bench measures in blocks, and takes turns between its set-ups, so that whatever else the machine does meets all of
them alike. A figure is the median over the blocks; its spread, from the lowest block to the highest, is printed beside
it.
"""

import json
import logging
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import structlog
from msgspec import Struct
from rich.console import Console
from rich.table import Table


def median(samples: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(samples)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` of 100 do not exceed (nearest rank)."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


class Figure(Struct, frozen=True):
    """One number over all blocks."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, blocks: Sequence[float]) -> "Figure":
        """The median of the blocks and their spread."""
        return cls(value=median(blocks), low=min(blocks), high=max(blocks))


class Blocks:
    """Values by dotted name, one a block, in the order in which names first came."""

    def __init__(self) -> None:
        self._values: Final[dict[str, list[float]]] = {}

    def add(self, prefix: str, values: dict[str, float]) -> None:
        """One block's values; names become `prefix.name`."""
        for name, value in values.items():
            self._values.setdefault(f"{prefix}.{name}", []).append(value)

    def of(self, name: str) -> list[float]:
        """What came under the name, block by block."""
        return self._values[name]

    @property
    def last(self) -> dict[str, float]:
        """What came last under each name."""
        return {name: values[-1] for name, values in self._values.items()}

    def figures(self) -> dict[str, Figure]:
        """All names with their medians over blocks."""
        return {name: Figure.of(values) for name, values in self._values.items()}


def report(bench: str, method: dict[str, object], figures: dict[str, Figure], *, as_json: bool) -> None:
    """Print tables, one row a prefix, and with `as_json` the object for programs after them.

    The object holds values only: spreads are for whoever looks at the table.
    """
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    for line in (f"{name}: {value}" for name, value in method.items()):
        console.print(line, highlight=False, soft_wrap=True)
    for columns, rows in _grouped(figures):
        table = Table(title=bench)
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right")
        for row, cells in rows:
            table.add_row(row, *(_cell(cells[column]) for column in columns))
        console.print(table)
    if as_json:
        values = {name: round(figure.value, 6) for name, figure in figures.items()}
        print(json.dumps({"bench": bench, "method": method, "figures": values}), flush=True)


def progress(text: str) -> None:
    """One line about how far a long run has come, away from the results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """A node inside the bench's process says errors only."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)


def _grouped(figures: dict[str, Figure]) -> Iterable[tuple[tuple[str, ...], list[tuple[str, dict[str, Figure]]]]]:
    """Rows that have the same columns share a table."""
    rows: dict[str, dict[str, Figure]] = {}
    for name, figure in figures.items():
        row, _, column = name.rpartition(".")
        rows.setdefault(row, {})[column] = figure
    tables: dict[tuple[str, ...], list[tuple[str, dict[str, Figure]]]] = {}
    for row, cells in rows.items():
        tables.setdefault(tuple(cells), []).append((row, cells))
    return tables.items()


def _cell(figure: Figure) -> str:
    if figure.low == figure.high:
        return _number(figure.value)
    return f"{_number(figure.value)} ({_number(figure.low)}-{_number(figure.high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
