"""Stories told by hand over the simulated cluster, with named nodes and links; the checkers watch as in the swarm."""

from collections.abc import Callable
from typing import Any

import pytest
import trio

from sdcpd.protocol.ladder import Ladder
from sdcpd.roles.cache import Cache
from sdcpd.roles.router import Router
from sdcpd.roles.verifier import Verifier
from tests.sim import report
from tests.sim.faults import Faults
from tests.sim.options import ClientPlan, DrafterPlan, SimOptions
from tests.sim.world import Outcome, Story, World, run_options

GOOD = DrafterPlan(agrees=0.8, rogue=False)


def client(**changes: Any) -> ClientPlan:
    values: dict[str, Any] = {
        "begins_s": 0.0,
        "model": "a",
        "prompt": (1, 2, 3),
        "max_new": 60,
        "stop": (),
        "speculation": True,
        "leaves_after": None,
        "reads_s": 0.0,
    }
    return ClientPlan(**(values | changes))


def quiet(**changes: Any) -> SimOptions:
    """One of each role, one request, nothing that happens by itself."""
    values: dict[str, Any] = {
        "seed": 1,
        "verifiers": 1,
        "drafters": (GOOD,),
        "clients": (client(),),
        "ladders": {"a": Ladder(), "b": Ladder()},
        "faults": {},
        "ttl_ms": 3000,
        "pages": 64,
        "pass_s": 0.05,
        "waiting_limit_s": 20.0,
        "durable": True,
    }
    return SimOptions(**(values | changes))


def told(story: Story, **changes: Any) -> Outcome:
    outcome = run_options(quiet(**changes), story)
    assert outcome.kind == 0, report.failure(outcome)
    return outcome


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await trio.sleep(0.01)


def committed(world: World) -> int:
    return max((len(book.output) for book in world.checkers.books.values()), default=0)


def verifier(world: World) -> Verifier:
    role = world.nodes["v1"].role
    assert isinstance(role, Verifier)
    return role


def test_nothing_happens_and_all_is_well() -> None:
    async def story(world: World) -> None:
        await trio.sleep_forever()

    assert told(story).ends == {"finished": 1}


def test_a_verdict_that_is_lost_is_given_again() -> None:
    """6.9: the drafter repeats its proposal and gets the same verdict; nothing is decided twice."""
    proposals: list[int] = []

    async def story(world: World) -> None:
        await until(lambda: committed(world) >= 10)
        world.network.cut("v1", "d1", trio.current_time() + 2.0)
        await until(lambda: committed(world) >= 20)
        proposals.extend(len(bodies) for book in world.checkers.books.values() for bodies in book.proposals.values())

    assert told(story).ends == {"finished": 1}
    assert max(proposals) > 1


def test_a_zombie_verifier_stops_by_itself() -> None:
    """6.8: it sleeps, its session is fenced, it wakes and still believes: its next append tells it."""
    after: list[Any] = []

    async def story(world: World) -> None:
        await until(lambda: committed(world) >= 10)
        zombie = world.nodes["v1"].incarnation
        assert zombie is not None
        zombie.pause()
        await Faults(world).fence()
        before = committed(world)
        zombie.resume()
        await until(lambda: not verifier(world).status().queue)
        after.extend([before, committed(world), verifier(world).snapshot().sessions[0].reason])

    outcome = told(story)
    assert after == [after[0], after[0], "fenced"]
    assert outcome.ends == {"finished": 1}


def test_power_is_lost_while_records_are_on_their_way() -> None:
    """Whatever the disk had acknowledged is there afterwards, and the answer goes on (64, 109)."""

    async def story(world: World) -> None:
        for length in (5, 20, 35, 50):
            await until(lambda length=length: committed(world) >= length)  # type: ignore[misc]
            await world.crash(world.nodes["c1"], power=True)
            await trio.sleep(0.3)
            world.start(world.nodes["c1"])
        await trio.sleep_forever()

    assert told(story).ends == {"finished": 1}


def test_a_full_disk_releases_nothing_and_goes_on_when_there_is_room() -> None:
    stood: list[int] = []

    async def story(world: World) -> None:
        await until(lambda: committed(world) >= 10)
        world.disk.capacity_bytes = world.disk.used_bytes
        await trio.sleep(1.0)
        stood.append(committed(world))
        await trio.sleep(3.0)
        stood.append(committed(world))
        world.disk.capacity_bytes = None
        await trio.sleep_forever()

    assert told(story).ends == {"finished": 1}
    assert stood[0] == stood[1] < 60


def test_a_router_that_stood_still_gives_nobody_up() -> None:
    """Decision 95: statuses it could not read while it slept are no sign of death."""

    async def story(world: World) -> None:
        await until(lambda: committed(world) >= 10)
        router = world.nodes["r1"].incarnation
        assert router is not None
        router.pause()
        await trio.sleep(10.0)
        router.resume()
        await trio.sleep_forever()

    assert told(story).ends == {"finished": 1}


