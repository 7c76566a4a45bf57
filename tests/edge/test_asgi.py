"""The ASGI skin: which role, who calls, how much of a body is read, and what becomes of our own faults."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import structlog
import trio

from sdcpd.cache.settings import CacheSettings
from sdcpd.edge import asgi
from sdcpd.edge.asgi import IDENTITY, Failures, Mount, PeerApp
from sdcpd.edge.dispatch import cache_dispatcher, router_dispatcher, verifier_dispatcher
from sdcpd.edge.h2_server import GONE
from sdcpd.edge.identity import CertificateNames, CertifiedIdentity
from sdcpd.edge.routes import PROPOSAL_LIMIT_BYTES
from sdcpd.edge.transport import Handler, Request, Response
from sdcpd.protocol.encoding import MEDIA_TYPE, encode
from sdcpd.roles.ports import Peer
from tests.edge.services import PEERS, VERDICT, Recorder
from tests.edge.wire.world import echo
from tests.support.messages import proposal
from tests.support.ports import CountingMeters

DRAFTER = PEERS["drafter"].uri
ROUTER = PEERS["router"].uri


class Answer:
    def __init__(self, sent: list[Any], read: int) -> None:
        self.status = sent[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in sent)
        self.read = read

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json"
        problem = json.loads(self.body)
        assert problem["status"] == self.status
        assert isinstance(problem, dict)
        return problem


class Asker:
    """An ASGI server with one request at a time. `uris`: what the caller's certificate carries."""

    def __init__(self, app: PeerApp, uris: Sequence[str] = (DRAFTER,)) -> None:
        self.app = app
        self.identity = CertifiedIdentity(CertificateNames(uris=tuple(uris)), {})
        self.gone: Any = None

    async def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        query: str = "",
        headers: Sequence[tuple[str, str]] = (),
        pieces: Sequence[bytes] = (),
        endless: bool = False,
    ) -> Answer:
        waiting = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        waiting.append({"type": "http.request", "body": b"", "more_body": False})
        sent: list[Any] = []
        read = 0

        async def receive() -> Any:
            nonlocal read
            await trio.lowlevel.checkpoint()
            if endless:
                read += len(pieces[0])
                return waiting[0]
            if not waiting:
                await trio.sleep_forever()
            message = waiting.pop(0)
            read += len(message["body"])  # type: ignore[arg-type]  # a dict of mixed values
            return message

        async def send(message: Any) -> None:
            await trio.lowlevel.checkpoint()
            sent.append(message)

        def read_no_more(gone: Any) -> None:
            self.gone = gone

        scope = {
            "type": "http",
            "method": method,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers],
            "state": {IDENTITY: self.identity},
            "extensions": {GONE: read_no_more},
        }
        await self.app(scope, receive, send)
        return Answer(sent, read)


def app_with(**handlers: Handler) -> PeerApp:
    def failed(error: Exception) -> None:
        raise AssertionError(error)

    return PeerApp(
        failed, [Mount(f"/{role}/", handler, lambda method, path: 1000) for role, handler in handlers.items()]
    )


async def test_the_first_part_of_the_path_chooses_the_role() -> None:
    seen: list[tuple[str, Peer, Request]] = []

    def note(role: str) -> Handler:
        async def handle(peer: Peer, request: Request) -> Response:
            seen.append((role, peer, request))
            return Response(200, {"etag": '"x"'}, b"body")

        return handle

    app = app_with(verifier=note("verifier"), cache=note("cache"))
    asker = Asker(app)
    answer = await asker.ask(
        "/verifier/sessions/a%2Fb",
        method="POST",
        query="from=1&x=%20",
        headers=[("Prefer", "wait=1"), ("x", "1"), ("x", "2")],
        pieces=[b"ab", b"", b"cd"],
    )
    assert (answer.status, answer.body) == (200, b"body")
    assert answer.headers == {"etag": '"x"', "content-length": "4"}
    await asker.ask("/cache/v1/thing")
    (first, peer, request), (second, _, _) = seen
    assert (first, second) == ("verifier", "cache")
    assert peer == PEERS["drafter"]
    assert request == Request("POST", "sessions/a%2Fb", "from=1&x=%20", {"prefer": "wait=1", "x": "1, 2"}, b"abcd")
    app.withdraw("/cache/")
    for path in ("/cache/v1/thing", "/", "/verifier", "/verifierx/y", "*", "/drafter/assignments", "//verifier/x"):
        refused = await asker.ask(path)
        assert (refused.status, refused.problem["type"]) == (404, "about:blank")
    assert app.under_way == 0


