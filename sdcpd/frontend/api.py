"""The client port as an ASGI application: its routes, and where every refusal becomes an error object.

| method | path | |
|---|---|---|
| GET | /v1/models, /v1/models/{id} | what can be named |
| POST | /v1/chat/completions, /v1/completions | answers, whole or streamed |
| GET | /health | the process lives |
| GET | /ready | a request could be served now; else 503 with the reason |
| GET | /metrics | Prometheus text |

Every answer carries `x-request-id`: the client's own, if it is harmless, or a new one.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import structlog
import trio
from msgspec import Struct

from sdcpd.frontend.answers import ChatShape, Shape, TextShape, model_body, model_list_body
from sdcpd.frontend.errors import ApiError, error_body, model_not_found, server_stopping, unavailable
from sdcpd.frontend.exchange import ClientGone, Exchange, Receive, Scope, Send, header
from sdcpd.frontend.generate import Generator
from sdcpd.frontend.openai import Ask, read_chat, read_completion
from sdcpd.frontend.outlets import Outlet, StreamOutlet, WholeOutlet
from sdcpd.frontend.ports import FrontendPorts
from sdcpd.frontend.settings import FrontendSettings
from sdcpd.frontend.text import ModelText
from sdcpd.roles.generation import Generations

log = structlog.get_logger(__name__)

REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MODEL_PREFIX: Final = "/v1/models/"
GETS: Final = frozenset({"/v1/models", "/health", "/ready", "/metrics"})
ENDPOINTS: Final = GETS | {"/v1/chat/completions", "/v1/completions"}
CLIENT_GONE: Final = "499"
"""As a status in metrics: the client left before its answer was whole (a habit of reverse proxies)."""


class FrontendSnapshot(Struct, frozen=True):
    """The client port now. `requests_running`: completions from the head of the request to the end of the answer."""

    requests_running: int


class FrontendApp:
    """`await app(scope, receive, send)`, as ASGI 3 has it. Built once; serves any number of requests at once."""

    def __init__(
        self,
        settings: FrontendSettings,
        ports: FrontendPorts,
        generations: Generations,
        texts: Mapping[str, ModelText],
    ) -> None:
        """`texts`: the text side of each model by name (text.load_model_text), as in `settings.models`."""
        self._settings: Final = settings
        self._ports: Final = ports
        self._generations: Final = generations
        self._generator: Final = Generator(ports, generations, texts, max_prompt_chars=settings.max_prompt_chars)
        self._started: Final = int(ports.wall_clock())
        self._running = 0  # completions from head to end of answer
        self._halted: Final = trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # becomes 403
            return
        assert scope["type"] == "http", "our server starts no lifespan"
        exchange = Exchange(
            scope,
            receive,
            send,
            request_id=self._request_id(scope),
            body_limit=self._settings.max_body_bytes,
            body_s=self._settings.body_timeout_s,
            send_s=self._settings.stalled_client_timeout_s,
        )
        try:
            await self._serve(exchange)
        except ClientGone:
            log.info("client left", request_id=exchange.request_id)
            self._count(exchange, CLIENT_GONE)
        except Exception:
            # Ours is the fault, and hypercorn will log the trace; the client still gets an answer it can read.
            self._count(exchange, "500")
            if exchange.status is None:
                await exchange.answer(500, error_body(ApiError(500, "internal error", code="internal_error")))
            raise
        else:
            self._count(exchange, str(exchange.status))

    def snapshot(self) -> FrontendSnapshot:
        """For gauges and sdcpctl."""
        return FrontendSnapshot(self._running)

    def halt(self) -> None:
        """Break off all answers, as the server stops: each ends with the error `server_stopping`, as a status where
        nothing was sent yet, else as an event. From then on no completion is begun."""
        self._halted.set()

    def _count(self, exchange: Exchange, status: str) -> None:
        endpoint = exchange.path if exchange.path in ENDPOINTS else "other"
        self._ports.meters.count("requests_total", 1, endpoint=endpoint, status=status)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await self._route(exchange)
        except ApiError as error:
            log.info("request refused", request_id=exchange.request_id, status=error.status, code=error.code)
            await exchange.answer(error.status, error_body(error), headers=error.headers)

    async def _route(self, exchange: Exchange) -> None:
        match exchange.path:
            case "/v1/chat/completions":
                _allow(exchange, "POST")
                await self._complete(exchange, read_chat, ChatShape, "chatcmpl-")
            case "/v1/completions":
                _allow(exchange, "POST")
                await self._complete(exchange, read_completion, TextShape, "cmpl-")
            case path if path in GETS or path.startswith(MODEL_PREFIX):
                _allow(exchange, "GET", "HEAD")
                await self._get(exchange, path)
            case _:
                raise ApiError(404, f"no such path: {exchange.method} {exchange.path[:256]}", code="unknown_url")

    async def _get(self, exchange: Exchange, path: str) -> None:
        match path:
            case "/health":
                await exchange.answer(200, msgspec.json.encode({"status": "ok"}))
            case "/ready":
                ready, reason = self._generations.ready()
                if ready:
                    await exchange.answer(200, msgspec.json.encode({"status": "ready"}))
                else:  # answered here, not raised: a probe that waits is no refused request
                    error = unavailable(reason, "not_ready")
                    await exchange.answer(error.status, error_body(error), headers=error.headers)
            case "/metrics":
                await exchange.answer(200, self._ports.metrics_page(), content_type=METRICS_TYPE)
            case "/v1/models":
                await exchange.answer(200, model_list_body(self._generator.cards(), self._started))
            case _:
                name = path.removeprefix(MODEL_PREFIX)
                cards = self._generator.cards()
                for card in cards:
                    if card.name == name:
                        await exchange.answer(200, model_body(card, self._started))
                        return
                raise model_not_found(name, tuple(card.name for card in cards))

    async def _complete(
        self,
        exchange: Exchange,
        read: Callable[[bytes], Ask],
        shape_kind: type[ChatShape] | type[TextShape],
        id_prefix: str,
    ) -> None:
        arrived_at = self._ports.clock.now()
        _check_media_type(exchange)
        if self._halted.is_set():
            raise server_stopping()
        if self._running >= self._settings.max_requests:
            raise unavailable(f"{self._running} requests are being served, which is the limit here", "overloaded")
        self._running += 1
        try:
            ask = read(await exchange.read_body())
            created = int(self._ports.wall_clock())
            shape = shape_kind(
                id_prefix + self._random_hex("client answers"), created, ask.model, include_usage=ask.include_usage
            )

            async def work(nursery: trio.Nursery) -> None:
                request = await self._generator.prepare(ask, exchange.shown_headers())
                outlet = self._outlet(exchange, shape, ask, nursery)
                with trio.CancelScope() as writer:
                    nursery.start_soon(self._halt, outlet, writer)
                    await self._generator.answer(
                        ask, request, outlet, arrived_at=arrived_at, request_id=exchange.request_id
                    )
                if writer.cancelled_caught:
                    log.info("answer broken off by the stop", request_id=exchange.request_id)
                    await outlet.fail(server_stopping())

            await exchange.until_gone(work)
        finally:
            self._running -= 1

    async def _halt(self, outlet: Outlet, writer: trio.CancelScope) -> None:
        await self._halted.wait()
        await outlet.halt(writer)

    def _outlet(self, exchange: Exchange, shape: Shape, ask: Ask, nursery: trio.Nursery) -> Outlet:
        if not ask.stream:
            return WholeOutlet(exchange, shape)
        outlet = StreamOutlet(
            exchange, shape, self._ports.clock, self._settings.keep_alive_s, with_usage=ask.include_usage
        )
        nursery.start_soon(outlet.keep_alive, nursery.cancel_scope)
        return outlet

    def _request_id(self, scope: Scope) -> str:
        given = header(scope, "x-request-id")
        if given is not None and REQUEST_ID.fullmatch(given):
            return given
        return self._random_hex("client requests")

    def _random_hex(self, stream: str) -> str:
        return self._ports.randomness.stream(stream).octets(12).hex()


def _allow(exchange: Exchange, *methods: str) -> None:
    if exchange.method not in methods:
        raise ApiError(
            405,
            f"{exchange.path[:256]} takes {' or '.join(methods)}, not {exchange.method[:32]}",
            code="method_not_allowed",
            headers=(("allow", ", ".join(methods)),),
        )


def _check_media_type(exchange: Exchange) -> None:
    media_type = (exchange.header("content-type") or "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json", code="unsupported_media_type")
    coding = (exchange.header("content-encoding") or "identity").strip().lower()
    if coding != "identity":
        raise ApiError(415, "compressed bodies are not accepted; send no Content-Encoding", code="unsupported_coding")
