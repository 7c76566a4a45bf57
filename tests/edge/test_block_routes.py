"""KV blocks over HTTP: each answer of the table in cache part 5.3; tenants kept apart; only caches that were named."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio
from msgspec import UNSET
from trio.testing import MockClock

from sdcpd.cache.bandwidth import ASSUMED_MBPS, Bandwidth
from sdcpd.cache.block_file import write_block
from sdcpd.cache.block_index import Pin
from sdcpd.cache.block_orders import Tier
from sdcpd.cache.blocks import extend
from sdcpd.cache.refs import BlockName, ObjectKind, block_reference, object_reference, scope_path
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.block_routes import BLOCK_TYPE
from sdcpd.edge.cache_messages import (
    CACHE_TYPE,
    BatchAnswer,
    BatchItem,
    BatchRequest,
    CacheStats,
    LeaseAnswer,
    LeaseRenewal,
    LeaseRequest,
    LookupAnswer,
    LookupRequest,
    PurgeAnswer,
)
from sdcpd.edge.dispatch import object_cache_dispatcher
from sdcpd.edge.http_fields import content_digest
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.transport import LoopbackNetwork, Request, Response
from sdcpd.protocol.encoding import decode, encode
from sdcpd.roles.object_cache import ObjectCache
from sdcpd.roles.ports import Appended, Content, Done, Missing, Peers, Ports, StoreRefused
from tests.edge.services import PEERS
from tests.support.block_names import LAYOUT, content, name_of
from tests.support.blocks import Stand
from tests.support.ports import CountingMeters, InlineWorkers, MemoryLogs, RecordedPeers, SeededRandomness, TrioClock

BASE = "https://v.example:8443/cache/"
SCOPE = bytes(range(16))
NAMES = [name_of(number) for number in range(4)]


def file_of(name: bytes, scope: bytes | None = None) -> bytes:
    return write_block(LAYOUT, name, scope, content(name))


def path_of(name: bytes, scope: bytes | None = None) -> str:
    return BlockName(scope, name).path


def tag(octets: bytes) -> str:
    return f'"{hashlib.sha256(octets).hexdigest()}"'


class World:
    """A node with the blocks of a target model, and peers that ask it."""

    def __init__(self, network: LoopbackNetwork, blocks: Stand) -> None:
        self.network = network
        self.blocks = blocks
        self.bandwidth = Bandwidth()

    async def ask(self, role: str, method: str, path: str, body: bytes = b"", **headers: str) -> Response:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        request = Request(method=method, path=path, body=body, headers=fields)
        return await self.network.transport(PEERS[role]).exchange(BASE, request)

    async def put(self, name: bytes, octets: bytes | None = None, scope: bytes | None = None, **more: str) -> Response:
        fields = {"content_type": BLOCK_TYPE, "if_none_match": "*"} | more
        octets = file_of(name, scope) if octets is None else octets
        return await self.ask("verifier", "PUT", path_of(name, scope), octets, **fields)

    async def look_up(self, role: str = "verifier", **asked: object) -> LookupAnswer:
        message = LookupRequest(**{"root": self.blocks.store.root(None)} | asked)  # type: ignore[arg-type]
        answer = await self.ask(role, "POST", "lookup", encode(message), content_type=CACHE_TYPE)
        assert answer.status == 200, answer
        return decode(answer.body, LookupAnswer)

    def client(self, role: str = "verifier") -> ObjectClient:
        return ObjectClient(
            self.network.transport(PEERS[role]),
            CountingMeters(),
            [BASE],
            workers=InlineWorkers(),
            clock=TrioClock(),
            bandwidth=self.bandwidth,
        )


@asynccontextmanager
async def world(pages: int = 4, buffers: int = 4) -> AsyncIterator[World]:
    ports = Ports(
        clock=TrioClock(),
        randomness=SeededRandomness(),
        workers=InlineWorkers(),
        meters=CountingMeters(),
        peers=cast(Peers, RecordedPeers()),
        objects=MemoryLogs(),
    )
    settings, network, stand = CacheSettings(), LoopbackNetwork(), Stand(pages, buffers)
    cache = ObjectCache(settings, ports)
    cache.blocks.serve("verifier", stand.store)
    network.serve(BASE, object_cache_dispatcher(cache, settings, CountingMeters()).handle)
    yield World(network, stand)
    stand.check()


async def test_a_block_is_read_where_it_is(autojump_clock: MockClock) -> None:
    async with world() as w:
        w.blocks.compute(NAMES[0])
        await trio.sleep(3)
        octets = file_of(NAMES[0])
        found = await w.ask("verifier", "GET", path_of(NAMES[0]))
        assert (found.status, found.body, found.headers["etag"]) == (200, octets, tag(octets))
        assert (found.headers["kvsp-tier"], found.headers["age"]) == ("device", "3")
        assert (await w.put(NAMES[1])).status == 201
        assert (await w.ask("drafter", "GET", path_of(NAMES[1]))).headers["kvsp-tier"] == "host"
        assert (await w.ask("verifier", "GET", path_of(NAMES[2]))).status == 404


async def test_conditions_and_ranges() -> None:
    async with world() as w:
        w.blocks.compute(NAMES[0])
        octets, path = file_of(NAMES[0]), path_of(NAMES[0])
        head = await w.ask("verifier", "HEAD", path)
        assert (head.status, head.headers["content-length"], head.body) == (200, str(len(octets)), b"")
        assert (await w.ask("verifier", "GET", path, if_none_match=tag(octets))).status == 304
        part = await w.ask("verifier", "GET", path, range="bytes=-3")
        assert (part.status, part.body) == (206, octets[-3:])
        assert part.headers["content-range"] == f"bytes {len(octets) - 3}-{len(octets) - 1}/{len(octets)}"
        assert (await w.ask("verifier", "GET", path, range="bytes=99999-")).status == 416


@pytest.mark.parametrize(
    ("octets", "more", "status"),
    [
        (None, {}, 201),
        (None, {"kvsp_class": "block", "kvsp_pin": "soft", "content_digest": content_digest(file_of(NAMES[0]))}, 201),
        (None, {"content_digest": content_digest(b"")}, 422),
        (file_of(NAMES[1]), {}, 422),
        (file_of(NAMES[0], SCOPE), {}, 422),
        (file_of(NAMES[0])[:-1], {}, 422),
        (b"", {}, 422),
        (None, {"if_none_match": '"x"'}, 400),
        (None, {"kvsp_class": "object"}, 400),
        (None, {"kvsp_pin": "very"}, 400),
        (None, {"kvsp_tier": "device"}, 501),
        (None, {"kvsp_replicas": "2"}, 501),
        (None, {"content_encoding": "gzip"}, 400),
        (None, {"content_type": CACHE_TYPE}, 415),
    ],
)
async def test_what_is_stored(octets: bytes | None, more: dict[str, str], status: int) -> None:
    """Visible once it is verified: "201; 422 digest"; nobody sees anything else."""
    async with world() as w:
        assert (await w.put(NAMES[0], octets, None, **more)).status == status
        assert (await w.ask("verifier", "GET", path_of(NAMES[0]))).status == (200 if status == 201 else 404)


async def test_two_writers_make_one_block() -> None:
    async with world() as w:
        assert [(await w.put(NAMES[0])).status for _ in range(2)] == [201, 204]


async def test_no_room_is_507_and_a_pin_that_cannot_be_kept_too() -> None:
    async with world(buffers=2) as w:
        assert (await w.put(NAMES[0], kvsp_pin="hard")).status == 201
        assert (await w.put(NAMES[1], kvsp_pin="hard")).status == 507, "it is there, and not pinned"
        assert w.blocks.store.facts(NAMES[1], now=0.0).pin is Pin.NONE  # type: ignore[union-attr]
    async with world(buffers=0) as w:
        assert (await w.put(NAMES[0])).status == 507


async def test_who_may_what() -> None:
    async with world() as w:
        w.blocks.compute(NAMES[0])
        look = encode(LookupRequest(root=w.blocks.store.root(None), hashes=()))
        expected = {
            "verifier": (200, 204, 200, 200),
            "drafter": (200, 404, 200, 200),  # 404: no draft model runs here
            "router": (403, 403, 200, 200),
            "operator": (403, 403, 403, 200),
            "cache": (403, 403, 403, 403),
            "client": (403, 403, 403, 403),
        }
        for role, answers in expected.items():
            got = (
                await w.ask(role, "GET", path_of(NAMES[0])),
                await w.ask(
                    role, "PUT", path_of(NAMES[0]), file_of(NAMES[0]), content_type=BLOCK_TYPE, if_none_match="*"
                ),
                await w.ask(role, "POST", "lookup", look, content_type=CACHE_TYPE),
                await w.ask(role, "GET", "stats"),
            )
            assert tuple(each.status for each in got) == answers, role


async def test_a_lookup_finds_the_longest_run_and_holds_it(autojump_clock: MockClock) -> None:
    tokens = (5, 6, 7, 8, 9, 10, 11)
    async with world(pages=16) as w:
        names, name = [], w.blocks.store.root(None)
        for start in (0, 2, 4):
            name = extend(name, tokens[start : start + 2])
            names.append(name)
        for each in (names[0], names[1]):
            w.blocks.compute(each)
        assert (await w.look_up(tokens=tokens)).tiers == ("device", "device")
        assert (await w.look_up("router", hashes=tuple(names))).tiers == ("device", "device")
        assert (await w.look_up(hashes=(names[2], names[0]))).tiers == ()
        assert (await w.look_up(root=bytes(32), hashes=tuple(names))).tiers == (), "of another model"
        held = await w.look_up(tokens=tokens, lease_ms=5000)
        assert (held.leased, held.ttl_ms) == (2, 5000)
        assert w.blocks.store.facts(names[0], now=0.0).leases == 1  # type: ignore[union-attr]
        assert isinstance(held.lease, str)
        place = f"leases/{held.lease}"
        renewal = encode(LeaseRenewal(ttl_ms=9000))
        assert (await w.ask("drafter", "PUT", place, renewal, content_type=CACHE_TYPE)).status == 403
        renewed = await w.ask("verifier", "PUT", place, renewal, content_type=CACHE_TYPE)
        assert decode(renewed.body, LeaseAnswer).ttl_ms == 9000
        assert (await w.ask("drafter", "DELETE", place)).status == 403
        assert [(await w.ask("verifier", "DELETE", place)).status for _ in range(2)] == [204, 204]
        assert (await w.ask("verifier", "PUT", place, renewal, content_type=CACHE_TYPE)).status == 404
        both = encode(LookupRequest(root=bytes(32), hashes=(), tokens=()))
        assert (await w.ask("verifier", "POST", "lookup", both, content_type=CACHE_TYPE)).status == 400


async def test_a_lease_on_blocks_that_were_named() -> None:
    async with world(pages=16) as w:
        w.blocks.compute(NAMES[0])
        here, away = path_of(NAMES[0]), path_of(NAMES[1])

        async def lease(*paths: str) -> Response:
            body = encode(LeaseRequest(objects=paths, ttl_ms=5000))
            return await w.ask("verifier", "POST", "leases", body, content_type=CACHE_TYPE)

        made = await lease(here, away)
        answer = decode(made.body, LeaseAnswer)
        assert (made.status, answer.missed, answer.ttl_ms) == (201, (away,), 5000)
        assert made.headers["location"] == f"leases/{answer.lease}"
        none = await lease(away)
        assert (none.status, decode(none.body, LeaseAnswer)) == (200, LeaseAnswer(ttl_ms=0, missed=(away,)))
        rows = object_reference(BASE, None, SCOPE, 1, 1, ObjectKind.Q).removeprefix(BASE)
        assert (await lease(here, rows)).status == 400


async def test_tenants_do_not_see_each_other() -> None:
    """A right name with a wrong scope finds nothing, by whatever operation."""
    ours, theirs = name_of(1, SCOPE), name_of(1)
    async with world() as w:
        w.blocks.compute(ours, SCOPE)
        assert (await w.ask("verifier", "GET", path_of(ours, SCOPE))).status == 200
        assert (await w.ask("verifier", "GET", path_of(ours))).status == 404
        assert (await w.put(ours)).status == 422
        assert (await w.look_up(hashes=(ours,))).tiers == ()
        assert (await w.look_up(scope=SCOPE, root=w.blocks.store.root(SCOPE), hashes=(ours,))).tiers == ("device",)
        body = encode(LeaseRequest(objects=(path_of(ours),), ttl_ms=5000))
        assert (await w.ask("verifier", "POST", "leases", body, content_type=CACHE_TYPE)).status == 200
        w.blocks.compute(theirs)
        purged = await w.ask("operator", "DELETE", scope_path(SCOPE))
        assert decode(purged.body, PurgeAnswer) == PurgeAnswer(objects=0, blocks=1, logs=0, records=0)
        assert (await w.ask("verifier", "GET", path_of(ours, SCOPE))).status == 404
        assert (await w.ask("verifier", "GET", path_of(theirs))).status == 200


async def test_a_leased_block_stands_in_the_way_of_a_purge() -> None:
    async with world(pages=16) as w:
        w.blocks.compute(NAMES[0])
        await w.look_up(hashes=(NAMES[0],), lease_ms=5000)
        assert (await w.ask("operator", "DELETE", "v1/s/-")).status == 423
        force = Request("DELETE", "v1/s/-", "force=1")
        assert (await w.network.transport(PEERS["operator"]).exchange(BASE, force)).status == 200


async def test_stats_tell_each_tier() -> None:
    async with world() as w:
        w.blocks.compute(NAMES[0], times=3)
        await w.put(NAMES[1])
        stats = decode((await w.ask("operator", "GET", "stats")).body, CacheStats)
        tiers = {each.tier: each for each in stats.blocks}
        assert set(tiers) == {"device", "host"}
        assert (tiers["device"].blocks, tiers["device"].hits, tiers["host"].blocks) == (1, 2, 1)
        assert stats.cache_mbps == ASSUMED_MBPS


async def test_blocks_in_a_batch() -> None:
    async with world() as w:
        items = (
            BatchItem(op="put", name=path_of(NAMES[0]), octets=file_of(NAMES[0])),
            BatchItem(op="exists", name=path_of(NAMES[0])),
            BatchItem(op="get", name=path_of(NAMES[0])),
            BatchItem(op="get", name=path_of(NAMES[1])),
        )
        answered = await w.ask("verifier", "POST", "batch", encode(BatchRequest(items=items)), content_type=CACHE_TYPE)
        results = decode(answered.body, BatchAnswer).results
        assert [one.status for one in results] == [201, 200, 200, 404]
        assert (results[1].octets, results[2].octets) == (UNSET, file_of(NAMES[0]))


async def test_blocks_by_reference() -> None:
    async with world(pages=16) as w:
        verifier, ref = w.client(), block_reference(BASE, None, NAMES[0])
        assert await verifier.fetch(ref, wait_s=5) == Missing()
        octets = file_of(NAMES[0])
        assert await verifier.publish(ref, octets, ttl_ms=0) == Appended(tag=tag(octets))
        assert await verifier.publish(ref, octets, ttl_ms=0) == Appended(tag="")
        assert await verifier.fetch(ref) == Content(octets=octets, tag=tag(octets))
        found = await verifier.look_up(BASE, None, w.blocks.store.root(None), [NAMES[0]], lease_ms=1000)
        assert isinstance(found, LookupAnswer)
        assert (found.tiers, found.leased) == ((Tier.HOST.value,), 1)
        assert isinstance(found.lease, str)
        assert await verifier.release(f"{BASE}leases/{found.lease}") == Done()


async def test_blocks_are_fetched_from_caches_that_were_named_and_nowhere_else() -> None:
    """Decision 21: "Allow-list of cache origins per instance; no redirects"."""
    elsewhere = "https://x.example/cache/"
    asked: list[str] = []

    class Redirecting:
        async def exchange(self, base_uri: str, request: Request) -> Response:
            asked.append(base_uri)
            return Response(307, {"location": elsewhere + request.path})

    client = ObjectClient(Redirecting(), CountingMeters(), [BASE])
    for ref, status in (
        (block_reference(elsewhere, None, NAMES[0]), 403),
        (block_reference(BASE, None, NAMES[0]).upper().replace("HTTPS", "https"), 400),
        (BASE + "v1/s/-/b/" + "0" * 63, 400),
        (BASE + "v1/s/-/b/" + "A" * 64, 400),
        (block_reference(BASE, None, NAMES[0]), 307),
    ):
        refused = await client.fetch(ref)
        assert isinstance(refused, StoreRefused), ref
        assert refused.status == status, ref
    assert asked == [BASE]
    for base in (elsewhere, "nonsense"):
        assert isinstance(await client.look_up(base, None, bytes(32), []), StoreRefused)
