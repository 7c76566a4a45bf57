"""What the SDCP port answers with: which role, who calls, how much of a body is read, what of our own faults."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import trio

from sdcpd.cache.settings import CacheSettings
from sdcpd.edge import peer_app
from sdcpd.edge.dispatch import cache_dispatcher, router_dispatcher, verifier_dispatcher
from sdcpd.edge.h2_server import Inbox
from sdcpd.edge.identity import CertificateNames, CertifiedIdentity
from sdcpd.edge.peer_app import Failures, Mount, PeerApp
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
    def __init__(self, response: Response, read: int) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.body
        self.read = read

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json"
        problem = json.loads(self.body)
        assert problem["status"] == self.status
        assert isinstance(problem, dict)
        return problem


class EndlessInbox(Inbox):
    """What was put in comes again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.piece = b""
        self.read = 0

    def put(self, octets: bytes) -> None:
        self.piece = octets

    async def receive(self) -> tuple[bytes, bool]:
        await trio.lowlevel.checkpoint()
        self.read += len(self.piece)
        return self.piece, True


class Asker:
    """A connection with one request at a time. `uris`: what the caller's certificate carries."""

    def __init__(self, app: PeerApp, uris: Sequence[str] = (DRAFTER,)) -> None:
        self.app = app
        self.identity = CertifiedIdentity(CertificateNames(uris=tuple(uris)), {})

    async def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        query: str = "",
        headers: Mapping[str, str] | None = None,
        pieces: Sequence[bytes] = (),
        endless: bool = False,
    ) -> Answer:
        inbox = EndlessInbox() if endless else Inbox()
        for piece in pieces:
            inbox.put(piece)
        if not endless:
            inbox.end()
        sent: list[Response] = []

        async def send(response: Response) -> None:
            await trio.lowlevel.checkpoint()
            assert self.app.under_way > 0
            sent.append(response)

        await self.app(self.identity, Request(method, path, query, headers or {}), inbox, send)
        (response,) = sent
        return Answer(response, inbox.read if isinstance(inbox, EndlessInbox) else 0)


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
        headers={"prefer": "wait=1"},
        pieces=[b"ab", b"", b"cd"],
    )
    assert (answer.status, answer.body) == (200, b"body")
    assert answer.headers == {"etag": '"x"'}
    await asker.ask("/cache/v1/thing")
    (first, peer, request), (second, _, _) = seen
    assert (first, second) == ("verifier", "cache")
    assert peer == PEERS["drafter"]
    assert request == Request("POST", "sessions/a%2Fb", "from=1&x=%20", {"prefer": "wait=1"}, b"abcd")
    app.withdraw("/cache/")
    for path in ("/cache/v1/thing", "/", "/verifier", "/verifierx/y", "*", "/drafter/assignments", "//verifier/x"):
        refused = await asker.ask(path)
        assert (refused.status, refused.problem["type"]) == (404, "about:blank")
    assert app.under_way == 0


async def test_the_field_chooses_among_the_certificates_names() -> None:
    app = app_with(verifier=echo)
    several, single = Asker(app, [DRAFTER, ROUTER]), Asker(app)
    for asker, claim, caller in (
        (several, ROUTER, f"router {ROUTER}"),
        (several, DRAFTER, f"drafter {DRAFTER}"),
        (single, None, f"drafter {DRAFTER}"),
        (single, DRAFTER, f"drafter {DRAFTER}"),
    ):
        assert (await asker.ask("/verifier/x", headers=claiming(claim))).headers["caller"] == caller
    for asker, claim in (
        (several, None),
        (several, "https://other.example/router/"),
        (several, f"{ROUTER}, {ROUTER}"),  # as a repeated field is read
        (single, ROUTER),
        (single, f"{DRAFTER}, {ROUTER}"),
        (Asker(app, ["https://h.example/nobody/"]), None),
    ):
        assert (await asker.ask("/verifier/x", headers=claiming(claim))).problem["status"] == 403


def claiming(claim: str | None) -> dict[str, str]:
    return {} if claim is None else {"sdcpd-as": claim}


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


CBOR = {"content-type": MEDIA_TYPE}


async def test_the_dispatchers_refusals_arrive() -> None:
    asker = Asker(node_app(Recorder()))
    body = encode(proposal((1,)))
    for path, method, headers, pieces, status in (
        ("/verifier/proposals", "POST", CBOR, [body], 200),
        ("/verifier/proposals", "GET", CBOR, [], 405),
        ("/verifier/proposals", "POST", {"content-type": "application/cbor"}, [body], 415),
        ("/verifier/proposals", "POST", CBOR, [body, b"\0"], 400),
        ("/verifier/nothing", "POST", CBOR, [body], 404),
        ("/verifier/sessions", "POST", CBOR, [body], 403),
        ("/verifier/sessions/AAECAwQFBgcICQoLDA0ODw", "GET", {}, [b"x"], 403),
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
    monkeypatch.setattr(peer_app, "BODIES_LIMIT_BYTES", 500)
    app = app_with(verifier=echo)
    answer = await Asker(app).ask("/verifier/x", method="POST", pieces=[bytes(400), bytes(200), b"x"])
    assert answer.problem["status"] == 503
    assert answer.headers["retry-after"] == "1"
    assert app._bodies_bytes == 0


async def test_requests_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_app, "REQUESTS_LIMIT", 2)

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

    inbox = Inbox()

    async def dribble() -> None:
        while True:
            await trio.sleep(1)
            inbox.put(b"x")

    async def send(response: Response) -> None:
        sent.append(response.status)

    sent: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dribble)
        await app(Asker(app).identity, Request("GET", "/verifier/x"), inbox, send)
        nursery.cancel_scope.cancel()
    assert sent == [408]
    assert trio.current_time() < 100


async def test_a_peer_that_leaves_ends_the_wait_and_nothing_else() -> None:
    """The connection cancels the request's task."""
    waits: list[str] = []

    async def wait(peer: Peer, request: Request) -> Response:
        try:
            await trio.sleep_forever()
        finally:
            waits.append("cancelled")
        raise AssertionError

    app = app_with(verifier=wait)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Asker(app).ask, "/verifier/x")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert waits == ["cancelled"]
    assert app.under_way == 0


async def test_our_own_fault_is_500_and_reaches_the_node() -> None:
    """The peer learns no more than that."""

    async def fail(peer: Peer, request: Request) -> Response:
        raise KeyError("secret")

    failures = Failures()
    app = PeerApp(failures.report, [Mount("/verifier/", fail, lambda method, path: 0)])
    with pytest.raises(ExceptionGroup) as raised:
        async with trio.open_nursery() as nursery:
            await nursery.start(failures.watch)
            answer = await Asker(app).ask("/verifier/x")
            assert answer.problem["status"] == 500
            assert b"secret" not in answer.body
            await trio.sleep_forever()
    assert [type(error) for error in raised.value.exceptions] == [KeyError]
    assert app.under_way == 0
