"""Time to the first token of a prompt that was seen before, by the tier that has its blocks, beside a cold run."""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sdcpd.cache.block_orders import Order, Source, Tier
from sdcpd.cache.blocks import BlockChain
from sdcpd.cache.files import RealFiles
from sdcpd.cache.settings import CacheSettings
from sdcpd.engine.forward import Engine
from sdcpd.engine.spans import Span
from tests.bench.figures import Blocks, progress, report
from tests.bench.passes import PRECISIONS, demo_model, load

CHUNK: Final = 256
MIB: Final = 1 << 20


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="scripts/bench prefix", description=__doc__)
    result.add_argument("--json", action="store_true", help="one object on the last line")
    result.add_argument("--model", type=Path, help="a Hugging Face folder (default: the demo model)")
    result.add_argument("--precision", choices=PRECISIONS, default="bf16")
    result.add_argument("--threads", type=int, default=os.cpu_count(), help="of the engine (default: all cores)")
    result.add_argument("--blocks", type=int, default=3, help="times that everything is measured (default 3)")
    result.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt (default 2000)")
    result.add_argument("--tokens", type=int, default=64, help="tokens that follow and are compared (default 64)")
    return result


class Bench:
    """One engine with all tiers, and one prompt."""

    def __init__(self, engine: Engine, prompt: Sequence[int], new_tokens: int, directory: Path) -> None:
        self.engine = engine
        self.prompt = tuple(prompt)
        self._new_tokens = new_tokens
        self.store = engine.keep_blocks(
            CacheSettings(cpu_bytes_to_use=256 * MIB, disk_bytes_to_use=1024 * MIB), RealFiles(directory)
        )
        size = self.store.layout.block_tokens
        self._names = BlockChain(self.store.root(None), size).up_to((len(prompt) - 1) // size, lambda: self.prompt)

    def cold(self) -> tuple[float, list[int]]:
        """As if nobody had ever asked."""
        self.store.purge(None)
        return self.answer()

    def answer(self) -> tuple[float, list[int]]:
        """Milliseconds to the first token, and all tokens, of a session that takes what is there."""
        engine, store, blocks = self.engine, self.store, self.engine.blocks
        assert blocks is not None
        sequence = engine.open_sequence()
        began = time.perf_counter()
        assert engine.reserve(sequence, len(self.prompt) + self._new_tokens)
        place = 0
        while place < len(self._names):
            page = store.page_of(self._names[place])
            if page is not None:
                blocks.place(sequence, place, page)
                place += 1
            elif store.fill(self._names[place:], blocks.pages(sequence)[place : len(self._names)]) is not None:
                order = store.next_fill()
                assert order is not None
                self._carry_out(order)
            else:
                break
        start = place * store.layout.block_tokens
        while len(self.prompt) - start > CHUNK:
            self._run(sequence, self.prompt[start : start + CHUNK], start, 0)
            start += CHUNK
        tokens = [self._run(sequence, self.prompt[start:], start, 1)]
        first_ms = 1e3 * (time.perf_counter() - began)
        while len(tokens) < self._new_tokens:
            tokens.append(self._run(sequence, tokens[-1:], len(self.prompt) + len(tokens) - 1, 1))
        for number, name in enumerate(self._names):
            if number >= place:
                store.publish(name, None, blocks.pages(sequence)[number], 0.0)
            store.taken(name, 0.0)
        engine.close_sequence(sequence)
        return first_ms, tokens

    def only_in(self, tier: Tier) -> None:
        """Have the blocks in this tier and in no other. Those of the device are made by an answer."""
        if tier is Tier.DEVICE:
            return
        pool, held = self.engine.pool, []
        while pool.free_pages:
            while (order := self.store.next_spill(0.0)) is not None:
                self._carry_out(order)
            held += pool.allocate(1)
        pool.release(held)
        if tier is Tier.DISK:
            self._to_disk()
        assert self.store.lookup(self._names) == (tier,) * len(self._names)

    def _to_disk(self) -> None:
        """What the buffers hold goes to files, as under pressure."""
        index, moves = self.store._index, self.store._moves
        for entry in list(index.entries.values()):
            if entry.buffer is not None:
                order = moves._spill(entry, Source(buffer=entry.buffer), 0.0)
                assert order is not None
                self._carry_out(order)
                index.leave_buffer(entry)

    def _run(self, sequence: int, tokens: Sequence[int], start: int, rows: int) -> int:
        span = Span(sequence=sequence, tokens=tuple(tokens), start=start, rows=rows)
        answers = self.engine.run(self.engine.plan([span]))[0]
        return answers[0].token if answers else 0

    def _carry_out(self, order: Order) -> None:
        self.store.settle(order, order.run(), 0.0)


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    folder = options.model or demo_model()
    engine = load(folder, options.precision, options.threads, "auto")
    prompt = [(7 * place * place + 3 * place) % engine.info.vocabulary for place in range(options.prompt)]
    blocks = Blocks()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(engine, prompt, options.tokens, Path(directory))
        for block in range(options.blocks):
            progress(f"block {block + 1} of {options.blocks}")
            cold_ms, expected = bench.cold()
            blocks.add("cold", {"ttft_ms": cold_ms})
            for tier in Tier:
                bench.only_in(tier)
                ttft_ms, tokens = bench.answer()
                same = tokens == expected
                assert same or engine.info.numerics != "batch_invariant", "the tokens are those of the cold run"
                blocks.add(
                    tier.value, {"ttft_ms": ttft_ms, "share_of_cold": ttft_ms / cold_ms, "same_tokens": float(same)}
                )
        bench.store.close()
    method = {
        "model": folder.name,
        "precision": options.precision,
        "numerics": engine.info.numerics,
        "threads": options.threads,
        "cores": os.cpu_count(),
        "prompt_tokens": options.prompt,
        "tokens": options.tokens,
        "blocks": options.blocks,
        "load_average": os.getloadavg()[0],
    }
    report("prefix", method, blocks.figures(), as_json=options.json)
