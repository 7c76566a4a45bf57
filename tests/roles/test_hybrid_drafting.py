"""The frequency hybrid: when the lookup's draft is verified, when the model's, and that both keep up."""

from collections.abc import Sequence
from typing import Any

import trio
from trio.testing import MockClock

from sdcpd.drafting.length import Acceptance, LengthChooser, VerifyTime
from sdcpd.drafting.payoff import Features, FrequencyPayoff
from sdcpd.drafting.settings import HybridSettings, LengthSettings, SuffixSettings
from sdcpd.drafting.source import MODEL, Draft
from sdcpd.drafting.suffix_source import SuffixSource
from sdcpd.protocol.distributions import Profile
from sdcpd.roles.drafting import DraftJob, Lengths, Order
from sdcpd.roles.hybrid_drafting import HybridDrafting
from tests.support.draft_models import M, draft_model, often_wrong
from tests.support.drafter_world import idle, running
from tests.support.messages import SESSION
from tests.support.ports import InlineWorkers

LINE = [*range(20, 50)]


class Model:
    """Says 7 whenever it is asked."""

    slow = True

    def __init__(self) -> None:
        self.contexts: dict[bytes, list[int]] = {}
        self.full = False  # nothing more goes into its context

    async def run(self) -> None: ...
    async def open(self, session: bytes, context: Sequence[int], scope: bytes | None) -> None:
        self.contexts[session] = list(context)

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        self.contexts[session] += committed

    def begin(self, order: Order, instead: Draft | None = None) -> DraftJob:
        job = DraftJob(order, instead)
        job.guess = None if self.full else 7
        job.finish(Draft(tokens=() if self.full else (7,), matched=MODEL))
        return job

    def settled(self, draft: Draft, accepted: int) -> None: ...
    def close(self, session: bytes) -> None:
        self.contexts.pop(session, None)


