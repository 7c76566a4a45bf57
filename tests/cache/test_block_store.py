"""The store's bookkeeping: where blocks are, what moves, what may go, and that nothing is lost track of."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcpd.cache.block_index import Pin
from sdcpd.cache.block_moves import DISK_REST_S, BlockHeld, BlockRefused
from sdcpd.cache.block_orders import AcceptBlock, Discard, Spill, Tier
from sdcpd.cache.block_store import BlocksLeased
from tests.cache.sim_disk import SimDisk
from tests.support.block_names import BLOCK_BYTES, content, name_of
from tests.support.blocks import Stand

SCOPE = bytes([7]) * 16
NAMES = [name_of(number) for number in range(40)]
DISK: dict[str, Any] = {"disk_bytes_to_use": 8 * BLOCK_BYTES}


def counts(stand: Stand, tier: Tier) -> dict[str, int]:
    (found,) = [stats for stats in stand.store.stats() if stats.tier is tier]
    return {key: getattr(found, key) for key in found.__struct_fields__ if key not in ("tier", "bytes")}


def tiers_of(stand: Stand, name: bytes) -> tuple[Tier, ...]:
    facts = stand.store.facts(name, now=stand.now)
    return () if facts is None else facts.tiers


def test_a_block_is_found_in_its_page_until_the_page_is_needed() -> None:
    stand = Stand(pages=2)
    stand.compute(NAMES[0])
    stand.compute(NAMES[1])
    assert stand.store.lookup([NAMES[0], NAMES[1], NAMES[2]]) == (Tier.DEVICE, Tier.DEVICE)
    assert stand.store.lookup([NAMES[2], NAMES[0]]) == (), "a run begins with the first"
    assert stand.pool.free_pages == 2
    stand.compute(NAMES[2])
    assert stand.store.lookup([NAMES[0]]) == (), "the longest unused went"
    assert stand.store.lookup([NAMES[1]]) == (Tier.DEVICE,)
    assert counts(stand, Tier.DEVICE)["evictions"] == 1
    stand.check()


def test_what_was_used_more_than_once_goes_down_tier_by_tier_and_comes_back() -> None:
    stand = Stand(pages=10, buffers=10, files=SimDisk(), disk_bytes_to_use=40 * BLOCK_BYTES)
    for number, name in enumerate(NAMES[:30]):
        stand.compute(name, times=1 + number % 2)
        stand.spill_all()
        stand.check()
    tiers = {name: stand.store.facts(name, now=0.0) for name in NAMES[:30]}
    assert all(tiers[name] is None for name in NAMES[0:18:2]), "used once only"
    found = [facts.tiers for facts in map(tiers.get, NAMES[1:30:2]) if facts is not None]
    assert len(found) == 15, "none that was used twice is lost"
    assert {tier for tiers_ in found for tier in tiers_} == set(Tier)
    for tier, wanted in ((Tier.HOST, (Tier.HOST,)), (Tier.DISK, (Tier.DISK,))):
        name = next(name for name, facts in tiers.items() if facts is not None and facts.tiers == wanted)
        assert stand.fill(name) == content(name)
        assert counts(stand, tier)["promotions"] == 1
        assert counts(stand, tier)["demotions"] > 0
        stand.check()


def test_a_lease_keeps_a_page_and_its_end_gives_it_back() -> None:
    stand = Stand(pages=4)
    for name in NAMES[:4]:
        stand.compute(name)
    leased = stand.store.lease([NAMES[0], NAMES[9]], "peer", 5.0, 0.0)
    assert isinstance(leased, BlocksLeased)
    assert leased.lease is not None
    assert leased.missed == (NAMES[9],)
    assert stand.pool.free_pages == 3
    for name in NAMES[4:8]:
        stand.compute(name)
    assert stand.store.lookup([NAMES[0]]) == (Tier.DEVICE,)
    assert isinstance(stand.store.evict(NAMES[0]), BlockRefused)
    facts = stand.store.facts(NAMES[0], now=1.0)
    assert facts is not None
    assert facts.leases == 1
    stand.store.expire(5.0)
    assert stand.pool.free_pages == 4
    assert stand.store.evict(NAMES[0]) is None
    assert stand.store.lookup([NAMES[0]]) == ()
    stand.check()


def test_leases_alone_keep_a_quarter_of_the_pages_at_most() -> None:
    stand = Stand(pages=8)
    for name in NAMES[:8]:
        stand.compute(name)
    leased = stand.store.lease(NAMES[:8], "peer", 5.0, 0.0)
    assert isinstance(leased, BlocksLeased)
    assert leased.missed == tuple(NAMES[2:8])
    assert stand.pool.free_pages == 6


def test_a_hard_pin_is_kept_by_a_copy_or_refused() -> None:
    alone = Stand(pages=2)
    alone.compute(NAMES[0])
    assert isinstance(alone.store.pin(NAMES[0], Pin.HARD), BlockRefused)
    stand = Stand(pages=2, buffers=2)
    stand.compute(NAMES[0])
    assert stand.store.pin(NAMES[0], Pin.HARD) is None
    assert stand.pool.free_pages == 1, "until there is a copy"
    stand.spill_all()
    assert stand.pool.free_pages == 2
    for name in NAMES[1:9]:
        stand.compute(name, times=2)
        stand.spill_all()
        stand.check()
    stand.pool.release(stand.pool.allocate(2))
    assert stand.store.lookup([NAMES[0]]) == (Tier.HOST,)
    stand.compute(NAMES[9])
    assert isinstance(stand.store.pin(NAMES[9], Pin.HARD), BlockRefused), "half of the host tier at most"
    assert stand.store.pin(NAMES[0], Pin.NONE) is None


def test_what_is_pinned_softly_goes_last() -> None:
    stand = Stand(pages=3)
    for name in NAMES[:3]:
        stand.compute(name)
    stand.store.pin(NAMES[0], Pin.SOFT)
    stand.compute(NAMES[3])
    stand.compute(NAMES[4])
    assert stand.store.lookup([NAMES[0]]) == (Tier.DEVICE,)
    stand.pool.release(stand.pool.allocate(3))
    assert stand.store.lookup([NAMES[0]]) == ()


def test_a_block_goes_from_one_store_to_another_as_it_is() -> None:
    giver, taker = Stand(pages=2), Stand(pages=2, buffers=1)
    giver.compute(name_of(1, SCOPE), SCOPE)
    order = giver.store.read_order(name_of(1, SCOPE))
    assert order is not None
    octets = giver.carry_out(order)
    assert isinstance(octets, bytes)
    wrong = taker.store.accept_order(name_of(1, SCOPE), None, octets)
    assert isinstance(wrong, AcceptBlock)
    assert isinstance(taker.store.settle(wrong, wrong.run(), 0.0), BlockRefused), "of another scope"
    accept = taker.store.accept_order(name_of(1, SCOPE), SCOPE, octets)
    assert isinstance(accept, AcceptBlock)
    assert taker.store.lookup([name_of(1, SCOPE)]) == (), "not before it is settled"
    assert taker.store.settle(accept, accept.run(), 0.0) is None
    assert taker.fill(name_of(1, SCOPE)) == content(name_of(1, SCOPE))
    assert isinstance(taker.store.accept_order(name_of(1, SCOPE), SCOPE, octets), BlockHeld)
    assert taker.store.purge(None) == 0
    assert taker.store.purge(SCOPE) == 1
    assert taker.store.entries(now=0.0) == []
    for stand in (giver, taker):
        stand.check()


def test_a_store_without_room_below_its_pages_takes_no_block_from_others() -> None:
    stand = Stand()
    refused = stand.store.accept_order(NAMES[0], None, b"")
    assert isinstance(refused, BlockRefused)
    assert refused.full


def test_a_full_disk_costs_some_files_and_a_second_try_then_the_block() -> None:
    disk = SimDisk()
    stand = Stand(pages=1, files=disk, **DISK)
    for name in NAMES[:4]:
        stand.compute(name, times=2)
        stand.spill_all()
    assert counts(stand, Tier.DISK)["blocks"] == 4
    disk.capacity_bytes = disk.used_bytes
    stand.compute(NAMES[4], times=2)
    done = stand.spill_all()
    assert [type(order) for order in done] == [Spill, Discard, Spill]
    assert stand.store.lookup([NAMES[0]]) == (), "given up for the newer one"
    assert Tier.DISK in tiers_of(stand, NAMES[4])
    disk.capacity_bytes = 0
    stand.compute(NAMES[5], times=2)
    stand.spill_all()
    assert counts(stand, Tier.DISK)["failed_writes"] == 1
    stand.compute(NAMES[6], times=2)
    assert stand.spill_all() == [], "it rests"
    disk.capacity_bytes = None
    stand.now += DISK_REST_S
    stand.spill_all()
    assert Tier.DISK in tiers_of(stand, NAMES[6])
    stand.check()


def test_damage_on_disk_is_a_miss_and_is_counted() -> None:
    disk = SimDisk()
    stand = Stand(pages=1, files=disk, **DISK)
    stand.compute(NAMES[0], times=2)
    stand.spill_all()
    stand.pool.release(stand.pool.allocate(1))
    (file,) = disk.names()
    disk.flip(file, len(disk.read(file)) - 1)
    assert stand.fill(NAMES[0]) is None
    assert counts(stand, Tier.DISK)["damaged"] == 1
    assert stand.store.lookup([NAMES[0]]) == ()
    stand.spill_all()
    assert disk.names() == []
    stand.check()


def test_distrusted_blocks_are_gone_from_everywhere_even_while_they_are_moved() -> None:
    stand = Stand(pages=2, buffers=2)
    stand.compute(NAMES[0], times=2)
    stand.compute(NAMES[1], times=2)
    order = stand.store.next_spill(0.0)
    assert order is not None
    stand.store.distrust(NAMES[:2])
    stand.compute(NAMES[0])
    stand.carry_out(order)
    assert stand.store.lookup([NAMES[0]]) == (Tier.DEVICE,), "the new one only"
    assert counts(stand, Tier.HOST)["blocks"] == 0
    stand.check()


ACTIONS = st.tuples(
    st.sampled_from(
        [
            "compute",
            "take",
            "allocate",
            "release",
            "spill",
            "settle",
            "fill",
            "lease",
            "free",
            "pin",
            "evict",
            "read",
            "distrust",
            "purge",
            "wait",
        ]
    ),
    st.integers(0, 11),
)


class Walk:
    """Any calls in any order, orders carried out late or not at all; beside it, a plain account of the leases."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.used: list[int] = []
        self.orders: list[tuple[Any, bool]] = []
        self.leases: dict[str, tuple[float, tuple[bytes, ...]]] = {}

    def step(self, what: str, number: int) -> None:
        stand, store, pool = self.stand, self.stand.store, self.stand.pool
        name = NAMES[number]
        match what:
            case "compute" if pool.can_allocate(1):
                stand.compute(name, times=1 + number % 2)
            case "take" if (page := store.page_of(name)) is not None:
                pool.retain([page])
                self.used.append(page)
                store.taken(name, stand.now)
            case "allocate" if pool.can_allocate(number % 3):
                self.used += pool.allocate(number % 3)
            case "release" if self.used:
                pool.release([self.used.pop(number % len(self.used))])
            case "spill" if (order := store.next_spill(stand.now)) is not None:
                self.orders.append((order, number > 1))
            case "fill" if pool.can_allocate(1):
                pages = pool.allocate(1)
                if store.fill([name], pages) is not None:
                    self.orders.append((store.next_fill(), number > 1))
                pool.release(pages)
            case "read" if (order := store.read_order(name)) is not None:
                self.orders.append((order, True))
            case "settle" if self.orders:
                self.settle(number)
            case "lease":
                names = tuple(NAMES[number : number + 3])
                leased = store.lease(names, "peer", 1.0 + number, stand.now)
                assert isinstance(leased, BlocksLeased)
                if leased.lease is not None:
                    held = tuple(name for name in names if name not in leased.missed)
                    self.leases[leased.lease.id] = (leased.lease.until, held)
            case "free" if self.leases:
                lease = list(self.leases)[number % len(self.leases)]
                assert store.release(lease, "peer") is None
                del self.leases[lease]
            case "pin":
                store.pin(name, list(Pin)[number % 3])
            case "evict":
                store.evict(name)
            case "distrust" if number < 2:
                store.distrust([name])
                self.leases = {i: (u, tuple(n for n in names if n != name)) for i, (u, names) in self.leases.items()}
            case "purge" if number == 0:
                store.purge(None)
                self.leases.clear()
            case "wait":
                stand.now += number / 4
                store.expire(stand.now)
                self.leases = {i: lease for i, lease in self.leases.items() if lease[0] > stand.now}
            case _:
                pass  # not possible now

    def settle(self, number: int) -> None:
        order, carried_out = self.orders.pop(number % len(self.orders))
        self.stand.store.settle(order, order.run() if carried_out else None, self.stand.now)

    def check(self) -> None:
        self.stand.check()
        for _, names in self.leases.values():
            for name in names:
                assert self.stand.store.lookup([name]), "nothing leased goes"


