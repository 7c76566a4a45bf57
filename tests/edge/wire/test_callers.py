"""Who may call what, over the wire: each resource of each role by each kind of certificate (decisions 33, 37, 112).

The table is written out by hand from the decisions, so that a wrong route cannot make itself right. All roles are real,
the answers of those that are let in too: a router that knows no session answers an event with 404, a cache a lease
that it does not know, and a verifier of this version answers a policy with 501.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest
import trio
from msgspec import Struct

from sdcpd.cache.refs import BlockName, LogName, RecordName
from sdcpd.edge.cache_messages import CACHE_TYPE, BatchItem, BatchRequest, LeaseRenewal, LeaseRequest, LookupRequest
from sdcpd.edge.cache_routes import LOG_TYPE
from sdcpd.edge.object_routes import ROWS_TYPE, TOKENS_TYPE
from sdcpd.edge.problem_body import refusal
from sdcpd.edge.transport import Request, Response
from sdcpd.edge.wire_transport import WireTransport
from sdcpd.protocol.encoding import MEDIA_TYPE, encode
from sdcpd.protocol.messages import Event, Policy, Sampling, SessionState
from sdcpd.protocol.terms import Action, instance_path_id, session_path_id
from sdcpd.roles.ports import Peer
from tests.cache.log_tools import EMPTY, commit, end, fence
from tests.edge.wire.doors import client_context
from tests.edge.wire.doors import refusal as refusal_at_the_door
from tests.edge.wire.pki import Authority
from tests.edge.wire.roles import PROMPT, RolesWorld, roles_world
from tests.edge.wire.world import tls_world
from tests.support.messages import SESSION, proposal, status
from tests.support.toy_engine import greedy

ROLES: Final = ("router", "drafter", "verifier", "cache", "operator", "client")

TABLE: Final = """
                                   router drafter verifier cache operator client
