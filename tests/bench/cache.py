"""Bandwidth of the cache: each tier, and a peer over TLS, beside what memory, the disk and TLS themselves do."""

import argparse
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import msgspec
import trio

from sdcpd.cache.refs import ObjectKind, object_reference
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.tls import Tls, TlsSettings
from sdcpd.edge.wire_settings import PeerClientSettings
from sdcpd.edge.wire_transport import Target, WireClient, WireDialer
from sdcpd.node.metrics import RegistryMeters
from sdcpd.node.real_ports import SystemClock, ThreadWorkers
from sdcpd.roles.ports import Appended, Content, Done, Peer
from tests.bench.cache_node import NodeSettings, send_plain, take_plain
from tests.bench.figures import Blocks, progress, report
from tests.bench.tiers import tier_figures
from tests.edge.wire.pki import Authority

MIB: Final = 1 << 20
DRAFTER: Final = Peer(uri="https://d.example/drafter/", role="drafter")
SESSION: Final = bytes(16)
DEADLINE_S: Final = 60.0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="scripts/bench cache", description=__doc__)
    result.add_argument("--json", action="store_true", help="one object on the last line")
    result.add_argument("--mib", type=int, default=64, help="of an object of the peer, and of the floors (default 64)")
    result.add_argument("--blocks", type=int, default=5, help="times that everything is measured (default 5)")
    result.add_argument("--repeats", type=int, default=3, help="transfers in each block (default 3)")
    result.add_argument("--folder", type=Path, help="where files go (default: a temporary one; name the cache's disk)")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if min(options.mib, options.blocks, options.repeats) < 1:
        parser().error("--mib, --blocks and --repeats are at least 1")
    size = options.mib * MIB
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, blocks, octets = Path(name), Blocks(), os.urandom(size)
        authority = Authority(folder)
        with ended_at_exit() as start:
            peer = Ends(authority, start(authority, size, plain=False), octets, options.repeats)
            plain = PlainTls(authority, start(authority, size, plain=True), octets, options.repeats)
            for block in range(options.blocks):
                progress(f"block {block + 1} of {options.blocks}")
                blocks.add("memcpy", {"mb_per_s": copied(octets, options.repeats)})
                blocks.add("disk_floor", disk_floor(folder / "floor", octets, options.repeats))
                blocks.add("tls_floor", plain.measure())
                for prefix, bulk in (("peer", True), ("peer_http2", False)):
                    blocks.add(prefix, trio.run(peer.measure, bulk, f"{block}"))
                for tier, figures in tier_figures(folder / f"blocks-{block}", options.repeats).items():
                    blocks.add(tier, figures)
            plain.close()
    method: dict[str, object] = {
        "object": f"{options.mib} MiB, random; MB are 10^6 octets",
        "peer": "one loopback connection, TLS 1.3 with client certificates, contents checked against their digests",
        "blocks": f"{options.blocks}, of {options.repeats} transfers",
        "cores": os.cpu_count(),
    }
    report("cache", method, blocks.figures(), as_json=options.json)


def rate(size: int, times: int, work: Callable[[], object]) -> float:
    """MB a second."""
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return times * size / 1e6 / (time.perf_counter() - begin)


def copied(octets: bytes, times: int) -> float:
    """From one place in memory, which is there already, to another."""
    into, source = memoryview(bytearray(len(octets))), memoryview(octets)

    def copy() -> None:
        into[:] = source

    copy()
    return rate(len(octets), times, copy)


def disk_floor(path: Path, octets: bytes, times: int) -> dict[str, float]:
    """A file written and synced; and read again, as a rule from the kernel's memory."""

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(octets)
            os.fsync(file.fileno())

    return {
        "put_mb_per_s": rate(len(octets), times, write),
        "get_mb_per_s": rate(len(octets), times, path.read_bytes),
    }


class Started(msgspec.Struct):
    port: int
    stdin: IO[bytes]


