"""Drafters of every character: a source that agrees with the target at a tunable rate, and ways of proposing.

A rogue is the real drafter role; what it says is falsified on the way out, at its Peers port. Whatever it does, under
rules 1 and 65281 it may cost time and nothing else; under rule 2 it may steer the text within its rows (67), and each
round still follows from what it showed. A plain one does not know `sdcpd_q`, so that its rows are fetched (101).
"""

import math
import random
import struct
from collections.abc import Awaitable, Callable, Sequence

import trio
from msgspec import UNSET
from msgspec.structs import replace

from sdcpd.drafting.source import Draft
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.transport import Transport
from sdcpd.protocol.draft_rows import row_of
from sdcpd.protocol.messages import InlineRow, Proposal, Verdict
from sdcpd.roles.ports import Meters, Refusal, Unreachable
from tests.sim import oracle
from tests.sim.injector import Injector

SILENCE_S = (1.0, 30.0)


class ToySource:
    """Implements DraftSource. Each token is the target's with the chance `agrees`; a pure function of the context.

    With `rows` it shows the distribution that a token was drawn from, else it is certain of each (decision 55).
    """

    def __init__(self, seed: str, agrees: float, rows: bool) -> None:
        self._seed = seed
        self._agrees = agrees
        self._rows = rows
        self._contexts: dict[bytes, list[int]] = {}

    def open(self, session: bytes, prompt: Sequence[int], scope: bytes | None = None) -> None:
        self._contexts[session] = list(prompt)

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        self._contexts[session] += committed

    def propose(self, session: bytes, limit: int, assumed: Sequence[int] = ()) -> Draft:
        context = [*self._contexts[session], *assumed]
        chance = random.Random(f"{self._seed} {session.hex()} {len(context)}")
        began = len(context)
        rows = []
        for _ in range(limit):
            right, other = oracle.next_token(context), (1 - self._agrees) / oracle.VOCABULARY
            context.append(right if chance.random() < self._agrees else chance.randrange(oracle.VOCABULARY))
            q = [(token, other + self._agrees * (token == right)) for token in range(oracle.VOCABULARY)]
            rows.append(row_of([entry for entry in q if entry[1] > 0.0]))
        shown = tuple(rows) if self._rows else None
        return Draft(tokens=tuple(context[began:]), matched=chance.randrange(3), rows=shown)

    def close(self, session: bytes) -> None:
        self._contexts.pop(session, None)


class PlainPeers(PeerClient):
    """The Peers port of a drafter that follows the draft to the letter: rows by reference, and no other way."""

    async def propose(self, verifier: str, message: Proposal) -> Verdict | Refusal | Unreachable:
        return await super().propose(verifier, replace(message, q=UNSET))


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
        if isinstance(message.q, tuple) and message.q and strikes("rows_false"):
            message = replace(message, q=self._false(message.q))
        return message

    def _false(self, rows: tuple[InlineRow, ...]) -> tuple[InlineRow, ...]:
        """Rows that no draft came from: some are no distributions at all, some merely untrue."""
        place, chance = self._chance.randrange(len(rows)), self._chance
        values = list(struct.unpack(f"<{len(rows[place].ids)}f", rows[place].values))
        at = chance.randrange(len(values))
        values[at] = chance.choice((math.nan, math.inf, -0.5, 0.0, 2.0, values[at] / 1e6, values[-1 - at]))
        if chance.random() < 0.5 and all(0 <= value < math.inf for value in values) and sum(values) > 0:
            values = [value / sum(values) for value in values]
        false = replace(rows[place], values=struct.pack(f"<{len(values)}f", *values))
        return (*rows[:place], false, *rows[place + 1 :])

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(oracle.VOCABULARY) for _ in range(count))