@given(st.lists(ACTIONS, max_size=80), st.integers(0, 4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_nothing_leased_goes_and_all_is_accounted_for(steps: list[Any], buffers: int, disk: bool) -> None:
    """Free + used = total in every tier after any calls; at the end of all leases and orders nothing is held."""
    stand = Stand(pages=8, buffers=buffers, files=SimDisk() if disk else None, **DISK if disk else {})
    walk = Walk(stand)
    for what, number in steps:
        walk.step(what, number)
        walk.check()
    while walk.orders:
        walk.settle(0)
    for name in NAMES[:12]:
        stand.store.pin(name, Pin.NONE)
    stand.now += 100.0
    stand.store.expire(stand.now)
    stand.pool.release(walk.used)
    stand.check()
    assert stand.pool.free_pages == 8
    stand.store.purge(None)
    stand.check()
    assert stand.pool.empty_pages == 8
    assert stand.store.entries(now=stand.now) == []


@pytest.mark.parametrize("pages", [1, 2, 8, 100])
def test_pressure_never_takes_a_page_from_use(pages: int) -> None:
    stand = Stand(pages=pages, buffers=4)
    stand.compute(NAMES[0], times=2)
    held = stand.pool.allocate(pages - 1)
    assert len(stand.spill_all()) == 1, "the last page but those in use"
    stand.pool.release(held)
    stand.check()


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 3)), max_size=40), st.integers(0, 4), st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_what_presses_is_moved_once_however_small_the_tiers_below(
    uses: list[tuple[int, int]], buffers: int, files: int
) -> None:
    """More blocks are worth a copy than there is room for: they must not take one another's place for ever."""
    disk: dict[str, Any] = {"files": SimDisk(), "disk_bytes_to_use": files * BLOCK_BYTES} if files else {}
    stand = Stand(pages=28, buffers=buffers, **disk)
    for name in NAMES[12:]:
        stand.compute(name, times=2)
    for number, times in uses:
        if (page := stand.store.page_of(NAMES[number])) is None:
            stand.compute(NAMES[number], times=times)
        else:
            stand.pool.retain([page])
            stand.pool.release([page])
        moved = 0
        while (order := stand.store.next_spill(stand.now)) is not None:
            stand.carry_out(order)
            moved += not isinstance(order, Discard)
            assert moved <= 5 + buffers, "a copy of each page that is taken next, and of each buffer"
        stand.check()
