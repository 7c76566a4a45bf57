"""Every way of drafting through the whole cluster, in virtual time: whatever is drafted, the text is the target's.

Most draft models here are the target itself: under every rule all they propose must be accepted.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from sdcpd.drafting.payoff import FrequencyPayoff
from sdcpd.drafting.settings import DraftModelSettings, HybridSettings, SuffixSettings
from sdcpd.drafting.source import Draft
from sdcpd.drafting.suffix_source import SuffixSource
from sdcpd.protocol.distributions import Profile, draw, target_masses
from sdcpd.protocol.draws import replay_draw
from sdcpd.protocol.ladder import Ladder
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.drafting import Drafting, DraftJob, LookupDrafting, Order
from sdcpd.roles.hybrid_drafting import HybridDrafting
from sdcpd.roles.model_drafting import ModelDrafting
from tests.support.cluster import running_cluster
from tests.support.messages import TARGET, TOKENIZER
from tests.support.ports import CountingMeters, InlineWorkers, SeededStream, TrioClock
from tests.support.toy_engine import ToyEngine, greedy, next_logits, next_token

PROMPT = (5, 6, 7, 8)
M = 4
WARM = Profile(temperature_milli=900, top_k=20, top_p_milli=950, seed=11)


def model(**engine: Any) -> ModelDrafting:
    """A pass of the draft model takes a tenth of the target's."""
    draws = SeededStream("drafts")
    toy = ToyEngine(TrioClock(), model=TARGET, tokenizer=TOKENIZER, **{"pass_s": 0.001} | engine)
    settings = DraftModelSettings(model="toy", num_speculative_tokens=M)
    return ModelDrafting(settings, toy, TrioClock(), CountingMeters(), draws)


def sometimes_wrong(prefix: Sequence[int]) -> int:
    return next_token(prefix) if len(prefix) % 5 else 3


def hybrid(drafts: Drafting) -> HybridDrafting:
    suffix = SuffixSource(SuffixSettings())
    return HybridDrafting(HybridSettings(), suffix, drafts, FrequencyPayoff(), InlineWorkers())


WAYS: dict[str, Callable[[], Drafting]] = {
    "suffix": lambda: LookupDrafting(SuffixSource(SuffixSettings()), InlineWorkers()),
    "suffix with a corpus": lambda: LookupDrafting(
        SuffixSource(SuffixSettings(), [greedy(PROMPT, 30)]), InlineWorkers()
    ),
    "identity": model,
    "perturbed": lambda: model(target=sometimes_wrong),
    "hybrid": lambda: hybrid(model(target=sometimes_wrong)),
    "hybrid with a short context": lambda: hybrid(model(context_tokens=64)),
    "small pool": lambda: model(pages=8),
    "short context": lambda: model(context_tokens=64),
}


@pytest.mark.parametrize("name", WAYS)
async def test_the_text_does_not_depend_on_how_it_was_drafted(
    tmp_path: Path, autojump_clock: MockClock, name: str
) -> None:
    prompts = [(9 + n, 4, 5 + n) for n in range(4)] + [PROMPT]
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [], draftings=[WAYS[name]()]) as cluster:

            async def one(prompt: tuple[int, ...]) -> None:
                assert (await cluster.generate(prompt, 100))[0] == greedy(prompt, 100)

            async with trio.open_nursery() as nursery:
                for prompt in prompts:
                    nursery.start_soon(one, prompt)
            assert cluster.engine.free_pages == cluster.engine.info.pages
            assert cluster.meters.counts["drafter_proposals_total"] > 5


