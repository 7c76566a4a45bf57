"""How sdcpctl prints: plain tables, as wide as the terminal."""

import json
from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.table import Table

FILE_WIDTH: Final = 400


def console() -> Console:
    """The terminal's width; elsewhere wide enough that nothing is cut which a script may look for."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_WIDTH)


def table_of(*columns: str) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def print_or(console: Console, table: Table, rows: Iterable[object], nothing: str) -> None:
    """The table, or `nothing` where it has no rows."""
    if rows:
        console.print(table)
    else:
        console.print(nothing)


def text_of(value: object) -> str:
    """A member of an answer in a cell."""
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.3g}"
        case list() | dict():
            return json.dumps(value)
        case _:
            return str(value)
