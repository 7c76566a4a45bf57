"""A TLS connection that takes and gives many records at a time.

trio's own SSLStream hands out one record, 16 KiB at most, for each turn of the loop, and reads the socket as finely:
for large bodies those turns cost more than the ciphers. Here whatever the socket had is decrypted in one go, into the
caller's memory where the caller has some, and what is sent goes through OpenSSL in pieces of PIECE_BYTES, so that the
encrypted form of a large body never lies in memory as a whole.

As between browsers and servers, a peer may end without a farewell of TLS: whoever reads knows from HTTP whether all
has come. One task may send while another receives. Foreign exceptions: ssl.SSLError and its kin become
trio.BrokenResourceError, with the reason as its cause.
"""

import ssl
from contextlib import suppress
from typing import Any, Final

import trio

PIECE_BYTES: Final = 256 << 10
"""Encrypted at a time, and read from the socket at a time: small beside a processor's cache, large beside a turn."""
RECORD_BYTES: Final = 16 << 10
"""The most that one record of TLS holds."""


class TlsStream(trio.abc.Stream):
    """TLS over `transport_stream`, which it closes."""

    def __init__(
        self,
        transport_stream: trio.abc.Stream,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        server_hostname: str | None = None,
    ) -> None:
        self.transport_stream: Final = transport_stream
        self._incoming: Final = ssl.MemoryBIO()
        self._outgoing: Final = ssl.MemoryBIO()
        self._tls: Final = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._sending: Final = trio.StrictFIFOLock()
        self._open = False
        self._closed = False

    async def do_handshake(self) -> None:
        """Raises BrokenResourceError. What OpenSSL has to say of a failure is then in `unsent`."""
        while not self._open:
            try:
                self._tls.do_handshake()
                self._open = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise trio.BrokenResourceError from error
            await self._flush()
            if not self._open:
                await self._refill()

    def unsent(self) -> bytes:
        """What is still to be told to the peer, such as why a handshake failed."""
        return self._outgoing.read()

    def getpeercert(self) -> Any:
        """As ssl.SSLObject.getpeercert."""
        return self._tls.getpeercert()

    def selected_alpn_protocol(self) -> str | None:
        """What both agreed on, after the handshake."""
        return self._tls.selected_alpn_protocol()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """All of it, piece by piece."""
        rest = memoryview(data)
        if self._closed:
            raise trio.ClosedResourceError
        if not rest:
            await trio.lowlevel.checkpoint()
        while rest:
            try:
                self._tls.write(rest[:PIECE_BYTES])
            except ssl.SSLError as error:
                raise trio.BrokenResourceError from error
            rest = rest[PIECE_BYTES:]
            await self._flush()

    async def wait_send_all_might_not_block(self) -> None:
        await self.transport_stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has come, `max_bytes` at most; empty at the end."""
        room = memoryview(bytearray(RECORD_BYTES if max_bytes is None else max_bytes))
        return bytes(room[: await self.receive_into(room)])

    async def receive_into(self, room: memoryview) -> int:
        """What has come, into `room`: how many octets, of which it takes at least one; 0 at the end."""
        suspended = False
        while True:
            if self._closed:
                raise trio.ClosedResourceError
            taken, ended = self._decrypt(room)
            if taken or ended:
                if not suspended:
                    await trio.lowlevel.checkpoint()
                return taken
            if self._outgoing.pending:  # a change of keys that the peer asked for
                await self._flush()
            await self._refill()
            suspended = True

    async def aclose(self) -> None:
        """Say farewell, without waiting for the peer's."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        try:
            if self._open:
                with suppress(ssl.SSLError):  # the peer has not said farewell, or never will
                    self._tls.unwrap()
                await self._flush()
        except (trio.BrokenResourceError, trio.BusyResourceError):
            pass  # gone, or a last write is under way that nobody waits for
        finally:
            await self.transport_stream.aclose()

    def _decrypt(self, room: memoryview) -> tuple[int, bool]:
        """Octets that were put into `room`, and whether the peer has ended."""
        taken = 0
        try:
            while taken < len(room):
                size = self._tls.read(len(room) - taken, room[taken:])
                if not size:
                    return taken, True
                taken += int(size)  # a number, when it has a buffer
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return taken, True
        except ssl.SSLError as error:
            if not taken:
                raise trio.BrokenResourceError from error
        return taken, False

    async def _refill(self) -> None:
        octets = await self.transport_stream.receive_some(PIECE_BYTES)
        if octets:
            self._incoming.write(octets)
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        """Whoever sends first sends all there is, in the order in which it was encrypted."""
        try:
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            if self._outgoing.pending:
                await self.transport_stream.send_all(self._outgoing.read())
        finally:
            self._sending.release()
