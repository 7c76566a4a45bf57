"""How the drafter role asks for drafts: an order is begun, its job may be waited for, given up, or looked at halfway.

A lookup is done when it begins. A model takes passes that it shares with other sessions, so its jobs take time; that
is also why drafting ahead exists (ahead.py): a job for the next round is begun while this one is out, and its first
token, the guess of what the verifier will add, is known before the rest.
"""

from collections.abc import Sequence
from statistics import median_low
from typing import Final, Protocol

import trio
from msgspec import Struct

from sdcpd.drafting.length import Acceptance, Choice, LengthChooser, VerifyTime
from sdcpd.drafting.source import Draft, DraftSource
from sdcpd.protocol.distributions import Profile
from sdcpd.roles.ports import Workers


class Lengths:
    """The choice of M for one proposal (6.2): everything but the class of the draft and how many tokens there are."""

    def __init__(self, chooser: LengthChooser, acceptance: Acceptance, verify: VerifyTime, *, publishes: bool) -> None:
        self._chooser = chooser
        self._acceptance = acceptance
        self._verify = verify
        self._publishes = publishes

    def choose(self, matched: int, limit: int) -> Choice:
        """The best M in 1..limit for a draft of this class."""
        return self._chooser.choose(
            self._acceptance, self._verify, matched=matched, limit=limit, publishes=self._publishes
        )

    def rate(self, matched: int, m: int, tokens: float) -> float:
        """Tokens a second of a round over m tokens that is expected to commit `tokens`."""
        return self._chooser.rate(self._verify, matched=matched, m=m, tokens=tokens)


class Order(Struct, frozen=True):
    """What is to be drafted: up to `limit` tokens, limit >= 1, behind the committed ones and those that are `assumed`.

    `ahead`: of an order for the next round, whose first further token is a guess of what the verifier will add. It is
    not part of the draft, and does not count in `limit`. `place` is the output index of the first token drafted, the
    guess included. How the tokens are chosen follows from the session's rule and the profile in force; nothing is
    drafted behind a `stop` token.
    """

    session: bytes
    assumed: tuple[int, ...]
    ahead: bool
    limit: int
    place: int
    rule: int
    profile: Profile
    stop: tuple[int, ...]
    lengths: Lengths


class DraftJob:
    """An order being carried out. `guess` is there as soon as it is known.

    `drafted` counts tokens computed so far, the guess included. `instead` is said if nothing comes of it.
    """

    def __init__(self, order: Order, instead: Draft | None = None) -> None:
        self.order: Final = order
        self.guess: int | None = None
        self.drafted = 0
        self.cancelled = False
        self._instead = instead
        self._times: list[float] = []
        self._draft: Draft | None = None
        self._done = trio.Event()

    @property
    def token_s(self) -> float | None:
        """What a token took, None for a lookup. The median: a pass that waited for somebody else's says little."""
        return median_low(self._times) if self._times else None

    def timed(self, seconds: float) -> None:
        """One token took so long."""
        self._times.append(seconds)

    @property
    def finished(self) -> bool:
        return self._draft is not None

    def finish(self, draft: Draft) -> None:
        """At most `order.limit` tokens; none where there is nothing to say."""
        assert len(draft.tokens) <= self.order.limit
        self._draft = draft if draft.tokens or self.cancelled or self._instead is None else self._instead
        self._done.set()

    def cancel(self) -> None:
        """It is not wanted any more; whoever still waits gets nothing. Without effect once it is finished."""
        if not self.finished:
            self.cancelled = True
            self.finish(Draft(tokens=(), matched=0))

    async def result(self) -> Draft:
        if self._draft is None:
            await self._done.wait()
        assert self._draft is not None
        return self._draft


class Drafting(Protocol):
    """What a drafter drafts with. One job a session at a time; all but `run` and `open` return at once."""

    @property
    def slow(self) -> bool:
        """Whether a draft takes long enough for drafting ahead to pay."""

    async def run(self) -> None:
        """Whatever must run for jobs to get done, until cancelled."""

    async def open(self, session: bytes, context: Sequence[int], scope: bytes | None) -> None:
        """Begin a session's context, or begin it anew."""

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        """The output grew by these tokens."""

    def begin(self, order: Order, instead: Draft | None = None) -> DraftJob:
        """Start drafting; any earlier job of the session is done or cancelled. `instead` is what to say if there is
        nothing else to say."""

    def settled(self, draft: Draft, accepted: int) -> None:
        """A draft had its verdict."""

    def close(self, session: bytes) -> None:
        """Forget the session; one that is not there is no error."""


class LookupDrafting:
    """Drafting with a lookup source alone."""

    slow: Final = False

    def __init__(self, source: DraftSource, workers: Workers) -> None:
        self.source: Final = source
        self._workers = workers

    async def run(self) -> None:
        """Nothing runs between calls."""

    async def open(self, session: bytes, context: Sequence[int], scope: bytes | None) -> None:
        await self._workers.run(self.source.open, session, context, scope)

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        self.source.extend(session, committed)

    def begin(self, order: Order, instead: Draft | None = None) -> DraftJob:
        job = DraftJob(order, instead)
        draft = look_up(self.source, job)
        job.finish(shortened(draft, order.lengths.choose(draft.matched, len(draft.tokens)).m if draft.tokens else 0))
        return job

    def settled(self, draft: Draft, accepted: int) -> None:
        """A lookup learns by the tokens alone."""

    def close(self, session: bytes) -> None:
        self.source.close(session)


def look_up(source: DraftSource, job: DraftJob) -> Draft:
    """What a source says to an order, at its full length. Ahead, the guess is taken off."""
    order = job.order
    draft = source.propose(order.session, order.limit + order.ahead, order.assumed)
    job.drafted = len(draft.tokens)
    if not order.ahead:
        return draft
    job.guess = draft.tokens[0] if draft.tokens else None
    return Draft(tokens=draft.tokens[1:], matched=draft.matched, score=max(0.0, draft.score - 1.0))


def shortened(draft: Draft, m: int) -> Draft:
    """The first m tokens of a draft, with their rows."""
    rows = None if draft.rows is None else draft.rows[:m]
    return Draft(tokens=draft.tokens[:m], matched=draft.matched, rows=rows, score=draft.score)
