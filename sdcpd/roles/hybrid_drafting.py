"""Drafting with a lookup and a model: the lookup's draft where it is worth its verification, else the model's.

The decision is taken for each draft, before anything is computed. With `min_score` it is a threshold on the estimated
payoff (payoff.py), the rule of frequency-based hybrid decoding. Without, both are rated in tokens a second: the
lookup's draft by its payoff and the time of a round over it, the model's by its acceptance so far, at its own best
length, with the time that drafting takes. A weak model is then left for a fair lookup, and a lookup that promises two
tokens does not displace a good model.

The model is not run for drafts that come from the lookup; what it missed is run with its next draft.
"""

from collections.abc import Sequence
from typing import Final

from sdcpd.drafting.payoff import Features, Payoff
from sdcpd.drafting.settings import HybridSettings
from sdcpd.drafting.source import MODEL, Draft, DraftSource
from sdcpd.roles.drafting import Drafting, DraftJob, Order, look_up, shortened
from sdcpd.roles.ports import Workers


class HybridDrafting:
    """Drafting with both. The lookup is called where it stands, the model runs its own loop."""

    slow: Final = True

    def __init__(
        self, settings: HybridSettings, lookup: DraftSource, model: Drafting, payoff: Payoff, workers: Workers
    ) -> None:
        self._settings = settings
        self._lookup = lookup
        self._model = model
        self._payoff = payoff
        self._workers = workers

    async def run(self) -> None:
        await self._model.run()

    async def open(self, session: bytes, context: Sequence[int], scope: bytes | None) -> None:
        await self._workers.run(self._lookup.open, session, context, scope)
        await self._model.open(session, context, scope)

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        self._lookup.extend(session, committed)
        self._model.extend(session, committed)

    def begin(self, order: Order, instead: Draft | None = None) -> DraftJob:
        job = DraftJob(order, instead)
        found = look_up(self._lookup, job)
        draft = None
        if found.tokens:
            draft = shortened(found, order.lengths.choose(found.matched, len(found.tokens)).m)
            if self._pays(order, found, draft):
                job.finish(draft)
                return job
        # A context longer than the model's, or no room for it: the lookup goes on by itself. Not ahead, where the
        # guess would have to be the model's.
        return self._model.begin(order, None if order.ahead else draft)

    def settled(self, draft: Draft, accepted: int) -> None:
        if draft.matched != MODEL:
            self._payoff.observe(_features(draft), accepted)

    def _pays(self, order: Order, found: Draft, draft: Draft) -> bool:
        """`draft` is what would be proposed of what was `found`."""
        if self._settings.min_score is not None:
            return self._payoff.estimate(_features(found)) >= self._settings.min_score
        m, payoff = len(draft.tokens), self._payoff.estimate(_features(draft))
        return (
            order.lengths.rate(draft.matched, m, 1.0 + payoff) > order.lengths.choose(MODEL, order.limit).tokens_per_s
        )

    def close(self, session: bytes) -> None:
        self._lookup.close(session)
        self._model.close(session)


def _features(draft: Draft) -> Features:
    return Features(matched=draft.matched, score=draft.score, length=len(draft.tokens))