verifier POST   sessions              200     403      403   403      403    403
verifier PUT    sessions/*/drafter    200     403      403   403      403    403
verifier POST   proposals             NOT     200      NOT   NOT      NOT    NOT
verifier GET    sessions/*/output     200     403      403   403      403    200
verifier POST   sessions/*/policy     200     403      403   403      403    403
verifier GET    sessions/*            200     403      403   403      403    403
verifier DELETE sessions/*            204     403      403   403      403    403
drafter  POST   assignments           204     403      403   403      403    403
drafter  DELETE assignments/*         204     403      403   403      403    403
router   PUT    instances/*/status    403     204      204   403      403    403
router   POST   events                403     403      404   403      403    403
router   GET    sessions/*/output     404     403      403   403      403    404
cache    PUT    log, empty            403     403      201   403      403    403
cache    PUT    log, a fence          201     403      403   403      403    403
cache    PUT    log, an end           201     403      201   403      403    403
cache    PUT    log with a commit     403     403      204   403      403    403
cache    PATCH  log, a commit         403     403      204   403      403    403
cache    PATCH  log, a fence          204     403      403   403      403    403
cache    PATCH  log, an end           204     403      204   403      403    403
cache    GET    log                   200     403      200   403      403    403
cache    DELETE log                   403     403      403   403      204    403
cache    PUT    object tokens         201     403      403   403      403    403
cache    PUT    object q              403     201      403   403      403    403
cache    PUT    object draft          403     201      403   403      403    403
cache    GET    object tokens         200     200      200   403      403    403
cache    GET    object q              200     200      200   403      403    403
cache    GET    object draft          200     200      200   403      403    403
cache    DELETE object tokens         204     403      403   403      204    403
cache    DELETE object q              403     204      403   403      204    403
cache    DELETE object draft          403     204      403   403      204    403
cache    HEAD   object q              200     200      200   403      403    403
cache    POST   leases                201     201      201   403      403    403
cache    PUT    leases/*              404     404      404   403      403    403
cache    DELETE leases/*              204     204      204   403      403    403
cache    PUT    record, new           201     403      403   403      403    403
cache    GET    record                200     403      403   403      403    403
cache    DELETE record                204     403      403   403      204    403
cache    GET    directory             200     403      403   403      403    403
cache    POST   batch                 200     200      200   403      403    403
cache    DELETE scope                 403     403      403   403      409    403
cache    PUT    block                 403     404      404   403      403    403
cache    GET    block                 403     404      404   403      403    403
cache    POST   lookup                200     200      200   403      403    403
cache    GET    stats                 200     200      200   403      200    403
"""
"""NOT: 403 with the problem type sdcp-not-assigned; 403: about:blank."""


def expected(role: str | None) -> dict[str, str]:
    """The column of a role; None is the column of nobody in particular, to whom all is 403."""
    head, *lines = TABLE.strip("\n").splitlines()
    assert tuple(head.split()) == ROLES
    column: dict[str, str] = {}
    for line in lines:
        resource, answers = line[:34].rstrip(), line[34:].split()
        assert len(answers) == len(ROLES), line
        column[resource] = "403" if role is None else answers[ROLES.index(role)]
    return column


ID = session_path_id(SESSION)
OBJECTS = {"tokens": (TOKENS_TYPE, b"\x81\x01"), "q": (ROWS_TYPE, bytes(8)), "draft": (ROWS_TYPE, bytes(8))}


def sdcp(method: str, path: str, message: Struct) -> Request:
    return Request(method, path, headers={"content-type": MEDIA_TYPE}, body=encode(message))


def log_request(method: str, number: int, octets: bytes = b"", epoch: int = 1, **conditions: str) -> Request:
    """To a log of its own."""
    headers = {name.replace("_", "-"): value for name, value in conditions.items()}
    headers |= {"kvsp-epoch": str(epoch), "content-type": LOG_TYPE}
    return Request(method, LogName(None, bytes([number]) * 16).path, headers=headers, body=octets)


def object_request(method: str, kind: str, round_: int) -> Request:
    media_type, content = OBJECTS[kind]
    path = f"v1/s/-/o/{ID}/1/{round_}/{kind}"
    if method != "PUT":
        return Request(method, path)
    return Request(method, path, headers={"content-type": media_type, "if-none-match": "*"}, body=content)


def cbor(method: str, path: str, message: Struct) -> Request:
    return Request(method, path, headers={"content-type": CACHE_TYPE}, body=encode(message))


def record_request(method: str, number: int) -> Request:
    path = RecordName(None, bytes([number]) * 16).path
    if method != "PUT":
        return Request(method, path)
    return Request(method, path, headers={"content-type": CACHE_TYPE, "if-none-match": "*"}, body=b"\xa0")


EXISTING = range(4, 9)
"""Logs that are there, empty."""


def requests(w: RolesWorld, caller: Peer, digest: bytes) -> dict[str, Request]:
    """One request for each line of the table, which whoever may call it would make."""
    report = status(instance=caller.uri, role={"verifier": 2}.get(caller.role, 1))
    event = Event(session=SESSION, epoch=1, kind=Action.SWITCH, committed=0, digest=digest)
    drafting = w.assignment(bytes(16), drafter=w.base("drafter"))
    made = {
        "verifier POST   sessions": sdcp("POST", "sessions", w.session_open()),
        "verifier PUT    sessions/*/drafter": sdcp("PUT", f"sessions/{ID}/drafter", w.assignment()),
        "verifier POST   proposals": sdcp("POST", "proposals", proposal(tuple(greedy(PROMPT, 2)), base_digest=digest)),
        "verifier GET    sessions/*/output": Request("GET", f"sessions/{ID}/output", "from=0", {"prefer": "wait=0"}),
        "verifier POST   sessions/*/policy": sdcp(
            "POST", f"sessions/{ID}/policy", Policy(session=SESSION, from_round=9, sampling=Sampling())
        ),
        "verifier GET    sessions/*": Request("GET", f"sessions/{ID}"),
        "verifier DELETE sessions/*": Request("DELETE", f"sessions/{ID}"),
        "drafter  POST   assignments": sdcp("POST", "assignments", drafting),
        "drafter  DELETE assignments/*": Request("DELETE", f"assignments/{session_path_id(bytes(16))}"),
        "router   PUT    instances/*/status": sdcp("PUT", f"instances/{instance_path_id(caller.uri)}/status", report),
        "router   POST   events": sdcp("POST", "events", event),
        "router   GET    sessions/*/output": Request("GET", f"sessions/{ID}/output", "from=0", {"prefer": "wait=0"}),
        "cache    PUT    log, empty": log_request("PUT", 1, if_none_match="*"),
        "cache    PUT    log, a fence": log_request("PUT", 2, fence(2), 2, if_none_match="*"),
        "cache    PUT    log, an end": log_request("PUT", 3, end(1), if_none_match="*"),
        "cache    PUT    log with a commit": log_request("PUT", 4, commit(1, 1), if_match=EMPTY),
        "cache    PATCH  log, a commit": log_request("PATCH", 5, commit(1, 1), if_match=EMPTY),
        "cache    PATCH  log, a fence": log_request("PATCH", 6, fence(2), 2, if_match=EMPTY),
        "cache    PATCH  log, an end": log_request("PATCH", 7, end(1), if_match=EMPTY),
        "cache    GET    log": log_request("GET", 8),
        "cache    DELETE log": log_request("DELETE", 8),
    }
    for method, round_ in (("PUT", 1), ("GET", 0), ("DELETE", 0)):
        made |= {f"cache    {method:6} object {kind}": object_request(method, kind, round_) for kind in OBJECTS}
    lasting = f"v1/s/-/o/{ID}/1/2/q"
    block = BlockName(None, bytes(32)).path  # no model of this node keeps blocks: 404 to those that are let in
    return made | {
        "cache    HEAD   object q": Request("HEAD", lasting),
        "cache    POST   leases": cbor("POST", "leases", LeaseRequest(objects=(lasting,), ttl_ms=1000)),
        "cache    PUT    leases/*": cbor("PUT", "leases/unknown", LeaseRenewal(ttl_ms=1000)),
        "cache    DELETE leases/*": Request("DELETE", "leases/unknown"),
        "cache    PUT    record, new": record_request("PUT", 1),
        "cache    GET    record": record_request("GET", 0),
        "cache    DELETE record": record_request("DELETE", 0),
        "cache    GET    directory": Request("GET", "v1/s/-/d"),
        "cache    POST   batch": cbor("POST", "batch", BatchRequest(items=(BatchItem(op="exists", name=lasting),))),
        "cache    PUT    block": Request("PUT", block, headers={"content-type": ROWS_TYPE, "if-none-match": "*"}),
        "cache    GET    block": Request("GET", block),
        "cache    POST   lookup": cbor("POST", "lookup", LookupRequest(root=bytes(32), hashes=())),
        "cache    GET    stats": Request("GET", "stats"),
        "cache    DELETE scope": Request("DELETE", "v1/s/-"),  # in which logs are open
    }


