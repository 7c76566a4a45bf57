"""Objects and leases over HTTP and by reference, on a node that serves its own objects only (decisions 54, 112)."""

import gzip
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio
from msgspec import UNSET
from trio.testing import MockClock, wait_all_tasks_blocked

from sdcpd.cache.content_coding import CODINGS, Coding, unpack
from sdcpd.cache.refs import ObjectKind, log_reference, object_reference, scope_path
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.cache_batch import BATCH_LIMIT_BYTES, ITEMS_LIMIT
from sdcpd.edge.cache_messages import (
    CACHE_TYPE,
    BatchAnswer,
    BatchItem,
    BatchRequest,
    LeaseAnswer,
    LeaseRenewal,
    LeaseRequest,
    PurgeAnswer,
)
from sdcpd.edge.dispatch import object_cache_dispatcher
from sdcpd.edge.http_fields import content_digest
from sdcpd.edge.object_routes import ROWS_TYPE
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.transport import LoopbackNetwork, Request, Response, TransportError
from sdcpd.protocol.encoding import decode, encode
from sdcpd.roles.object_cache import ObjectCache
from sdcpd.roles.ports import (
    Appended,
    Content,
    Done,
    Leased,
    Missing,
    Peers,
    Ports,
    ReadOutcome,
    StoreRefused,
    Unreachable,
)
from tests.edge.services import PEERS
from tests.edge.wire.world import MEMORY_BASE, memory_world
from tests.support.ports import CountingMeters, InlineWorkers, MemoryLogs, RecordedPeers, SeededRandomness, TrioClock

BASE = "https://d.example:8443/cache/"
OTHER = "https://c.example/cache/"
SESSION = bytes(range(16))
ROWS, MORE = (object_reference(BASE, None, SESSION, 1, round_, ObjectKind.Q) for round_ in (1, 2))
TOKENS = object_reference(BASE, None, SESSION, 1, 0, ObjectKind.TOKENS)
PATH, MORE_PATH = ROWS.removeprefix(BASE), MORE.removeprefix(BASE)
LARGE = bytes(100_000) + b"end"


def tag(octets: bytes) -> str:
    return f'"{hashlib.sha256(octets).hexdigest()}"'


class Spy:
    """A transport that notes what went through."""

    def __init__(self, network: LoopbackNetwork, role: str) -> None:
        self._inner = network.transport(PEERS[role])
        self.requests: list[Request] = []
        self.responses: list[Response] = []

    async def exchange(self, base_uri: str, request: Request) -> Response:
        self.requests.append(request)
        self.responses.append(await self._inner.exchange(base_uri, request))
        return self.responses[-1]


class World:
    def __init__(self, network: LoopbackNetwork) -> None:
        self.network = network

    def client(self, role: str, near: tuple[str, ...] = ()) -> tuple[ObjectClient, Spy]:
        spy = Spy(self.network, role)
        client = ObjectClient(spy, CountingMeters(), [OTHER, BASE], near=near, workers=InlineWorkers())
        return client, spy

    async def ask(self, role: str, method: str, path: str, body: bytes = b"", **headers: str) -> Response:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        request = Request(method=method, path=path, body=body, headers=fields)
        return await self.network.transport(PEERS[role]).exchange(BASE, request)

    async def put(self, octets: bytes, path: str = PATH, **headers: str) -> Response:
        fields = {"content_type": ROWS_TYPE, "if_none_match": "*"} | headers
        return await self.ask("drafter", "PUT", path, octets, **fields)


def ports(meters: CountingMeters) -> Ports:
    return Ports(
        clock=TrioClock(),
        randomness=SeededRandomness(),
        workers=InlineWorkers(),
        meters=meters,
        peers=cast(Peers, RecordedPeers()),
        objects=MemoryLogs(),
    )


@asynccontextmanager
async def world(settings: CacheSettings | None = None) -> AsyncIterator[World]:
    settings, meters, network = settings or CacheSettings(), CountingMeters(), LoopbackNetwork()
    cache = ObjectCache(settings, ports(meters))
    network.serve(BASE, object_cache_dispatcher(cache, settings, meters).handle)
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        yield World(network)
        nursery.cancel_scope.cancel()


