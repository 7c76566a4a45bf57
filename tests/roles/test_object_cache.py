"""Objects of any node: who may read and lease, reads that wait, bodies in gzip coding (decisions 54, 112)."""

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sdcpd.cache.refs import ObjectKind, ObjectName
from sdcpd.cache.settings import KIB, CacheSettings
from sdcpd.protocol.problems import Forbidden, IllFormed, Overloaded, TooLarge, UnknownResource
from sdcpd.roles.object_cache import LeaseGranted, ObjectCache, ObjectLeased
from sdcpd.roles.ports import Peer, Peers, Ports
from tests.support.ports import CountingMeters, InlineWorkers, MemoryLogs, RecordedPeers, SeededRandomness, TrioClock

TOKENS, ROWS = (
    ObjectName(scope=None, session=bytes(16), epoch=1, round=0, kind=kind) for kind in (ObjectKind.TOKENS, ObjectKind.Q)
)
VERIFIER, ROUTER, DRAFTER, CACHE, OPERATOR, CLIENT = (
    Peer(uri=f"https://h.example/{role}/", role=role)
    for role in ("verifier", "router", "drafter", "cache", "operator", "client")
)


@asynccontextmanager
async def running(settings: CacheSettings | None = None) -> AsyncIterator[ObjectCache]:
    ports = Ports(
        clock=TrioClock(),
        randomness=SeededRandomness(),
        workers=InlineWorkers(),
        meters=CountingMeters(),
        peers=cast(Peers, RecordedPeers()),
        objects=MemoryLogs(),
    )
    cache = ObjectCache(settings or CacheSettings(), ports)
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        yield cache
        nursery.cancel_scope.cancel()


async def granted(cache: ObjectCache, peer: Peer, ttl_ms: int, *names: ObjectName) -> str:
    lease = await cache.lease_objects(peer, names, ttl_ms)
    assert lease.id is not None
    return lease.id


async def test_rows_live_for_as_long_as_their_lease(autojump_clock: MockClock) -> None:
    """5.4: q_rows "lease until verdict"."""
    async with running() as cache:
        await cache.create_object(DRAFTER, ROWS, b"rows", ttl_s=1)
        lease = await granted(cache, DRAFTER, 10_000, ROWS)
        for _ in range(3):
            await trio.sleep(8)
            assert (await cache.renew_lease(DRAFTER, lease, 10_000)).ttl_ms == 10_000
            assert (await cache.read_object(VERIFIER, ROWS)).octets == b"rows"
        await cache.release_lease(DRAFTER, lease)
        await cache.release_lease(DRAFTER, lease)
        assert cache.snapshot().object_bytes == 0
        with pytest.raises(UnknownResource):
            await cache.read_object(VERIFIER, ROWS)
        with pytest.raises(UnknownResource):
            await cache.renew_lease(DRAFTER, lease, 10_000)


async def test_what_nobody_renews_is_swept_away(autojump_clock: MockClock) -> None:
    async with running() as cache:
        await cache.create_object(DRAFTER, ROWS, b"rows", ttl_s=1)
        assert (await cache.lease_objects(DRAFTER, [ROWS], 3_600_000)).ttl_ms == 60_000, "the cap"
        await trio.sleep(59)
        assert cache.snapshot().objects == 1
        await trio.sleep(12)
        assert (cache.snapshot().objects, cache.snapshot().leases) == (0, 0)


async def test_who_may_lease_and_what_a_lease_stands_against() -> None:
    async with running() as cache:
        await cache.create_object(DRAFTER, ROWS, b"rows")
        for peer in (CACHE, OPERATOR, CLIENT):
            with pytest.raises(Forbidden):
                await cache.lease_objects(peer, [ROWS], 1000)
        lease = await granted(cache, VERIFIER, 1000, ROWS)
        for other in (ROUTER, DRAFTER):
            with pytest.raises(Forbidden):
                await cache.renew_lease(other, lease, 1000)
            with pytest.raises(Forbidden):
                await cache.release_lease(other, lease)
        for other in (DRAFTER, OPERATOR):
            with pytest.raises(ObjectLeased):
                await cache.remove_object(other, ROWS)
        await cache.release_lease(VERIFIER, lease)
        await cache.remove_object(DRAFTER, ROWS)


