"""TLS as a peer has it that plays by other rules than ours, and what it is told at the door."""

import ssl

import trio

from sdcpd.edge.tls import TlsSettings
from tests.edge.wire.world import Served


def client_context(settings: TlsSettings | None, ca: str) -> ssl.SSLContext:
    """As a peer that plays by other rules would have it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ca)
    context.set_alpn_protocols(["h2"])
    if settings is not None:
        context.load_cert_chain(settings.certificate, settings.key)
    return context


async def secure(served: Served, context: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    stream = await trio.open_tcp_stream("127.0.0.1", served.bound.port)
    return trio.SSLStream(stream, context, server_hostname="127.0.0.1", https_compatible=True)


async def refusal(served: Served, context: ssl.SSLContext) -> str:
    """What a peer is told that is not let in. With TLS 1.3 it learns of it after its own part of the handshake."""
    stream = await secure(served, context)
    try:
        await stream.do_handshake()
        octets = await stream.receive_some()
    except trio.BrokenResourceError as error:
        return str(error.__cause__)
    finally:
        await trio.aclose_forcefully(stream)
    return "closed" if not octets else "let in"