async def test_a_node_of_objects_has_no_logs() -> None:
    """Decision 112: "Every node serves its objects at `/cache/`; only the `cache` role serves logs"."""
    async with world() as w:
        assert (await w.ask("router", "GET", log_reference(BASE, None, SESSION).removeprefix(BASE))).status == 404
        assert (await w.put(b"rows")).status == 201
        assert (await w.ask("verifier", "GET", PATH)).body == b"rows"


@pytest.mark.parametrize(
    ("wanted", "status", "content_range", "body"),
    [
        ("bytes=0-3", 206, "bytes 0-3/10", b"0123"),
        ("bytes=4-", 206, "bytes 4-9/10", b"456789"),
        ("bytes=-2", 206, "bytes 8-9/10", b"89"),
        ("bytes=-20", 206, "bytes 0-9/10", b"0123456789"),
        ("Bytes = 9-99", 206, "bytes 9-9/10", b"9"),
        ("bytes=10-", 416, "bytes */10", None),
        ("bytes=-0", 416, "bytes */10", None),
        ("bytes=10-12", 416, "bytes */10", None),
        ("bytes=3-2", 200, None, b"0123456789"),
        ("bytes=-", 200, None, b"0123456789"),
        ("bytes=0-1,3-4", 200, None, b"0123456789"),
        ("lines=0-1", 200, None, b"0123456789"),
        ("bytes=0-" + "9" * 30, 200, None, b"0123456789"),
        ("nonsense", 200, None, b"0123456789"),
    ],
)
async def test_ranges(wanted: str, status: int, content_range: str | None, body: bytes | None) -> None:
    async with world() as w:
        await w.put(b"0123456789")
        response = await w.ask("verifier", "GET", PATH, range=wanted)
        assert (response.status, response.headers.get("content-range")) == (status, content_range)
        if body is not None:
            assert (response.body, response.headers["etag"]) == (body, tag(b"0123456789"))


async def test_a_range_is_of_the_identity_form_and_of_the_content_it_was_meant_for() -> None:
    async with world() as w:
        await w.put(LARGE)
        part = await w.ask("verifier", "GET", PATH, range="bytes=-3", accept_encoding="gzip")
        assert (part.status, part.body) == (206, b"end")
        assert "content-encoding" not in part.headers
        for condition, status in ((tag(LARGE), 206), (tag(b""), 200), ("W/" + tag(LARGE), 200)):
            response = await w.ask("verifier", "GET", PATH, range="bytes=-3", if_range=condition)
            assert response.status == status, condition
        await w.put(b"", MORE_PATH)
        assert (await w.ask("verifier", "GET", MORE_PATH, range="bytes=0-")).status == 416


async def test_head_and_conditions() -> None:
    async with world() as w:
        assert (await w.ask("verifier", "HEAD", PATH)).status == 404
        await w.put(LARGE)
        head = await w.ask("verifier", "HEAD", PATH, range="bytes=0-1")
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(LARGE)))
        assert (head.headers["etag"], head.headers["content-type"]) == (tag(LARGE), ROWS_TYPE)
        for method in ("GET", "HEAD"):
            for known in (tag(LARGE), "*", f'"x", W/{tag(LARGE)}'):
                response = await w.ask("verifier", method, PATH, if_none_match=known, range="bytes=0-1")
                assert (response.status, response.body, response.headers["etag"]) == (304, b"", tag(LARGE))
            assert (await w.ask("verifier", method, PATH, if_none_match=tag(b""))).status == 200


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        ("br, GZIP;q=0.5", "gzip"),
        ("gzip, zstd", CODINGS[0]),
        ("zstd;q=0, gzip", "gzip"),
        ("*", "gzip"),
        ("gzip;q=0", None),
        ("gzip; q=0.000, *", None),
        ("br", None),
        ("", None),
    ],
)
async def test_a_reader_may_have_it_packed(accepted: str, coding: Coding | None) -> None:
    async with world() as w:
        await w.put(LARGE)
        response = await w.ask("verifier", "GET", PATH, accept_encoding=accepted)
        assert response.headers["etag"] == tag(LARGE)
        assert response.headers.get("content-encoding") == coding
        assert (response.body if coding is None else unpack(response.body, len(LARGE), coding)) == LARGE


