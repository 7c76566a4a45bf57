"""How the rounds of one session are judged: draws, draft rows in hand, and rows that wait for them (6.3 steps 5 to 7).

Rule 1 needs nothing here. Under rule 65281 each row draws by its output index. Under rule 2 a proposal's draft rows
mostly come along with it (decision 101); where they have to be fetched, that runs beside the scoring:

    rows in hand before the pass     the pass judges
    pass done before the rows        its target rows wait on a shelf; once the draft rows are in hand they are judged
    rows bad or not to be had        the round is rejected; what was scored is dropped, and nothing was drawn

Draws are made when a round is judged, never before its rows are in hand and checked. They come from a stream of the
verifier's own; a drafter's source has another one.
"""

from collections.abc import Callable

from sdcpd.engine.spans import Drawn, Judge, Kept, Row, Shelf, Weighed
from sdcpd.protocol.draft_rows import CheckedRow
from sdcpd.protocol.draws import RoundDraws, replayed_round, seeded_round, unseeded_round
from sdcpd.protocol.messages import Proposal
from sdcpd.protocol.problems import Problem
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import Begin, Work
from sdcpd.protocol.terms import Rule
from sdcpd.roles.ports import Engine, Ports, RandomStream
from sdcpd.roles.row_supply import RowSupply
from sdcpd.roles.waits import Changes

Scored = Callable[[Work, tuple[Row, ...]], None]


class Attempt:
    """One proposal being verified. Those who wait for its verdict look here for its refusal."""

    def __init__(self, proposal: Proposal, begun: Begin) -> None:
        self.proposal = proposal
        self.work = begun.work
        self.rows: tuple[CheckedRow, ...] | None = begun.rows
        self.shelf: Shelf | None = None  # given to a pass because the rows were not in hand
        self.passed = False  # that pass is over
        self.problem: Problem | None = None


class Judging:
    """One session's. `scored` takes what was judged after its pass."""

    def __init__(
        self, session: bytes, scope: bytes | None, ports: Ports, engine: Engine, supply: RowSupply, draws: RandomStream
    ) -> None:
        self._session = session
        self._scope = scope
        self._ports = ports
        self._engine = engine
        self._supply = supply
        self._uniform = draws.uniform
        self.attempt: Attempt | None = None  # the latest
        self._changes = Changes()

    def begin(self, proposal: Proposal, begun: Begin) -> None:
        """A proposal was taken."""
        self.attempt = Attempt(proposal, begun)
        if begun.rows:
            self._supply.took(proposal.drafter, begun.rows)
        self._changes.notify()

    def judge(self, work: Work) -> Judge | None:
        """How the pass that takes this work is to judge it."""
        proposed = len(work.tokens) - 1
        if work.rule == Rule.GREEDY:
            return None
        if work.rule == Rule.REPLAYABLE_SAMPLING:
            assert work.profile.seed is not None, "neither a contract nor a policy of this rule is taken without a seed"
            return Drawn(work.profile, replayed_round(work.profile.seed, work.committed, proposed).tokens)
        if proposed == 0:
            return Drawn(work.profile, self._draws(work).tokens)
        attempt = self.attempt
        assert attempt is not None
        assert attempt.work is work
        if attempt.rows is None:
            attempt.shelf = Shelf()
            return Kept(attempt.shelf)
        return self._weighed(work, attempt.rows)

    def shelved(self, work: Work) -> None:
        """A pass left this work's rows on the shelf; they are judged from there, if they are still wanted."""
        if self.attempt is not None and self.attempt.work is work:
            self.attempt.passed = True
            self._changes.notify()

    async def run(self, machine: Session, scored: Scored, refused: Callable[[], None]) -> None:
        """Obtain the rows of each proposal that came without. `refused` is told when a round was rejected."""
        done: Attempt | None = None
        while True:
            attempt = self.attempt
            if attempt is None or attempt is done or attempt.rows is not None:
                await self._changes.wait()
                continue
            done = attempt
            rows = await self._supply.fetch(attempt.proposal, self._scope)
            if isinstance(rows, Problem):
                if machine.rows_refused(attempt.work.ticket, self._ports.clock.now()):
                    attempt.problem = rows
                    self._ports.meters.count("proposals_refused_total", reason=rows.suffix or str(rows.status))
                    refused()
            elif machine.rows_obtained(attempt.work.ticket):
                attempt.rows = rows
                await self._judge_shelved(machine, attempt, rows, scored)

    async def _judge_shelved(
        self, machine: Session, attempt: Attempt, rows: tuple[CheckedRow, ...], scored: Scored
    ) -> None:
        work, shelf = attempt.work, attempt.shelf
        if shelf is None:
            return  # in time for the pass
        while not attempt.passed:
            await self._changes.wait()
        if machine.wants(work.ticket):
            scored(work, await self._engine.judge(shelf, work.tokens, self._weighed(work, rows)))

    def _weighed(self, work: Work, rows: tuple[CheckedRow, ...]) -> Weighed:
        """Rows of tokens beyond max_new were checked like all, and are not needed (decision 58)."""
        return Weighed(work.profile, rows[: len(work.tokens) - 1], self._draws(work))

    def _draws(self, work: Work) -> RoundDraws:
        proposed, seed = len(work.tokens) - 1, work.profile.seed
        if seed is not None:
            return seeded_round(seed, self._session, work.round, proposed)
        return unseeded_round(self._uniform, proposed)