def test_a_drafter_that_goes_away_and_comes_back_costs_time_only() -> None:
    async def story(world: World) -> None:
        for length in (10, 30):
            await until(lambda length=length: committed(world) >= length)  # type: ignore[misc]
            await world.crash(world.nodes["d1"], power=False)
            await trio.sleep(4.0)
            world.start(world.nodes["d1"])
        await trio.sleep_forever()

    assert told(story, clients=(client(max_new=100),)).ends == {"finished": 1}


def test_a_client_that_leaves_frees_all_that_it_held() -> None:
    held: list[tuple[int, int, int]] = []

    async def story(world: World) -> None:
        await until(lambda: any(one.ended is not None for one in world.clients))
        await trio.sleep(2.0)
        router, cache = world.nodes["r1"].role, world.nodes["c1"].role
        assert isinstance(router, Router)
        assert isinstance(cache, Cache)
        shown = verifier(world).snapshot()
        held.append((router.snapshot().in_care, shown.pages - shown.free_pages, cache.snapshot().waiting_appends))
        await trio.sleep_forever()

    clients = (client(leaves_after=5), client(begins_s=8.0, max_new=5))
    assert told(story, clients=clients).ends == {"left": 1, "finished": 1}
    assert held == [(0, 0, 0)]


def test_a_session_walks_from_verifier_to_verifier() -> None:
    """6.9: twice its verifier dies, the one it went to included; the answer goes on without gap or repeat."""
    epochs: list[int] = []

    async def story(world: World) -> None:
        for length in (15, 40):
            await until(lambda length=length: committed(world) >= length)  # type: ignore[misc]
            (book,) = world.checkers.books.values()
            epochs.append(book.epoch)
            await world.crash(world.nodes[book.servers[book.epoch]], power=False)
        await until(lambda: all(one.ended is not None for one in world.clients))
        epochs.extend(book.epoch for book in world.checkers.books.values())

    assert told(story, verifiers=3).ends == {"finished": 1}
    assert epochs == [1, 2, 3]


def test_a_router_that_another_took_the_place_of_only_reads_on() -> None:
    """106, 111: the old process does not know of it; its client gets the whole answer, by whichever router."""
    served: list[tuple[dict[int, int], int]] = []

    async def story(world: World) -> None:
        await until(lambda: committed(world) >= 10)
        world.doubles.append(world.nodes["r1"].leave_behind())
        world.start(world.nodes["r1"])
        await until(lambda: committed(world) >= 90)
        served.extend((book.namers, book.fence) for book in world.checkers.books.values())
        await trio.sleep_forever()

    assert told(story, clients=(client(max_new=100),)).ends == {"finished": 1}
    ((namers, fence),) = served
    assert namers == {1: 1, 2: 2}, "each names under its own incarnation"
    assert fence == 0, "and nobody had to fence"


def test_a_request_whose_router_goes_before_its_session_began_is_made_anew() -> None:
    """404 says that nothing was begun: the directory record is written before anything else (106)."""
    asked: list[int] = []

    async def story(world: World) -> None:
        world.network.cut("r1", "c1", trio.current_time() + 2.0)
        await until(lambda: world.clients[0].session is not None)
        asked.append(len(world.checkers.asked))
        await world.crash(world.nodes["r1"], power=False)
        await trio.sleep(1.0)
        world.start(world.nodes["r1"])
        await until(lambda: committed(world) > 0)
        asked.append(len(world.checkers.asked))
        await trio.sleep_forever()

    assert told(story).ends == {"finished": 1}
    assert asked == [1, 2]


def test_a_full_disk_delays_a_failover_and_nothing_else() -> None:
    async def story(world: World) -> None:
        await until(lambda: committed(world) >= 10)
        world.disk.capacity_bytes = world.disk.used_bytes
        await world.crash(world.nodes["v1"], power=False)
        await trio.sleep(6.0)
        world.disk.capacity_bytes = None
        await trio.sleep_forever()

    assert told(story, verifiers=2).ends == {"finished": 1}


@pytest.mark.parametrize("known", [False, True], ids=["not yet known to be dead", "given up for dead"])
def test_a_session_cancelled_while_no_verifier_lives_is_closed_in_its_log(known: bool) -> None:
    """112: the router writes the end, behind a fence: whoever finds the log resumes nothing."""
    closed: list[bool] = []

    async def story(world: World) -> None:
        await until(lambda: committed(world) >= 10)
        await world.crash(world.nodes["v1"], power=False)
        (book,) = world.checkers.books.values()
        if known:
            await until(lambda: book.fence > 0)
        world.clients[0].leave()
        await until(lambda: book.closed)
        closed.append(world.nodes["v1"].up)
        world.start(world.nodes["v1"])
        await trio.sleep_forever()

    clients = (client(max_new=100), client(begins_s=35.0, max_new=5))
    assert told(story, verifiers=1, clients=clients).ends == {"left": 1, "finished": 1}
    assert closed == [False], "nobody but the router was there to do it"