async def test_a_writer_may_send_it_packed() -> None:
    async with world(CacheSettings(max_object_bytes=len(LARGE))) as w:
        packed = gzip.compress(LARGE)
        stored = await w.put(packed, content_encoding="gzip", content_digest=content_digest(packed))
        assert (stored.status, stored.headers["etag"]) == (201, tag(LARGE))
        assert (await w.ask("verifier", "GET", PATH)).body == LARGE
        assert (await w.put(LARGE)).status == 204, "the same content, however it came"
        for body, headers, status in (
            (gzip.compress(LARGE + b"x"), {"content_encoding": "gzip"}, 413),
            (packed[:-1], {"content_encoding": "gzip"}, 400),
            (packed, {"content_encoding": "br"}, 415),
            (packed, {"content_encoding": "gzip, gzip"}, 415),
            (packed, {"content_encoding": "gzip", "content_digest": content_digest(LARGE)}, 422),
        ):
            assert (await w.put(body, MORE_PATH, **headers)).status == status, headers


async def test_large_bodies_go_packed_by_reference_too_but_not_within_the_process() -> None:
    async with world() as w:
        for near, coding in (((), "gzip"), ((BASE,), None)):
            ref = ROWS if near else MORE
            drafter, sent = w.client("drafter", near)
            assert await drafter.publish(ref, LARGE, ttl_ms=30_000) == Appended(tag=tag(LARGE))
            assert sent.requests[0].headers.get("content-encoding") == coding
            verifier, got = w.client("verifier", near)
            assert await verifier.fetch(ref) == Content(octets=LARGE, tag=tag(LARGE))
            assert got.responses[0].headers.get("content-encoding") == (None if near else CODINGS[0])


async def test_without_workers_bodies_go_as_they_are() -> None:
    async with world() as w:
        spy = Spy(w.network, "drafter")
        drafter = ObjectClient(spy, CountingMeters(), [BASE])
        assert await drafter.publish(ROWS, LARGE, ttl_ms=30_000) == Appended(tag=tag(LARGE))
        assert await drafter.fetch(ROWS) == Content(octets=LARGE, tag=tag(LARGE))
        assert [len(spy.requests[0].body), len(spy.responses[1].body)] == [len(LARGE)] * 2


async def test_a_fetch_takes_no_more_than_its_limit() -> None:
    async with world() as w:
        for ref, octets in ((ROWS, LARGE), (MORE, b"x" * 100)):
            await w.client("drafter")[0].publish(ref, octets, ttl_ms=30_000)
            verifier, _ = w.client("verifier")
            assert isinstance(await verifier.fetch(ref, limit_bytes=len(octets)), Content)
            refused = await verifier.fetch(ref, limit_bytes=len(octets) - 1)
            assert isinstance(refused, StoreRefused)
            assert refused.status == 413


