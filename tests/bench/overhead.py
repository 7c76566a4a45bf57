"""A round's time outside the model's pass: from a proposal going out to its verdict coming in.

A drafter and a verifier as two processes over mutual TLS, with a model that costs nothing; README.md has the method.
"""

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
import trio
import trio.testing
from msgspec import Struct

from sdcpd.cache.refs import log_reference
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.tls import Tls
from sdcpd.edge.transport import Request, Response, Transport
from sdcpd.edge.wire_settings import PeerClientSettings
from sdcpd.edge.wire_transport import WireClient, WireDialer
from sdcpd.node.metrics import RegistryMeters
from sdcpd.node.real_ports import SystemClock
from sdcpd.protocol.messages import Assignment, Contract, Output, Proposal, SessionOpen, SessionState, Status, Verdict
from sdcpd.protocol.terms import LadderAction, session_path_id
from sdcpd.roles.ports import Peer
from tests.bench.figures import Blocks, Figure, median, percentile, progress, report
from tests.bench.overhead_node import MODEL, TOKEN, TOKENIZER, Heard, NodeSettings
from tests.bench.yardsticks import echoes, lone_fdatasync, python_loop
from tests.edge.wire.pki import Authority

DRAFT_TOKENS: Final = 8
"""In each proposal, as a drafter sends while it is right."""
MANY: Final = 16
"""Sessions at once."""
POLL_WAIT_S: Final = 20.0
DRAFTER: Final = Peer(uri="https://127.0.0.1:1/drafter/", role="drafter")
ROUTER: Final = Peer(uri="https://127.0.0.1:1/router/", role="router")

T = TypeVar("T")

Log = Literal["memory", "fsync", "remote"]


class SetUp(Struct, frozen=True):
    """`log`: where commits go. `polls`: one output poll a session is open throughout."""

    name: str
    log: Log
    polls: bool = False


SET_UPS: Final = (
    SetUp("", "memory"),
    SetUp("fsync_", "fsync"),
    SetUp("polls_", "memory", polls=True),
    SetUp("remote_", "remote"),
)


class Node:
    """A process of the measurement."""

    def __init__(self, settings: NodeSettings, listening: socket.socket) -> None:
        self._process: Final = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.overhead_node", msgspec.json.encode(settings).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listening.fileno()],
        )
        self.base: Final = settings.instance

    def ready(self) -> None:
        self._line()

    def hear(self) -> Heard:
        """What it did since the last question."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._line(), type=Heard)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process of the measurement has ended; what it said is above")
        return line


class Nodes:
    """The processes of all set-ups, each with a certificate of one authority."""

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder
        self._authority: Final = Authority(folder)
        self._nodes: Final[list[Node]] = []

    def start(self, log: Log) -> tuple[Node, ...]:
        """The verifier, and the cache if the log is on another process."""
        if log != "remote":
            return (self._start("verifier", log, "https://127.0.0.1:1/cache/", remote=False),)
        cache = self._start("cache", "memory", "", remote=False)
        cache.ready()
        return self._start("verifier", log, cache.base, remote=True), cache

    def client(self) -> Tls:
        return Tls(self._authority.issue(DRAFTER.uri, ROUTER.uri))

    def stop(self) -> None:
        for node in self._nodes:
            node.stop()

    def _start(self, role: Literal["verifier", "cache"], log: Log, cache: str, *, remote: bool) -> Node:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            base = f"https://127.0.0.1:{listening.getsockname()[1]}/{role}/"
            settings = NodeSettings(
                role=role,
                instance=base,
                router=ROUTER.uri,
                socket=listening.fileno(),
                tls=self._authority.issue(base),
                state=str(self._folder / f"journal-{len(self._nodes)}"),
                durability="fsync" if log == "fsync" else "page_cache",
                cache=cache or base,
                cache_is_remote=remote,
            )
            self._nodes.append(Node(settings, listening))
        return self._nodes[-1]


class TimedTransport:
    """Says how long the exchange of the last request took."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.took_s = 0.0

    async def exchange(self, base_uri: str, request: Request) -> Response:
        begin = time.perf_counter()
        response = await self._transport.exchange(base_uri, request)
        self.took_s = time.perf_counter() - begin
        return response


class Round(Struct, frozen=True):
    """One round's milliseconds: in all, and the part of it spent on the exchange."""

    took: float
    exchange: float