@contextmanager
def ended_at_exit() -> Iterator[Callable[..., Started]]:
    """What starts processes; they end with this."""
    running: list[subprocess.Popen[bytes]] = []

    def start(authority: Authority, size: int, *, plain: bool) -> Started:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        instance = f"https://127.0.0.1:{port}/cache/"
        listener.set_inheritable(True)
        settings = NodeSettings(listener.fileno(), authority.issue(instance), instance, size, plain)
        command = [sys.executable, "-m", "tests.bench.cache_node", msgspec.json.encode(settings).decode()]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
        listener.close()
        running.append(process)
        assert process.stdin is not None
        return Started(port, process.stdin)

    try:
        yield start
    finally:
        for process in running:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class PlainTls:
    """Blocking sockets and nothing above TLS."""

    def __init__(self, authority: Authority, started: Started, octets: bytes, repeats: int) -> None:
        context = Tls(authority.issue(DRAFTER.uri)).client
        raw = socket.create_connection(("127.0.0.1", started.port))
        self._stream: Final[ssl.SSLSocket] = context.wrap_socket(raw, server_hostname="127.0.0.1")
        self._octets: Final = memoryview(octets)
        self._room: Final = bytearray(256 << 10)
        self._repeats: Final = repeats

    def measure(self) -> dict[str, float]:
        size = len(self._octets)
        return {
            "get_mb_per_s": rate(size, self._repeats, self._get),
            "put_mb_per_s": rate(size, self._repeats, self._put),
        }

    def close(self) -> None:
        self._stream.close()

    def _get(self) -> None:
        self._stream.sendall(b"G")
        take_plain(self._stream, self._room, len(self._octets))

    def _put(self) -> None:
        self._stream.sendall(b"P")
        send_plain(self._stream, self._octets)
        assert self._stream.recv(1) == b"."


class Http2Only(WireDialer):
    """As if the peer took no HTTP/1.1."""

    async def dial_bulk(self, target: Target) -> None:
        await trio.lowlevel.checkpoint()


class Ends:
    """Ours, of a node whose cache is in another process."""

    def __init__(self, authority: Authority, started: Started, octets: bytes, repeats: int) -> None:
        self._files: Final[TlsSettings] = authority.issue(DRAFTER.uri)
        self._base: Final = f"https://127.0.0.1:{started.port}/cache/"
        self._octets: Final = octets
        self._repeats: Final = repeats

    async def measure(self, bulk: bool, run: str) -> dict[str, float]:
        """One connection; the first transfer, which makes it, is not counted."""
        clock, meters = SystemClock(), RegistryMeters()
        dialer = (WireDialer if bulk else Http2Only)(Tls(self._files), insecure_loopback=False)
        wire = WireClient(
            dialer, PeerClientSettings(connect_timeout_s=DEADLINE_S, max_answer_bytes=2 * len(self._octets)), clock
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(wire.run)
            transport = wire.transport(DRAFTER, named=False)
            objects = ObjectClient(transport, meters, [self._base], workers=ThreadWorkers())
            put_s = get_s = 0.0
            for round_ in range(self._repeats + 1):
                ref = object_reference(self._base, None, SESSION, 1 + int(bulk), round_, ObjectKind.DRAFT)
                with trio.fail_after(DEADLINE_S):
                    begin = clock.now()
                    assert isinstance(await objects.publish(ref, self._octets, ttl_ms=60_000), Appended), run
                    middle = clock.now()
                    fetched = await objects.fetch(ref, limit_bytes=len(self._octets))
                    end = clock.now()
                    assert isinstance(fetched, Content), fetched
                    assert fetched.octets == self._octets
                    assert isinstance(await objects.remove(ref), Done)
                if round_:
                    put_s, get_s = put_s + middle - begin, get_s + end - middle
            nursery.cancel_scope.cancel()
        moved = self._repeats * len(self._octets) / 1e6
        return {"get_mb_per_s": moved / get_s, "put_mb_per_s": moved / put_s}
