"""Draft 5.1, HTTP Usage: Table 1 over the dispatcher. TLS and HTTP/2 are proven on the wire in tests/edge."""

import base64
import json

import pytest
from msgspec import Struct

from sdcpd.edge.dispatch import Dispatcher, drafter_dispatcher, router_dispatcher, verifier_dispatcher
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.transport import Request, Response
from sdcpd.protocol.encoding import decode, encode
from sdcpd.protocol.messages import Event, Policy, Sampling, SessionState, Verdict
from sdcpd.protocol.problems import StaleBase
from sdcpd.protocol.terms import Action, session_from_path_id, session_path_id
from sdcpd.roles.ports import Refusal
from tests.edge.services import OUTPUT, PEERS, STATE, VERDICT, Recorder
from tests.support.messages import DRAFTER, SESSION, assignment, proposal, session_open, status
from tests.support.ports import CountingMeters

ID = "AAECAwQFBgcICQoLDA0ODw"  # octets 0 to 15
INSTANCE = base64.urlsafe_b64encode(DRAFTER.encode()).rstrip(b"=").decode()
POLICY = Policy(session=SESSION, from_round=9, sampling=Sampling())
EVENT = Event(session=SESSION, epoch=1, kind=Action.SWITCH, committed=7, digest=bytes(32))

TABLE_1: list[tuple[str, str, str, Struct | None, str, Struct | None]] = [
    # role, method, path, body, caller, response
    ("verifier", "POST", "sessions", session_open(), "router", STATE),
    ("verifier", "PUT", f"sessions/{ID}/drafter", assignment(), "router", STATE),
    ("verifier", "POST", "proposals", proposal((5, 6)), "drafter", VERDICT),
    ("verifier", "GET", f"sessions/{ID}/output", None, "router", OUTPUT),
    ("verifier", "POST", f"sessions/{ID}/policy", POLICY, "router", STATE),
    ("drafter", "POST", "assignments", assignment(), "router", None),
    ("router", "PUT", f"instances/{INSTANCE}/status", status(), "drafter", None),
    ("router", "POST", "events", EVENT, "verifier", None),
]


def dispatcher(role: str, recorder: Recorder) -> Dispatcher:
    meters = CountingMeters()
    return {
        "verifier": verifier_dispatcher(recorder, meters),
        "drafter": drafter_dispatcher(recorder, meters),
        "router": router_dispatcher(recorder, meters),
    }[role]


def request(method: str, path: str, body: Struct | None, media_type: str = "application/sdcp+cbor") -> Request:
    headers = {"content-type": media_type} if body is not None else {}
    query = "from=2" if path.endswith("/output") else ""
    return Request(method=method, path=path, query=query, headers=headers, body=encode(body) if body else b"")


@pytest.mark.parametrize(("role", "method", "path", "body", "caller", "expected"), TABLE_1)
async def test_table_1(
    role: str, method: str, path: str, body: Struct | None, caller: str, expected: Struct | None
) -> None:
    """ "Table 1: SDCP Resources": each body is read, each response written, "none (204)" is 204 without a body."""
    recorder = Recorder()
    response = await dispatcher(role, recorder).handle(PEERS[caller], request(method, path, body))
    assert recorder.calls[0][1] == PEERS[caller]
    assert body is None or body in recorder.calls[0]
    if expected is None:
        assert (response.status, response.body) == (204, b"")
    else:
        assert response.status in (200, 201)
        assert response.headers["content-type"] == "application/sdcp+cbor"
        assert response.body == encode(expected)


@pytest.mark.parametrize(("role", "method", "path", "body", "caller"), [row[:5] for row in TABLE_1 if row[3]])
async def test_bodies_use_the_media_type(role: str, method: str, path: str, body: Struct, caller: str) -> None:
    """ "Message bodies use the media type "application/sdcp+cbor"." """
    recorder = Recorder()
    for other in ("application/cbor", "application/json"):
        response = await dispatcher(role, recorder).handle(PEERS[caller], request(method, path, body, other))
        assert response.status == 415
    assert recorder.calls == []


def test_session_ids_in_paths() -> None:
    """ "{id} in session paths is the base64url encoding without padding [RFC4648] of the session identifier." """
    assert session_path_id(bytes(range(16))) == ID
    assert session_path_id(b"\xff" * 16) == "_" * 21 + "w"
    assert session_from_path_id(ID) == bytes(range(16))
    for other in (f"{ID}==", ID[:-1], f"{ID}A", ID[:-1] + "x", "+" * 22, "é" * 22):
        with pytest.raises(ValueError, match="session id"):
            session_from_path_id(other)


async def test_errors_use_problem_details() -> None:
    """ "Errors use Problem Details [RFC9457]" """
    recorder = Recorder()

    def refuse() -> None:
        raise StaleBase("base 1 is not the committed prefix", state=STATE)

    recorder.hook = refuse
    sent = request("POST", "proposals", proposal((5,)))
    response = await dispatcher("verifier", recorder).handle(PEERS["drafter"], sent)
    assert (response.status, response.headers["content-type"]) == (409, "application/problem+json")
    members = json.loads(response.body)
    assert members["type"].endswith("#sdcp-stale-base")
    assert members["status"] == 409
    assert decode(base64.urlsafe_b64decode(members["session-state"] + "=="), SessionState) == STATE


class Answering:
    """A transport that gives one answer."""

    def __init__(self, status_: int) -> None:
        self.status = status_

    async def exchange(self, base_uri: str, request: Request) -> Response:
        return Response(status=self.status)


@pytest.mark.parametrize("code", [418, 451, 499, 505, 599])
async def test_clients_handle_unlisted_status_codes_by_class(code: int) -> None:
    """ "clients handle unlisted status codes by class [RFC9110]" """
    answer = await PeerClient(Answering(code), CountingMeters()).propose("https://v.example/", proposal((5,)))
    assert isinstance(answer, Refusal)
    assert (answer.status, answer.suffix) == (code, None)


async def test_any_2xx_is_success() -> None:
    """The same sentence, for the class of success (decision 28)."""

    class Created(Answering):
        async def exchange(self, base_uri: str, request: Request) -> Response:
            return Response(status=self.status, body=encode(VERDICT))

    answer = await PeerClient(Created(207), CountingMeters()).propose("https://v.example/", proposal((5,)))
    assert isinstance(answer, Verdict)


async def test_output_is_asked_for_from_an_index() -> None:
    """ "GET sessions/{id}/output?from=n" """
    recorder = Recorder()
    await dispatcher("verifier", recorder).handle(PEERS["router"], request("GET", f"sessions/{ID}/output", None))
    assert recorder.calls[0][:4] == ("read_output", PEERS["router"], SESSION, 2)
