"""Clients: each asks once, reads its answer to the end (or leaves), and says how it ended.

A client stands outside of the router's process. It waits while no router is there or none can serve it. When the router
of its answer is gone it reads the rest from the one that comes back, and asks anew if its session had not begun.
"""

import contextlib
from typing import TYPE_CHECKING, Final

import trio
from msgspec import UNSET, Struct

from sdcpd.protocol.messages import Output, Sampling
from sdcpd.protocol.problems import UnknownResource
from sdcpd.protocol.terms import Action, Rule, session_path_id
from sdcpd.roles.generation import Generation, GenerationRefused, GenerationRequest
from sdcpd.roles.ports import Refusal
from sdcpd.roles.router import Router
from tests.sim import atlas, oracle
from tests.sim.checkers import Reader
from tests.sim.options import ClientPlan, PolicyPlan
from tests.sim.oracle import Sampled
from tests.sim.sampling_book import Wish
from tests.sim.sim_node import Incarnation

if TYPE_CHECKING:
    from tests.sim.world import World

COME_AGAIN_S: Final = 0.5
POLL_S: Final = 5.0
READ_LIMIT_S: Final = 10.0


class Ended(Struct, frozen=True):
    """How a client's answer ended: "finished", "failed" or "left". `tokens`: how many it had by then."""

    how: str
    reason: str = ""
    detail: str = ""
    tokens: int = 0