async def test_a_fetch_may_wait_for_the_rows(autojump_clock: MockClock) -> None:
    async with world() as w:
        verifier, spy = w.client("verifier")
        started, got = trio.current_time(), []

        async def fetch() -> None:
            got.append(await verifier.fetch(ROWS, wait_s=2.5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            await trio.sleep(1)
            await w.client("drafter")[0].publish(ROWS, b"rows", ttl_ms=1000)
        assert got == [Content(octets=b"rows", tag=tag(b"rows"))]
        assert trio.current_time() - started == pytest.approx(1)
        assert await verifier.fetch(MORE, wait_s=2.5) == Missing()
        assert trio.current_time() - started == pytest.approx(4), "whole seconds, rounded up"
        assert await verifier.fetch(MORE) == Missing()
        assert ["prefer" in request.headers for request in spy.requests] == [True, True, False]


async def test_a_lease_by_reference(autojump_clock: MockClock) -> None:
    async with world() as w:
        drafter, verifier = w.client("drafter")[0], w.client("verifier")[0]
        await drafter.publish(ROWS, b"rows", ttl_ms=1000)
        lease = await drafter.lease(BASE, [MORE, ROWS], 600_000)
        assert isinstance(lease, Leased)
        assert lease == Leased(lease=lease.lease, missed=(MORE,), ttl_ms=60_000)
        assert lease.lease is not None
        assert await drafter.lease(BASE, [MORE], 1000) == Leased(lease=None, missed=(MORE,), ttl_ms=0)
        await trio.sleep(50)
        assert await drafter.renew(lease.lease, 30_000) == Leased(lease=lease.lease, missed=(), ttl_ms=30_000)
        assert isinstance(await verifier.fetch(ROWS), Content)
        foreign = await verifier.renew(lease.lease, 1000)
        assert isinstance(foreign, StoreRefused)
        assert foreign.status == 403
        assert await drafter.release(lease.lease) == Done()
        assert await drafter.release(lease.lease) == Done()
        assert await drafter.renew(lease.lease, 1000) == Missing()
        assert await verifier.fetch(ROWS) == Missing()


async def test_a_removal_waits_for_others_leases() -> None:
    async with world() as w:
        drafter, verifier = w.client("drafter")[0], w.client("verifier")[0]
        await drafter.publish(ROWS, b"rows", ttl_ms=1000)
        lease = await verifier.lease(BASE, [ROWS], 1000)
        assert isinstance(lease, Leased)
        assert lease.lease is not None
        refused = await drafter.remove(ROWS)
        assert isinstance(refused, StoreRefused)
        assert refused.status == 423
        await verifier.release(lease.lease)
        assert await drafter.remove(ROWS) == Done()
        assert await drafter.remove(ROWS) == Done()


async def test_how_leases_are_answered() -> None:
    async with world() as w:
        await w.put(b"rows")
        body = encode(LeaseRequest(objects=(PATH, MORE_PATH), ttl_ms=5000, owner="HTTPS://h.example:443/verifier"))
        made = await w.ask("verifier", "POST", "leases", body, content_type=CACHE_TYPE)
        answer = decode(made.body, LeaseAnswer)
        assert (made.status, made.headers["location"]) == (201, f"leases/{answer.lease}")
        assert answer == LeaseAnswer(lease=answer.lease, ttl_ms=5000, missed=(MORE_PATH,))
        path = made.headers["location"]
        renewed = await w.ask(
            "verifier", "PUT", path, encode(LeaseRenewal(ttl_ms=9000)), content_type=f"{CACHE_TYPE}; x=1"
        )
        assert (renewed.status, decode(renewed.body, LeaseAnswer)) == (
            200,
            LeaseAnswer(lease=answer.lease, ttl_ms=9000),
        )
        assert (await w.ask("verifier", "DELETE", path)).status == 204
        assert (await w.ask("verifier", "DELETE", path)).status == 204
        none = await w.ask(
            "verifier", "POST", "leases", encode(LeaseRequest(objects=(MORE_PATH,), ttl_ms=1)), content_type=CACHE_TYPE
        )
        assert (none.status, decode(none.body, LeaseAnswer)) == (200, LeaseAnswer(ttl_ms=0, missed=(MORE_PATH,)))


LEASE = encode(LeaseRequest(objects=(PATH,), ttl_ms=1))


@pytest.mark.parametrize(
    ("method", "path", "body", "content_type", "status"),
    [
        ("POST", "leases", LEASE, "application/sdcp+cbor", 415),
        ("POST", "leases", LEASE + b"\0", CACHE_TYPE, 400),
        ("POST", "leases", b"\xa0", CACHE_TYPE, 400),
        ("POST", "leases", encode(LeaseRequest(objects=(), ttl_ms=1)), CACHE_TYPE, 400),
        ("POST", "leases", encode(LeaseRequest(objects=("v1/s/-/x",), ttl_ms=1)), CACHE_TYPE, 400),
        (
            "POST",
            "leases",
            encode(LeaseRequest(objects=("v1/s/-/l/" + PATH.split("/")[4],), ttl_ms=1)),
            CACHE_TYPE,
            400,
        ),
        ("POST", "leases", encode(LeaseRequest(objects=(PATH,) * 129, ttl_ms=1)), CACHE_TYPE, 413),
        ("POST", "leases", encode(LeaseRequest(objects=(PATH,), ttl_ms=1, owner="x")), CACHE_TYPE, 400),
        (
            "POST",
            "leases",
            encode(LeaseRequest(objects=(PATH,), ttl_ms=1, owner="https://h.example/drafter/")),
            CACHE_TYPE,
            403,
        ),
        ("POST", "leases", bytes(17 << 10), CACHE_TYPE, 413),
        ("PUT", "leases/x", encode(LeaseRenewal(ttl_ms=1)), CACHE_TYPE, 404),
        ("PUT", "leases/x", b"\xa1\x66ttl_ms\x20", CACHE_TYPE, 400),
        ("GET", "leases/x", b"", CACHE_TYPE, 405),
        ("GET", "leases", b"", CACHE_TYPE, 405),
    ],
)
async def test_leases_that_are_not_taken(method: str, path: str, body: bytes, content_type: str, status: int) -> None:
    async with world() as w:
        await w.put(b"rows")
        assert (await w.ask("verifier", method, path, body, content_type=content_type)).status == status


@pytest.mark.parametrize("caller", PEERS)
async def test_who_may_come_at_all(caller: str) -> None:
    async with world() as w:
        for method, path in (
            ("PUT", PATH),
            ("GET", PATH),
            ("HEAD", PATH),
            ("POST", "leases"),
            ("PUT", "leases/x"),
            ("DELETE", "leases/x"),
        ):
            allowed = caller in ("router", "verifier", "drafter")
            assert ((await w.ask(caller, method, path)).status != 403) == allowed, (method, path)


async def test_leases_are_only_asked_of_known_caches_for_their_own_objects() -> None:
    async with world() as w:
        drafter, spy = w.client("drafter")
        elsewhere = object_reference("https://e.example/cache/", None, SESSION, 1, 1, ObjectKind.Q)
        for outcome, status in (
            (await drafter.lease("https://e.example/cache/", [elsewhere], 1), 403),
            (await drafter.lease("nonsense", [], 1), 400),
            (await drafter.lease(BASE, [elsewhere], 1), 403),
            (await drafter.lease(OTHER, [ROWS], 1), 400),
            (await drafter.lease(BASE, [log_reference(BASE, None, SESSION)], 1), 400),
            (await drafter.renew("https://e.example/cache/leases/x", 1), 403),
            (await drafter.renew(BASE + "leases/", 1), 400),
            (await drafter.release(BASE + "leases/../x"), 400),
            (await drafter.remove(log_reference(BASE, None, SESSION)), 400),
        ):
            assert isinstance(outcome, StoreRefused), outcome
            assert outcome.status == status
        assert spy.requests == []


@pytest.mark.parametrize(
    ("response", "leased", "renewed", "removed", "read"),
    [
        (TransportError("gone"), Unreachable, Unreachable, Unreachable, Unreachable),
        (Response(status=500), Unreachable, Unreachable, Unreachable, Unreachable),
        (Response(status=503), StoreRefused, StoreRefused, StoreRefused, StoreRefused),
        (Response(status=404), StoreRefused, Missing, Done, Missing),
        (Response(status=200), Unreachable, Unreachable, Done, Unreachable),
        (Response(status=201, body=encode(LeaseAnswer(ttl_ms=1))), Unreachable, Unreachable, Done, StoreRefused),
        (Response(status=201, body=b"\xa2\x65lease\x62..\x66ttl_ms\x01"), Unreachable, Unreachable, Done, StoreRefused),
        (Response(status=201, body=encode(LeaseAnswer(lease="x", ttl_ms=1))), Leased, Leased, Done, StoreRefused),
        (Response(status=200, headers={"content-encoding": "br"}), Unreachable, Unreachable, Done, Unreachable),
        (Response(status=200, headers={"content-encoding": "gzip"}), Unreachable, Unreachable, Done, Unreachable),
    ],
)
async def test_every_end_of_an_exchange_has_its_outcome(
    response: Response | TransportError, leased: type, renewed: type, removed: type, read: type
) -> None:
    class Scripted:
        async def exchange(self, base_uri: str, request: Request) -> Response:
            if isinstance(response, TransportError):
                raise response
            return response

    client = ObjectClient(Scripted(), CountingMeters(), [BASE])
    assert isinstance(await client.lease(BASE, [ROWS], 1), leased)
    assert isinstance(await client.renew(BASE + "leases/x", 1), renewed)
    assert isinstance(await client.release(BASE + "leases/x"), removed)
    assert isinstance(await client.remove(ROWS), removed)
    outcome: ReadOutcome = await client.fetch(ROWS)
    assert isinstance(outcome, read)


async def test_over_http_2(autojump_clock: MockClock) -> None:
    """A body of several frames, none for HEAD and 304 whatever length they tell, and waits beside other requests."""
    settings, meters = CacheSettings(), CountingMeters()
    cache = ObjectCache(settings, ports(meters))
    async with memory_world(object_cache_dispatcher(cache, settings, meters).handle) as wire:
        client = ObjectClient(wire.transport, meters, [MEMORY_BASE], workers=InlineWorkers())
        rows = object_reference(MEMORY_BASE, None, SESSION, 1, 1, ObjectKind.Q)
        noise = random.Random(1).randbytes(300_000)
        got: list[ReadOutcome] = []

        async def fetch() -> None:
            got.append(await client.fetch(rows, wait_s=10))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            await trio.sleep(1)
            assert not got
            assert await client.publish(rows, noise, ttl_ms=30_000) == Appended(tag=tag(noise))
        assert got == [Content(octets=noise, tag=tag(noise))]
        head = await wire.ask(Request("HEAD", PATH))
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "300000")
        known = await wire.ask(Request("GET", PATH, headers={"if-none-match": tag(noise)}))
        assert (known.status, known.body, "content-length" in known.headers) == (304, b"", False)
        part = await wire.ask(Request("GET", PATH, headers={"range": "bytes=1-2"}))
        assert (part.status, part.body, part.headers["content-length"]) == (206, noise[1:3], "2")
        leased = await client.lease(MEMORY_BASE, [rows], 1000)
        assert isinstance(leased, Leased)
        assert leased.lease is not None
        assert await client.release(leased.lease) == Done()
        assert wire.failures == []


async def test_many_wait_while_others_are_served() -> None:
    async with world(CacheSettings(max_waiting_object_reads=1)) as w:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.client("verifier")[0].fetch, ROWS, 20.0)
            await wait_all_tasks_blocked()
            refused = await w.client("verifier")[0].fetch(ROWS, 20.0)
            assert isinstance(refused, StoreRefused)
            assert refused.status == 503
            await w.put(b"rows")


