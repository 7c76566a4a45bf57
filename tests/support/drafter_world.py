"""The drafter role in a world of small verifiers that can be told to lose, refuse and hang."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import trio
from msgspec import UNSET

from sdcpd.drafting.lookup_source import LookupSource
from sdcpd.drafting.settings import LookupSettings
from sdcpd.drafting.source import DraftSource
from sdcpd.protocol.draft_session import Identity
from sdcpd.protocol.messages import Assignment, Proposal, Status, Verdict
from sdcpd.protocol.problems import Problem
from sdcpd.roles.drafter import Drafter
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.drafting import Drafting, LookupDrafting
from sdcpd.roles.ports import FETCH_LIMIT_BYTES, Done, Peer, Peers, Ports, ReadOutcome, Refusal, Unreachable
from tests.support.messages import (
    CACHE,
    DRAFTER,
    ROUTER,
    SESSION,
    TOKENIZER,
    assignment,
    contract,
)
from tests.support.ports import CountingMeters, InlineWorkers, MemoryLogs, SeededRandomness, TrioClock
from tests.support.tiny_verifier import TinyVerifier

ROUTER_PEER = Peer(uri=ROUTER, role="router")
PROMPT = (1, 1, 1)
VOCABULARY = 12
"""Few tokens, so that the toy text runs into a loop soon."""
OTHER_VERIFIER = "https://w.example/verifier/"
IDENTITY = Identity(instance=DRAFTER, model=b"\x07" * 32, tokenizer=TOKENIZER, vocabulary=VOCABULARY)
TOKENS = f"{CACHE}v1/s/-/o/AAECAwQFBgcICQoLDA0ODw/1/3/tokens"

Answer = Verdict | Refusal | Unreachable
Script = Callable[[Proposal], Answer | str | None]


class Cluster:
    """The peers of one drafter. Every session lives at a TinyVerifier; `script` may answer in its place.

    A script returns an answer, "lost" (not delivered, no answer), "unanswered" (delivered, no answer), "hang", or None
    for the verifier's own answer.
    """

    def __init__(self) -> None:
        self.verifiers: dict[bytes, TinyVerifier] = {}
        self.script: Script = lambda _: None
        self.sent: list[tuple[float, str, Proposal]] = []
        self.statuses: list[tuple[float, Status]] = []
        self.out: dict[bytes, int] = {}
        self.round_s = 0.01

    def always(self, answer: Answer | str) -> None:
        self.script = lambda _: answer

    async def propose(self, verifier: str, message: Proposal) -> Answer:
        self.sent.append((trio.current_time(), verifier, message))
        self.out[message.session] = self.out.get(message.session, 0) + 1
        assert self.out[message.session] == 1, "two outstanding proposals"
        try:
            return await self._answer(message)
        finally:
            self.out[message.session] -= 1

    async def _answer(self, message: Proposal) -> Answer:
        await trio.sleep(self.round_s)
        scripted = self.script(message)
        if scripted == "hang":
            await trio.sleep_forever()
        if scripted == "lost":
            return Unreachable(reason="lost")
        if scripted is not None and not isinstance(scripted, str):
            return scripted
        try:
            verdict = self.verifiers[message.session].answer(message)
        except Problem as problem:
            return refusal(problem)
        return Unreachable(reason="no answer") if scripted == "unanswered" else verdict

    async def report_status(self, router: str, message: Status) -> Done:
        self.statuses.append((trio.current_time(), message))
        return Done()

    def add(self, session: bytes = SESSION, **changes: Any) -> tuple[TinyVerifier, Assignment]:
        """Open a session and name the drafter; the assignment is still to be delivered."""
        terms = contract(**({"max_new": 40} | changes))
        verifier = TinyVerifier(terms, PROMPT, session=session, vocabulary=VOCABULARY)
        self.verifiers[session] = verifier
        message = of_state(verifier)
        verifier.name(message)
        return verifier, message


def refusal(problem: Problem) -> Refusal:
    return Refusal(problem.status, problem.suffix, problem.detail, problem.state, problem.retry_after_s, problem.m_cap)


def of_state(of: TinyVerifier, **changes: Any) -> Assignment:
    """The assignment a router would send now."""
    values: dict[str, Any] = {
        "session": of.session,
        "epoch": of.epoch,
        "contract": of.contract,
        "round": of.round,
        "committed": len(of.tokens),
        "digest": of.digest,
        "seq": 1,
    }
    return assignment(**(values | changes))


class SlowObjects(MemoryLogs):
    fetch_s = 0.0

    async def fetch(
        self, ref: str, wait_s: float = 0.0, *, limit_bytes: int = FETCH_LIMIT_BYTES, also: str | None = None
    ) -> ReadOutcome:
        await trio.sleep(self.fetch_s)
        return await super().fetch(ref)


class World:
    def __init__(self, source: DraftSource | None = None, *, drafting: Drafting | None = None, **settings: Any) -> None:
        self.cluster = Cluster()
        self.objects = SlowObjects()
        self.meters = CountingMeters()
        self.ports = Ports(
            clock=TrioClock(),
            randomness=SeededRandomness(),
            workers=InlineWorkers(),
            meters=self.meters,
            peers=cast(Peers, self.cluster),
            objects=self.objects,
        )
        self.source = source or LookupSource(LookupSettings())
        self.drafter = Drafter(
            DrafterSettings(**settings),
            self.ports,
            identity=IDENTITY,
            drafting=drafting or LookupDrafting(self.source, self.ports.workers),
            routers=(ROUTER,),
            caches=(CACHE,),
            boot=b"b" * 16,
        )

    async def assign(self, message: Assignment) -> None:
        await self.drafter.assign(ROUTER_PEER, message)

    @property
    def rounds_sent(self) -> list[int]:
        return [message.round for _, _, message in self.cluster.sent]

    def declined(self) -> tuple[bytes, ...]:
        last = self.cluster.statuses[-1][1].declined
        return () if last is UNSET else last


@asynccontextmanager
async def running(
    source: DraftSource | None = None, *, drafting: Drafting | None = None, **settings: Any
) -> AsyncIterator[World]:
    world = World(source, drafting=drafting, **settings)
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            await nursery.start(world.drafter.run)
            yield world
            nursery.cancel_scope.cancel()


async def idle(world: World, limit_s: float = 300.0) -> None:
    """Wait until nothing is drafted any more."""
    with trio.fail_after(limit_s):
        while world.drafter.snapshot().sessions:  # the role tells nobody, and virtual time is free
            await trio.sleep(0.01)