class Watching(FrequencyPayoff):
    """Remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[Features, int]] = []

    def observe(self, features: Features, accepted: int) -> None:
        self.seen.append((features, accepted))


def hybrid(payoff: Any = None, **settings: Any) -> HybridDrafting:
    return HybridDrafting(
        HybridSettings(**settings),
        SuffixSource(SuffixSettings()),
        Model(),
        payoff or FrequencyPayoff(),
        InlineWorkers(),
    )


def lengths(*, model_right: float) -> Lengths:
    """A round takes 20 ms and 0.4 ms a token, a token of the model 2 ms; its tokens are right so often."""
    settings = LengthSettings()
    chooser, acceptance, verify = LengthChooser(settings), Acceptance(settings), VerifyTime(settings)
    for m in (1, 4, 8) * 10:
        verify.observe(m, 0.02 + 0.0004 * m)
        chooser.drafted(MODEL, 1, 0.002)
    for _ in range(20):
        acceptance.observe(MODEL, proposed=100, accepted=round(100 * model_right) if model_right < 1 else 100)
        for _ in range(0 if model_right > 0.5 else 20):
            acceptance.observe(MODEL, proposed=1, accepted=0)
    return Lengths(chooser, acceptance, verify, publishes=False)


def order(lengths: Lengths, **changes: Any) -> Order:
    values: dict[str, Any] = {
        "session": SESSION,
        "assumed": (),
        "ahead": False,
        "limit": 16,
        "place": 0,
        "rule": 1,
        "profile": Profile(),
        "stop": (),
        "lengths": lengths,
    }
    return Order(**values | changes)


async def drafted(drafting: HybridDrafting, context: Sequence[int], ordered: Order) -> Draft:
    await drafting.open(SESSION, context, None)
    return await drafting.begin(ordered).result()


async def test_a_threshold_decides_by_the_score() -> None:
    copying = [*LINE, 5, *LINE[:6]]
    even = lengths(model_right=0.9)
    assert (await drafted(hybrid(min_score=6.0), copying, order(even))).tokens[0] == LINE[6]
    assert (await drafted(hybrid(min_score=40.0), copying, order(even))).matched == MODEL
    once = [3, 4, 3]
    assert (await drafted(hybrid(min_score=1.0), once, order(even))).tokens[0] == 4
    assert (await drafted(hybrid(min_score=2.5), [3, 4, 0, 3, 6, 1, 3], order(even))).matched == MODEL


async def test_without_one_both_are_rated_by_what_they_cost() -> None:
    copying, chatting = [*LINE, 5, *LINE[:8]], [3, 4, 3, 5, 3]
    good, bad = lengths(model_right=0.95), lengths(model_right=0.0)
    assert (await drafted(hybrid(), copying, order(good))).matched >= 8
    assert (await drafted(hybrid(), chatting, order(good))).matched == MODEL
    assert (await drafted(hybrid(), chatting, order(bad))).matched == 1
    assert (await drafted(hybrid(), [3, 4, 5], order(bad))).matched in (0, MODEL)


async def test_ahead_the_lookups_first_token_is_the_guess() -> None:
    drafting = hybrid(min_score=3.0)
    await drafting.open(SESSION, [*LINE, 5, *LINE[:6]], None)
    job = drafting.begin(order(lengths(model_right=0.5), assumed=tuple(LINE[6:9]), ahead=True))
    assert job.guess == LINE[9]
    draft = await job.result()
    assert draft.tokens[:3] == tuple(LINE[10:13])
    job = drafting.begin(order(lengths(model_right=0.5), assumed=(5, 5, 6), ahead=True))
    assert (job.guess, (await job.result()).matched) == (7, MODEL)


async def test_where_the_models_context_ends_the_lookup_goes_on_by_itself() -> None:
    model = Model()
    drafting = HybridDrafting(
        HybridSettings(min_score=50.0), SuffixSource(SuffixSettings()), model, FrequencyPayoff(), InlineWorkers()
    )
    ordered = order(lengths(model_right=0.9))
    assert (await drafted(drafting, [3, 4, 3], ordered)).tokens == (7,)
    model.full = True
    assert (await drafted(drafting, [3, 4, 3], ordered)).tokens[0] == 4
    assert (await drafted(drafting, [3, 4, 5], ordered)).tokens == (5,), "the cheap guess"
    ahead = drafting.begin(order(lengths(model_right=0.9), assumed=(4,), ahead=True))
    assert (ahead.guess, (await ahead.result()).tokens) == (None, ())


async def test_the_estimator_sees_what_was_verified_and_what_came_of_it() -> None:
    payoff = Watching()
    drafting = hybrid(payoff, min_score=1.0)
    draft = await drafted(drafting, [*LINE, 5, *LINE[:4]], order(lengths(model_right=0.5)))
    drafting.settled(draft, 3)
    drafting.settled(Draft(tokens=(7,), matched=MODEL), 1)
    ((features, accepted),) = payoff.seen
    assert (features.matched, features.length, accepted) == (4, len(draft.tokens), 3)
    assert payoff.estimate(features) == features.length <= features.score


async def test_a_whole_session_takes_from_both_and_the_text_is_the_targets(autojump_clock: MockClock) -> None:
    both = HybridDrafting(
        HybridSettings(), SuffixSource(SuffixSettings()), draft_model(often_wrong), FrequencyPayoff(), InlineWorkers()
    )
    async with running(drafting=both) as world:
        verifier, message = world.cluster.add(max_new=300, m_max=M)
        truth = verifier.truth(300)
        sources: dict[str, float] = {}
        count = world.meters.count

        def by_source(name: str, amount: float = 1, **labels: str) -> None:
            if name == "drafts_settled_total":
                sources[labels["source"]] = sources.get(labels["source"], 0) + amount
            count(name, amount, **labels)

        world.meters.count = by_source  # type: ignore[method-assign]  # to see a label
        await world.assign(message)
        await idle(world)
        assert verifier.tokens == truth
        assert sources["lookup"] > 10, "the toy text repeats"
        assert sources["model"] >= 1
        await trio.sleep(1)
