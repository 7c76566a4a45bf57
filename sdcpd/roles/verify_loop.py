"""The verifier's heart: one pass after the other, each with whatever is ready at its boundary (draft 6.3 step 6).

    1. gather   rounds, self-decoded tokens and prompts that are ready now, those that wait longest first
    2. choose   the mix that shares the next pass, within the budget (engine/scheduler.py) and the pages (kv_room.py)
    3. run      one pass on the engine; proposals that arrive meanwhile wait for the next boundary
    4. settle   rows to their sessions' machines, which make records; each session's keeper appends its own

The loop never waits for an append: while a record is being made durable, the next pass runs. What is settled between
two passes is the machines' bookkeeping alone, tens of microseconds a session; records, verdicts and their encoding are
made by the sessions' own tasks while the next pass runs. (A next pass that did not wait for this bookkeeping could only
hold other sessions. Two groups of sessions would take turns from then on, each in passes that cost nearly as much as
one pass for both.)
"""

from collections.abc import Callable, Iterable

from sdcpd.engine.scheduler import Mix, Ready, choose
from sdcpd.roles.hosted import Hosted
from sdcpd.roles.kv_room import KvRoom
from sdcpd.roles.load_meter import LoadMeter
from sdcpd.roles.ports import Engine, Ports
from sdcpd.roles.verifier_settings import VerifierSettings
from sdcpd.roles.waits import Changes


class VerifyLoop:
    """Scores the sessions that `sessions` yields, in the order of their opening."""

    def __init__(
        self,
        settings: VerifierSettings,
        ports: Ports,
        engine: Engine,
        meter: LoadMeter,
        sessions: Callable[[], Iterable[Hosted]],
        load: Callable[[], int],
        room: KvRoom,
    ) -> None:
        self._settings = settings
        self._ports = ports
        self._engine = engine
        self._meter = meter
        self._sessions = sessions
        self._load = load
        self._room = room
        self._work = Changes()
        self._ready_since: dict[bytes, int] = {}  # by session, the pass at whose boundary its work was first ready
        self.passes = 0
        self.pass_began_at: float | None = None  # of the pass that runs now

    def wake(self) -> None:
        """Something may have become ready."""
        self._work.notify()

    async def run(self) -> None:
        while True:
            mix, hosted = self._gather()
            if not mix.rounds and not mix.prefills:
                await self._work.wait()
                continue
            await self._run(mix, hosted)

    def _gather(self) -> tuple[Mix, dict[bytes, Hosted]]:
        """Steps 1 and 2. Work that the budget cut off goes first next time: see the bound in scheduler.py."""
        self._room.let_in()
        load = self._load()
        hosted = {session.id: session for session in self._sessions()}
        ready: list[Ready] = []
        prefills = []
        for key, session in hosted.items():
            span = session.ready_work(load)
            if span is not None:
                ready.append(Ready(key=key, span=span))
            prefill = session.prefill_left()
            if prefill is not None:
                prefills.append(prefill)
        self._ready_since = {one.key: self._ready_since.get(one.key, self.passes) for one in ready}
        ready.sort(key=lambda one: self._ready_since[one.key])  # stable: among equals the oldest session first
        mix = choose(
            ready,
            prefills,
            budget_tokens=self._settings.max_batch_tokens,
            chunk_tokens=self._settings.prefill_chunk_tokens,
            busy=any(session.open for session in hosted.values()),
        )
        mix = self._room.grant(mix)
        for one in mix.rounds:
            del self._ready_since[one.key]
        return mix, hosted

    async def _run(self, mix: Mix, hosted: dict[bytes, Hosted]) -> None:
        """Steps 3 and 4."""
        works = [(hosted[ready.key], hosted[ready.key].take_work()) for ready in mix.rounds]
        judged = [session.judged(work, span) for (session, work), span in zip(works, mix.spans, strict=False)]
        clock = self._ports.clock
        started = clock.now()
        self.pass_began_at = started
        rows = await self._engine.run_pass([*judged, *(hosted[key].telling(span) for key, span in mix.prefills)])
        ended = clock.now()
        self.pass_began_at = None
        self.passes += 1
        self._meter.passed(started, ended, mix.rows)
        self._ports.meters.count("target_forwards_total")
        self._ports.meters.observe("target_forward_seconds", ended - started)
        self._ports.meters.observe("target_forward_sessions", len(mix.rounds) + len(mix.prefills))
        load = self._load()
        for (session, work), answer in zip(works, rows[: len(works)], strict=True):
            session.scored(work, answer, load)
        for (key, span), answer in zip(mix.prefills, rows[len(works) :], strict=True):
            hosted[key].ran_prefill(len(span.tokens), answer)
