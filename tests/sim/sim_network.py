"""Links between nodes: each direction of each pair has its own delay, and is cut or clogged on its own.

A request's handler runs in a task of the node that is asked, as on a wire: a caller that goes away gives up the answer,
and its stream's reset may or may not reach the handler. A request to a node that crashed meets a closed port; one whose
request or answer is lost hears nothing until its own deadline, or until `SILENCE_S`, the patience of a transport.
"""

import contextlib
import random
from collections.abc import Callable

import trio

from sdcpd.edge.transport import Handler, Request, Response, TransportError
from sdcpd.roles.ports import Peer
from tests.sim.injector import Injector
from tests.sim.sim_node import Incarnation
from tests.sim.trace import Trace

SILENCE_S = 60.0
HOP_S = (0.0002, 0.004)
CLOG_S = (0.5, 8.0)


class Served:
    """A base URI as it is served now."""

    def __init__(self, incarnation: Incarnation, handler: Handler) -> None:
        self.incarnation = incarnation
        self.handler = handler


class Exchange:
    """One request as it stands at its handler. `over` is set with a response, or without when the node is gone."""

    def __init__(self) -> None:
        self.response: Response | None = None
        self.over = trio.Event()
        self.scope = trio.CancelScope()


class SimNetwork:
    """Implements what a Transport needs. The taps see each request and response where they truly happen:

    `arrived(node, caller, request)` before the handler, `served(..., response)` right after it, whatever becomes of the
    answer, and `heard(caller's node, base URI, request, response)` when the caller has it.
    """

    def __init__(
        self, chance: random.Random, inject: Injector, trace: Trace, spawn: Callable[..., None], taps: "Taps"
    ) -> None:
        self._chance = chance
        self._inject = inject
        self._trace = trace
        self._spawn = spawn
        self._taps = taps
        self._served: dict[str, Served] = {}
        self._cut: dict[tuple[str, str], float] = {}  # links that carry nothing, and until when
        self._clogged: dict[tuple[str, str], float] = {}
        self._requests = 0
        self.under_way = 0  # handlers that have not answered yet

    def serve(self, uri: str, incarnation: Incarnation, handler: Handler) -> None:
        assert uri not in self._served
        self._served[uri] = Served(incarnation, handler)

    def withdraw(self, uri: str) -> None:
        self._served.pop(uri, None)

    def cut(self, one: str, other: str, until: float) -> None:
        """What `one` sends does not reach `other`."""
        self._cut[one, other] = until

    def heal(self) -> None:
        self._cut.clear()
        self._clogged.clear()

    async def exchange(self, caller: Incarnation, peer: Peer, uri: str, request: Request) -> Response:
        """One request, from the node `caller`. Raises TransportError."""
        await caller.gate()
        self._requests += 1
        number = self._requests
        callee = uri.split("/")[2].split(".")[0]
        what = f"#{number} {request.method} {request.path.split('?')[0]}"
        self._trace.say(caller.name, f"-> {callee} {what} {len(request.body)}")
        await trio.sleep(self._delay_s(caller.name, callee))
        if self._inject.strikes("connection_reset"):
            raise TransportError("connection reset")
        if self._inject.strikes("request_lost") or self._is_cut(caller.name, callee):
            await self._silence(what)
        if self._inject.strikes("request_repeated"):
            self._spawn(self._again, peer, uri, request)
        exchange = self._begin(peer, uri, request)
        try:
            await exchange.over.wait()
        except trio.Cancelled:
            if self._chance.random() < 0.5:
                exchange.scope.cancel()
            raise
        response = exchange.response
        await trio.sleep(self._delay_s(callee, caller.name))
        if self._inject.strikes("answer_lost") or self._is_cut(callee, caller.name):
            await self._silence(what)
        if response is None:
            raise TransportError("the connection broke")
        response = await self._taps.tampered(uri, request, response)
        await caller.gate()
        self._trace.say(caller.name, f"<- {callee} #{number} {response.status} {len(response.body)}")
        self._taps.heard(caller, uri, request, response)
        return response

    def _begin(self, peer: Peer, uri: str, request: Request) -> Exchange:
        target = self._served.get(uri)
        if target is None or not target.incarnation.alive:
            raise TransportError("nothing is served there")
        exchange = Exchange()
        target.incarnation.spawn(self._handle, target, peer, uri, request, exchange)
        return exchange

    async def _handle(self, target: Served, peer: Peer, uri: str, request: Request, exchange: Exchange) -> None:
        self.under_way += 1
        try:
            with exchange.scope:
                await target.incarnation.gate()
                refused = self._taps.refused_instead(uri, request)
                if refused is not None:
                    exchange.response = refused
                    return
                self._taps.arrived(target.incarnation, uri, peer, request)
                response = await target.handler(peer, request)
                if target.incarnation.alive:
                    self._taps.served(target.incarnation, uri, peer, request, response)
                    exchange.response = response
        finally:
            self.under_way -= 1
            exchange.over.set()

    async def _again(self, peer: Peer, uri: str, request: Request) -> None:
        """The same octets arrive once more, some time later; nobody waits for the answer."""
        await trio.sleep(self._chance.expovariate(0.5))
        self._trace.say("net", f"again {request.method} {request.path} to {uri}")
        with contextlib.suppress(TransportError):
            await self._begin(peer, uri, request).over.wait()

    async def _silence(self, what: str) -> None:
        self._trace.say("net", f"lost {what}")
        await trio.sleep(SILENCE_S)
        raise TransportError("no answer")

    def _delay_s(self, one: str, other: str) -> float:
        delay_s = self._chance.uniform(*HOP_S)
        tail_s = self._inject.rates.get("slow_links", 0.0)
        if tail_s and not self._inject.over:
            delay_s += self._chance.expovariate(1 / tail_s)
            self._inject.note("slow_links")
        now = trio.current_time()
        return max(delay_s, self._clogged.get((one, other), 0.0) - now)

    def clog(self, one: str, other: str, until: float) -> None:
        """What `one` sends to `other` arrives after `until`."""
        self._clogged[one, other] = until

    def _is_cut(self, one: str, other: str) -> bool:
        return self._cut.get((one, other), 0.0) > trio.current_time()


class Taps:
    """What watches, and falsifies, messages. The world supplies it; this one lets all pass."""

    def arrived(self, node: Incarnation, uri: str, peer: Peer, request: Request) -> None: ...

    def served(self, node: Incarnation, uri: str, peer: Peer, request: Request, response: Response) -> None: ...

    def heard(self, caller: Incarnation, uri: str, request: Request, response: Response) -> None: ...

    def refused_instead(self, uri: str, request: Request) -> Response | None:
        """An answer to be given in the handler's place."""
        return None

    async def tampered(self, uri: str, request: Request, response: Response) -> Response:
        return response


class SimTransport:
    """Implements edge.transport.Transport for one role of one node."""

    def __init__(self, network: SimNetwork, caller: Incarnation, peer: Peer) -> None:
        self._network = network
        self._caller = caller
        self._peer = peer

    async def exchange(self, base_uri: str, request: Request) -> Response:
        return await self._network.exchange(self._caller, self._peer, base_uri, request)
