"""One process of the bench `overhead`: a verifier with a model that costs nothing, or a cache, behind the real port.

It is told by one JSON argument what to be and by lines on its standard input when to say how it fares: each line is
answered by one, with the CPU time so far and the times of what was handled since the line before. Its listening socket
is handed down, so that the certificate could be made for its port.
"""

import os
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec
import trio
from msgspec import Struct

from sdcpd.cache.files import RealFiles
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.dispatch import Dispatcher, cache_dispatcher, verifier_dispatcher
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.peer_app import Failures, Mount, PeerApp
from sdcpd.edge.peer_server import PeerServer
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.tls import Tls, TlsSettings
from sdcpd.edge.transport import LoopbackNetwork, Request, Response, Transport
from sdcpd.edge.wire_settings import PeerClientSettings, PeerServerSettings
from sdcpd.edge.wire_transport import WireClient, WireDialer
from sdcpd.engine.spans import EngineInfo, Row, Shelf, Span, Weighed
from sdcpd.node.logs import LogSettings, configure_logs
from sdcpd.node.metrics import RegistryMeters
from sdcpd.node.real_ports import OsRandomness, SystemClock, ThreadWorkers
from sdcpd.protocol.encoding import MEDIA_TYPE
from sdcpd.protocol.messages import Event, Proposal, Status, Verdict
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.cache import Cache
from sdcpd.roles.ports import AppendOutcome, Done, Peer, Ports
from sdcpd.roles.verifier import Verifier
from sdcpd.roles.verifier_settings import VerifierSettings
from tests.bench.yardsticks import ANSWER_BYTES, ECHO_PATH, QUESTION_BYTES

MODEL: Final = b"\x01" * 32
TOKENIZER: Final = b"\x02" * 32
TOKEN: Final = 7
"""What the model says, always."""
CONTEXT_TOKENS: Final = 1 << 20
SESSIONS: Final = 64


class NodeSettings(Struct, frozen=True, kw_only=True):
    """What this process is. `log`: in the verifier's own process, in memory or synced, or at the cache `cache`."""

    role: Literal["verifier", "cache"]
    instance: str
    router: str
    socket: int
    tls: TlsSettings
    state: str
    durability: Literal["fsync", "page_cache"]
    cache: str
    cache_is_remote: bool


class Heard(Struct, frozen=True):
    """Since the last question. `handled`: by session in the order of rounds, (request, append of its record) in ms."""

    cpu_s: float
    handled: dict[str, list[tuple[float, float]]]


class FreeEngine:
    """The Engine port: a model that costs nothing and always says the same."""

    def __init__(self) -> None:
        self.info = EngineInfo(
            model=MODEL,
            tokenizer=TOKENIZER,
            vocabulary=1000,
            context_tokens=CONTEXT_TOKENS,
            page_tokens=CONTEXT_TOKENS,
            pages=4 * SESSIONS,
            dtype="none",
            device="none",
        )
        self.free_pages = self.info.pages
        self.blocks = None
        self._sequences = 0
        self._holding: set[int] = set()
        self._row = Row(token=TOKEN, margin=1.0, finite=True)

    def open_sequence(self) -> int:
        self._sequences += 1
        return self._sequences

    def close_sequence(self, sequence: int) -> None:
        if sequence in self._holding:
            self._holding.remove(sequence)
            self.free_pages += 1

    def reserve(self, sequence: int, length: int) -> bool:
        """A page holds a whole session."""
        if sequence not in self._holding:
            if not self.free_pages:
                return False
            self._holding.add(sequence)
            self.free_pages -= 1
        return True

    async def run_pass(self, spans: Sequence[Span]) -> list[tuple[Row, ...]]:
        await trio.lowlevel.checkpoint()
        return [(self._row,) * span.rows for span in spans]

    async def passes_ended(self) -> None:
        raise AssertionError("no blocks are kept here")

    async def judge(self, shelf: Shelf, tokens: tuple[int, ...], weighed: Weighed) -> tuple[Row, ...]:
        raise AssertionError("only rule 2 keeps rows, and this bench speaks rule 1")


class Silent(PeerClient):
    """Calls of a verifier whose router is not part of the measurement: it takes whatever it is told."""

    async def report_status(self, router: str, message: Status) -> Done:
        return Done()

    async def report_event(self, router: str, message: Event) -> Done:
        return Done()


