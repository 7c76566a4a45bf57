"""The other ends of the cache's bench, each in a process of its own: a node's cache over TLS, and plain TLS.

The listening socket and the TLS files come from the bench; a process ends when its standard input does.
"""

import socket
import ssl
import sys
from functools import partial
from typing import Final

import msgspec
import trio
from msgspec import Struct

from sdcpd.cache.settings import MIB, CacheSettings
from sdcpd.edge.dispatch import object_cache_dispatcher
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.peer_app import Failures, Mount, PeerApp
from sdcpd.edge.peer_server import PeerServer
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.tls import Tls, TlsSettings
from sdcpd.edge.transport import LoopbackNetwork
from sdcpd.edge.wire_settings import PeerServerSettings
from sdcpd.node.metrics import RegistryMeters
from sdcpd.node.real_ports import OsRandomness, SystemClock, ThreadWorkers
from sdcpd.roles.object_cache import ObjectCache
from sdcpd.roles.ports import Peer, Ports

PIECE_BYTES: Final = 256 << 10


class NodeSettings(Struct, frozen=True):
    """`plain`: TLS and nothing above it, from one blocking socket to another: the floor."""

    socket: int
    tls: TlsSettings
    instance: str
    object_bytes: int
    plain: bool = False


def main(argument: str) -> None:
    settings = msgspec.json.decode(argument, type=NodeSettings)
    if settings.plain:
        serve_plain(settings)
    else:
        trio.run(serve_cache, settings)


async def serve_cache(settings: NodeSettings) -> None:
    clock, meters, failures = SystemClock(), RegistryMeters(), Failures()
    transport = LoopbackNetwork().transport(Peer(uri=settings.instance, role="cache"))
    ports = Ports(
        clock=clock,
        randomness=OsRandomness(),
        workers=ThreadWorkers(),
        meters=meters,
        peers=PeerClient(transport, meters),
        objects=ObjectClient(transport, meters, ()),
    )
    kept = CacheSettings(max_object_bytes=settings.object_bytes, object_memory_bytes=4 * settings.object_bytes + MIB)
    cache = ObjectCache(kept, ports)
    dispatcher = object_cache_dispatcher(cache, kept, meters)
    app = PeerApp(failures.report, [Mount("/cache/", dispatcher.handle, dispatcher.body_limit_bytes)])
    server = PeerServer(app, PeerServerSettings(), clock, Tls(settings.tls, [settings.instance]), bulk=app)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=settings.socket)))
    async with trio.open_nursery() as nursery:
        await nursery.start(failures.watch)
        await nursery.start(cache.run)
        await nursery.start(partial(server.run, [listener]))
        while await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            pass
        nursery.cancel_scope.cancel()


def serve_plain(settings: NodeSettings) -> None:
    """One connection: `G` sends a body, `P` takes one and says so."""
    listener = socket.socket(fileno=settings.socket)
    listener.setblocking(True)
    accepted, _ = listener.accept()
    body, room = memoryview(bytes(settings.object_bytes)), bytearray(PIECE_BYTES)
    with Tls(settings.tls).server.wrap_socket(accepted, server_side=True) as stream:
        while command := stream.recv(1):
            if command == b"G":
                send_plain(stream, body)
            else:
                take_plain(stream, room, len(body))
                stream.sendall(b".")


def send_plain(stream: ssl.SSLSocket, body: memoryview) -> None:
    """All of it, piece by piece."""
    for start in range(0, len(body), PIECE_BYTES):
        stream.sendall(body[start : start + PIECE_BYTES])


def take_plain(stream: ssl.SSLSocket, room: bytearray, size: int) -> None:
    """So many octets, which are dropped."""
    while size > 0:
        taken = stream.recv_into(room)
        assert taken, "the other end has left"
        size -= taken


if __name__ == "__main__":
    main(sys.argv[1])
