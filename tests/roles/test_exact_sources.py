"""Whatever drafts, the text is the target's: each way of drafting, as the drafter has it, under all three rules.

A target over five tokens whose distribution depends on the last three; drafts of two tokens, from the real sources over
what they remember of earlier sessions. Under rules 1 and 65281 each text must be the target's own, token for token.
Under rule 2 the texts of many sessions must have the target's distribution (chi-square over all texts of two tokens),
and the same test must find out a drafter that shows other rows than it sampled from.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import count

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from sdcpd.drafting.length import Acceptance, LengthChooser, VerifyTime
from sdcpd.drafting.lookup_source import LookupSource
from sdcpd.drafting.payoff import FrequencyPayoff
from sdcpd.drafting.settings import (
    DraftModelSettings,
    HybridSettings,
    LengthSettings,
    LookupSettings,
    SuffixSettings,
)
from sdcpd.drafting.source import MODEL, Draft
from sdcpd.drafting.suffix_source import SuffixSource
from sdcpd.protocol.acceptance import Accepted, accept_equal, accept_speculative, argmax
from sdcpd.protocol.distributions import Profile, draw
from sdcpd.protocol.draft_rows import check_rows, one_hot, row_of
from sdcpd.protocol.draws import replay_draw, unseeded_round
from sdcpd.protocol.terms import Rule
from sdcpd.roles.drafting import Drafting, DraftJob, Lengths, LookupDrafting, Order
from sdcpd.roles.hybrid_drafting import HybridDrafting
from sdcpd.roles.model_drafting import ModelDrafting
from tests.support.chance import TOKENS, VOCABULARY, expected, logits_after, masses_after, surprise
from tests.support.messages import TARGET, TOKENIZER
from tests.support.ports import CountingMeters, InlineWorkers, SeededStream, TrioClock
from tests.support.toy_engine import ToyEngine

PROMPT = (0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 4, 4)
M = 2
SESSIONS = 2000
AT_ONCE = 50
PROFILE = Profile(temperature_milli=1200, top_k=4)
SEEDED = replace(PROFILE, seed=5)
LIKELY, WRONG = 4.0, 8.0
"""Standard deviations: what a right rule stays below, and a wrong one exceeds (fixed seeds)."""


@cache
def guessed(output: tuple[int, ...]) -> list[float]:
    """The draft model: near the target, and not the same."""
    own = random.Random(f"draft {output[-3:]}")
    return [logit + own.gauss(0.0, 1.0) for logit in logits_after(output)]


def model() -> ModelDrafting:
    engine = ToyEngine(
        TrioClock(),
        model=TARGET,
        tokenizer=TOKENIZER,
        pages=4 * AT_ONCE,
        vocabulary=VOCABULARY,
        pass_s=0.0,
        target=lambda prefix: argmax(guessed(tuple(prefix[len(PROMPT) :]))),
        logits=lambda prefix: guessed(tuple(prefix[len(PROMPT) :])),
    )
    settings = DraftModelSettings(model="toy", num_speculative_tokens=M, temperature_milli=800)
    return ModelDrafting(settings, engine, TrioClock(), CountingMeters(), SeededStream("drafts"))


def suffix() -> SuffixSource:
    return SuffixSource(SuffixSettings())


WAYS: dict[str, Callable[[], Drafting]] = {
    "ngram": lambda: LookupDrafting(LookupSource(LookupSettings()), InlineWorkers()),
    "suffix": lambda: LookupDrafting(suffix(), InlineWorkers()),
    "draft_model": model,
    "frequency_hybrid": lambda: HybridDrafting(
        HybridSettings(min_score=1.1), suffix(), model(), FrequencyPayoff(), InlineWorkers()
    ),
}


def lengths() -> Lengths:
    """Always as many as there are: a verification costs the same for all."""
    settings = LengthSettings()
    verify = VerifyTime(settings)
    for m in (1, 2):
        verify.observe(m, 1.0)
    return Lengths(LengthChooser(settings), Acceptance(settings), verify, publishes=False)


def chosen_by(rule: int, output: tuple[int, ...]) -> int:
    """The target's own token under rules 1 and 65281."""
    if rule == Rule.GREEDY:
        return argmax(logits_after(output))
    assert SEEDED.seed is not None
    return draw(masses_after(output, SEEDED), replay_draw(SEEDED.seed, len(output) + 1))