async def test_an_answer_says_where_it_was_and_for_how_long(autojump_clock: MockClock) -> None:
    """5.3, Read: "Response tells tier and age"."""
    async with world() as w:
        await w.put(LARGE)
        await trio.sleep(7.5)
        for method, wanted in (("GET", ""), ("HEAD", ""), ("GET", "bytes=0-1")):
            found = await w.ask("verifier", method, PATH, range=wanted)
            assert (found.headers["kvsp-tier"], found.headers["age"]) == ("host", "7")


@pytest.mark.parametrize(
    ("wish", "status"),
    [
        ({"kvsp_class": "object", "kvsp_tier": "host", "kvsp_replicas": "1"}, 201),
        ({"kvsp_class": "block"}, 400),
        ({"kvsp_tier": "disk"}, 501),
        ({"kvsp_pin": "hard"}, 501),
        ({"kvsp_replicas": "2"}, 501),
    ],
)
async def test_wishes_are_honoured_or_refused(wish: dict[str, str], status: int) -> None:
    """5.3, Placement: "pins are honoured or refused, never silently dropped"."""
    async with world() as w:
        assert (await w.put(b"rows", **wish)).status == status


async def test_a_removal_may_name_the_content() -> None:
    """5.3, Delete: "`DELETE`, optional `If-Match`; 204, idempotent (404 counts as done)"."""
    async with world() as w:
        await w.put(b"rows")
        assert (await w.ask("drafter", "DELETE", PATH, if_match=tag(b"other"))).status == 412
        assert (await w.ask("drafter", "DELETE", PATH, if_match="W/" + tag(b"rows"))).status == 412
        assert (await w.ask("drafter", "DELETE", PATH, if_match="rows")).status == 400
        assert (await w.ask("drafter", "DELETE", PATH, if_match=tag(b"rows"))).status == 204
        assert (await w.ask("drafter", "DELETE", PATH, if_match=tag(b"rows"))).status == 204


