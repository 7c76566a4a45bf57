"""The faults that strike by themselves: one task for each class that is on, at the rate its seed drew.

Chances per message, pass or write (sim_network, sim_files, sim_engine, sim_draft) are the Injector's. What may be done
at all is atlas.py's.
"""

import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import trio

from sdcpd.cache.refs import LogName, ObjectKind, ObjectName, log_reference, parse_path
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.problem_body import problem_response
from sdcpd.edge.transport import Request, Response
from sdcpd.protocol.commit_log import FenceRecord, write_record
from sdcpd.protocol.problems import PreconditionFailed, UnknownResource
from sdcpd.roles.cache import Cache
from sdcpd.roles.ports import Content, Peer
from tests.sim import atlas
from tests.sim.sim_network import SimTransport
from tests.sim.sim_node import Incarnation, SimNode
from tests.support.ports import CountingMeters

if TYPE_CHECKING:
    from tests.sim.world import World

STRANGER: Final = "https://r9.sim/router/"
STALL_S: Final = (1.0, 40.0)
LATE_S: Final = (0.01, 1.5)


class Faults:
    """Runs beside the workload until it is cancelled."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._inject = world.inject
        self._stranger = Incarnation("r9", 1)

    async def run(self) -> None:
        acts: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "link_clogged": self._clog,
            "partition": self._partition,
            "verifier_crash": lambda chance: self._crash(chance, "verifier_crash"),
            "drafter_crash": lambda chance: self._crash(chance, "drafter_crash"),
            "cache_crash": lambda chance: self._crash(chance, "cache_crash"),
            "router_crash": lambda chance: self._crash(chance, "router_crash"),
            "node_pause": self._pause,
            "clock_jump": self._jump,
            "disk_full": self._fill,
            "bit_rot": self._rot,
            "object_evicted": self._evict,
            "foreign_fence": self._fence,
            "router_doubled": self.double,
        }
        async with trio.open_nursery() as nursery:
            for name, act in acts.items():
                if name in self._inject.rates:
                    nursery.start_soon(self._strike, name, act)
            nursery.start_soon(self._attend_store)

    async def _strike(self, name: str, act: Callable[[random.Random], Awaitable[None]]) -> None:
        """Again and again, one at a time for each class. An act may find nothing to strike."""
        while True:
            await trio.sleep(self._inject.wait_s(name))
            await act(self._inject.chance(name))

    # Network

    async def _clog(self, chance: random.Random) -> None:
        one, other = self._two(chance)
        self._say(f"clogs {one} -> {other}", "link_clogged")
        self._world.network.clog(one, other, trio.current_time() + chance.uniform(0.5, 8.0))

    async def _partition(self, chance: random.Random) -> None:
        """Isolate one node, split the cluster, or cut one direction of one link."""
        names = sorted(self._world.nodes)
        until = trio.current_time() + min(atlas.LONGEST_OUTAGE_S, chance.expovariate(0.25))
        way = chance.randrange(3)
        if way == 2:
            pairs = [self._two(chance)]
        else:
            count = 1 if way == 0 else chance.randrange(1, len(names))
            side = chance.sample(names, count)
            pairs = [(one, other) for one in side for other in names if other not in side]
            pairs += [(other, one) for one, other in pairs]
        self._say(f"cuts {' '.join(f'{one}>{other}' for one, other in pairs)}", "partition")
        for one, other in pairs:
            self._world.network.cut(one, other, until)

    def _two(self, chance: random.Random) -> tuple[str, str]:
        one, other = chance.sample(sorted(self._world.nodes), 2)
        return one, other

    # Nodes

    async def _crash(self, chance: random.Random, name: str) -> None:
        node = self._node(chance, name[0])
        if node is None:
            return
        self._say(f"crashes {node.name}", name)
        await self._world.crash(node, power=chance.random() < 0.5 and atlas.may_lose_power(self._world.options))
        await trio.sleep(min(atlas.LONGEST_OUTAGE_S, chance.choice((0.0, chance.expovariate(0.5)))))
        self._world.start(node)

    async def _pause(self, chance: random.Random) -> None:
        node = self._node(chance, "vdcr")
        if node is None or node.incarnation is None:
            return
        own = node.incarnation
        self._say(f"pauses {node.name}", "node_pause")
        own.pause()
        await trio.sleep(min(atlas.LONGEST_OUTAGE_S, chance.expovariate(0.3)))
        own.resume()
        self._say(f"resumes {node.name}")

    async def _jump(self, chance: random.Random) -> None:
        node = self._node(chance, "vdcr")
        if node is None:
            return
        by_s = min(atlas.LONGEST_JUMP_S, chance.expovariate(0.3))
        self._say(f"clock of {node.name} jumps {by_s:.1f} s", "clock_jump")
        self._world.clocks[node.name].jump(by_s)

    def _node(self, chance: random.Random, kinds: str) -> SimNode | None:
        up = [node for name, node in sorted(self._world.nodes.items()) if name[0] in kinds and node.up]
        return chance.choice(up) if up else None

    # Log, disk, cache

    async def _fill(self, chance: random.Random) -> None:
        disk = self._world.disk
        self._say("fills the disk", "disk_full")
        disk.capacity_bytes = disk.used_bytes + chance.randrange(400)
        await trio.sleep(min(atlas.LONGEST_OUTAGE_S, chance.expovariate(0.3)))
        disk.capacity_bytes = None

    async def _rot(self, chance: random.Random) -> None:
        if not self._world.disk.rot():
            return
        self._say("flips a bit of the journal", "bit_rot")

    async def _evict(self, chance: random.Random) -> None:
        cache = self._world.nodes["c1"].role
        session = self._session(chance)
        if not isinstance(cache, Cache) or session is None:
            return
        book = self._world.checkers.books[session]
        epoch, round_ = max(1, book.fence), len(book.commits)
        name = ObjectName(scope=None, session=session, epoch=epoch, round=round_, kind=ObjectKind.TOKENS)
        self._say(f"evicts {name.path}", "object_evicted")
        await cache.remove_object(Peer(uri="https://op.sim/operator/", role="operator"), name)

    async def _attend_store(self) -> None:
        """An operator: a journal whose disk failed is started again."""
        while True:
            await trio.sleep(2.0)
            node = self._world.nodes["c1"]
            if isinstance(node.role, Cache) and node.role.snapshot().stopped is not None and node.up:
                self._say("an operator restarts the cache")
                await self._world.crash(node, power=False)
                self._world.start(node)

    # Routers

    async def _fence(self, chance: random.Random) -> None:
        """Another router believes that the session is its own, fences it, and goes away."""
        session = self._session(chance)
        if session is None:
            return
        transport = SimTransport(self._world.network, self._stranger, Peer(uri=STRANGER, role="router"))
        objects = ObjectClient(transport, CountingMeters(), (self._world.cache_uri,))
        ref = log_reference(self._world.cache_uri, None, session)
        content = await objects.read_log(ref)
        if not isinstance(content, Content):
            return
        epoch = max(1, self._world.checkers.books[session].fence) + 1
        self._say(f"fences {ref} at {epoch}", "foreign_fence")
        record = write_record(FenceRecord(epoch=epoch, by=f"{STRANGER} {chance.randrange(1 << 32)}"))
        await objects.append(ref, record, epoch=epoch, if_match=content.tag)

    async def double(self, chance: random.Random) -> None:
        """A router is given up for dead and started anew, while the old process runs on; often it has only slept."""
        node = self._world.nodes["r1"]
        if not node.up:
            return
        self._say("starts a second r1", "router_doubled")
        double = node.leave_behind()
        self._world.doubles.append(double)
        if chance.random() < 0.5:
            double.pause()
        self._world.start(node)
        await trio.sleep(min(atlas.LONGEST_OUTAGE_S, chance.expovariate(0.3)))
        double.resume()
        await trio.sleep(min(atlas.LONGEST_DOUBLE_S, chance.expovariate(0.2)))
        await self._world.end_doubles()

    async def fence(self) -> None:
        """For a story: fence the session that is open."""
        while not self._inject.any("foreign_fence"):
            await self._fence(random.Random(0))
            await trio.sleep(0.01)

    def _session(self, chance: random.Random) -> bytes | None:
        books = self._world.checkers.books
        return chance.choice([session for session in books if not books[session].closed] or [None])

    def _say(self, event: str, name: str | None = None) -> None:
        """What is about to be done; counted under its class."""
        self._world.trace.say("!", event)
        if name is not None:
            self._inject.note(name)


async def tampered(world: "World", uri: str, request: Request, response: Response) -> Response:
    """What the way back from a cache does to an answer: stalled, cut short, or lost after an append."""
    inject = world.inject
    if uri != world.cache_uri:
        return response
    if request.method == "PATCH" and inject.strikes("append_unanswered"):
        return Response(status=504)
    if request.method == "GET" and response.status == 200:
        if request.path.split("?")[0].endswith("/q"):
            if inject.strikes("rows_late"):
                await trio.sleep(inject.chance("rows_late").uniform(*LATE_S))
            if inject.strikes("rows_lost"):
                return problem_response(UnknownResource("there is no such object"))
        if inject.strikes("content_stalled"):
            await trio.sleep(inject.chance("content_stalled").uniform(*STALL_S))
        if response.body and inject.strikes("content_cut"):
            return Response(status=200, headers=response.headers, body=response.body[:-1])
    return response


def refused_instead(world: "World", uri: str, request: Request) -> Response | None:
    """A store that reports a conflict where there is none (a retry below us that met its own first try)."""
    if uri == world.cache_uri and request.method == "PATCH" and world.inject.strikes("append_conflict"):
        assert isinstance(parse_path(request.path), LogName)
        return problem_response(PreconditionFailed("the log is not at this tag"))
    return None
