"""Where an answer's text goes: into one JSON body, or into a stream of server-sent events as it is committed.

A stream's first octet is its promise of status 200, so it is opened only with the first text, or with a comment line
when nothing has come for a while; until then a failure still gets its own status. A failure after that is an event
with the error object, and the stream then ends without `[DONE]`.

An answer may be broken off from outside (the server stops): `halt` cancels its writer, but never in the middle of what
it sends, and `fail` then says why. What was finished meanwhile stays finished.
"""

from typing import Final, Protocol

import trio

from sdcpd.frontend.answers import FinishReason, Metrics, Shape, Usage
from sdcpd.frontend.errors import ApiError, error_body
from sdcpd.frontend.exchange import ClientGone, Exchange
from sdcpd.roles.ports import Clock


class Outlet(Protocol):
    """`write` any number of times, then `finish` or `fail`. All three raise ClientGone.

    `halt` cancels `writer`, within which the others are called, once nothing is being sent; after it comes `fail`.
    `fail` does nothing where the answer is finished already.
    """

    async def write(self, text: str) -> None: ...
    async def finish(self, finish: FinishReason, usage: Usage, metrics: Metrics | None) -> None: ...
    async def fail(self, error: ApiError) -> None: ...
    async def halt(self, writer: trio.CancelScope) -> None: ...


class WholeOutlet:
    """For an answer that is not streamed. Holds the text, which the context's length bounds."""

    def __init__(self, exchange: Exchange, shape: Shape) -> None:
        self._exchange: Final = exchange
        self._shape: Final = shape
        self._texts: Final[list[str]] = []
        self._lock: Final = trio.Lock()
        self._ended = False

    async def write(self, text: str) -> None:
        self._texts.append(text)

    async def finish(self, finish: FinishReason, usage: Usage, metrics: Metrics | None) -> None:
        body = self._shape.whole("".join(self._texts), finish, usage, metrics)
        async with self._lock:
            await trio.lowlevel.checkpoint_if_cancelled()  # halted while waiting for the lock
            self._ended = True
            await self._exchange.answer(200, body)

    async def fail(self, error: ApiError) -> None:
        if not self._ended:
            raise error

    async def halt(self, writer: trio.CancelScope) -> None:
        async with self._lock:
            writer.cancel()


class StreamOutlet:
    """For a streamed answer. `keep_alive` runs beside the writer, so a lock keeps events whole."""

    def __init__(
        self, exchange: Exchange, shape: Shape, clock: Clock, keep_alive_s: float, *, with_usage: bool
    ) -> None:
        self._exchange: Final = exchange
        self._shape: Final = shape
        self._clock: Final = clock
        self._keep_alive_s: Final = keep_alive_s
        self._with_usage: Final = with_usage
        self._lock: Final = trio.Lock()
        self._opened = False
        self._ended = False
        self._refused = False  # the exchange is about to be answered otherwise; nothing may be sent here any more
        self._first_sent = False
        self._latest_at = clock.now()

    async def write(self, text: str) -> None:
        await self._send(self._event(self._shape.piece(text)), with_first=True)

    async def finish(self, finish: FinishReason, usage: Usage, metrics: Metrics | None) -> None:
        events = self._event(self._shape.last(finish))
        if self._with_usage:
            events += self._event(self._shape.usage(usage, metrics))
        await self._send(events + self._event(b"[DONE]"), with_first=True, last=True)

    async def fail(self, error: ApiError) -> None:
        async with self._lock:
            if self._ended:
                return
            if not self._opened:
                self._refused = True
                raise error
        await self._send(self._event(error_body(error)), with_first=False, last=True)

    async def halt(self, writer: trio.CancelScope) -> None:
        async with self._lock:
            writer.cancel()

    async def keep_alive(self, scope: trio.CancelScope) -> None:
        """A comment line whenever the stream was silent for `keep_alive_s`; for ever. Cancels `scope` if the client is
        gone."""
        try:
            while True:
                await self._clock.sleep_until(self._latest_at + self._keep_alive_s)
                if self._clock.now() >= self._latest_at + self._keep_alive_s:
                    await self._send(b": keep-alive\n\n", with_first=False)
        except ClientGone:
            scope.cancel()

    async def _send(self, octets: bytes, *, with_first: bool, last: bool = False) -> None:
        async with self._lock:
            await trio.lowlevel.checkpoint_if_cancelled()  # halted while waiting for the lock
            if self._refused or self._ended:
                return
            if not self._opened:
                await self._exchange.open_stream(
                    content_type="text/event-stream; charset=utf-8",
                    headers=(("x-accel-buffering", "no"),),  # asks proxies not to collect the stream
                )
                self._opened = True
            first = self._shape.first() if with_first and not self._first_sent else None
            self._first_sent = self._first_sent or with_first
            await self._exchange.write(octets if first is None else self._event(first) + octets)
            self._latest_at = self._clock.now()
            if last:
                self._ended = True
                await self._exchange.close_stream()

    @staticmethod
    def _event(data: bytes) -> bytes:
        return b"data: " + data + b"\n\n"