ROUTER = Peer(uri="https://r.example/router/", role="router")
CALLERS = {role: Peer(uri=f"https://{role[0]}.example/{role}/", role=role) for role in ROLES}


async def prepare(w: RolesWorld) -> bytes:
    """A session with a drafter, logs and objects; the session's digest."""
    router = await w.calls(ROUTER)
    opened = await router.open_session(w.base(), w.session_open())
    assert isinstance(opened, SessionState), opened
    assert isinstance(await router.name_drafter(w.base(), w.assignment()), SessionState)
    ask = {role: await w.transport(CALLERS[role]) for role in ("verifier", "router", "drafter")}
    for number in EXISTING:
        created = await ask["verifier"].exchange(w.base("cache"), log_request("PUT", number, if_none_match="*"))
        assert created.status == 201
    for kind in OBJECTS:
        owner = ask["router" if kind == "tokens" else "drafter"]
        assert (await owner.exchange(w.base("cache"), object_request("PUT", kind, 0))).status == 201
    for who, request in (("drafter", object_request("PUT", "q", 2)), ("router", record_request("PUT", 0))):
        assert (await ask[who].exchange(w.base("cache"), request)).status == 201
    return opened.digest


async def column(w: RolesWorld, caller: Peer, ask: Callable[[str, Request], Awaitable[Response]]) -> dict[str, str]:
    """What a caller is answered at each line. Problems are checked on the way."""
    digest = await prepare(w)
    found: dict[str, str] = {}
    for resource, request in requests(w, caller, digest).items():
        answer = await ask(resource.split()[0], request)
        found[resource] = str(answer.status)
        if answer.status >= 300 and request.method != "HEAD":
            assert answer.headers["content-type"] == "application/problem+json", resource
            suffix = refusal(answer).suffix
            assert suffix in (None, "sdcp-not-assigned"), resource
            if suffix is not None:
                assert answer.status == 403
                found[resource] = "NOT"
    return found