async def test_no_content_has_no_length() -> None:
    async def nothing(peer: Peer, request: Request) -> Response:
        return Response(204)

    assert (await Asker(app_with(verifier=nothing)).ask("/verifier/x")).headers == {}


async def test_the_field_chooses_among_the_certificates_names() -> None:
    app = app_with(verifier=echo)
    several, single = Asker(app, [DRAFTER, ROUTER]), Asker(app)
    for asker, claim, caller in (
        (several, [("sdcpd-as", ROUTER)], f"router {ROUTER}"),
        (several, [("SDCPD-AS", DRAFTER)], f"drafter {DRAFTER}"),
        (single, [], f"drafter {DRAFTER}"),
        (single, [("sdcpd-as", DRAFTER)], f"drafter {DRAFTER}"),
    ):
        assert (await asker.ask("/verifier/x", headers=claim)).headers["caller"] == caller
    for asker, claim in (
        (several, []),
        (several, [("sdcpd-as", "https://other.example/router/")]),
        (several, [("sdcpd-as", ROUTER), ("sdcpd-as", ROUTER)]),
        (single, [("sdcpd-as", ROUTER)]),
        (single, [("sdcpd-as", DRAFTER), ("sdcpd-as", ROUTER)]),
        (Asker(app, ["https://h.example/nobody/"]), []),
    ):
        assert (await asker.ask("/verifier/x", headers=claim)).problem["status"] == 403


def node_app(recorder: Recorder) -> PeerApp:
    meters = CountingMeters()
    app = app_with()
    for role, dispatcher in (
        ("verifier", verifier_dispatcher(recorder, meters)),
        ("router", router_dispatcher(recorder, meters)),
        ("cache", cache_dispatcher(recorder, CacheSettings(), meters)),  # type: ignore[arg-type]  # never reached
    ):
        app.serve(Mount(f"/{role}/", dispatcher.handle, dispatcher.body_limit_bytes))
    return app


CBOR = [("content-type", MEDIA_TYPE)]


async def test_the_dispatchers_refusals_arrive() -> None:
    asker = Asker(node_app(Recorder()))
    body = encode(proposal((1,)))
    for path, method, headers, pieces, status in (
        ("/verifier/proposals", "POST", CBOR, [body], 200),
        ("/verifier/proposals", "GET", CBOR, [], 405),
        ("/verifier/proposals", "POST", [("content-type", "application/cbor")], [body], 415),
        ("/verifier/proposals", "POST", CBOR, [body, b"\0"], 400),
        ("/verifier/nothing", "POST", CBOR, [body], 404),
        ("/verifier/sessions", "POST", CBOR, [body], 403),
        ("/verifier/sessions/AAECAwQFBgcICQoLDA0ODw", "GET", [], [b"x"], 403),
    ):
        answer = await asker.ask(path, method=method, headers=headers, pieces=pieces)
        assert answer.status == status, (path, answer.body)
        if status == 200:
            assert answer.body == encode(VERDICT)
        else:
            assert answer.problem["status"] == status
        if status == 405:
            assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "method", "status", "read"),
    [
        ("/verifier/proposals", "POST", 413, PROPOSAL_LIMIT_BYTES),
        ("/verifier/sessions", "POST", 403, 4 << 20),  # not for this role comes first, as without a wire
        ("/verifier/nothing", "POST", 404, 0),
        ("/verifier/proposals", "PUT", 405, 0),
        ("/elsewhere", "POST", 404, -1),
    ],
)
async def test_a_body_without_end_is_read_to_its_limit_only(path: str, method: str, status: int, read: int) -> None:
    """Bug 26, decision 117."""
    recorder = Recorder()
    app = node_app(recorder)
    answer = await Asker(app).ask(path, method=method, headers=CBOR, pieces=[bytes(10_000)], endless=True)
    assert answer.problem["status"] == status
    assert answer.read <= read + 10_000
    assert recorder.calls == []
    assert app._bodies_bytes == 0


