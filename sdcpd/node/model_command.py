"""`sdcpctl model`: what a model's folder holds, and a folder made out of a GGUF file.

    sdcpctl model inspect PATH          shape, digests, memory by precision, KV bytes a token
    sdcpctl model import FILE.gguf DIR  needs the extra `demo` (the package gguf)

Works on files alone; no daemon is asked, and torch is not loaded. The digest of a target depends on the precision it
runs in: `inspect` tells one for each. The weights' files are read whole for them, which takes a second a gigabyte.
Where memory depends on the machine and on the weights themselves (model_size.py), it tells the least and the most.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sdcpd.engine.model_config import ModelRefused, read_model_config
from sdcpd.engine.model_digest import target_digest, tokenizer_digest
from sdcpd.engine.model_size import DTYPE_BYTES, PRECISIONS, measure
from sdcpd.node.gguf_facts import ImportRefused
from sdcpd.node.gguf_import import import_gguf

OK, REFUSED = 0, 1
FILE_WIDTH: Final = 400
"""Columns where the output goes to no terminal: nothing is cut that a script may look for."""


def add_model(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `model` command to the command line of sdcpctl."""
    model = commands.add_parser("model", help="what a model's folder holds; a folder out of a GGUF file (files only)")
    verbs = model.add_subparsers(dest="verb", required=True, metavar="inspect|import")
    inspect = verbs.add_parser("inspect", help="shape, digests, memory by precision, KV bytes a token")
    inspect.add_argument("path", type=Path, metavar="PATH", help="a Hugging Face folder")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    made = verbs.add_parser("import", help="make a Hugging Face folder out of a GGUF file (weights become bf16)")
    made.add_argument("file", type=Path, metavar="FILE.gguf")
    made.add_argument("folder", type=Path, metavar="DIR", help="the folder to be made; must not be there yet")


def run_model(options: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    try:
        if options.verb == "import":
            _import(options.file, options.folder)
            return OK
        facts = inspect_model(options.path)
    except (ModelRefused, ImportRefused) as error:
        sys.stderr.write(f"sdcpctl: {error}\n")
        return REFUSED
    if options.json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        _show(facts)
    return OK


def inspect_model(folder: Path) -> dict[str, Any]:
    """All facts of a folder, as `--json` prints them. Raises ModelRefused."""
    config = read_model_config(folder)
    size = measure(config)
    shape: dict[str, Any] = msgspec.to_builtins(config)
    with tempfile.TemporaryDirectory(prefix="sdcpctl-") as kept:  # each file is hashed once, not once a precision
        targets = {
            (dtype, quantization): target_digest(folder, config, dtype, Path(kept), quantization=quantization).hex()
            for dtype, quantization in PRECISIONS
        }
    return {
        "path": str(folder),
        "parameters": size.parameters,
        "shape": shape,
        "tokenizer": tokenizer_digest(folder).hex(),
        "kv_bytes_a_token": {dtype: size.kv_bytes_a_token(dtype) for dtype in DTYPE_BYTES},
        "precisions": [
            {
                "dtype": dtype,
                "quantization": quantization,
                "weights_bytes": size.weights_bytes(dtype, quantization),
                "least_weights_bytes": size.least_weights_bytes(dtype, quantization),
                "target": targets[dtype, quantization],
            }
            for dtype, quantization in PRECISIONS
        ],
    }


def _import(file: Path, folder: Path) -> None:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("convert", total=1.0)
        import_gguf(file, folder, lambda step, fraction: progress.update(task, description=step, completed=fraction))
    sys.stdout.write(f"{folder}: made. Set engine.model to it.\n")


def _show(facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_WIDTH)
    table = _table(facts["path"], "")
    for name, value in _lines(facts):
        table.add_row(name, value)
    console.print(table)
    table = _table("dtype", "quantization", "weights", "KV a token", "target digest")
    for row in facts["precisions"]:
        kv_bytes = facts["kv_bytes_a_token"][row["dtype"]]
        least, most = _bytes(row["least_weights_bytes"]), _bytes(row["weights_bytes"])
        weights = most if least == most else f"{least} to {most}"
        table.add_row(row["dtype"], row["quantization"], weights, _bytes(kv_bytes), row["target"])
    console.print(table)


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    shape = facts["shape"]
    yield "parameters", f"{facts['parameters']:,}"
    for name, value in shape.items():
        if isinstance(value, dict):
            yield name, ", ".join(f"{key} {member}" for key, member in value.items() if key != "layers")
        elif name == "window_layers":
            yield name, f"{len(value)} of {shape['layers']}" if value else "-"
        else:
            yield name, "-" if value is None else str(value)
    yield "tokenizer digest", facts["tokenizer"]


def _bytes(number: int) -> str:
    """With three digits and a binary unit."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
