"""The client port as an ASGI application: its routes, and where every refusal becomes an error object.

| method | path | |
|---|---|---|
| GET | /v1/models, /v1/models/{id} | what can be named |
| POST | /v1/chat/completions, /v1/completions | answers, whole or streamed |
| POST | /tokenize, /detokenize | text to tokens and back |
| GET | /health | the process lives |
| GET | /ready | a request could be served now; else 503 with the reason |
| GET | /metrics | Prometheus text |

Every answer carries `x-request-id`: the client's own, if it is harmless, or a new one. Who may ask for what stands in
admission.py; browsers of other origins are cors.py's.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from sdcpd.frontend.admission import Admission
from sdcpd.frontend.answers import model_body, model_list_body
from sdcpd.frontend.completing import Completions
from sdcpd.frontend.cors import Cors
from sdcpd.frontend.errors import ApiError, error_body, unavailable
from sdcpd.frontend.exchange import ClientGone, Exchange, Receive, Scope, Send, header
from sdcpd.frontend.generate import Generator
from sdcpd.frontend.keys import Caller, KeyRing
from sdcpd.frontend.model_texts import ModelTexts
from sdcpd.frontend.ports import FrontendPorts
from sdcpd.frontend.settings import FrontendSettings
from sdcpd.frontend.text import ModelText
from sdcpd.frontend.tokenizing import Tokenizing
from sdcpd.roles.generation import Generations

log = structlog.get_logger(__name__)

REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MODEL_PREFIX: Final = "/v1/models/"
PROBES: Final = frozenset({"/health", "/ready"})
GETS: Final = PROBES | {"/v1/models", "/metrics"}
POSTS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"})
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
        keys: KeyRing | None = None,
    ) -> None:
        """`texts`: the text side of each model by name (text.load_model_text), as in `settings.models`. `keys` None:
        nobody is asked for one."""
        self._settings: Final = settings
        self._ports: Final = ports
        self._generations: Final = generations
        self._models: Final = ModelTexts(ports, generations, texts, max_prompt_chars=settings.max_prompt_chars)
        self._admission: Final = Admission(keys, ports.clock)
        self._cors: Final = Cors(settings.cors_origins)
        self._completions: Final = Completions(
            settings, ports, self._admission, Generator(ports, generations, self._models)
        )
        self._tokenizing: Final = Tokenizing(ports, self._models)
        self._started: Final = int(ports.wall_clock())

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
        return FrontendSnapshot(self._completions.running)

    def take_keys(self, keys: KeyRing) -> None:
        """The key file was read again: from now on these are known. Not where there were none at the start."""
        self._admission.take(keys)

    def halt(self) -> None:
        """Break off all answers, as the server stops: each ends with the error `server_stopping`, as a status where
        nothing was sent yet, else as an event. From then on no completion is begun."""
        self._completions.halt()

    def _count(self, exchange: Exchange, status: str) -> None:
        endpoint = exchange.path if exchange.path in GETS | POSTS else "other"
        self._ports.meters.count("requests_total", 1, endpoint=endpoint, status=status)

    async def _serve(self, exchange: Exchange) -> None:
        origin = exchange.header("origin")
        try:
            if exchange.method == "OPTIONS" and exchange.header("access-control-request-method") is not None:
                await self._preflight(exchange, origin)
                return
            exchange.add_headers(self._cors.headers(origin))
            await self._route(exchange)
        except ApiError as error:
            log.info("request refused", request_id=exchange.request_id, status=error.status, code=error.code)
            await exchange.answer(error.status, error_body(error), headers=error.headers)

    async def _preflight(self, exchange: Exchange, origin: str | None) -> None:
        """What a browser asks before a page's request. It carries no key."""
        headers = self._cors.preflight(origin, exchange.header("access-control-request-headers"))
        if headers is None:
            raise ApiError(403, "pages of this origin may not call this port", code="origin_not_allowed")
        exchange.add_headers(headers)
        await exchange.answer(204, b"")

    async def _route(self, exchange: Exchange) -> None:
        path = exchange.path
        if path in POSTS:
            _allow(exchange, "POST")
            await self._post(exchange, path, self._admission.caller(exchange))
        elif path in GETS or path.startswith(MODEL_PREFIX):
            _allow(exchange, "GET", "HEAD")
            if path not in PROBES:
                self._admission.caller(exchange)
            await self._get(exchange, path)
        else:
            raise ApiError(404, f"no such path: {exchange.method} {path[:256]}", code="unknown_url")

    async def _post(self, exchange: Exchange, path: str, caller: Caller) -> None:
        _check_media_type(exchange)
        match path:
            case "/v1/chat/completions":
                await self._completions.chat(exchange, caller)
            case "/v1/completions":
                await self._completions.text(exchange, caller)
            case "/tokenize":
                await exchange.answer(200, await self._tokenizing.tokenize(await exchange.read_body()))
            case _:
                await exchange.answer(200, await self._tokenizing.detokenize(await exchange.read_body()))

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
                await exchange.answer(200, model_list_body(self._models.cards(), self._started))
            case _:
                card, _ = self._models.find(path.removeprefix(MODEL_PREFIX))
                await exchange.answer(200, model_body(card, self._started))

    def _request_id(self, scope: Scope) -> str:
        given = header(scope, "x-request-id")
        if given is not None and REQUEST_ID.fullmatch(given):
            return given
        return self._ports.randomness.stream("client requests").octets(12).hex()


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
