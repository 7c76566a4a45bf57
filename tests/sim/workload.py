"""Clients: each asks once, reads its answer to the end (or leaves), and says how it ended.

A client stands outside of the router's process. It waits while no router is there or none can serve it. When the router
of its answer is gone it knows no more of it, until routers take their sessions up again: then it reads the rest.
"""

from typing import TYPE_CHECKING, Final

import trio
from msgspec import UNSET, Struct

from sdcpd.protocol.messages import Output
from sdcpd.protocol.terms import Action
from sdcpd.roles.generation import Generation, GenerationRefused, GenerationRequest
from sdcpd.roles.router import Router
from tests.sim import oracle
from tests.sim.checkers import Reader
from tests.sim.options import BUILT, ClientPlan
from tests.sim.sim_node import Incarnation

if TYPE_CHECKING:
    from tests.sim.world import World

COME_AGAIN_S: Final = 0.5
POLL_S: Final = 5.0


class Ended(Struct, frozen=True):
    """How a client's answer ended: "finished", "failed", "left" or "gone" (with its router)."""

    how: str
    reason: str = ""
    detail: str = ""


class Client:
    """One client. `ended` is set when it has nothing more to wait for."""

    def __init__(self, world: "World", name: str, plan: ClientPlan) -> None:
        self.name = name
        self.plan = plan
        self.ended: Ended | None = None
        self.session: bytes | None = None
        self.expected = oracle.output(plan.prompt, plan.max_new, plan.stop)
        self._world = world
        self._reader = Reader(world.checkers, world.wrong)

    async def run(self) -> None:
        await trio.sleep(self.plan.begins_s)
        while self.ended is None:
            node = self._world.nodes["r1"]
            if isinstance(node.role, Router) and node.incarnation is not None:
                await self._ask(node.role, node.incarnation)
            else:
                await trio.sleep(COME_AGAIN_S)
        self._world.trace.say(self.name, f"{self.ended.how} {self.ended.reason}")
        if self.ended.how == "finished" and tuple(self._reader.tokens) != self.expected:
            self._world.wrong(
                f"10: {self.name} finished with {len(self._reader.tokens)} of {len(self.expected)} tokens"
            )

    async def _ask(self, router: Router, process: Incarnation) -> None:
        plan = self.plan
        request = GenerationRequest(
            model=plan.model, prompt=plan.prompt, max_new=plan.max_new, stop=plan.stop, speculation=plan.speculation
        )
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await process.over.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                await process.gate()
                async with router.generation(request) as generation:
                    self.session = generation.session
                    self._world.trace.say(self.name, f"asks: {generation.session.hex()[:6]}")
                    await self._read(generation, process)
            except GenerationRefused as refused:
                if refused.reason not in ("overloaded", "not_ready"):
                    self._world.wrong(f"10: {self.name} was refused: {refused.reason} {refused.detail}")
                await trio.sleep(refused.retry_after_s or COME_AGAIN_S)
            nursery.cancel_scope.cancel()
        if self.ended is None and self.session is not None and not process.alive:
            if BUILT["router_directory"]:
                await self._read_rest(self.session)
            else:
                self.ended = Ended("gone", "router_stopped")

    async def _read(self, generation: Generation, process: Incarnation) -> None:
        leaves = self.plan.leaves_after
        async for page in generation.pages():
            await process.gate()
            if self._took(page, generation) or (leaves is not None and len(self._reader.tokens) >= leaves):
                break
            await trio.sleep(self.plan.reads_s)
        if self.ended is None:
            self.ended = Ended("left")

    def _took(self, page: Output, generation: Generation | None) -> bool:
        self._world.trace.say(self.name, f"page {page.from_} +{len(page.tokens)}{' final' if page.final else ''}")
        self._reader.page(page)
        if not page.final:
            return False
        reason = "" if page.reason is UNSET else page.reason
        detail = ""
        placement = getattr(generation, "placement", None)
        if placement is not None and placement.ending is not None:
            detail = placement.ending.detail
        self.ended = Ended("finished" if page.finish is Action.FINISH else "failed", reason, detail)
        return True

    async def _read_rest(self, session: bytes) -> None:
        """The router came back: the rest of the answer, from its own output resource."""
        peers = self._world.client_peers(self.name)
        while self.ended is None:
            page = await peers.read_output(self._world.nodes["r1"].uri, session, len(self._reader.tokens), POLL_S)
            if isinstance(page, Output):
                self._took(page, None)
            else:
                await trio.sleep(COME_AGAIN_S)
