"""Where an answer's text goes: into one JSON body, or into a stream of server-sent events as it is committed.

A stream's first octet is its promise of status 200, so it is opened only with the first text, or with a comment line
when nothing has come for a while; until then a failure still gets its own status. A failure after that is an event
with the error object, and the stream then ends without `[DONE]`.

An answer may have several choices, which take turns here piece by piece, each under its index. The header
`X-SDCP-Session` names their sessions in the order of choices, as far as they have begun when the answer does.

An answer may be broken off from outside (the server stops): `halt` cancels its writer, but never in the middle of what
it sends, and `fail` then says why. What was finished meanwhile stays finished.
"""

from itertools import chain
from typing import Final, Protocol

import trio

from sdcpd.frontend.answers import Finished, FinishReason, Metrics, Shape, Usage
from sdcpd.frontend.errors import ApiError, error_body
from sdcpd.frontend.exchange import ClientGone, Exchange
from sdcpd.frontend.reply import Delta
from sdcpd.roles.ports import Clock

SESSION_HEADER: Final = "x-sdcp-session"


class Outlet(Protocol):
    """For each choice `name_session`, `write` any number of times, then `end`; when all have ended, `finish`. Or, at
    any time and once, `fail`. All but the first raise ClientGone.

    `halt` cancels `writer`, within which the others are called, once nothing is being sent; after it comes `fail`.
    `fail` does nothing where the answer is finished already.
    """

    def name_session(self, index: int, session: str) -> None: ...
    async def write(self, index: int, delta: Delta) -> None: ...
    async def end(self, index: int, finish: FinishReason) -> None: ...
    async def finish(self, usage: Usage, metrics: Metrics | None) -> None: ...
    async def fail(self, error: ApiError) -> None: ...
    async def halt(self, writer: trio.CancelScope) -> None: ...


class _Sessions:
    """What `X-SDCP-Session` says."""

    def __init__(self) -> None:
        self._by_index: Final[dict[int, str]] = {}

    def name_session(self, index: int, session: str) -> None:
        self._by_index[index] = session

    def tell(self, exchange: Exchange) -> None:
        if self._by_index:
            exchange.add_headers(((SESSION_HEADER, ", ".join(self._by_index[i] for i in sorted(self._by_index))),))


class WholeOutlet(_Sessions):
    """For an answer that is not streamed. Holds the text, which the context's length bounds."""

    def __init__(self, exchange: Exchange, shape: Shape, choices: int) -> None:
        super().__init__()
        self._exchange: Final = exchange
        self._shape: Final = shape
        self._deltas: Final[list[list[Delta]]] = [[] for _ in range(choices)]
        self._finishes: Final[dict[int, FinishReason]] = {}
        self._lock: Final = trio.Lock()
        self._ended = False

    async def write(self, index: int, delta: Delta) -> None:
        self._deltas[index].append(delta)

    async def end(self, index: int, finish: FinishReason) -> None:
        self._finishes[index] = finish

    async def finish(self, usage: Usage, metrics: Metrics | None) -> None:
        choices = [Finished(joined(deltas), self._finishes[index]) for index, deltas in enumerate(self._deltas)]
        body = self._shape.whole(choices, usage, metrics)
        async with self._lock:
            await trio.lowlevel.checkpoint_if_cancelled()  # halted while waiting for the lock
            self._ended = True
            self.tell(self._exchange)
            await self._exchange.answer(200, body)

    async def fail(self, error: ApiError) -> None:
        if not self._ended:
            self.tell(self._exchange)
            raise error

    async def halt(self, writer: trio.CancelScope) -> None:
        async with self._lock:
            writer.cancel()


class StreamOutlet(_Sessions):
    """For a streamed answer. `keep_alive` runs beside the writers, so a lock keeps events whole."""

    def __init__(
        self, exchange: Exchange, shape: Shape, choices: int, clock: Clock, keep_alive_s: float, *, with_usage: bool
    ) -> None:
        """`with_usage`: the stream's last chunk has no choices, but the usage and whatever goes with it."""
        super().__init__()
        self._exchange: Final = exchange
        self._shape: Final = shape
        self._clock: Final = clock
        self._keep_alive_s: Final = keep_alive_s
        self._with_usage: Final = with_usage
        self._lock: Final = trio.Lock()
        self._opened = False
        self._ended = False
        self._refused = False  # the exchange is about to be answered otherwise; nothing may be sent here any more
        self._running = choices
        self._last_end: tuple[int | None, bytes] = (None, b"")  # goes out together with what follows at once
        self._begun: Final[set[int]] = set()
        self._latest_at = clock.now()

    async def write(self, index: int, delta: Delta) -> None:
        await self._send(self._event(self._shape.piece(index, delta)), index)

    async def end(self, index: int, finish: FinishReason) -> None:
        event = self._event(self._shape.last(index, finish))
        self._running -= 1
        if self._running:
            await self._send(event, index)
        else:
            self._last_end = index, event

    async def finish(self, usage: Usage, metrics: Metrics | None) -> None:
        index, events = self._last_end
        if self._with_usage:
            events += self._event(self._shape.usage(usage, metrics))
        await self._send(events + self._event(b"[DONE]"), index, last=True)

    async def fail(self, error: ApiError) -> None:
        async with self._lock:
            if self._ended:
                return
            if not self._opened:
                self._refused = True
                self.tell(self._exchange)
                raise error
        await self._send(self._event(error_body(error)), None, last=True)

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
                    await self._send(b": keep-alive\n\n", None)
        except ClientGone:
            scope.cancel()

    async def _send(self, octets: bytes, index: int | None, *, last: bool = False) -> None:
        """`index`: the choice that speaks, opened if it has not spoken before."""
        async with self._lock:
            await trio.lowlevel.checkpoint_if_cancelled()  # halted while waiting for the lock
            if self._refused or self._ended:
                return
            if not self._opened:
                self.tell(self._exchange)
                await self._exchange.open_stream(
                    content_type="text/event-stream; charset=utf-8",
                    headers=(("x-accel-buffering", "no"),),  # asks proxies not to collect the stream
                )
                self._opened = True
            first = None
            if index is not None and index not in self._begun:
                self._begun.add(index)
                first = self._shape.first(index)
            await self._exchange.write(octets if first is None else self._event(first) + octets)
            self._latest_at = self._clock.now()
            if last:
                self._ended = True
                await self._exchange.close_stream()

    @staticmethod
    def _event(data: bytes) -> bytes:
        return b"data: " + data + b"\n\n"


def joined(deltas: list[Delta]) -> Delta:
    """All that a choice said, as one."""
    return Delta("".join(delta.text for delta in deltas), tuple(chain(*(delta.logprobs for delta in deltas))))