def batch(*items: BatchItem) -> bytes:
    return encode(BatchRequest(items=items))


async def test_a_batch_carries_out_each_of_its_items() -> None:
    """5.3, Batch: "get, put, exists on many names; per-item status; no cross-item atomicity"."""
    tokens = TOKENS.removeprefix(BASE)
    items = (
        BatchItem(op="put", name=PATH, octets=b"rows", ttl_ms=5000),
        BatchItem(op="put", name=PATH, octets=b"other"),
        BatchItem(op="get", name=PATH),
        BatchItem(op="exists", name=PATH),
        BatchItem(op="exists", name=MORE_PATH),
        BatchItem(op="put", name=tokens, octets=b"\x80"),
        BatchItem(op="get", name="v1/s/-/l/AAAAAAAAAAAAAAAAAAAAAA"),
        BatchItem(op="get", name="nonsense"),
    )
    async with world() as w:
        answered = await w.ask("drafter", "POST", "batch", batch(*items), content_type=CACHE_TYPE)
        results = decode(answered.body, BatchAnswer).results
        assert [one.status for one in results] == [201, 412, 200, 200, 404, 403, 404, 404]
        assert (results[2].octets, results[2].tag) == (b"rows", tag(b"rows"))
        assert results[3].octets is UNSET
        for role, status in (("operator", 403), ("client", 403), ("router", 200), ("verifier", 200)):
            assert (await w.ask(role, "POST", "batch", batch(), content_type=CACHE_TYPE)).status == status