class Client:
    """One client. `ended` is set when it has nothing more to wait for."""

    def __init__(self, world: "World", name: str, plan: ClientPlan) -> None:
        self.name = name
        self.plan = plan
        self.ended: Ended | None = None
        self.session: bytes | None = None
        self._world = world
        self._wish: Wish | None = None  # of the session that it was told of last
        self._reader = Reader(world.checkers, world.wrong)

    async def run(self) -> None:
        await trio.sleep(self.plan.begins_s)
        while self.ended is None:
            node = self._world.nodes["r1"]
            if isinstance(node.role, Router) and node.incarnation is not None:
                await self._ask(node.role, node.incarnation)
            else:
                await trio.sleep(COME_AGAIN_S)
            if self._told_to_come_again():
                await trio.sleep(COME_AGAIN_S)
        self._world.trace.say(self.name, f"{self.ended.how} {self.ended.reason}")
        told, expected = tuple(self._reader.tokens), self._expected()
        if told != expected[: len(told)] or (self.ended.how == "finished" and told != expected):
            self._world.wrong(f"10: {self.name} {self.ended.how} with {len(told)} of {len(expected)} tokens")

    def _expected(self) -> tuple[int, ...]:
        """The oracle's text where it follows from the request, whatever happened meanwhile; else what is in the log,
        each token of which has been checked."""
        plan, wish = self.plan, self._wish
        if plan.rule == Rule.GREEDY or wish is None:
            return oracle.output(plan.prompt, plan.max_new, plan.stop)
        if plan.rule == Rule.REPLAYABLE_SAMPLING and len(wish.profiles) == 1:
            return oracle.output(plan.prompt, plan.max_new, plan.stop, wish.profiles[0])
        book = self._world.checkers.books.get(self.session) if self.session is not None else None
        return () if book is None else tuple(self._reader.tokens if book.rotted else book.output)

    def _told_to_come_again(self) -> bool:
        """A front end answers such an end with 503; its client asks anew."""
        ended = self.ended
        if ended is None or not atlas.may_ask_anew(ended, self._world.inject):
            return False
        self._world.trace.say(self.name, f"is told to come again: {ended.reason}")
        self.ended = None
        return True

    async def _ask(self, router: Router, process: Incarnation) -> None:
        plan = self.plan
        request = GenerationRequest(
            model=plan.model,
            prompt=plan.prompt,
            max_new=plan.max_new,
            stop=plan.stop,
            speculation=plan.speculation,
            temperature_milli=plan.temperature_milli,
            top_k=plan.top_k,
            top_p_milli=plan.top_p_milli,
            seed=plan.seed,
            rule=plan.rule,
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
                    self._wish = Wish(
                        plan.rule, Sampled(plan.temperature_milli, plan.top_k, plan.top_p_milli, plan.seed)
                    )
                    self._world.checkers.asked[self.session] = self._wish
                    self._world.trace.say(self.name, f"asks: {generation.session.hex()[:6]}")
                    await self._read(generation, process, router)
            except GenerationRefused as refused:
                if refused.reason not in ("overloaded", "not_ready"):
                    self._world.wrong(f"10: {self.name} was refused: {refused.reason} {refused.detail}")
                await trio.sleep(refused.retry_after_s or COME_AGAIN_S)
            nursery.cancel_scope.cancel()
        if self.ended is None and self.session is not None and not process.alive:
            await self._read_rest(self.session, process)

    async def _read(self, generation: Generation, process: Incarnation, router: Router) -> None:
        leaves, policies = self.plan.leaves_after, list(self.plan.policies)
        async for page in generation.pages():
            await process.gate()
            while policies and len(self._reader.tokens) >= policies[0].after:
                self._wants(policies.pop(0), generation.session, router)
            if self._took(page, generation) or (leaves is not None and len(self._reader.tokens) >= leaves):
                break
            await trio.sleep(self.plan.reads_s)
        if self.ended is None:
            self._end("left")

    def _wants(self, policy: PolicyPlan, session: bytes, router: Router) -> None:
        """Another profile from here on, of all that is not decided yet."""
        wish = self._wish
        assert wish is not None
        top_k, top_p, seed = policy.top_k, policy.top_p_milli, policy.seed
        sampling = Sampling(
            temperature_milli=policy.temperature_milli,
            top_k=top_k,
            top_p_milli=top_p,
            seed=UNSET if seed is None else seed,
        )
        kept = wish.profiles[-1].seed if seed is None else seed
        wish.profiles.append(Sampled(policy.temperature_milli, top_k, top_p, kept))
        with contextlib.suppress(UnknownResource):  # it has ended meanwhile
            router.set_sampling(session, sampling)
            self._world.trace.say(self.name, f"wants another profile: {policy}")

    def _took(self, page: Output, generation: Generation | None) -> bool:
        self._world.trace.say(self.name, f"page {page.from_} +{len(page.tokens)}{' final' if page.final else ''}")
        self._reader.page(page)
        if not page.final:
            return False
        reason = "" if page.reason is UNSET else page.reason
        placement = getattr(generation, "placement", None)
        ending = placement.ending if placement is not None else None
        detail = self._detail(page.session) if ending is None else ending.detail
        self._end("finished" if page.finish is Action.FINISH else "failed", reason, detail)
        return True

    def _detail(self, session: bytes) -> str:
        """What the router would tell its operator of an end that was read by the network."""
        router, name = self._world.nodes["r1"].role, session_path_id(session)
        views = router.snapshot().sessions if isinstance(router, Router) else ()
        return next((view.detail or "" for view in views if view.session == name), "")

    def _end(self, how: str, reason: str = "", detail: str = "") -> None:
        self.ended = Ended(how, reason, detail, len(self._reader.tokens))

    async def _read_rest(self, session: bytes, process: Incarnation) -> None:
        """The router came back: the rest of the answer, from its own output resource."""
        peers = self._world.client_peers(self.name)
        while self.ended is None:
            page: object = None
            with trio.move_on_after(READ_LIMIT_S):
                page = await peers.read_output(self._world.nodes["r1"].uri, session, len(self._reader.tokens), POLL_S)
            if isinstance(page, Output):
                # 6.7: what a double says of an epoch that is over is discarded. One router alone never goes back.
                if page.epoch >= self._reader.epoch or not self._world.inject.any("router_doubled"):
                    self._took(page, None)
            elif isinstance(page, Refusal) and page.status == 404:
                began_at = self._world.checkers.recorded_at(session)
                if began_at is None:
                    return  # its router went before the session began: it is asked for anew
                late = process.left_behind_at is not None and began_at >= process.left_behind_at
                self._end("failed", "no_such_session", "begun by a double" if late else page.detail)
            elif isinstance(page, Refusal) and page.status == 410:
                self._end("failed", "output_gone", page.detail)
            else:
                await trio.sleep(COME_AGAIN_S)