def verified(rule: int, output: tuple[int, ...], draft: Draft, uniform: Callable[[], float]) -> Accepted:
    """What the verifier makes of a draft (6.4); tokens without rows are certain (55)."""
    prefixes = [output + draft.tokens[:known] for known in range(len(draft.tokens) + 1)]
    if rule != Rule.SPECULATIVE_SAMPLING:
        return accept_equal(draft.tokens, [chosen_by(rule, prefix) for prefix in prefixes])
    rows = check_rows(draft.rows or [one_hot(token) for token in draft.tokens], draft.tokens)
    masses = [masses_after(prefix, PROFILE) for prefix in prefixes]
    return accept_speculative(draft.tokens, masses, rows, unseeded_round(uniform, len(draft.tokens)))


class Told:
    """What came of many sessions."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, ...]] = []
        self.accepted = 0
        self.by_source: Counter[str] = Counter()


async def decode(drafting: Drafting, rule: int, *, sessions: int, tokens: int) -> Told:
    told, numbers = Told(), count()
    verifier = random.Random(f"verifier {rule}")
    profile = {Rule.GREEDY: Profile(temperature_milli=0), Rule.SPECULATIVE_SAMPLING: PROFILE}.get(Rule(rule), SEEDED)

    async def one_after_the_other() -> None:
        while (number := next(numbers)) < sessions:
            session = number.to_bytes(16, "big")
            output: tuple[int, ...] = ()
            await drafting.open(session, PROMPT, None)
            while len(output) < tokens:
                order = Order(
                    session=session,
                    assumed=(),
                    ahead=False,
                    limit=M,
                    place=len(output),
                    rule=rule,
                    profile=profile,
                    stop=(),
                    lengths=lengths(),
                )
                draft = await drafting.begin(order).result()
                assert draft.tokens
                outcome = verified(rule, output, draft, verifier.random)
                told.accepted += outcome.accepted
                told.by_source["model" if draft.matched == MODEL else "lookup"] += 1
                drafting.settled(draft, outcome.accepted)
                added = (*draft.tokens[: outcome.accepted], outcome.additional)
                drafting.extend(session, added)
                output += added
            drafting.close(session)
            told.texts.append(output[:tokens])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drafting.run)
        async with trio.open_nursery() as workers:
            for _ in range(AT_ONCE):
                workers.start_soon(one_after_the_other)
        nursery.cancel_scope.cancel()
    return told


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.REPLAYABLE_SAMPLING])
@pytest.mark.parametrize("way", WAYS)
async def test_under_rules_1_and_65281_each_text_is_the_targets_own(
    autojump_clock: MockClock, way: str, rule: int
) -> None:
    wanted: tuple[int, ...] = ()
    while len(wanted) < 40:
        wanted += (chosen_by(rule, wanted),)
    told = await decode(WAYS[way](), rule, sessions=6, tokens=40)
    assert told.texts == [wanted] * 6
    assert told.accepted > 20


@pytest.mark.parametrize("way", WAYS)
async def test_under_rule_2_texts_have_the_targets_distribution(autojump_clock: MockClock, way: str) -> None:
    told = await decode(WAYS[way](), Rule.SPECULATIVE_SAMPLING, sessions=SESSIONS, tokens=TOKENS)
    assert abs(surprise(Counter(told.texts), expected(PROFILE))) < LIKELY
    assert told.accepted > SESSIONS / 10
    if way == "frequency_hybrid":
        assert min(told.by_source["model"], told.by_source["lookup"]) > SESSIONS / 10, "both had their say"


class Mislabelling:
    """Shows a row that it did not sample from: another temperature's."""

    slow = True

    def __init__(self, drafting: ModelDrafting) -> None:
        self.run, self.open, self.extend = drafting.run, drafting.open, drafting.extend
        self.settled, self.close = drafting.settled, drafting.close
        self._drafting = drafting

    def begin(self, order: Order, instead: Draft | None = None) -> DraftJob:
        job = self._drafting.begin(order, instead)
        finish = job.finish

        def bent(draft: Draft) -> None:
            flat = row_of([(token, 1.0 / VOCABULARY) for token in range(VOCABULARY)])
            finish(replace(draft, rows=(flat,) * len(draft.tokens)))

        job.finish = bent  # type: ignore[method-assign]  # a bent one
        return job


async def test_a_drafter_that_shows_other_rows_is_found_out(autojump_clock: MockClock) -> None:
    told = await decode(Mislabelling(model()), Rule.SPECULATIVE_SAMPLING, sessions=SESSIONS, tokens=TOKENS)
    assert surprise(Counter(told.texts), expected(PROFILE)) > WRONG
    assert math.isfinite(surprise(Counter(told.texts), expected(PROFILE)))
