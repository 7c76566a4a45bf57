"""The cache on the admin socket: what an operator sees, and what he may keep, drop and erase."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from sdcpd.cache.block_index import Pin
from sdcpd.cache.refs import ObjectKind, ObjectName
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.admin import Admin
from sdcpd.edge.admin_cache import CacheAdmin
from sdcpd.roles.object_cache import ObjectCache
from sdcpd.roles.ports import Peer, Peers, Ports
from tests.support.block_names import name_of
from tests.support.blocks import Stand
from tests.support.ports import CountingMeters, InlineWorkers, MemoryLogs, RecordedPeers, SeededRandomness, TrioClock

SCOPE = bytes(range(16))
TENANT = "AAECAwQFBgcICQoLDA0ODw"
OURS, THEIRS = name_of(1), name_of(1, SCOPE)
ROWS = ObjectName(scope=SCOPE, session=bytes(16), epoch=1, round=1, kind=ObjectKind.Q)
DRAFTER = Peer(uri="https://d.example/drafter/", role="drafter")


class Desk:
    """What an operator does by hand."""

    def __init__(self, admin: Admin, cache: ObjectCache, blocks: Stand) -> None:
        self.admin = admin
        self.cache = cache
        self.blocks = blocks

    def get(self, what: str = "", query: str = "") -> tuple[int, dict[str, Any]]:
        return self.admin.answer("GET", f"/cache/{what}" if what else "/cache", query)

    async def do(self, what: str, query: str) -> tuple[int, dict[str, Any]]:
        return await self.admin.command(f"/cache/{what}", query)


@asynccontextmanager
async def desk() -> AsyncIterator[Desk]:
    """An object of a tenant, and a block of the same name but for its scope for the tenant and for nobody."""
    ports = Ports(
        clock=TrioClock(),
        randomness=SeededRandomness(),
        workers=InlineWorkers(),
        meters=CountingMeters(),
        peers=cast(Peers, RecordedPeers()),
        objects=MemoryLogs(),
    )
    cache, blocks = ObjectCache(CacheSettings(), ports), Stand(pages=16, buffers=4)
    cache.blocks.serve("verifier", blocks.store)
    blocks.compute(OURS)
    blocks.compute(THEIRS, SCOPE)
    await cache.create_object(DRAFTER, ROWS, b"rows")
    yield Desk(Admin({}, "1.2.3", cache=CacheAdmin(lambda: cache)), cache, blocks)
    blocks.check()


async def test_what_is_there() -> None:
    async with desk() as d:
        status, stats = d.get()
        assert (status, stats["objects"]["objects"], stats["objects"]["bytes"]) == (200, 1, 4)
        assert [(tier["model"], tier["tier"], tier["blocks"]) for tier in stats["blocks"]] == [
            ("verifier", "device", 2),
            ("verifier", "host", 0),
        ]
        status, listed = d.get("list")
        assert (status, listed["left_out"]) == (200, 0)
        assert {entry["name"] for entry in listed["entries"]} == {ROWS.path, OURS.hex(), THEIRS.hex()}
        _, of_tenant = d.get("list", f"scope={TENANT}")
        assert {entry["name"] for entry in of_tenant["entries"]} == {ROWS.path, THEIRS.hex()}
        _, of_nobody = d.get("list", "scope=-")
        assert [entry["scope"] for entry in of_nobody["entries"]] == ["-"]
        assert d.get("list", "scope=x")[0] == 400


async def test_one_of_them_by_name_or_its_beginning() -> None:
    async with desk() as d:
        for name in (OURS.hex(), OURS.hex()[:6]):
            status, entry = d.get("entry", f"name={name}")
            assert (status, entry["name"], entry["tiers"]) == (200, OURS.hex(), ["device"])
        assert d.get("entry", f"name={ROWS.path}")[1]["kind"] == "object"
        assert d.get("entry", "name=zzzz")[0] == 404
        assert d.get("entry", "name=v1/s/-/o/x")[0] == 404
        assert d.get("entry", f"name={OURS.hex()[:3]}")[0] == 400
        alike = (bytes([7]) * 31 + bytes([last]) for last in range(2))
        for name_ in alike:
            d.blocks.compute(name_)
        assert d.get("entry", "name=07070707")[0] == 409


async def test_pins() -> None:
    async with desk() as d:
        name = OURS.hex()[:8]
        for level in Pin:
            status, entry = await d.do("pin", f"name={name}&level={level.value}")
            assert (status, entry["pin"]) == (200, level.value)
        assert (await d.do("pin", f"name={name}&level=very"))[0] == 400
        assert (await d.do("pin", f"name={ROWS.path}&level=hard"))[0] == 409
        assert (await d.do("pin", "name=zzzz&level=hard"))[0] == 404


async def test_eviction_stops_before_what_is_held() -> None:
    async with desk() as d:
        await d.do("pin", f"name={OURS.hex()}&level=hard")
        assert (await d.do("evict", f"name={OURS.hex()}"))[0] == 409
        assert await d.do("evict", f"name={THEIRS.hex()}") == (200, {"evicted": THEIRS.hex()})
        await d.cache.lease_objects(Peer(uri="https://v.example/verifier/", role="verifier"), [ROWS], 1000)
        assert (await d.do("evict", f"name={ROWS.path}"))[0] == 423
        assert d.get("entry", f"name={THEIRS.hex()}")[0] == 404


async def test_a_tenant_is_erased() -> None:
    async with desk() as d:
        assert (await d.do("purge", ""))[0] == 400
        assert await d.do("purge", f"scope={TENANT}") == (200, {"objects": 1, "blocks": 1, "logs": 0, "records": 0})
        assert [entry["name"] for entry in d.get("list")[1]["entries"]] == [OURS.hex()]
        await d.cache.create_object(DRAFTER, ROWS, b"rows")
        await d.cache.lease_objects(Peer(uri="https://v.example/verifier/", role="verifier"), [ROWS], 1000)
        assert (await d.do("purge", f"scope={TENANT}"))[0] == 423
        assert (await d.do("purge", f"scope={TENANT}&force=1"))[1]["objects"] == 1


async def test_what_there_is_not() -> None:
    async with desk() as d:
        assert d.get("nothing")[0] == 404
        assert (await d.do("nothing", ""))[0] == 404
    without = Admin({}, "1.2.3")
    assert without.answer("GET", "/cache")[0] == 409
    assert (await without.command("/cache/evict", "name=x"))[0] == 409


def test_a_long_list_says_how_much_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from sdcpd.edge import admin_cache

    monkeypatch.setattr(admin_cache, "LISTED_LIMIT", 2)
    assert admin_cache._listed(iter([{"name": str(n)} for n in range(5)])) == (
        200,
        {"entries": [{"name": "0"}, {"name": "1"}], "left_out": 3},
    )
