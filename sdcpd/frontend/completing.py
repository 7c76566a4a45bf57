"""POST /v1/completions and /v1/chat/completions: one request from its body to the end of its answer.

Completions are counted from head to end, and one above the limit is refused at once, before its body is read: a queue
would only hide that the node is full. A stop of the server breaks them off in order.
"""

from collections.abc import Callable
from typing import Final

import structlog
import trio

from sdcpd.frontend.admission import Admission
from sdcpd.frontend.answers import ChatShape, Shape, TextShape
from sdcpd.frontend.errors import server_stopping, unavailable
from sdcpd.frontend.exchange import Exchange
from sdcpd.frontend.generate import Generator
from sdcpd.frontend.keys import Caller
from sdcpd.frontend.openai import Ask, read_chat, read_completion
from sdcpd.frontend.outlets import Outlet, StreamOutlet, WholeOutlet
from sdcpd.frontend.ports import FrontendPorts
from sdcpd.frontend.settings import FrontendSettings

log = structlog.get_logger(__name__)


class Completions:
    """Serves both endpoints. `running`: completions now."""

    def __init__(
        self, settings: FrontendSettings, ports: FrontendPorts, admission: Admission, generator: Generator
    ) -> None:
        self._settings: Final = settings
        self._ports: Final = ports
        self._admission: Final = admission
        self._generator: Final = generator
        self._halted: Final = trio.Event()
        self.running = 0

    def halt(self) -> None:
        """Break all off with `server_stopping`; no other is begun."""
        self._halted.set()

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/chat/completions. Raises ApiError and ClientGone."""
        await self._serve(exchange, caller, read_chat, ChatShape, "chatcmpl-")

    async def text(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/completions. Raises ApiError and ClientGone."""
        await self._serve(exchange, caller, read_completion, TextShape, "cmpl-")

    async def _serve(
        self,
        exchange: Exchange,
        caller: Caller,
        read: Callable[[bytes], Ask],
        shape_kind: type[ChatShape] | type[TextShape],
        id_prefix: str,
    ) -> None:
        arrived_at = self._ports.clock.now()
        if self._halted.is_set():
            raise server_stopping()
        if self.running >= self._settings.max_requests:
            raise unavailable(f"{self.running} requests are being served, which is the limit here", "overloaded")
        with self._admission.request(caller):
            self.running += 1
            try:
                ask = read(await exchange.read_body())
                answer_id = id_prefix + self._ports.randomness.stream("client answers").octets(12).hex()
                created = int(self._ports.wall_clock())
                shape = shape_kind(answer_id, created, ask.model, include_usage=ask.include_usage)
                await self._answer(exchange, caller, ask, shape, arrived_at)
            finally:
                self.running -= 1

    async def _answer(self, exchange: Exchange, caller: Caller, ask: Ask, shape: Shape, arrived_at: float) -> None:
        def charge(tokens: int) -> None:
            self._admission.charge(caller, tokens)

        async def serve(nursery: trio.Nursery) -> None:
            work = await self._generator.prepare(ask, caller, exchange.shown_headers())
            outlet = self._outlet(exchange, shape, ask, len(work.requests), nursery)
            with trio.CancelScope() as writer:
                nursery.start_soon(self._halt, outlet, writer)
                await self._generator.answer(
                    work, outlet, charge=charge, arrived_at=arrived_at, request_id=exchange.request_id
                )
            if writer.cancelled_caught:
                log.info("answer broken off by the stop", request_id=exchange.request_id)
                await outlet.fail(server_stopping())

        await exchange.until_gone(serve)

    async def _halt(self, outlet: Outlet, writer: trio.CancelScope) -> None:
        await self._halted.wait()
        await outlet.halt(writer)

    def _outlet(self, exchange: Exchange, shape: Shape, ask: Ask, choices: int, nursery: trio.Nursery) -> Outlet:
        if not ask.stream:
            return WholeOutlet(exchange, shape, choices)
        outlet = StreamOutlet(
            exchange,
            shape,
            choices,
            self._ports.clock,
            self._settings.keep_alive_s,
            with_usage=ask.include_usage or ask.speculation.stats,
        )
        nursery.start_soon(outlet.keep_alive, nursery.cancel_scope)
        return outlet
