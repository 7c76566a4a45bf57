"""What must hold for as long as nodes run: nothing is lost, stuck or left behind, whatever comes and goes."""

import os
import random
from collections.abc import Callable
from typing import Any

import trio

from sdcpd.edge.transport import Handler, Request, Response, TransportError
from sdcpd.roles.ports import Peer
from tests.edge.wire.pki import Authority
from tests.edge.wire.world import GET, POLL, POST, Served, echo, memory_world, polls_wait, tls_world


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def living_tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def until(what: Callable[[], bool], limit_s: float = 5) -> None:
    with trio.fail_after(limit_s):
        while not what():
            await trio.sleep(0.02)


async def test_ten_thousand_requests_on_one_connection(autojump_clock: Any) -> None:
    """A server whose default ends a connection after a thousand does so in mid-answer."""
    async with memory_world() as world:
        wrong = 0

        async def ask(worker: int) -> None:
            nonlocal wrong
            for number in range(625):
                body = b"%d %d" % (worker, number)
                answer = await world.ask(Request("POST", "x", body=body))
                wrong += answer.body != body

        async with trio.open_nursery() as nursery:
            for worker in range(16):
                nursery.start_soon(ask, worker)
        assert wrong == 0
        assert len(world.network.streams) == 1
        (connection,) = world.server._connections
        assert len(connection._h2.streams) <= 32, "h2 forgets what is over"


async def test_polls_that_come_and_go_leave_nothing_behind(autojump_clock: Any) -> None:
    """Open, cancelled at any moment, answered: 2000 polls, up to 60 at once."""
    draw = random.Random(3)
    async with memory_world(polls_wait(2.0)) as world:
        await world.ask(POST)
        await world.ask(POLL)
        tasks = living_tasks()

        async def poll(patience_s: float) -> None:
            with trio.move_on_after(patience_s):
                assert (await world.ask(POLL)).status == 200

        async with trio.open_nursery() as nursery:
            for number in range(2000):
                nursery.start_soon(poll, draw.choice([0, 0.001, 1, 1.999, 2, 3]))
                if number % 20 == 0:
                    await trio.sleep(1)
        await trio.testing.wait_all_tasks_blocked()
        assert (await world.ask(POLL)).status == 200
        assert (len(world.network.streams), world.app.under_way) == (2, 0)
        assert living_tasks() <= tasks
        for connection in world.server._connections:
            assert connection.requests == 0


class Counting:
    """A handler that notes what it carried out. GET and polls may be repeated; the rest may not."""

    def __init__(self, pause_s: Callable[[], float]) -> None:
        self.done: list[bytes] = []
        self._pause_s = pause_s

    async def __call__(self, peer: Peer, request: Request) -> Response:
        if request.method == "POST":
            self.done.append(request.body)
        await trio.sleep(self._pause_s())
        return await echo(peer, request)


async def test_connections_that_are_retired_under_load_lose_nothing(authority: Authority) -> None:
    """GOAWAY in mid-flight, both ends, again and again: each request is answered, and carried out once."""
    draw = random.Random(7)
    counting = Counting(lambda: draw.choice([0, 0.002, 0.01]))
    async with tls_world(authority) as world:
        served = await world.serve({"verifier": counting})
        client = await world.client("https://d.example/drafter/")
        calls = client.transport(Peer(uri="https://d.example/drafter/", role="drafter"), named=False)
        stop = False

        async def ask(worker: int, asked: list[bytes]) -> None:
            number = 0
            while not stop:
                body = b"%d %d" % (worker, number)
                number += 1
                asked.append(body)
                assert (await calls.exchange(served.base(), Request("POST", "x", body=body))).body == body

        asked: list[bytes] = []
        async with trio.open_nursery() as nursery:
            for worker in range(6):
                nursery.start_soon(ask, worker, asked)
            for _ in range(4):
                await trio.sleep(0.3)
                served.server.retire()
                await trio.sleep(0.1)
                client.retire()
            stop = True
        assert sorted(counting.done) == sorted(asked)
        assert len(asked) > 50
        await until(lambda: served.server.connections <= 1)


async def test_a_server_restarted_under_load_leaves_nothing_behind(authority: Authority) -> None:
    """Stopped in order and cut off, six times: every call ends, and then all is as before."""
    async with tls_world(authority) as world:
        handler: Handler = polls_wait(0.5)
        client = await world.client("https://d.example/drafter/", idle_connection_timeout_s=1)
        calls = client.transport(Peer(uri="https://d.example/drafter/", role="drafter"), named=False)
        served = await world.serve({"verifier": handler}, grace_s=0.2)
        base = served.base()
        await trio.lowlevel.checkpoint()
        files, tasks, stop = open_files(), living_tasks(), False
        answered: dict[str, int] = {"post": 0, "get": 0, "poll": 0}

        async def ask(kind: str, request: Request) -> None:
            while not stop:
                try:
                    with trio.fail_after(5):
                        assert (await calls.exchange(base, request)).status == 200
                    answered[kind] += 1
                except TransportError:
                    await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask, "post", POST)
                nursery.start_soon(ask, "get", GET)
                nursery.start_soon(ask, "poll", POLL)
            for turn in range(6):
                await trio.sleep(0.15)
                await (_stop if turn % 2 else _cut_off)(served)
                before = dict(answered)
                assert served.app.under_way == 0
                served = await world.serve({"verifier": handler}, port=served.bound.port, grace_s=0.2)
                await until(lambda now=before: all(answered[kind] > now[kind] for kind in answered))  # type: ignore[misc]  # mypy does not type the default
            stop = True
        await until(lambda: client.connections == 0 and served.server.connections == 0, 10)
        assert served.app.under_way == 0
        await until(lambda: open_files() <= files and living_tasks() <= tasks)


async def _stop(served: Served) -> None:
    served.server.stop()
    await served.returned.wait()


async def _cut_off(served: Served) -> None:
    served.scope.cancel()
    await served.returned.wait()


async def test_large_bodies_arrive_whole_both_ways_beside_small_ones(authority: Authority) -> None:
    body = random.Random(1).randbytes(8 << 20)
    async with tls_world(authority) as world:
        served = await world.serve()
        calls = await world.calls()
        slowest = 0.0
        over = False

        async def small() -> None:
            nonlocal slowest
            while not over:
                begin = trio.current_time()
                assert (await calls.exchange(served.base(), POST)).status == 200
                slowest = max(slowest, trio.current_time() - begin)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(small)
            for _ in range(2):
                assert (await calls.exchange(served.base(), Request("PUT", "x", body=body))).body == body
            over = True
        assert slowest < 1
