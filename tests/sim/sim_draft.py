"""Drafters of every character: a source that agrees with the target at a tunable rate, and a rogue's way of proposing.

The rogue is the real drafter role; what it says is falsified on the way out, at its Peers port. Whatever it does, under
rule 1 it may cost time and nothing else.
"""

import random
from collections.abc import Awaitable, Callable, Sequence

import trio
from msgspec.structs import replace

from sdcpd.drafting.source import Draft
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.transport import Transport
from sdcpd.protocol.messages import Proposal, Verdict
from sdcpd.roles.ports import Meters, Refusal, Unreachable
from tests.sim import oracle
from tests.sim.injector import Injector

SILENCE_S = (1.0, 30.0)


class ToySource:
    """Implements DraftSource. Each token is the target's with the chance `agrees`; a pure function of the context."""

    def __init__(self, seed: str, agrees: float) -> None:
        self._seed = seed
        self._agrees = agrees
        self._contexts: dict[bytes, list[int]] = {}

    def open(self, session: bytes, prompt: Sequence[int], scope: bytes | None = None) -> None:
        self._contexts[session] = list(prompt)

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        self._contexts[session] += committed

    def propose(self, session: bytes, limit: int, assumed: Sequence[int] = ()) -> Draft:
        context = [*self._contexts[session], *assumed]
        chance = random.Random(f"{self._seed} {session.hex()} {len(context)}")
        began = len(context)
        for _ in range(limit):
            right = oracle.next_token(context)
            context.append(right if chance.random() < self._agrees else chance.randrange(oracle.VOCABULARY))
        return Draft(tokens=tuple(context[began:]), matched=chance.randrange(3))

    def close(self, session: bytes) -> None:
        self._contexts.pop(session, None)


class RoguePeers(PeerClient):
    """The Peers port of a drafter that lies. `spawn` runs what it does beside the call."""

    def __init__(
        self,
        transport: Transport,
        meters: Meters,
        chance: random.Random,
        inject: Injector,
        spawn: Callable[[Callable[[], Awaitable[object]]], None],
    ) -> None:
        super().__init__(transport, meters)
        self._chance = chance
        self._inject = inject
        self._spawn = spawn

    async def propose(self, verifier: str, message: Proposal) -> Verdict | Refusal | Unreachable:
        if self._inject.strikes("silence"):
            await trio.sleep(self._chance.uniform(*SILENCE_S))
        if self._inject.strikes("other_body"):
            other = replace(message, tokens=self._tokens(len(message.tokens)))
            self._spawn(lambda: super(RoguePeers, self).propose(verifier, other))
        return await super().propose(verifier, self._falsified(message))

    def _falsified(self, message: Proposal) -> Proposal:
        chance, strikes = self._chance, self._inject.strikes
        if strikes("over_m_cap"):
            # Mostly what the target would say, so that only the limit stands against it.
            message = replace(message, tokens=(*message.tokens, *self._tokens(chance.randrange(1, 40))))
        if strikes("stale_base"):
            message = replace(message, base=max(0, message.base + chance.choice((-2, -1, 1, 5))))
        if strikes("wrong_digest"):
            message = replace(message, base_digest=chance.randbytes(32))
        if strikes("wrong_epoch"):
            message = replace(message, epoch=max(0, message.epoch + chance.choice((-1, 1, 7))))
        if strikes("outside_vocabulary"):
            place = chance.randrange(len(message.tokens))
            beyond = chance.choice((oracle.VOCABULARY, 1 << 20, (1 << 32) - 1, 1 << 32, 1 << 40))
            message = replace(message, tokens=(*message.tokens[:place], beyond, *message.tokens[place + 1 :]))
        return message

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(oracle.VOCABULARY) for _ in range(count))
