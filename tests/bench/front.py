"""Many clients that stream from one daemon: errors, cross-talk, memory, and when tokens come."""

import argparse
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from msgspec import Struct

from sdcpd.node.demo_client import RequestFailed, chunks
from sdcpd.node.demo_daemon import DemoDaemon
from tests.bench.figures import Figure, percentile, progress, report
from tests.bench.passes import demo_model

READY_LIMIT_S: Final = 300
SUBJECTS: Final = ("rain", "bread", "the moon", "a bridge", "salt", "winter", "a clock", "honey")
ORDERS: Final = ("Say in one sentence what {} is.", "Write a line about {}, then write it again.")
PERCENTS: Final = (50, 90, 99)


class Heard(Struct, frozen=True):
    """One streamed answer: its text, tokens, and when its pieces came, in seconds from the request."""

    text: str
    tokens: int
    at_s: tuple[float, ...]


class Tally:
    """What all clients saw."""

    def __init__(self) -> None:
        self.heard: Final[list[Heard]] = []
        self.errors: Final[list[str]] = []
        self.crossed = 0
        self.lock: Final = threading.Lock()


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/bench front",
        description=f"{__doc__} Each answer must be the very text that its prompt has alone, in fp32. Ends with 1 if "
        "one was not, or if a request failed.",
    )
    result.add_argument("--json", action="store_true", help="one object on the last line")
    result.add_argument("--model", type=Path, help="a Hugging Face folder (default: the demo model)")
    result.add_argument("--clients", type=int, default=64, help="that stream at once (default 64)")
    result.add_argument("--seconds", type=float, default=120.0, help="in which requests are begun (default 120)")
    result.add_argument("--requests", type=int, default=0, help="of each client, instead of a time")
    result.add_argument("--tokens", type=int, default=24, help="of each answer (default 24)")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.clients < 1 or options.tokens < 2 or options.requests < 0 or options.seconds <= 0:
        parser().error("--clients is at least 1, --tokens 2, --requests 0, and --seconds above 0")
    folder = options.model or demo_model()
    prompts = [order.format(subject) for order in ORDERS for subject in SUBJECTS]
    room = max(64, options.clients)
    settings = (
        "engine.dtype=fp32",
        "engine.kv_cache_bytes=805306368",
        f"frontend.max_requests={room}",
        f"frontend.max_connections={2 * room}",
        f"verifier.max_sessions={room}",
        f"drafter.max_sessions={room}",
    )
    with DemoDaemon(folder, settings) as daemon:
        daemon.wait_ready(READY_LIMIT_S)
        assert daemon.process is not None
        pid = daemon.process.pid
        alone = {prompt: hear(daemon.address, folder.name, prompt, options.tokens).text for prompt in prompts}
        before, started = memory_mb(pid), time.monotonic()
        progress(f"{len(alone)} prompts answered alone; now {options.clients} clients")
        tally = run_clients(daemon.address, folder.name, alone, options)
        took_s, after = time.monotonic() - started, memory_mb(pid)
    for text in tally.errors[:5]:
        progress(text)
    method = {
        "model": folder.name,
        "clients": options.clients,
        "seconds": round(took_s, 1),
        "tokens_an_answer": options.tokens,
        "prompts": len(alone),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    report("front", method, figures_of(tally, took_s, before, after), as_json=options.json)
    if tally.errors or tally.crossed:
        raise SystemExit(1)


def run_clients(address: tuple[str, int], model: str, alone: dict[str, str], options: argparse.Namespace) -> Tally:
    """All clients to their ends. They begin within a second, not in step."""
    tally, until = Tally(), time.monotonic() + options.seconds

    def client(number: int) -> None:
        draws, left = Random(number), options.requests
        time.sleep(draws.random())
        while left > 0 if options.requests else time.monotonic() < until:
            left -= 1
            prompt = draws.choice(list(alone))
            try:
                heard = hear(address, model, prompt, options.tokens)
            except (RequestFailed, KeyError, ValueError) as error:
                with tally.lock:
                    tally.errors.append(f"client {number}: {error}")
                return
            with tally.lock:
                tally.heard.append(heard)
                tally.crossed += heard.text != alone[prompt]

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(options.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def hear(address: tuple[str, int], model: str, prompt: str, tokens: int) -> Heard:
    """One streamed chat. Raises RequestFailed."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, texts, at_s, counted = time.monotonic(), [], [], 0
    for chunk in chunks(address, body):
        if "error" in chunk:
            raise RequestFailed(str(chunk["error"]))
        if chunk["usage"] is not None:
            counted = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            if choice["delta"].get("content"):
                texts.append(choice["delta"]["content"])
                at_s.append(time.monotonic() - started)
    if counted != tokens:
        raise RequestFailed(f"{counted} tokens instead of {tokens}")
    return Heard("".join(texts), counted, tuple(at_s))


def figures_of(tally: Tally, took_s: float, before_mb: float, after_mb: float) -> dict[str, Figure]:
    """By dotted name. `piece_gap_ms` lies between two pieces of an answer, of one token or more; `token_ms` is an
    answer's time from its first piece to its last over the tokens in it."""
    heard = tally.heard
    found: dict[str, float] = {
        "all.answers": len(heard),
        "all.errors": len(tally.errors),
        "all.crossed": tally.crossed,
        "all.tokens_per_s": sum(one.tokens for one in heard) / took_s,
        "memory.before_mb": before_mb,
        "memory.after_mb": after_mb,
        "memory.grown_mb": after_mb - before_mb,
    }
    shown = [one for one in heard if one.at_s]
    samples = {
        "first_token_ms": [one.at_s[0] for one in shown],
        "piece_gap_ms": [
            later - sooner for one in shown for sooner, later in zip(one.at_s, one.at_s[1:], strict=False)
        ],
        "token_ms": [(one.at_s[-1] - one.at_s[0]) / (one.tokens - 1) for one in shown],
    }
    for name, values in samples.items():
        for percent in PERCENTS:
            found[f"{name}.p{percent}"] = 1000 * percentile(values, percent) if values else 0.0
    return {name: Figure.of([value]) for name, value in found.items()}


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024