class Stopwatch:
    """Times requests and appends, each where it happens, and puts those of one round together."""

    def __init__(self, clock: SystemClock) -> None:
        self._clock = clock
        self._session: ContextVar[list[str]] = ContextVar("session")
        self._appended: dict[str, float] = {}
        self._handled: dict[str, list[tuple[float, float]]] = {}

    def handler(self, handle: Callable[[Peer, Request], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        async def timed(peer: Peer, request: Request) -> Response:
            sessions: list[str] = []
            self._session.set(sessions)
            begin = self._clock.now()
            response = await handle(peer, request)
            took = self._clock.now() - begin
            for session in sessions:
                appended = self._appended.pop(session, 0.0)
                self._handled.setdefault(session, []).append((1000 * took, 1000 * appended))
            return response

        return timed

    def proposed(self, session: bytes) -> None:
        self._session.get().append(session_path_id(session))

    def appended(self, session: str, took_s: float) -> None:
        self._appended[session] = took_s

    def take(self) -> dict[str, list[tuple[float, float]]]:
        taken, self._handled = self._handled, {}
        return taken


class TimedVerifier(Verifier):
    """Says which request was a proposal."""

    stopwatch: Stopwatch

    async def propose(self, peer: Peer, message: Proposal) -> Verdict:
        self.stopwatch.proposed(message.session)
        return await super().propose(peer, message)


class TimedObjects(ObjectClient):
    """Says how long appends take, as the verifier's keeper sees it."""

    stopwatch: Stopwatch
    clock: SystemClock

    async def append(self, ref: str, record: bytes, *, epoch: int, if_match: str) -> AppendOutcome:
        begin = self.clock.now()
        outcome = await super().append(ref, record, epoch=epoch, if_match=if_match)
        self.stopwatch.appended(ref.rpartition("/")[2], self.clock.now() - begin)
        return outcome


async def _run(settings: NodeSettings) -> None:
    clock, meters = SystemClock(), RegistryMeters()
    stopwatch = Stopwatch(clock)
    tls = Tls(settings.tls, [settings.instance])
    network, failures = LoopbackNetwork(), Failures()
    async with trio.open_nursery() as nursery:
        wire = WireClient(WireDialer(tls, insecure_loopback=False), PeerClientSettings(), clock)
        await nursery.start(wire.run)

        def ports(transport: Transport, engine: FreeEngine | None = None) -> Ports:
            objects = TimedObjects(transport, meters, (settings.cache,))
            objects.stopwatch, objects.clock = stopwatch, clock
            return Ports(
                clock=clock,
                randomness=OsRandomness(),
                workers=ThreadWorkers(),
                meters=meters,
                peers=Silent(transport, meters),
                objects=objects,
                engine=engine,
            )

        caller = Peer(uri=settings.instance, role=settings.role)
        dispatcher: Dispatcher | None = None
        if not settings.cache_is_remote:
            kept = CacheSettings(commit_durability=settings.durability)
            cache = Cache(kept, ports(network.transport(caller)), RealFiles(Path(settings.state)))
            dispatcher = cache_dispatcher(cache, kept, meters)
            network.serve(settings.cache, dispatcher.handle)
            await nursery.start(cache.run)
        if settings.role == "verifier":
            remote = wire.transport(caller, named=False)
            verifier = TimedVerifier(
                VerifierSettings(speculation="on"),  # a bench of rounds: none may be made shorter
                ports(remote if settings.cache_is_remote else network.transport(caller), FreeEngine()),
                instance=settings.instance,
                routers=(settings.router,),
                caches=(settings.cache,),
                boot=bytes(16),
            )
            verifier.stopwatch = stopwatch
            await nursery.start(partial(verifier.run))
            dispatcher = verifier_dispatcher(verifier, meters)
        assert dispatcher is not None, "a cache keeps its own logs"
        app = PeerApp(failures.report, [_mount(settings.role, dispatcher, stopwatch)])
        await nursery.start(failures.watch)
        server = PeerServer(app, PeerServerSettings(), clock, tls)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=settings.socket)))
        await nursery.start(partial(server.run, [listener]))
        await _answer_questions(stopwatch)
        nursery.cancel_scope.cancel()


def _mount(role: str, dispatcher: Dispatcher, stopwatch: Stopwatch) -> Mount:
    """The role, timed, and beside it what answers at once."""
    serve = stopwatch.handler(dispatcher.handle)
    echo = Response(
        status=200, headers={"content-type": MEDIA_TYPE, "cache-control": "no-store"}, body=bytes(ANSWER_BYTES)
    )

    async def handle(peer: Peer, request: Request) -> Response:
        return echo if request.path == ECHO_PATH else await serve(peer, request)

    def limit_bytes(method: str, path: str) -> int:
        return QUESTION_BYTES if path == ECHO_PATH else dispatcher.body_limit_bytes(method, path)

    return Mount(f"/{role}/", handle, limit_bytes)


async def _answer_questions(stopwatch: Stopwatch) -> None:
    """Until the standard input ends."""
    questions, answers = trio.lowlevel.FdStream(os.dup(0)), trio.lowlevel.FdStream(os.dup(1))
    await answers.send_all(b"\n")
    async with questions, answers:
        while octets := await questions.receive_some():
            for _ in range(octets.count(b"\n")):
                used = resource.getrusage(resource.RUSAGE_SELF)
                heard = Heard(cpu_s=used.ru_utime + used.ru_stime, handled=stopwatch.take())
                await answers.send_all(msgspec.json.encode(heard) + b"\n")


if __name__ == "__main__":
    configure_logs(LogSettings(level="warning"))
    trio.run(_run, msgspec.json.decode(sys.argv[1], type=NodeSettings))
