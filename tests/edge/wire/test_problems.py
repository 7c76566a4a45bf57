"""What is refused over the wire: status, problem type, form; and that the connection then serves the next request."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import cbor2
import pytest
import trio

from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.cache_messages import CACHE_TYPE
from sdcpd.edge.cache_routes import LOG_TYPE
from sdcpd.edge.identity import CertificateNames
from sdcpd.edge.object_routes import ROWS_TYPE
from sdcpd.edge.problem_body import CONCISE_TYPE, PROBLEM_TYPE
from sdcpd.edge.tls import Tls
from sdcpd.edge.transport import Request, Response
from sdcpd.edge.wire_settings import PeerClientSettings
from sdcpd.edge.wire_transport import Target, WireClient, WireDialer
from sdcpd.protocol.encoding import MEDIA_TYPE, encode
from sdcpd.protocol.terms import instance_path_id, session_path_id
from sdcpd.roles.ports import Peer
from tests.edge.wire.pki import Authority
from tests.edge.wire.roles import CONTRACT, PROMPT, RolesWorld, roles_world
from tests.support.messages import DRAFTER, OTHER_DRAFTER, ROUTER, SESSION, first_digest, proposal
from tests.support.ports import TrioClock
from tests.support.toy_engine import VOCABULARY, greedy

ID: Final = session_path_id(SESSION)
NO_ID: Final = session_path_id(bytes(16))
KIB, MIB = 1 << 10, 1 << 20
SDCP = {"content-type": MEDIA_TYPE}
TYPE_BASE: Final = "https://iana.org/assignments/http-problem-types#"
FIRST = proposal(tuple(greedy(PROMPT, 4)), base_digest=first_digest(CONTRACT, PROMPT))
"""The round that is decided before anything else happens."""


class CountingDialer(WireDialer):
    """Counts the connections that it makes: whoever loses one makes another."""

    def __init__(self, tls: Tls) -> None:
        super().__init__(tls, insecure_loopback=False)
        self.dials = 0

    async def dial(self, target: Target) -> tuple[trio.abc.Stream, CertificateNames | None]:
        self.dials += 1
        return await super().dial(target)


class Callers:
    """A router, two drafters and a verifier, each with one connection for control, and a session with one round."""

    def __init__(self, w: RolesWorld) -> None:
        self.w = w
        self.dialers: dict[str, CountingDialer] = {}
        self._transports: dict[str, Any] = {}

    async def add(self, name: str, uri: str, role: str) -> None:
        dialer = CountingDialer(Tls(self.w.world.authority.issue(uri)))
        client = WireClient(dialer, PeerClientSettings(), TrioClock())
        await self.w.world.nursery.start(client.run)
        self.dialers[name] = dialer
        self._transports[name] = client.transport(Peer(uri=uri, role=role), named=False)

    async def ask(self, name: str, role: str, request: Request) -> Response:
        with trio.fail_after(20):
            answer: Response = await self._transports[name].exchange(self.w.base(role), request)
            return answer

    async def next_is_served(self, name: str) -> None:
        """By the same connection."""
        request, status = {
            "router": (Request("GET", f"sessions/{ID}"), 200),
            "drafter": (Request("POST", "proposals", headers=SDCP, body=encode(FIRST)), 200),
            "other": (Request("POST", "proposals", headers=SDCP, body=encode(FIRST)), 403),
            "verifier": (Request("POST", "sessions"), 403),
        }[name]
        assert (await self.ask(name, "verifier", request)).status == status
        assert self.dialers[name].dials == 1


@asynccontextmanager
async def callers(authority: Authority, journal: Path) -> AsyncIterator[Callers]:
    async with roles_world(authority, journal) as w:
        made = Callers(w)
        await made.add("router", ROUTER, "router")
        await made.add("drafter", DRAFTER, "drafter")
        await made.add("other", OTHER_DRAFTER, "drafter")
        await made.add("verifier", "https://v.example/verifier/", "verifier")
        opening = Request("POST", "sessions", headers=SDCP, body=encode(w.session_open()))
        assert (await made.ask("router", "verifier", opening)).status == 201
        naming = Request("PUT", f"sessions/{ID}/drafter", headers=SDCP, body=encode(w.assignment()))
        assert (await made.ask("router", "verifier", naming)).status == 200
        await made.next_is_served("drafter")
        yield made


def check(answer: Response, status: int, suffix: str | None) -> dict[str, Any]:
    """The members of a problem."""
    assert (answer.status, answer.headers["content-type"]) == (status, PROBLEM_TYPE)
    assert answer.headers["cache-control"] == "no-store"
    members = json.loads(answer.body)
    assert members["status"] == status
    assert members["type"] == ("about:blank" if suffix is None else TYPE_BASE + suffix)
    assert members["title"]
    assert members["detail"]
    assert isinstance(members, dict)
    return members


def post(path: str, body: bytes, media_type: str = MEDIA_TYPE) -> Request:
    return Request("POST", path, headers={"content-type": media_type}, body=body)


MALFORMED = {
    "nothing": b"",
    "endless array": b"\x9a\xff\xff\xff\xff",
    "endless map": b"\xbb" + b"\xff" * 8,
    "cut short": encode(FIRST)[:-1],
    "an octet after it": encode(FIRST) + b"\0",
    "a key twice": bytes.fromhex("a2616101616102"),
    "a tag": b"\xd9\xd9\xf7" + encode(FIRST),
    "too deep": b"\x81" * 100_000 + b"\0",
    "an array": b"\x80",
    "JSON": b'{"session": 1}',
    "a member of another type": cbor2.dumps(cbor2.loads(encode(FIRST)) | {"round": True}),
    "a member missing": cbor2.dumps({"session": SESSION}),
}


async def test_malformed_bodies(authority: Authority, tmp_path: Path) -> None:
    """Decision 7: 400 about:blank."""
    async with callers(authority, tmp_path) as c:
        for name, body in MALFORMED.items():
            answer = await c.ask("drafter", "verifier", post("proposals", body))
            assert answer.status == 400, name
            check(answer, 400, None)
            await c.next_is_served("drafter")


async def test_wrong_media_types(authority: Authority, tmp_path: Path) -> None:
    async with callers(authority, tmp_path) as c:
        for media_type in ("application/cbor", "application/json", "text/plain", MEDIA_TYPE + "x"):
            check(await c.ask("drafter", "verifier", post("proposals", encode(FIRST), media_type)), 415, None)
            await c.next_is_served("drafter")
        check(await c.ask("drafter", "verifier", Request("POST", "proposals", body=encode(FIRST))), 415, None)


LOG_PATH, OBJECT_PATH = f"v1/s/-/l/{NO_ID}", f"v1/s/-/o/{ID}/1/1/q"
APPENDING = {"kvsp-epoch": "1", "content-type": LOG_TYPE, "if-match": '"x"'}
RECORD_PATH, RECORDING = f"v1/s/-/d/{ID}", {"if-none-match": "*", "content-type": CACHE_TYPE}
CREATING = {"if-none-match": "*", "content-type": ROWS_TYPE}
CACHE = CacheSettings()
LIMITS: Final = [
    # caller, role, method, path, headers, limit, what a body of just the limit gets (decision 117, and the settings)
    ("drafter", "verifier", "POST", "proposals", SDCP, 256 * KIB, 400),
    ("router", "verifier", "POST", "sessions", SDCP, 4 * MIB, 400),
    ("router", "verifier", "PUT", f"sessions/{ID}/drafter", SDCP, 4 * MIB, 400),
    ("router", "verifier", "POST", f"sessions/{ID}/policy", SDCP, 16 * KIB, 400),
    ("router", "drafter", "POST", "assignments", SDCP, 4 * MIB, 400),
    ("drafter", "router", "PUT", f"instances/{instance_path_id(DRAFTER)}/status", SDCP, 16 * KIB, 400),
    ("verifier", "router", "POST", "events", SDCP, 16 * KIB, 400),
    ("verifier", "cache", "PATCH", LOG_PATH, APPENDING, 4 * CACHE.max_record_bytes, 400),
    ("drafter", "cache", "PUT", OBJECT_PATH, CREATING, CACHE.max_object_bytes, 201),
    ("router", "cache", "PUT", RECORD_PATH, RECORDING, CACHE.max_directory_record_bytes, 201),
    ("router", "cache", "POST", "leases", {"content-type": CACHE_TYPE}, 16 * KIB, 400),
    ("router", "cache", "PUT", "leases/x", {"content-type": CACHE_TYPE}, 16 * KIB, 400),
    ("router", "verifier", "GET", f"sessions/{ID}", {}, 0, 200),
    ("router", "verifier", "DELETE", f"sessions/{NO_ID}", {}, 0, 404),
]


@pytest.mark.parametrize(("caller", "role", "method", "path", "headers", "limit_bytes", "status"), LIMITS)
async def test_bodies_over_their_limit(
    caller: str,
    role: str,
    method: str,
    path: str,
    headers: dict[str, str],
    limit_bytes: int,
    status: int,
    authority: Authority,
    tmp_path: Path,
) -> None:
    """413 for one octet more, whether the length was announced or not; then the next request, on the connection."""
    async with callers(authority, tmp_path) as c:
        over = Request(method, path, headers=headers, body=bytes(limit_bytes + 1))
        members = check(await c.ask(caller, role, over), 413, None)
        assert str(limit_bytes) in members["detail"]
        await c.next_is_served(caller)
        far_over = Request(method, path, headers=headers, body=bytes(limit_bytes + 20 * MIB))
        check(await c.ask(caller, role, far_over), 413, None)
        await c.next_is_served(caller)
        just = await c.ask(caller, role, Request(method, path, headers=headers, body=bytes(limit_bytes)))
        assert just.status == status
        await c.next_is_served(caller)


async def test_contracts(authority: Authority, tmp_path: Path) -> None:
    """4.1: "A contract that contains a key not defined by this document MUST be rejected" as sdcp-bad-contract."""
    async with callers(authority, tmp_path) as c:
        opening = cbor2.loads(encode(c.w.session_open(bytes(16))))
        for change in (
            {"unheard-of": 1},
            {"sampling": {"temperature_milli": 0, "unheard-of": 1}},
            {"m_max": 0},
            {"m_max": 65},
            {"rule": 7},
        ):
            body = cbor2.dumps(opening | {"contract": opening["contract"] | change})
            check(await c.ask("router", "verifier", post("sessions", body)), 422, "sdcp-bad-contract")
            await c.next_is_served("router")
        other_keys = cbor2.dumps(opening | {"unheard-of": 1})
        assert (await c.ask("router", "verifier", post("sessions", other_keys))).status == 201


async def test_what_a_session_refuses(authority: Authority, tmp_path: Path) -> None:
    """Table 2, as far as rule 1 knows it; the session-state in a 409 is the one of decision 34."""
    async with callers(authority, tmp_path) as c:
        state = cbor2.loads((await c.ask("router", "verifier", Request("GET", f"sessions/{ID}"))).body)
        base, digest = state["committed"], state["digest"]
        assert base == 5

        async def propose(who: str, *tokens: int, **changes: Any) -> Response:
            made = {"round": 2, "base": base, "base_digest": digest} | changes
            drafter = OTHER_DRAFTER if who == "other" else DRAFTER
            message = proposal(tokens, **({"drafter": drafter} | made))
            return await c.ask(who, "verifier", post("proposals", encode(message)))

        check(await propose("other", 5), 403, "sdcp-not-assigned")
        check(await propose("other", 5, drafter=DRAFTER), 403, "sdcp-not-assigned")
        check(await propose("drafter", 5, session=bytes(16)), 404, None)
        check(await propose("drafter", 5, epoch=2), 409, "sdcp-stale-epoch")
        for wrong in ({"base": 4}, {"base_digest": bytes(32)}, {"round": 3}):
            members = check(await propose("drafter", 5, **wrong), 409, "sdcp-stale-base")
            octets = base64.urlsafe_b64decode(members["session-state"] + "=" * (-len(members["session-state"]) % 4))
            assert cbor2.loads(octets) == state
            assert (members["round"], members["committed"], members["epoch"]) == (1, base, 1)
        limit = check(await propose("drafter", *[5] * 9), 422, "sdcp-limit")
        assert limit["m_cap"] == 8
        check(await propose("drafter", VOCABULARY), 422, "sdcp-bad-proposal")
        check(await propose("drafter", 1 << 33), 422, "sdcp-bad-proposal")
        await c.next_is_served("drafter")
        assert (await propose("drafter", 5)).status == 200, "the round was open all the time"
        assert (await c.ask("router", "verifier", Request("DELETE", f"sessions/{ID}"))).status == 204
        check(await propose("drafter", 5, round=3), 410, "sdcp-session-closed")
        for who in ("drafter", "other"):
            assert c.dialers[who].dials == 1


async def test_no_such_thing(authority: Authority, tmp_path: Path) -> None:
    async with callers(authority, tmp_path) as c:
        for role, method, path in (
            ("verifier", "GET", f"sessions/{NO_ID}"),
            ("verifier", "GET", f"sessions/{NO_ID}/output"),
            ("verifier", "DELETE", f"sessions/{NO_ID}"),
            ("verifier", "GET", "sessions/no-id"),
            ("verifier", "GET", ""),
            ("verifier", "GET", f"sessions/{ID}/outputs"),
            ("verifier", "GET", f"sessions/{ID}/"),
            ("verifier", "GET", "x" * 5000),
            ("verifier", "POST", "events"),
            ("router", "POST", "sessions"),
            ("cache", "GET", LOG_PATH),
            ("cache", "GET", "v1/s/-/x"),
            ("cache", "GET", f"v1/s/-/l/{NO_ID}x"),
        ):
            check(await c.ask("router", role, Request(method, path)), 404, None)
            await c.next_is_served("router")
        for role, method, path, allow in (
            ("verifier", "GET", "proposals", "POST"),
            ("verifier", "PUT", "sessions", "POST"),
            ("verifier", "PATCH", f"sessions/{ID}", "DELETE, GET"),
            ("verifier", "HEAD", f"sessions/{ID}/drafter", "PUT"),
            ("cache", "POST", LOG_PATH, "DELETE, GET, PATCH, PUT"),
            ("router", "OPTIONS", "events", "POST"),
        ):
            answer = await c.ask("router", role, Request(method, path))
            if method != "HEAD":
                check(answer, 405, None)
            assert (answer.status, answer.headers["allow"]) == (405, allow)
            await c.next_is_served("router")


async def test_a_role_that_is_not_served_here(authority: Authority, tmp_path: Path) -> None:
    """A path below no role's base URI, past our own client, which would look at the certificate first."""
    async with callers(authority, tmp_path) as c:
        uri = "https://r.example/router/"
        tls = Tls(authority.issue(uri))
        dialer = CountingDialer(tls)
        dialer.admit = lambda target, names: None  # type: ignore[method-assign]
        client = WireClient(dialer, PeerClientSettings(), TrioClock())
        await c.w.world.nursery.start(client.run)
        calls = client.transport(Peer(uri=uri, role="router"), named=False)
        for _ in range(2):
            check(await calls.exchange(c.w.base("elsewhere"), Request("POST", "x", body=bytes(100_000))), 404, None)
            assert (await calls.exchange(c.w.base(), Request("GET", f"sessions/{ID}"))).status == 200
        assert dialer.dials == 1