class Drafter:
    """A bare client that sends the proposals of one session as a drafter would, each when the last is decided."""

    def __init__(self, wire: WireClient, base: str, cache: str) -> None:
        self._transport = TimedTransport(wire.transport(DRAFTER, named=True))
        self._meters = RegistryMeters()
        self._peers = PeerClient(self._transport, self._meters)
        self._router = PeerClient(wire.transport(ROUTER, named=True), self._meters)
        self._base = base
        self.session = os.urandom(16)
        self._log = log_reference(cache, None, self.session)
        self._committed = 0
        self.rounds: list[Round] = []

    async def open(self, rounds: int) -> None:
        """The router's part."""
        contract = Contract(
            target=MODEL,
            tokenizer=TOKENIZER,
            rule=1,
            m_max=DRAFT_TOKENS,
            max_new=(rounds + 1) * (DRAFT_TOKENS + 1),
            stop=(),
            low_rounds=8,
            fallback=(LadderAction.FAIL,),
        )
        prompt = (TOKEN,) * 16
        opening = SessionOpen(
            session=self.session, epoch=1, contract=contract, prompt=prompt, commit_log=self._log, router=ROUTER.uri
        )
        state = _expected(await self._router.open_session(self._base, opening), SessionState)
        assignment = Assignment(
            session=self.session,
            epoch=1,
            contract=contract,
            verifier=self._base,
            drafter=DRAFTER.uri,
            prompt=prompt,
            round=0,
            committed=0,
            digest=state.digest,
            m_init=DRAFT_TOKENS,
            seq=1,
        )
        self._digest = _expected(await self._router.name_drafter(self._base, assignment), SessionState).digest

    async def propose(self, rounds: int) -> None:
        """As many rounds, one after the other; times go to `rounds`."""
        status = Status(instance=DRAFTER.uri, role=1, load=12, queue=1, ttl_ms=3000)
        for round_ in range(1, rounds + 1):
            proposal = Proposal(
                session=self.session,
                epoch=1,
                round=round_,
                drafter=DRAFTER.uri,
                base=self._committed,
                base_digest=self._digest,
                tokens=(TOKEN,) * DRAFT_TOKENS,
                status=status,
            )
            begin = time.perf_counter()
            verdict = await self._peers.propose(self._base, proposal)
            took_s = time.perf_counter() - begin
            decided = _expected(verdict, Verdict)
            assert decided.accepted == DRAFT_TOKENS, decided
            self._committed, self._digest = decided.committed, decided.digest
            self.rounds.append(Round(took=1000 * took_s, exchange=1000 * self._transport.took_s))

    async def poll(self) -> None:
        """Read the output as a router does, one poll after the other, until cancelled."""
        start = 0
        while True:
            page = _expected(await self._router.read_output(self._base, self.session, start, POLL_WAIT_S), Output)
            start += len(page.tokens)

    async def close(self) -> None:
        await self._router.cancel_session(self._base, self.session)


async def measure(
    wire: WireClient, nodes: tuple[Node, ...], sessions: int, rounds: int, *, polls: bool
) -> dict[str, float]:
    """One block: that many sessions, each with that many rounds."""
    base, cache = nodes[0].base, nodes[-1].base if len(nodes) > 1 else "https://127.0.0.1:1/cache/"
    drafters = [Drafter(wire, base, cache) for _ in range(sessions)]
    for drafter in drafters:
        await drafter.open(rounds)
    async with trio.open_nursery() as polling:
        if polls:
            for drafter in drafters:
                polling.start_soon(drafter.poll)
        await trio.testing.wait_all_tasks_blocked(0.05)
        before, own = [node.hear() for node in nodes], _cpu_s()
        begin = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for drafter in drafters:
                nursery.start_soon(drafter.propose, rounds)
        took_s, own = time.perf_counter() - begin, _cpu_s() - own
        after = [node.hear() for node in nodes]
        polling.cancel_scope.cancel()
    for drafter in drafters:
        await drafter.close()
    used = [now.cpu_s - then.cpu_s for now, then in zip(after, before, strict=True)]
    return _figures(drafters, after[0], took_s, [own, *used])


def _figures(drafters: list[Drafter], heard: Heard, took_s: float, cpu_s: list[float]) -> dict[str, float]:
    """What one block says. Parts are means when many share the cores, so that they add up; medians alone."""
    rounds = [
        (r, h) for d in drafters for r, h in zip(d.rounds, heard.handled[session_path_id(d.session)], strict=True)
    ]
    took = [r.took for r, _ in rounds]
    parts: dict[str, Callable[[Round, tuple[float, float]], float]] = {
        "client_ms": lambda r, h: r.took - r.exchange,
        "transport_ms": lambda r, h: r.exchange - h[0],
        "server_ms": lambda r, h: h[0] - h[1],
        "append_ms": lambda r, h: h[1],
    }
    middle = median if len(drafters) == 1 else _mean
    figures = {"median_ms": median(took), "p99_ms": percentile(took, 99), "rounds_per_s": len(took) / took_s}
    figures |= {name: middle([part(r, h) for r, h in rounds]) for name, part in parts.items()}
    names = ("cpu_client_ms", "cpu_server_ms", "cpu_cache_ms")
    return figures | {name: 1000 * used / len(took) for name, used in zip(names, cpu_s, strict=False)}