async def test_a_body_at_its_limit_is_taken() -> None:
    answer = await Asker(app_with(verifier=echo)).ask("/verifier/x", method="POST", pieces=[bytes(999), b"x"])
    assert answer.body == bytes(999) + b"x"


async def test_bodies_of_all_requests_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "BODIES_LIMIT_BYTES", 500)
    app = app_with(verifier=echo)
    answer = await Asker(app).ask("/verifier/x", method="POST", pieces=[bytes(400), bytes(200), b"x"])
    assert answer.problem["status"] == 503
    assert answer.headers["retry-after"] == "1"
    assert app._bodies_bytes == 0


async def test_requests_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "REQUESTS_LIMIT", 2)

    async def wait(peer: Peer, request: Request) -> Response:
        await trio.sleep_forever()
        raise AssertionError

    app = app_with(verifier=wait)
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(Asker(app).ask, "/verifier/x")
        await trio.testing.wait_all_tasks_blocked()
        assert (await Asker(app).ask("/verifier/x")).problem["status"] == 503
        nursery.cancel_scope.cancel()
    assert app.under_way == 0


async def test_a_body_that_dribbles_is_not_waited_for(autojump_clock: Any) -> None:
    app = app_with(verifier=echo)
    asker = Asker(app)
    sent: list[Any] = []

    async def receive() -> Any:
        await trio.sleep(1)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "raw_path": b"/verifier/x",
        "query_string": b"",
        "headers": [],
        "state": {IDENTITY: asker.identity},
        "extensions": {GONE: lambda gone: None},
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 408
    assert trio.current_time() < 100


async def test_a_peer_that_leaves_ends_the_wait_and_nothing_else() -> None:
    waits: list[str] = []

    async def wait(peer: Peer, request: Request) -> Response:
        try:
            await trio.sleep_forever()
        finally:
            waits.append("cancelled")
        raise AssertionError

    asker = Asker(app_with(verifier=wait))
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(IndexError):  # nothing was answered
                await asker.ask("/verifier/x")

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        asker.gone()
    assert waits == ["cancelled"]


async def test_our_own_fault_is_500_and_reaches_the_node() -> None:
    async def fail(peer: Peer, request: Request) -> Response:
        raise KeyError("secret")

    failures = Failures()
    app = PeerApp(failures.report, [Mount("/verifier/", fail, lambda method, path: 0)])
    with pytest.raises(ExceptionGroup) as raised:
        async with trio.open_nursery() as nursery:
            await nursery.start(failures.watch)
            with pytest.raises(KeyError):
                await Asker(app).ask("/verifier/x")
            await trio.sleep_forever()
    assert [type(error) for error in raised.value.exceptions] == [KeyError]
    assert app.under_way == 0


async def test_a_peer_learns_no_more_than_500_of_our_fault() -> None:
    async def fail(peer: Peer, request: Request) -> Response:
        raise KeyError("secret")

    app = PeerApp(lambda error: None, [Mount("/verifier/", fail, lambda method, path: 0)])
    asker, sent = Asker(app), []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "raw_path": b"/verifier/x",
        "query_string": b"",
        "headers": [],
        "state": {IDENTITY: asker.identity},
        "extensions": {GONE: lambda gone: None},
    }
    with structlog.testing.capture_logs(), pytest.raises(KeyError):
        await app(scope, receive, send)
    assert sent[0]["status"] == 500
    assert b"secret" not in sent[1]["body"]


async def test_what_is_not_http_is_left_alone() -> None:
    async def never() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        raise AssertionError

    await app_with()({"type": "websocket"}, never, send)
