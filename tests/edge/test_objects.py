"""Logs and objects by reference: the client, dispatch and the real cache role on a simulated disk (draft 6.8)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio

from sdcpd.cache.refs import ObjectKind, log_reference, object_reference, record_reference
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.cache_messages import CACHE_TYPE
from sdcpd.edge.cache_routes import LOG_TYPE
from sdcpd.edge.dispatch import cache_dispatcher
from sdcpd.edge.http_fields import content_digest
from sdcpd.edge.object_routes import TOKENS_TYPE
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.transport import LoopbackNetwork, Request, Response, TransportError
from sdcpd.protocol.commit_log import log_tag
from sdcpd.roles.cache import Cache
from sdcpd.roles.ports import (
    Appended,
    BelowFence,
    Content,
    Done,
    Listed,
    ListedRecord,
    Missing,
    Objects,
    Peers,
    Ports,
    StoreRefused,
    TagMismatch,
    Unreachable,
)
from tests.cache.log_tools import EMPTY, commit, end, fence
from tests.cache.sim_disk import SimDisk
from tests.edge.services import PEERS
from tests.support.ports import CountingMeters, InlineWorkers, MemoryLogs, RecordedPeers, SeededRandomness, TrioClock

BASE = "https://c.example/cache/"
SESSION = bytes(range(16))
LOG = log_reference(BASE, None, SESSION)
TOKENS = object_reference(BASE, None, SESSION, 1, 0, ObjectKind.TOKENS)
RECORD = record_reference(BASE, None, SESSION)
RECORD_PATH = RECORD.removeprefix(BASE)
LOG_PATH, TOKENS_PATH = LOG.removeprefix(BASE), TOKENS.removeprefix(BASE)


class World:
    def __init__(self, disk: SimDisk, network: LoopbackNetwork) -> None:
        self.disk, self.network = disk, network

    def objects(self, role: str) -> Objects:
        return ObjectClient(self.network.transport(PEERS[role]), CountingMeters(), [BASE])

    async def ask(self, role: str, method: str, path: str, body: bytes = b"", **headers: str) -> Response:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        request = Request(method=method, path=path, body=body, headers=fields)
        return await self.network.transport(PEERS[role]).exchange(BASE, request)


@asynccontextmanager
async def world(disk: SimDisk | None = None, settings: CacheSettings | None = None) -> AsyncIterator[World]:
    disk, settings, meters = disk or SimDisk(), settings or CacheSettings(), CountingMeters()
    ports = Ports(
        clock=TrioClock(),
        randomness=SeededRandomness(),
        workers=InlineWorkers(),
        meters=meters,
        peers=cast(Peers, RecordedPeers()),
        objects=MemoryLogs(),
    )
    cache, network = Cache(settings, ports, disk), LoopbackNetwork()
    network.serve(BASE, cache_dispatcher(cache, settings, meters).handle)
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        yield World(disk, network)
        nursery.cancel_scope.cancel()


async def test_a_log_by_reference() -> None:
    async with world() as w:
        verifier, router = w.objects("verifier"), w.objects("router")
        assert await verifier.read_log(LOG) == Missing()
        assert await verifier.create_log(LOG, 1) == Appended(tag=EMPTY)
        assert await verifier.create_log(LOG, 1) == TagMismatch()
        first = commit(1, 1)
        assert await verifier.append(LOG, first, epoch=1, if_match=EMPTY) == Appended(tag=log_tag([first]))
        assert await verifier.append(LOG, first, epoch=1, if_match=EMPTY) == TagMismatch(), "bug 22"
        assert await router.read_log(LOG) == Content(octets=first, tag=log_tag([first]))
        assert isinstance(await router.append(LOG, fence(2), epoch=2, if_match=log_tag([first])), Appended)
        late = commit(1, 2)
        assert await verifier.append(LOG, late, epoch=1, if_match=log_tag([first])) == BelowFence()
        assert await verifier.append(LOG, late, epoch=1, if_match=log_tag([first, fence(2)])) == BelowFence()
        assert isinstance(await router.append(LOG, end(2), epoch=2, if_match=log_tag([first, fence(2)])), Appended)
    async with world(w.disk) as again:
        assert await again.objects("router").read_log(LOG) == Content(
            octets=first + fence(2) + end(2), tag=log_tag([first, fence(2), end(2)])
        )


async def test_a_router_fences_a_log_that_was_never_created() -> None:
    """Decision 86."""
    async with world() as w:
        client = ObjectClient(w.network.transport(PEERS["router"]), CountingMeters(), [BASE])
        assert await client.create_log(LOG, 2, fence(2)) == Appended(tag=log_tag([fence(2)]))
        assert await w.objects("verifier").create_log(LOG, 1) == TagMismatch()


async def test_an_append_to_a_log_that_is_gone_sends_the_writer_to_read() -> None:
    async with world() as w:
        assert await w.objects("verifier").append(LOG, commit(1, 1), epoch=1, if_match=EMPTY) == TagMismatch()
        assert await w.objects("verifier").read_log(LOG) == Missing()


async def test_a_directory_record_by_reference() -> None:
    """Decision 106: written before session-open and before each change of verifier, read back by a restarted router."""
    async with world() as w:
        router = w.objects("router")
        assert await router.read_record(RECORD) == Missing()
        assert await router.write_record(RECORD, b"one", log_tag([b"zero"])) == TagMismatch()
        first = Appended(tag=log_tag([b"one"]))
        assert await router.write_record(RECORD, b"one", None) == first
        assert await router.write_record(RECORD, b"one", None) == first, "a lost answer is settled by asking again"
        assert await router.write_record(RECORD, b"two", None) == TagMismatch()
        assert await router.write_record(RECORD, b"two", first.tag) == Appended(tag=log_tag([b"two"]))
        assert await router.write_record(RECORD, b"three", first.tag) == TagMismatch()
    async with world(w.disk) as again:
        router = again.objects("router")
        assert await router.read_record(RECORD) == Content(octets=b"two", tag=log_tag([b"two"]))
        listed = ListedRecord(session=SESSION, tag=log_tag([b"two"]))
        assert await router.list_records(BASE, None) == Listed(records=(listed,), more=False)
        assert await router.list_records(BASE, None, SESSION) == Listed(records=(), more=False)
        assert await router.list_records(BASE, SESSION) == Listed(records=(), more=False)
        assert await router.remove_record(RECORD) == Done()
        assert await router.remove_record(RECORD) == Done()
        for outcome, status in (
            (await again.objects("verifier").read_record(RECORD), 403),
            (await again.objects("verifier").list_records(BASE, None), 403),
            (await again.objects("drafter").write_record(RECORD, b"x", None), 403),
            (await router.write_record(RECORD, bytes(5 << 20), None), 413),
            (await router.list_records("https://e.example/cache/", None), 403),
            (await router.read_record(LOG), 400),
        ):
            assert isinstance(outcome, StoreRefused), outcome
            assert outcome.status == status


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("PUT", "v1/s/-/d/short", {"content_type": CACHE_TYPE, "if_none_match": "*"}, 404),
        ("GET", "v1/s/short/d", {}, 404),
        ("POST", "v1/s/-/d", {}, 405),
        ("PATCH", RECORD_PATH, {}, 405),
        ("PUT", RECORD_PATH, {"content_type": LOG_TYPE, "if_none_match": "*"}, 415),
        ("PUT", RECORD_PATH, {"content_type": CACHE_TYPE}, 400),
        ("PUT", RECORD_PATH, {"content_type": CACHE_TYPE, "if_match": "*"}, 400),
        ("PUT", RECORD_PATH, {"content_type": CACHE_TYPE, "if_none_match": "*", "if_match": EMPTY}, 400),
        ("PUT", RECORD_PATH, {"content_type": CACHE_TYPE, "if_match": EMPTY}, 404),
        (
            "PUT",
            RECORD_PATH,
            {"content_type": CACHE_TYPE, "if_none_match": "*", "content_digest": content_digest(b"")},
            422,
        ),
    ],
)
async def test_records_that_the_cache_does_not_take(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    async with world() as w:
        body = b"" if method == "GET" else b"x"
        assert (await w.ask("router", method, path, body, **headers)).status == status
        assert await w.objects("router").list_records(BASE, None) == Listed(records=(), more=False)


@pytest.mark.parametrize("query", ["after=x", "after=", f"after={LOG_PATH.split('/')[-1]}&after=x", "a&" * 99])
async def test_a_page_that_begins_behind_no_session(query: str) -> None:
    async with world() as w:
        request = Request(method="GET", path="v1/s/-/d", query=query)
        assert (await w.network.transport(PEERS["router"]).exchange(BASE, request)).status == 400


@pytest.mark.parametrize(
    ("response", "written", "listed"),
    [
        (Response(status=201, headers={"etag": '"a"'}), Appended(tag='"a"'), StoreRefused),
        (Response(status=404), TagMismatch(), StoreRefused),
        (Response(status=412), TagMismatch(), StoreRefused),
        (Response(status=409), StoreRefused, StoreRefused),
        (Response(status=409, body=b'{"type": "x#sdcp-stale-epoch"}'), StoreRefused, StoreRefused),
        (Response(status=500), Unreachable, Unreachable),
        (Response(status=507), StoreRefused, StoreRefused),
        (Response(status=200), Unreachable, Unreachable),
        (Response(status=200, body=b"\xa2\x64more\xf5\x67records\x80"), Unreachable, Unreachable),
        (Response(status=200, body=b"\xa2\x64more\xf4\x67records\x80"), Unreachable, Listed(records=(), more=False)),
        (TransportError("gone"), Unreachable(reason="gone"), Unreachable(reason="gone")),
    ],
)
async def test_every_end_of_an_exchange_about_records(
    response: Response | TransportError, written: object, listed: object
) -> None:
    class Scripted:
        async def exchange(self, base_uri: str, request: Request) -> Response:
            if isinstance(response, TransportError):
                raise response
            return response

    client = ObjectClient(Scripted(), CountingMeters(), [BASE])
    for outcome, expected in (
        (await client.write_record(RECORD, b"x", None), written),
        (await client.list_records(BASE, None), listed),
    ):
        assert isinstance(outcome, expected) if isinstance(expected, type) else outcome == expected, outcome


async def test_an_object_by_reference() -> None:
    async with world() as w:
        router, drafter = w.objects("router"), w.objects("drafter")
        assert await drafter.fetch(TOKENS) == Missing()
        published = await router.publish(TOKENS, b"\x82\x01\x02", ttl_ms=30_500)
        assert isinstance(published, Appended)
        assert await router.publish(TOKENS, b"\x82\x01\x02", ttl_ms=30_500) == published
        assert await router.publish(TOKENS, b"\x82\x01\x03", ttl_ms=30_500) == TagMismatch()
        assert await drafter.fetch(TOKENS) == Content(octets=b"\x82\x01\x02", tag=published.tag)


async def test_what_the_store_refuses() -> None:
    async with world() as w:
        drafter = w.objects("drafter")
        for outcome in (
            await drafter.create_log(LOG, 1),
            await drafter.append(LOG, commit(1, 1), epoch=1, if_match=EMPTY),
            await drafter.read_log(LOG),
            await drafter.publish(TOKENS, b"\x80", ttl_ms=1),
        ):
            assert isinstance(outcome, StoreRefused)
            assert outcome.status == 403
        verifier = w.objects("verifier")
        await verifier.create_log(LOG, 1)
        w.disk.capacity_bytes = w.disk.used_bytes
        full = await verifier.append(LOG, commit(1, 1), epoch=1, if_match=EMPTY)
        assert isinstance(full, StoreRefused)
        assert full.status == 507
        w.disk.capacity_bytes = None
        w.disk.fail_sync = lambda name: True
        unknown = await verifier.append(LOG, commit(1, 1), epoch=1, if_match=EMPTY)
        assert isinstance(unknown, Unreachable), "a failed sync may or may not have stored it"
        stopped = await verifier.append(LOG, commit(1, 1), epoch=1, if_match=EMPTY)
        assert isinstance(stopped, StoreRefused)
        assert stopped.status == 503


@pytest.mark.parametrize(
    ("ref", "status"),
    [
        ("https://elsewhere.example/cache/" + LOG_PATH, 403),
        ("https://c.example/other/" + LOG_PATH, 403),
        ("http://c.example/cache/" + LOG_PATH, 403),
        ("https://c.example:8443/cache/" + LOG_PATH, 403),
        ("https://c.example/cache/v1/s/-/x/y", 400),
        ("file:///etc/passwd", 400),
        ("", 400),
        (TOKENS, 400),
    ],
)
async def test_a_reference_is_only_followed_to_a_known_cache(ref: str, status: int) -> None:
    """Decision 21: "a verifier that fetches any URI is an SSRF tool"."""
    asked: list[str] = []

    class Spy:
        async def exchange(self, base_uri: str, request: Request) -> Response:
            asked.append(base_uri)
            return Response(status=404)

    client = ObjectClient(Spy(), CountingMeters(), ["https://c.example/cache"])
    for outcome in (
        await client.create_log(ref, 1),
        await client.append(ref, commit(1, 1), epoch=1, if_match=EMPTY),
        await client.read_log(ref),
    ):
        assert isinstance(outcome, StoreRefused)
        assert outcome.status == status
    if ref != TOKENS:
        for outcome in (await client.fetch(ref), await client.publish(ref, b"\x80", ttl_ms=1)):
            assert isinstance(outcome, StoreRefused)
            assert outcome.status == status
    assert asked == []


@pytest.mark.parametrize(
    ("response", "written", "read"),
    [
        (Response(status=201, headers={"etag": '"a"'}), Appended(tag='"a"'), None),
        (Response(status=204, headers={"etag": 'W/"a"'}), Unreachable, None),
        (Response(status=204), Unreachable, None),
        (Response(status=412), TagMismatch(), StoreRefused),
        (Response(status=409), StoreRefused, StoreRefused),
        (Response(status=409, body=b'{"type": "x#sdcp-stale-epoch"}'), BelowFence(), StoreRefused),
        (Response(status=409, body=b'{"type": "x#sdcp-stale-base"}'), StoreRefused, StoreRefused),
        (Response(status=400), StoreRefused, StoreRefused),
        (Response(status=413), StoreRefused, StoreRefused),
        (Response(status=429), StoreRefused, StoreRefused),
        (Response(status=500), Unreachable, Unreachable),
        (Response(status=502), Unreachable, Unreachable),
        (Response(status=503), StoreRefused, StoreRefused),
        (Response(status=504), Unreachable, Unreachable),
        (Response(status=507), StoreRefused, StoreRefused),
        (Response(status=302), StoreRefused, StoreRefused),
        (Response(status=200, headers={"etag": EMPTY}, body=b"x"), Appended(tag=EMPTY), Unreachable),
        (Response(status=200, body=b"x"), Unreachable, Unreachable),
        (Response(status=206, headers={"etag": EMPTY}), Appended(tag=EMPTY), StoreRefused),
        (Response(status=200, headers={"etag": EMPTY}), Appended(tag=EMPTY), Content(octets=b"", tag=EMPTY)),
        (TransportError("gone"), Unreachable(reason="gone"), Unreachable(reason="gone")),
    ],
)
async def test_every_end_of_an_exchange_has_its_outcome(
    response: Response | TransportError, written: object, read: object
) -> None:
    class Scripted:
        async def exchange(self, base_uri: str, request: Request) -> Response:
            if isinstance(response, TransportError):
                raise response
            return response

    def fits(outcome: object, expected: object) -> bool:
        return isinstance(outcome, expected) if isinstance(expected, type) else outcome == expected

    client = ObjectClient(Scripted(), CountingMeters(), [BASE])
    for outcome in (
        await client.create_log(LOG, 1),
        await client.append(LOG, commit(1, 1), epoch=1, if_match=EMPTY),
        await client.publish(TOKENS, b"\x80", ttl_ms=1),
    ):
        assert fits(outcome, written), outcome
    if read is not None:
        for content in (await client.read_log(LOG), await client.fetch(TOKENS)):
            assert fits(content, read), content


# The operations over HTTP themselves


async def test_how_the_cache_answers() -> None:
    async with world() as w:
        epoch = {"kvsp_epoch": "1"}
        created = await w.ask("verifier", "PUT", LOG_PATH, b"", if_none_match="*", **epoch)
        assert (created.status, created.headers["etag"], created.body) == (201, EMPTY, b"")
        first, second = commit(1, 1), commit(1, 2)
        appended = await w.ask("verifier", "PATCH", LOG_PATH, first, if_match=EMPTY, content_type=LOG_TYPE, **epoch)
        assert (appended.status, appended.headers["etag"]) == (204, log_tag([first]))
        put = await w.ask(
            "verifier", "PUT", LOG_PATH, first + second, if_match=log_tag([first]), content_type=LOG_TYPE, **epoch
        )
        assert (put.status, put.headers["etag"]) == (204, log_tag([first, second]))
        read = await w.ask("router", "GET", LOG_PATH)
        assert (read.status, read.headers["content-type"], read.body) == (200, LOG_TYPE, first + second)
        assert (await w.ask("operator", "DELETE", LOG_PATH)).status == 204
        assert (await w.ask("operator", "DELETE", LOG_PATH)).status == 204
        assert (await w.ask("router", "GET", LOG_PATH)).status == 404
        tokens = {"content_type": TOKENS_TYPE, "if_none_match": "*", "ttl": "30"}
        good = await w.ask("router", "PUT", TOKENS_PATH, b"\x80", content_digest=content_digest(b"\x80"), **tokens)
        assert good.status == 201
        assert (await w.ask("router", "PUT", TOKENS_PATH, b"\x80", **tokens)).status == 204
        assert (await w.ask("router", "PUT", TOKENS_PATH, b"\x81\x01", **tokens)).status == 412
        assert (await w.ask("drafter", "GET", TOKENS_PATH)).headers["content-type"] == TOKENS_TYPE
        assert (await w.ask("router", "DELETE", TOKENS_PATH)).status == 204
        for response in (created, appended, put, read, good):
            assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("PATCH", LOG_PATH, {"content_type": LOG_TYPE, "kvsp_epoch": "1"}, 400),
        ("PATCH", LOG_PATH, {"content_type": LOG_TYPE, "if_match": EMPTY}, 400),
        ("PATCH", LOG_PATH, {"content_type": LOG_TYPE, "if_match": EMPTY, "kvsp_epoch": "-1"}, 400),
        ("PATCH", LOG_PATH, {"content_type": LOG_TYPE, "if_match": EMPTY, "kvsp_epoch": "2"}, 400),
        ("PATCH", LOG_PATH, {"content_type": LOG_TYPE, "if_match": "*", "kvsp_epoch": "1"}, 400),
        ("PATCH", LOG_PATH, {"content_type": LOG_TYPE, "if_match": EMPTY + ", " + EMPTY, "kvsp_epoch": "1"}, 400),
        ("PATCH", LOG_PATH, {"content_type": LOG_TYPE, "if_match": EMPTY.strip('"'), "kvsp_epoch": "1"}, 400),
        ("PATCH", LOG_PATH, {"content_type": LOG_TYPE, "if_match": "W/" + EMPTY, "kvsp_epoch": "1"}, 412),
        ("PATCH", LOG_PATH, {"content_type": TOKENS_TYPE, "if_match": EMPTY, "kvsp_epoch": "1"}, 415),
        ("PUT", LOG_PATH, {"content_type": LOG_TYPE, "kvsp_epoch": "1"}, 400),
        ("PUT", LOG_PATH, {"content_type": LOG_TYPE, "if_none_match": '"x"', "kvsp_epoch": "1"}, 400),
        ("PUT", LOG_PATH, {"content_type": LOG_TYPE, "if_none_match": "*", "if_match": EMPTY, "kvsp_epoch": "1"}, 400),
        ("PUT", LOG_PATH, {"content_type": LOG_TYPE, "if_none_match": "*"}, 400),
        ("PUT", LOG_PATH, {"content_type": LOG_TYPE, "if_none_match": "*", "kvsp_epoch": "1"}, 412),
        ("PUT", LOG_PATH, {"if_match": EMPTY, "kvsp_epoch": "1"}, 415),
        (
            "PATCH",
            LOG_PATH,
            {"content_type": LOG_TYPE, "if_match": EMPTY, "kvsp_epoch": "1", "content_digest": content_digest(b"")},
            422,
        ),
        ("POST", LOG_PATH, {}, 405),
        ("PATCH", TOKENS_PATH, {}, 405),
        ("PUT", TOKENS_PATH, {"content_type": TOKENS_TYPE}, 400),
        ("PUT", TOKENS_PATH, {"content_type": "application/json", "if_none_match": "*"}, 415),
        ("PUT", TOKENS_PATH, {"content_type": TOKENS_TYPE, "if_none_match": "*", "ttl": "soon"}, 400),
        ("PUT", "v1/s/-/l/short", {"content_type": LOG_TYPE, "if_none_match": "*", "kvsp_epoch": "1"}, 404),
        ("PUT", LOG_PATH + "/x", {}, 404),
        ("POST", "v1/leases", {}, 404),
    ],
)
async def test_requests_that_the_cache_does_not_take(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    async with world() as w:
        await w.objects("verifier").create_log(LOG, 1)
        role = "router" if path == TOKENS_PATH else "verifier"
        assert (await w.ask(role, method, path, commit(1, 1), **headers)).status == status
        assert await w.objects("router").read_log(LOG) == Content(octets=b"", tag=EMPTY)
        assert await w.objects("router").fetch(TOKENS) == Missing()


async def test_bodies_over_their_limit() -> None:
    settings = CacheSettings(max_record_bytes=1024, max_object_bytes=1024)
    async with world(settings=settings) as w:
        await w.objects("verifier").create_log(LOG, 1)
        headers = {"content_type": LOG_TYPE, "if_match": EMPTY, "kvsp_epoch": "1"}
        long = commit(1, 1, *range(1000))
        assert (await w.ask("verifier", "PATCH", LOG_PATH, long, **headers)).status == 413
        assert (await w.ask("verifier", "PATCH", LOG_PATH, bytes(5000), **headers)).status == 413
        assert (await w.ask("verifier", "PUT", LOG_PATH, bytes(17 << 20), **headers)).status == 413
        assert (
            await w.ask("router", "PUT", TOKENS_PATH, bytes(1025), content_type=TOKENS_TYPE, if_none_match="*")
        ).status == 413


@pytest.mark.parametrize("caller", PEERS)
async def test_who_may_come_at_all(caller: str) -> None:
    """Decision 112; which records and kinds it is then, is the role's check (tests/roles/test_cache.py)."""
    async with world() as w:
        statuses = {
            (method, what): (await w.ask(caller, method, path)).status
            for what, path in (
                ("log", LOG_PATH),
                ("object", TOKENS_PATH),
                ("record", RECORD_PATH),
                ("list", "v1/s/-/d"),
            )
            for method in ("PUT", "PATCH", "GET", "DELETE")
        }
        log_writer = caller in ("verifier", "router")
        object_peer = caller in ("verifier", "router", "drafter")
        assert (statuses["PUT", "log"] != 403) == log_writer
        assert (statuses["PATCH", "log"] != 403) == log_writer
        assert (statuses["GET", "log"] != 403) == log_writer
        assert (statuses["DELETE", "log"] != 403) == (caller == "operator")
        assert (statuses["PUT", "object"] != 403) == object_peer
        assert (statuses["GET", "object"] != 403) == object_peer
        assert (statuses["DELETE", "object"] != 403) == (caller in ("router", "operator"))
        for what in (("PUT", "record"), ("GET", "record"), ("GET", "list")):
            assert (statuses[what] != 403) == (caller == "router"), what
        assert (statuses["DELETE", "record"] != 403) == (caller in ("router", "operator"))