class Planting:
    """Drafts as another one does, but for one token of every third draft; keeps what came of each."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._number = 0
        self._planted: set[tuple[int, ...]] = set()
        self.clean: list[tuple[int, int]] = []  # (proposed, accepted)
        self.wrong = 0
        self.slow = drafting.slow
        self.run, self.open, self.extend = drafting.run, drafting.open, drafting.extend
        self.close = drafting.close

    def begin(self, order: Order, instead: Draft | None = None) -> DraftJob:
        job = self._drafting.begin(order, instead)
        finish = job.finish
        self._number += 1

        def bent(draft: Draft) -> None:
            if self._number % 3 == 0 and draft.tokens:
                at = self._number % len(draft.tokens)
                wrong = 3 + (draft.tokens[at] - 3 + 1) % 47
                draft = Draft(tokens=(*draft.tokens[:at], wrong, *draft.tokens[at + 1 :]), matched=draft.matched)
                self._planted.add(draft.tokens)
            finish(draft)

        job.finish = bent  # type: ignore[method-assign]  # a bent one
        return job

    def settled(self, draft: Draft, accepted: int) -> None:
        if draft.tokens in self._planted:
            self.wrong += 1
        else:
            self.clean.append((len(draft.tokens), accepted))


@pytest.mark.parametrize("ahead", [False, True])
async def test_identity_drafter_through_rejections_and_self_decoding(
    tmp_path: Path, autojump_clock: MockClock, ahead: bool
) -> None:
    """M accepted in every round that nobody bent, for 200 rounds; the ladder sends bent ones into self-decoding."""
    planting = Planting(model(context_tokens=4096, pages=1024))
    ladder = Ladder(fallback=("self_decode*",), low_rounds=1, self_max=5, m_max=8)
    engine = ToyEngine(TrioClock(), model=TARGET, tokenizer=TOKENIZER, context_tokens=4096, pages=1024)
    settings = DrafterSettings(draft_ahead=ahead)
    with trio.fail_after(1000):
        async with running_cluster(
            tmp_path, [], draftings=[planting], engine=engine, ladder=ladder, drafter=settings
        ) as cluster:
            tokens, page = await cluster.generate(PROMPT, 1900)
            assert tokens == greedy(PROMPT, 1900)
            assert page.stats
            assert page.stats.rounds > page.stats.drafts, "some were self-decoded"
    assert len(planting.clean) >= 200
    assert planting.wrong > 50
    assert all(accepted == proposed for proposed, accepted in planting.clean)


# Sampling


def wishes(profile: Profile) -> dict[str, Any]:
    return {
        "temperature_milli": profile.temperature_milli,
        "top_k": profile.top_k,
        "top_p_milli": profile.top_p_milli,
        "seed": profile.seed,
    }


def replayed(count: int, profile: Profile) -> list[int]:
    """The oracle of rule 65281: the target alone, token n by u(n)."""
    assert profile.seed is not None
    tokens = list(PROMPT)
    for k in range(1, count + 1):
        tokens.append(draw(target_masses(next_logits(tokens), profile), replay_draw(profile.seed, k)))
    return tokens[len(PROMPT) :]


async def test_under_rule_65281_equal_distributions_choose_equal_tokens(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [], draftings=[model()]) as cluster:
            tokens, page = await cluster.generate(PROMPT, 100, **wishes(WARM))
            assert tokens == replayed(100, WARM)
            assert page.stats
            assert page.stats.drafts > 10
            assert page.stats.accepted_tokens == page.stats.draft_tokens


async def test_under_rule_2_equal_distributions_accept_all(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Whatever is left out of a row by its being short is left out of the profile as well."""
    profile = Profile(temperature_milli=900, top_k=5)
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [], draftings=[model()]) as cluster:
            _, page = await cluster.generate(PROMPT, 200, **wishes(profile))
            assert page.stats
            assert page.stats.drafts > 20
            assert page.stats.accepted_tokens == page.stats.draft_tokens
            assert cluster.meters.counts["draft_ahead_total"] > 20


async def test_the_hybrid_samples_too(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Looked-up drafts are certain of themselves, computed ones are not; both pass the verifier's checks."""
    with trio.fail_after(1000):
        async with running_cluster(tmp_path, [], draftings=[hybrid(model())]) as cluster:
            tokens, page = await cluster.generate(PROMPT, 150, temperature_milli=300)
            assert len(tokens) == 150
            assert page.stats
            assert page.stats.accepted_tokens > 50
            assert "drafter_refusals_total" not in cluster.meters.counts