async def test_a_lease_reports_each_object_and_has_limits() -> None:
    async with running(CacheSettings(max_lease_objects=2, max_leases=2)) as cache:
        await cache.create_object(DRAFTER, ROWS, b"rows")
        lease = await cache.lease_objects(VERIFIER, [TOKENS, ROWS], 1000)
        assert lease == LeaseGranted(id=lease.id, ttl_ms=1000, missed=(TOKENS,))
        assert await cache.lease_objects(VERIFIER, [TOKENS], 1000) == LeaseGranted(id=None, ttl_ms=0, missed=(TOKENS,))
        with pytest.raises(IllFormed):
            await cache.lease_objects(VERIFIER, [], 1000)
        with pytest.raises(TooLarge):
            await cache.lease_objects(VERIFIER, [ROWS] * 3, 1000)
        assert await granted(cache, VERIFIER, 1000, ROWS) != lease.id
        with pytest.raises(Overloaded):
            await cache.lease_objects(VERIFIER, [ROWS], 1000)


async def test_a_read_may_wait_for_an_object_to_be_written(autojump_clock: MockClock) -> None:
    """5.3: "hides row upload behind the proposal"."""
    async with running(CacheSettings(max_waiting_object_reads=2)) as cache:
        found: list[bytes] = []

        async def read(name: ObjectName) -> None:
            found.append((await cache.read_object(VERIFIER, name, wait_s=5)).octets)

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, ROWS)
            nursery.start_soon(read, ROWS)
            await wait_all_tasks_blocked()
            with pytest.raises(Overloaded):
                await cache.read_object(VERIFIER, TOKENS, wait_s=5)
            await trio.sleep(2)
            await cache.create_object(ROUTER, TOKENS, b"\x80")
            await trio.sleep(1)
            assert not found
            await cache.create_object(DRAFTER, ROWS, b"rows")
        assert found == [b"rows", b"rows"]
        assert trio.current_time() - started == pytest.approx(3)
        assert (await cache.read_object(VERIFIER, TOKENS, wait_s=5)).octets == b"\x80", "what is there does not wait"
        assert trio.current_time() - started == pytest.approx(3)


async def test_a_wait_in_vain_ends_in_a_miss(autojump_clock: MockClock) -> None:
    async with running() as cache:
        started = trio.current_time()
        with pytest.raises(UnknownResource):
            await cache.read_object(VERIFIER, ROWS, wait_s=5)
        assert trio.current_time() - started == pytest.approx(5)
        with trio.move_on_after(1):
            await cache.read_object(VERIFIER, ROWS, wait_s=5)
        assert cache.snapshot().waiting_object_reads == 0


async def test_a_packed_body_is_stored_as_what_it_holds() -> None:
    async with running(CacheSettings(max_object_bytes=64 * KIB)) as cache:
        octets = bytes(64 * KIB)
        stored = await cache.create_object(DRAFTER, ROWS, gzip.compress(octets), coding="gzip")
        content = await cache.read_object(VERIFIER, ROWS)
        assert (content.octets, content.tag) == (octets, stored.tag)
        packed = await cache.packed(content, "gzip")
        assert packed is not None
        assert gzip.decompress(packed) == octets
        with pytest.raises(TooLarge):
            await cache.create_object(DRAFTER, ROWS, gzip.compress(bytes(64 * KIB + 1)), coding="gzip")
        with pytest.raises(IllFormed):
            await cache.create_object(DRAFTER, ROWS, b"not gzip", coding="gzip")
        with pytest.raises(Forbidden):
            await cache.create_object(VERIFIER, ROWS, b"not gzip", coding="gzip")