def asking(w: RolesWorld, transport: WireTransport, claim: str | None = None) -> Callable[..., Awaitable[Response]]:
    async def ask(role: str, request: Request) -> Response:
        more = {} if claim is None else {"sdcpd-as": claim}
        asked = Request(request.method, request.path, request.query, {**request.headers, **more}, request.body)
        return await transport.exchange(w.base(role), asked)

    return ask


def test_the_table_is_whole() -> None:
    """ "Table 1 lists ..." eight resources; 37 adds two, 45 one, 84 one."""
    lines = list(expected(None))
    assert len([line for line in lines if not line.startswith("cache")]) == 8 + 2 + 1 + 1
    assert len(lines) == len(set(lines)) == 44


@pytest.mark.parametrize("role", ROLES)
async def test_a_certificate_with_one_role(role: str, authority: Authority, tmp_path: Path) -> None:
    caller = CALLERS[role]
    async with roles_world(authority, tmp_path) as w:
        found = await column(w, caller, asking(w, await w.transport(caller)))
    assert found == expected(role)


@pytest.mark.parametrize(
    "uri", ["https://d.example/drafter/extra/", "https://drafter.example/", "spiffe://d.example/drafter", ""]
)
async def test_a_certificate_without_a_role(uri: str, authority: Authority, tmp_path: Path) -> None:
    """A name that stands for no role, or none: 403 for all, and about:blank also for proposals."""
    nobody = Peer(uri=uri or "https://d.example/", role="nobody")
    async with roles_world(authority, tmp_path) as w:
        client = await w.world.client(*([uri] if uri else ["d.example"]))
        found = await column(w, nobody, asking(w, client.transport(nobody, named=False)))
    assert found == expected(None)


BOTH = (CALLERS["drafter"], CALLERS["operator"])


@pytest.mark.parametrize(
    ("claim", "role"),
    [
        (None, None),
        (CALLERS["drafter"].uri, "drafter"),
        (CALLERS["operator"].uri, "operator"),
        (CALLERS["router"].uri, None),
        ("https://x.example/drafter/", None),
        (f"{CALLERS['drafter'].uri}, {CALLERS['operator'].uri}", None),
        ("drafter", None),
        ("", None),
    ],
)
async def test_a_certificate_with_several_roles(
    claim: str | None, role: str | None, authority: Authority, tmp_path: Path
) -> None:
    """112: the request says in `sdcpd-as` which of them is calling; without, or with another, all is 403."""
    caller = CALLERS["drafter"]
    async with roles_world(authority, tmp_path) as w:
        client = await w.world.client(*(peer.uri for peer in BOTH))
        found = await column(w, caller, asking(w, client.transport(caller, named=False), claim))
    wanted = expected(role)
    if role == "operator":  # the drafter's own path: 403 as any
        assert wanted["router   PUT    instances/*/status"] == "403"
    assert found == wanted


@pytest.mark.parametrize("role", ROLES)
async def test_a_claim_adds_nothing_to_a_certificate(role: str, authority: Authority, tmp_path: Path) -> None:
    """A drafter's certificate with another role's name in the field: 403 for all but its own."""
    drafter = CALLERS["drafter"]
    async with roles_world(authority, tmp_path) as w:
        found = await column(w, drafter, asking(w, await w.transport(drafter), CALLERS[role].uri))
    assert found == expected("drafter" if role == "drafter" else None)


async def test_no_certificate_or_one_of_another_authority(authority: Authority, tmp_path: Path) -> None:
    """There is no resource for whom the handshake fails, whatever role the certificate names."""
    stranger = Authority(tmp_path, "stranger")
    async with tls_world(authority) as world:
        served = await world.serve()
        ca = str(authority.path)
        with trio.fail_after(10):
            assert "CERTIFICATE_REQUIRED" in await refusal_at_the_door(served, client_context(None, ca))
            for caller in CALLERS.values():
                context = client_context(stranger.issue(caller.uri), ca)
                assert "UNKNOWN_CA" in await refusal_at_the_door(served, context), caller.role
        assert (served.server.connections, served.app.under_way) == (0, 0)