async def test_a_batch_is_bounded() -> None:
    async with world() as w:
        many = batch(*[BatchItem(op="exists", name=PATH)] * (ITEMS_LIMIT + 1))
        assert (await w.ask("router", "POST", "batch", many, content_type=CACHE_TYPE)).status == 413
        await w.put(bytes(BATCH_LIMIT_BYTES - 10))
        gets = batch(*[BatchItem(op="get", name=PATH)] * 2)
        answered = await w.ask("verifier", "POST", "batch", gets, content_type=CACHE_TYPE)
        assert [one.status for one in decode(answered.body, BatchAnswer).results] == [200, 413]
        assert (await w.ask("router", "POST", "batch", batch(), content_type="text/plain")).status == 415


async def test_a_scope_is_purged_by_operators() -> None:
    """5.3, Purge. What a lease holds goes only by force, and what is in another scope stays."""
    scope = bytes(range(16, 32))
    ours, theirs = (object_reference(BASE, each, SESSION, 1, 1, ObjectKind.Q) for each in (scope, None))
    async with world() as w:
        drafter = w.client("drafter")[0]
        for ref in (ours, theirs):
            await drafter.publish(ref, b"rows", ttl_ms=10_000)
        await w.client("verifier")[0].lease(BASE, [ours], 5000)
        place = scope_path(scope)
        for role, query, status in (
            ("router", "", 403),
            ("operator", "", 423),
            ("operator", "force=2", 400),
            ("operator", "force=1", 200),
            ("operator", "", 200),
        ):
            purge = Request("DELETE", place, query)
            answered = await w.network.transport(PEERS[role]).exchange(BASE, purge)
            assert answered.status == status, (role, query)
            if status == 200:
                gone = 1 if query else 0
                assert decode(answered.body, PurgeAnswer) == PurgeAnswer(objects=gone, blocks=0, logs=0, records=0)
        assert await w.client("verifier")[0].fetch(ours) == Missing()
        assert isinstance(await w.client("verifier")[0].fetch(theirs), Content)
        assert (await w.ask("operator", "DELETE", "v1/s/nonsense")).status == 404
