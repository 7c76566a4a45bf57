"""Many sessions over few pages and small, failing tiers, in an order that chance decides: nobody gets a wrong token.

Prompts begin alike, so that blocks are shared while they are computed, filled, spilled and lost; clients leave in the
middle of everything. The toy target reads what lies in the pages, so whatever is taken in error shows in a text or in
its log-probabilities.
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import trio
from msgspec import UNSET
from trio.testing import MockClock

from sdcpd.protocol.messages import Contract
from sdcpd.protocol.problems import Overloaded, UnknownResource
from sdcpd.protocol.terms import Action
from tests.cache.sim_disk import SimDisk
from tests.roles.test_verifier import ROUTER_PEER, Stand, running
from tests.support.messages import VERIFIER, contract
from tests.support.paged_toy import PagedToyEngine
from tests.support.ports import SlowWorkers
from tests.support.toy_engine import entry_of, greedy, next_logits

SESSIONS = 40
AT_ONCE = 8


class Crowd:
    """Clients of one verifier."""

    def __init__(self, stand: Stand, seed: int) -> None:
        self.stand = stand
        self.served = 0
        self._random = random.Random(seed)
        self._texts = [tuple(self._random.randrange(1, 40) for _ in range(120)) for _ in range(3)]
        self._places = trio.CapacityLimiter(AT_ONCE)

    async def client(self, number: int) -> None:
        """One session, from its open to its end or to the moment its client leaves."""
        chance = self._random
        prompt = chance.choice(self._texts)[: chance.choice([16, 17, 40, 64, 65, 90, 100])]
        if chance.random() < 0.3:
            prompt = (*prompt, *(chance.randrange(1, 40) for _ in range(chance.randrange(1, 20))))
        scope = chance.choice([{}, {}, {"scope": bytes([7]) * 16}])
        of = contract(stop=(), max_new=chance.choice([1, 5, 20, 40]), low_rounds=100, **scope)
        tells = chance.choice([None, None, 0, 2])
        patience_s = chance.choice([1e6, 1e6, chance.random() * 0.1, chance.random()])
        await trio.sleep(chance.random())
        async with self._places:
            with trio.move_on_after(patience_s):
                await self._follow(number, prompt, of, tells)
                return
            await self._leave(number)

    async def _follow(self, number: int, prompt: tuple[int, ...], of: Contract, tells: int | None) -> None:
        session, stand = bytes([number]) * 16, self.stand
        await stand.open(of, session=session, prompt=prompt, logprobs=UNSET if tells is None else tells)
        await stand.draft(of, session=session, drafter=VERIFIER)
        tokens: list[int] = []
        entries: list[bytes] = []
        while True:
            page = await stand.verifier.read_output(ROUTER_PEER, session, len(tokens), 20.0)
            tokens += page.tokens
            entries += () if page.logprobs is UNSET else page.logprobs
            if page.final:
                break
        assert page.finish is Action.FINISH
        assert tokens == greedy(prompt, of.max_new)
        if tells is not None:
            assert entries == told(prompt, tokens, tells)
        self.served += 1

    async def _leave(self, number: int) -> None:
        """Whatever became of the session so far; the router would try again."""
        session = bytes([number]) * 16
        while session in self.stand.verifier._open:
            with suppress(Overloaded, UnknownResource):  # it is being opened still, or its end is not durable yet
                await self.stand.verifier.cancel_session(ROUTER_PEER, session)
            await trio.sleep(0.05)


def told(prompt: Sequence[int], tokens: Sequence[int], alternatives: int) -> list[bytes]:
    known = [*prompt, *tokens]
    return [
        entry_of(next_logits(known[:place]), known[place], alternatives) for place in range(len(prompt), len(known))
    ]


def tiers(kind: str, seed: int) -> dict[str, Any]:
    disk = SimDisk()
    chance = random.Random(seed + 1)
    disk.fail_read = lambda _: chance.random() < 0.1
    disk.fail_write = lambda _: 3 if chance.random() < 0.1 else None
    kinds: dict[str, dict[str, Any]] = {
        "pages": {},
        "host": {"host_blocks": 12},
        "disk": {"disk_blocks": 20, "files": disk},
        "all": {"host_blocks": 6, "disk_blocks": 20, "files": disk},
    }
    return kinds[kind]


@pytest.mark.parametrize(("kind", "seed"), [("pages", 3), ("host", 4), ("disk", 5), ("all", 10)])
async def test_sessions_of_a_crowd_get_their_texts(autojump_clock: MockClock, kind: str, seed: int) -> None:
    options = {"pages": 14, "page_tokens": 16, "context_tokens": 160} | tiers(kind, seed)
    async with running(
        options,
        kind=PagedToyEngine,
        workers=SlowWorkers(seed, 0.05),
        prefill_chunk_tokens=20,
        max_waiting_sessions=AT_ONCE,
    ) as stand:
        crowd = Crowd(stand, seed)
        async with trio.open_nursery() as nursery:
            for number in range(1, SESSIONS + 1):
                nursery.start_soon(crowd.client, number)
        await trio.sleep(60)
        engine = stand.engine
        assert isinstance(engine, PagedToyEngine)
        assert crowd.served > SESSIONS // 2
        assert stand.meters.counts["num_preemptions_total"] > 0
        assert engine.free_pages == engine.info.pages
        engine.pool.check_integrity()
        engine.store.check_integrity()
