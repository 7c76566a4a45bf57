"""Tokens a second of the engine at 1 to 32 sessions: one token a pass, and rounds of a few proposed tokens."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

from sdcpd.engine.forward import Engine
from sdcpd.engine.spans import Span
from tests.bench.figures import Blocks, progress, report
from tests.bench.passes import PRECISIONS, Stopwatch, demo_model, load

SESSIONS: Final = (1, 2, 4, 8, 16, 32)
PROMPT_TOKENS: Final = 64


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/bench batch",
        description=f"{__doc__} Drafts are right with a given chance for each token, so that nothing but the engine is "
        "measured: no drafter, no log, no network.",
    )
    result.add_argument("--json", action="store_true", help="one object on the last line")
    result.add_argument("--model", type=Path, help="a Hugging Face folder (default: the demo model)")
    result.add_argument("--precision", choices=PRECISIONS, default="bf16")
    result.add_argument("--threads", type=int, default=os.cpu_count(), help="of the engine (default: all cores)")
    result.add_argument("--blocks", type=int, default=3, help="times that everything is measured (default 3)")
    result.add_argument("--tokens", type=int, default=32, help="that each session decodes in a block (default 32)")
    result.add_argument("--proposed", type=int, default=5, help="tokens of a draft (default 5)")
    result.add_argument("--acceptance", type=float, default=0.8, help="chance of each drafted token (default 0.8)")
    result.add_argument("--sessions", type=int, default=max(SESSIONS), help="largest number of sessions")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.blocks < 1 or options.tokens < 1 or options.proposed < 1 or not 0 <= options.acceptance <= 1:
        parser().error("--blocks, --tokens and --proposed are at least 1, --acceptance lies in 0 to 1")
    folder = options.model or demo_model()
    engine = load(folder, options.precision, options.threads)
    blocks = Blocks()
    for block in range(options.blocks):
        progress(f"block {block + 1} of {options.blocks}")
        for sessions in (count for count in SESSIONS if count <= options.sessions):
            for name, proposed in (("off", 0), ("on", options.proposed)):
                random = Random(block)
                with Stopwatch() as watch:
                    passes = decode(engine, sessions, options.tokens, proposed, options.acceptance, random)
                tokens = sessions * options.tokens
                blocks.add(
                    f"{name}.sessions_{sessions}",
                    {
                        "tokens_per_s": tokens / watch.wall_ms * 1000,
                        "cpu_ms_a_token": watch.cpu_ms / tokens,
                        "passes": passes,
                    },
                )
    method = {
        "model": folder.name,
        "precision": options.precision,
        "numerics": engine.info.numerics,
        "threads": options.threads,
        "cores": os.cpu_count(),
        "tokens_a_session": options.tokens,
        "proposed": options.proposed,
        "acceptance": options.acceptance,
        "load_average": os.getloadavg()[0],
    }
    report("batch", method, blocks.figures(), as_json=options.json)


def decode(engine: Engine, sessions: int, count: int, proposed: int, acceptance: float, random: Random) -> int:
    """`count` tokens of each session in shared passes, prompts included; the number of passes."""
    vocabulary = engine.info.vocabulary
    prompts = [tuple((place * place + n) % vocabulary for place in range(PROMPT_TOKENS)) for n in range(sessions)]
    opened = [engine.open_sequence() for _ in prompts]
    for sequence, prompt in zip(opened, prompts, strict=True):
        assert engine.reserve(sequence, PROMPT_TOKENS + count + proposed + 1)
        engine.run(engine.plan([Span(sequence=sequence, tokens=prompt[:-1], start=0, rows=0)]))
    last = [prompt[-1] for prompt in prompts]
    done = [0] * sessions
    passes = 0
    while min(done) < count:
        active = [number for number in range(sessions) if done[number] < count]
        spans = []
        for number in active:
            tokens = (last[number], *(3 + place for place in range(proposed)))
            start = PROMPT_TOKENS - 1 + done[number]
            spans.append(Span(sequence=opened[number], tokens=tokens, start=start, rows=len(tokens)))
        rows = engine.run(engine.plan(spans))
        passes += 1
        for number, answer in zip(active, rows, strict=True):
            accepted = 0
            while accepted < proposed and random.random() < acceptance:
                accepted += 1
            done[number] = min(count, done[number] + accepted + 1)
            last[number] = answer[accepted].token
    for sequence in opened:
        engine.close_sequence(sequence)
    return passes