async def measure_echo(wire: WireClient, node: Node, callers: int, times: int) -> dict[str, float]:
    """One block of the exchange that asks for nothing, through the same port, connections and TLS."""
    before, own = node.hear().cpu_s, _cpu_s()
    took, took_s = await echoes(wire.transport(DRAFTER, named=True), node.base, callers, times)
    own, used = _cpu_s() - own, node.hear().cpu_s - before
    figures = {"median_ms": median(took), "p99_ms": percentile(took, 99), "rounds_per_s": len(took) / took_s}
    return figures | {"cpu_client_ms": 1000 * own / len(took), "cpu_server_ms": 1000 * used / len(took)}


async def run(folder: Path, blocks: int, rounds: int, only: tuple[str, ...] = ()) -> dict[str, Figure]:
    """All set-ups, in turns."""
    found, nodes, clock = Blocks(), Nodes(folder), SystemClock()
    set_ups = [set_up for set_up in SET_UPS if not only or (set_up.name.rstrip("_") or "memory") in only]
    try:
        started = {log: nodes.start(log) for log in dict.fromkeys(set_up.log for set_up in set_ups)}
        for group in started.values():
            group[0].ready()
        async with _wire(nodes.client(), clock) as wire:
            for block in range(blocks + 1):
                progress("warming up" if block == 0 else f"block {block} of {blocks}")
                for name, sessions in (("alone", 1), ("sixteen", MANY)):
                    count = max(1, (rounds if sessions == 1 else 2 * rounds // sessions) // (4 if block == 0 else 1))
                    node = started[set_ups[0].log][0]
                    echo = await measure_echo(wire, node, sessions, count)
                    if block:
                        found.add(f"echo_{name}", echo)
                    for set_up in set_ups:
                        values = await measure(wire, started[set_up.log], sessions, count, polls=set_up.polls)
                        if block:
                            found.add(set_up.name + name, values)
                            found.add(f"{set_up.name}{name}_to_echo", _ratios(values, echo))
                if block:
                    found.add("python", python_loop())
                    found.add("fdatasync", lone_fdatasync(folder, min(rounds, 200)))
                    _add_price_of_fsync(found)
    finally:
        nodes.stop()
    return found.figures()


def _ratios(values: dict[str, float], echo: dict[str, float]) -> dict[str, float]:
    """How many times an echo of the same block a round is."""
    cpu = ("cpu_client_ms", "cpu_server_ms")
    return {
        "median_ratio": values["median_ms"] / echo["median_ms"],
        "rate_ratio": echo["rounds_per_s"] / values["rounds_per_s"],
        "cpu_ratio": sum(values[one] for one in cpu) / sum(echo[one] for one in cpu),
    }


def _add_price_of_fsync(found: Blocks) -> None:
    """What fsync adds to a round beyond the disk's own time, within one block."""
    names = ("fsync_alone.median_ms", "alone.median_ms", "fdatasync.median_ms")
    if all(name in found.last for name in names):
        synced, memory, disk = (found.last[name] for name in names)
        found.add("fsync_over_fdatasync", {"median_ms": synced - memory - disk})


@asynccontextmanager
async def _wire(tls: Tls, clock: SystemClock) -> AsyncIterator[WireClient]:
    async with trio.open_nursery() as nursery:
        wire = WireClient(WireDialer(tls, insecure_loopback=False), PeerClientSettings(), clock)
        await nursery.start(wire.run)
        yield wire
        nursery.cancel_scope.cancel()


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="scripts/bench overhead", description=(__doc__ or "").splitlines()[0])
    kinds = [set_up.name.rstrip("_") or "memory" for set_up in SET_UPS]
    options.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options.add_argument("--blocks", type=int, default=5, help="how often all set-ups take their turn (default: 5)")
    options.add_argument("--rounds", type=int, default=400, help="rounds of one session in a block (default: 400)")
    options.add_argument("--only", action="append", default=[], choices=kinds, help="one set-up; again for more")
    options.add_argument("--folder", type=Path, help="where journals go (default: the folder for temporary files)")
    return options


def main(arguments: list[str]) -> None:
    """The command."""
    options = parser()
    chosen = options.parse_args(arguments)
    if chosen.blocks < 1 or chosen.rounds < 1:
        options.error("--blocks and --rounds: at least 1")
    with tempfile.TemporaryDirectory(prefix="sdcpd-bench-", dir=chosen.folder) as folder:
        figures = trio.run(partial(run, Path(folder), chosen.blocks, chosen.rounds, tuple(chosen.only)))
    report("overhead", _method(chosen.blocks, chosen.rounds), figures, as_json=chosen.json)


def _method(blocks: int, rounds: int) -> dict[str, object]:
    return {
        "blocks": blocks,
        "rounds_a_block": rounds,
        "draft_tokens": DRAFT_TOKENS,
        "cores": len(os.sched_getaffinity(0)),
        "log_in_memory": "the cache role in the verifier's process, commit_durability = page_cache",
        "machine_load_before": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
    }


def _expected(answer: object, kind: type[T]) -> T:
    assert isinstance(answer, kind), answer
    return answer


def _mean(samples: list[float]) -> float:
    return sum(samples) / len(samples)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