async def test_problems_in_cbor_for_who_asks(authority: Authority, tmp_path: Path) -> None:
    """Decision 34, from the role, the dispatcher and the door of the port alike."""
    async with callers(authority, tmp_path) as c:
        for who, request, status, suffix in (
            ("drafter", post("proposals", encode(proposal((5,), round=7))), 409, "sdcp-stale-base"),
            ("drafter", Request("GET", "proposals"), 405, None),
            ("router", Request("GET", "nothing"), 404, None),
            ("drafter", Request("GET", f"sessions/{ID}", headers={"sdcpd-as": ROUTER}), 403, None),
        ):
            accept = {"accept": f"{MEDIA_TYPE}, {CONCISE_TYPE}"}
            asked = Request(request.method, request.path, headers={**request.headers, **accept}, body=request.body)
            answer = await c.ask(who, "verifier", asked)
            assert (answer.status, answer.headers["content-type"]) == (status, CONCISE_TYPE)
            problem = cbor2.loads(answer.body)
            assert problem.keys() == {-1, -2, 7807}
            assert problem[7807][1] == status
            assert problem[7807][0] == ("about:blank" if suffix is None else TYPE_BASE + suffix)
            assert ("session-state" in problem[7807]) == (status == 409)
            await c.next_is_served(who)
