"""A whole node in the test's own process: real configuration, roles, front end and engine; no command line, no signals.

The engine is loaded once and shared by the tests of a module, since loading is what takes long. What it must be after
every test, `free` says: all pages given back.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from prometheus_client.parser import text_string_to_metric_families

from sdcpd.cache.files import RealFiles
from sdcpd.drafting.source import DraftSource
from sdcpd.engine.forward import Engine as ModelEngine
from sdcpd.engine.settings import EngineSettings
from sdcpd.engine.spans import Span
from sdcpd.node.config import load_config
from sdcpd.node.draft_parts import make_lookup
from sdcpd.node.node import Node, World
from sdcpd.node.notify import Notifier
from sdcpd.node.real_ports import OsRandomness, PassThread, SystemClock, ThreadedEngine, ThreadWorkers
from sdcpd.node.start import keep_blocks, keep_draft_blocks
from sdcpd.protocol.messages import Output
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.ports import Engine

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config" / "all-in-one.toml"
START_LIMIT_S = 60
GENERATE_LIMIT_S = 300
"""Ample for a busy machine, and short enough that a session which stands still is seen."""


async def eventually(condition: Callable[[], bool], limit_s: float) -> None:
    """Return once `condition` holds. Raises TooSlowError after `limit_s`. For what real threads and sockets decide."""
    with trio.fail_after(limit_s):
        while not condition():
            await trio.sleep(0.002)


class LoadedModel:
    """One engine and the thread that runs its passes."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        kv_cache_bytes: int,
        thread: PassThread | None = None,
        kind: type[ModelEngine] = ModelEngine,
        **settings: Any,
    ) -> None:
        """`thread` is another model's, to take turns with it; `kind` the class of the engine."""
        self.folder = folder
        settings |= {"model": str(folder), "device": "cpu", "dtype": dtype, "kv_cache_bytes": kv_cache_bytes}
        self.engine = kind.load(EngineSettings(**settings))
        self.thread = thread or PassThread("test passes")

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def free(self) -> bool:
        """Has everything been given back?"""
        return self.engine.free_pages == self.engine.info.pages

    async def plain_greedy(self, prompt: Sequence[int], max_new: int, stop: Sequence[int]) -> tuple[int, ...]:
        """The oracle: the prompt in one pass, then a token a pass, nothing else in the pass."""
        engine = self.engine
        sequence = engine.open_sequence()
        assert engine.reserve(sequence, len(prompt) + max_new)
        output: list[int] = []
        pending = tuple(prompt)
        start = 0
        while len(output) < max_new and (not output or output[-1] not in stop):
            batch = engine.plan([Span(sequence=sequence, tokens=pending, start=start, rows=1)])
            answers = await self.thread.run(partial(engine.run, batch))
            start += len(pending)
            output.append(answers[0][0].token)
            pending = (output[-1],)
        engine.close_sequence(sequence)
        return tuple(output)


class RunningNode:
    """A node that is ready."""

    def __init__(self, node: Node, model: str) -> None:
        self.node = node
        self.model = model

    @property
    def address(self) -> tuple[str, int]:
        assert self.node.address is not None
        return self.node.address

    async def generate(
        self, prompt: Sequence[int], max_new: int, stop: Sequence[int], *, speculation: bool = True, **sampling: Any
    ) -> tuple[tuple[int, ...], Output]:
        """One prompt through the router: the output's tokens and its final page. `sampling`: GenerationRequest's."""
        request = GenerationRequest(
            model=self.model,
            prompt=tuple(prompt),
            max_new=max_new,
            stop=tuple(stop),
            speculation=speculation,
            **sampling,
        )
        assert self.node.router is not None
        tokens: list[int] = []
        with trio.fail_after(GENERATE_LIMIT_S):
            async with self.node.router.generation(request) as generation:
                async for page in generation.pages():
                    assert page.from_ == len(tokens)
                    tokens += page.tokens
                    if page.final:
                        return tuple(tokens), page
        raise AssertionError("no final page")

    def sample(self, name: str) -> float:
        """A metric without labels (or the sum over them), as a scrape tells it."""
        families = text_string_to_metric_families(self.node.meters.scrape().decode())
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def labelled(self, name: str, label: str) -> dict[str, float]:
        """A metric by the values of one of its labels."""
        families = text_string_to_metric_families(self.node.meters.scrape().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {sample.labels[label]: sample.value for sample in samples}

    async def get(self, path: str) -> tuple[int, bytes]:
        """One GET at the client port."""
        stream = await trio.open_tcp_stream(*self.address)
        async with stream:
            await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n".encode())
            octets = b"".join([piece async for piece in stream])
        head, _, body = octets.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    async def open_completion(self, body: dict[str, Any]) -> trio.SocketStream:
        """Send a chat request and leave the answer to the caller."""
        octets = json.dumps({"model": self.model, **body}).encode()
        stream = await trio.open_tcp_stream(*self.address)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: n\r\nContent-Length: {len(octets)}\r\n"
        await stream.send_all(head.encode() + b"Content-Type: application/json\r\n\r\n" + octets)
        return stream


@asynccontextmanager
async def running_node(
    model: LoadedModel,
    state: Path,
    *settings: str,
    drafter: bool = True,
    drafts: LoadedModel | None = None,
    source: Callable[[], DraftSource] | None = None,
) -> AsyncIterator[RunningNode]:
    """A node over `model`, ready; stopped in order at the end. `drafts` is what a method with a draft model runs."""
    overrides = [
        f"engine.model={model.folder}",
        f"node.state_dir={state / 'state'}",
        f"node.runtime_dir={state / 'run'}",
        "frontend.listen=127.0.0.1:0",
        *settings,
    ]
    roles = "router,verifier,cache" + (",drafter" if drafter else "")
    config = load_config(CONFIG, overrides, roles)

    async def load_engine() -> Engine:
        await model.thread.run(partial(keep_blocks, config.cache, state / "state" / "blocks", model.engine))
        return ThreadedEngine(model.engine, model.thread)

    async def load_drafts() -> Engine:
        await trio.lowlevel.checkpoint()
        assert drafts is not None
        keep_draft_blocks(config.cache, drafts.engine)
        return ThreadedEngine(drafts.engine, drafts.thread)

    world = World(
        clock=SystemClock(),
        wall_clock=lambda: 1_800_000_000.0,
        randomness=OsRandomness(),
        workers=ThreadWorkers(),
        files=lambda: RealFiles(state / "state" / "log"),
        load_engine=load_engine,
        draft_source=source or partial(make_lookup, config),
        load_draft_engine=load_drafts,
    )
    node = Node(config, world, Notifier({}))
    async with trio.open_nursery() as nursery:
        with trio.fail_after(START_LIMIT_S):
            await nursery.start(node.run)
        yield RunningNode(node, model.name)
        node.stop()
