"""Drafting with a model: one batching loop over the jobs of all sessions, a token a job and pass (draft 6.2).

    1. gather   of each job the tokens that were not run yet: what was committed since, then its own last token
    2. run      one pass on the draft engine; jobs that begin meanwhile join at the next boundary
    3. settle   each job gets its next token; one that has enough is done

The KV of a session. A sequence of the engine holds keys and values for `kv`, a list of tokens by position. They are
valid as far as `kv` equals the session's context, and only that far: a job runs from the first position where they
differ. So a rejected token, a token that the verifier added, a self-decoded stretch and a draft that was given up all
come to the same: what is wrong is overwritten, what is missing is run, positions have no gaps. After a verdict the
valid part is the committed tokens but the last, less the last proposed one if all were accepted, which was sampled but
never run; the next pass begins with what is missing. Pages stay until the session ends, or until another session needs
them and this one is idle: then its context is run anew when its turn comes. Where the engine keeps blocks, a session
begins with those of its scope that are in pages, and leaves its own there: full ones of committed tokens but the last.

How a token is chosen follows the session's rule. Rule 1: the argmax, as the target will. Rule 65281: by the target's
own profile and the target's own random value of that place, so that equal distributions choose equal tokens (decision
115). Rule 2: by the drafter's profile and a random value of the drafter's own, from exactly the row that is published.
The guess that leads a draft ahead is an argmax under rule 2: nobody samples it, it only has to be right often.

M is chosen when a job begins, from estimates that hold the time of a token (length.py).
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from sdcpd.cache.blocks import BlockChain
from sdcpd.drafting.settings import DraftModelSettings
from sdcpd.drafting.source import MODEL, Draft
from sdcpd.engine.kv_blocks import KvBlocks
from sdcpd.engine.spans import Drawn, Judge, Row, Sampled, Span
from sdcpd.protocol.distributions import Profile
from sdcpd.protocol.draft_rows import DraftRow
from sdcpd.protocol.draws import replay_draw
from sdcpd.protocol.terms import Rule
from sdcpd.roles.drafting import DraftJob, Order
from sdcpd.roles.ports import Clock, Engine, Meters, RandomStream
from sdcpd.roles.waits import Changes

SHORT_TOKENS: Final = 32
"""Jobs with no more to run than this come before prompts."""


class _Sequence:
    """One session in the draft engine."""

    def __init__(self, context: Sequence[int], scope: bytes | None, blocks: KvBlocks | None) -> None:
        self.context = list(context)
        self.scope = scope
        self.published = 0  # so many blocks were taken or given a name
        self.chain = None if blocks is None else BlockChain(blocks.store.root(scope), blocks.block_tokens)
        self.handle: int | None = None
        self.kv: list[int] = []  # tokens by position, counting planned passes
        self.agreed = 0  # so many of `kv` are known to equal `context`
        self.running: _Running | None = None

    def extend(self, committed: Sequence[int]) -> None:
        self.context += committed
        while self.agreed < min(len(self.kv), len(self.context)) and self.kv[self.agreed] == self.context[self.agreed]:
            self.agreed += 1

    def dropped(self) -> None:
        """Its pages are gone."""
        self.handle, self.kv, self.agreed, self.published = None, [], 0, 0


class _Running:
    """A job under way: `todo` holds the tokens to run next, the first of them at position `start`."""

    def __init__(self, job: DraftJob, sequence: _Sequence, wanted: int) -> None:
        self.job = job
        self.sequence = sequence
        self.wanted = wanted  # tokens to draft, the guess included
        self.tokens: list[int] = []
        self.rows: list[DraftRow] = []
        whole = [*sequence.context, *job.order.assumed]
        valid = sequence.agreed
        while valid < min(len(sequence.kv), len(whole)) and sequence.kv[valid] == whole[valid]:
            valid += 1
        self.start = min(valid, len(whole) - 1)  # the last token is run in any case: its row is the draft's first
        self.todo = whole[self.start :]


def _dropped(running: _Running) -> bool:
    return running.job.finished  # cancelled too


class ModelDrafting:
    """Drafting with the model behind `engine`, which is this drafter's own."""

    slow: Final = True

    def __init__(
        self, settings: DraftModelSettings, engine: Engine, clock: Clock, meters: Meters, draws: RandomStream
    ) -> None:
        """`draws` is the drafter's own source of random values: nobody else's, the verifier's least of all."""
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._meters = meters
        self._draws = draws
        self._sequences: OrderedDict[bytes, _Sequence] = OrderedDict()  # the one used last at the end
        self._jobs: list[_Running] = []  # oldest first
        self._work = Changes()

    async def run(self) -> None:
        while True:
            self._jobs = [running for running in self._jobs if not _dropped(running)]
            spans, running = self._gather()
            if not spans:
                if not self._jobs:
                    await self._work.wait()
                continue
            began = self._clock.now()
            answers = await self._engine.run_pass(spans)
            took_s = self._clock.now() - began
            self._meters.count("draft_forwards_total")
            self._meters.observe("draft_forward_seconds", took_s)
            for one, span, rows in zip(running, spans, answers, strict=True):
                self._publish(one.sequence)
                if rows and not one.job.finished:  # else it was given up meanwhile
                    if len(span.tokens) <= SHORT_TOKENS:  # a prompt says nothing of what a token costs
                        one.job.timed(took_s)
                    self._settle(one, rows[0])

    # What the role asks

    async def open(self, session: bytes, context: Sequence[int], scope: bytes | None) -> None:
        """What of the context was computed for others of the scope need not be run."""
        self.close(session)
        self._sequences[session] = _Sequence(context, scope, self._engine.blocks)

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        self._sequences[session].extend(committed)

    def settled(self, draft: Draft, accepted: int) -> None:
        """Nothing is learned."""

    def close(self, session: bytes) -> None:
        sequence = self._sequences.pop(session, None)
        if sequence is None:
            return
        if sequence.running is not None:
            sequence.running.job.cancel()
        if sequence.handle is not None:
            self._engine.close_sequence(sequence.handle)
            sequence.handle = None

    def begin(self, order: Order, instead: Draft | None = None) -> DraftJob:
        job = DraftJob(order, instead)
        sequence = self._sequences[order.session]
        self._sequences.move_to_end(order.session)
        earlier = sequence.running
        assert earlier is None or earlier.job.finished, "one job a session"
        sequence.running = None
        room = self._engine.info.context_tokens - len(sequence.context) - len(order.assumed) - order.ahead
        limit = min(order.limit, room, self._settings.num_speculative_tokens)
        if limit < 1:
            job.finish(Draft(tokens=(), matched=MODEL))  # the model's context is full
            return job
        if sequence.handle is None:
            self._take(sequence)
        wanted = order.lengths.choose(MODEL, limit).m + order.ahead
        sequence.running = _Running(job, sequence, wanted)
        self._jobs.append(sequence.running)
        self._work.notify()
        return job

    # The loop

    def _gather(self) -> tuple[list[Span], list[_Running]]:
        """Step 1, within the token budget. What a planned pass will write counts as written."""
        settings = self._settings
        spans: list[Span] = []
        chosen: list[_Running] = []
        left = settings.max_batch_tokens
        waiting = sorted(self._jobs, key=lambda running: len(running.todo) > SHORT_TOKENS)  # stable: oldest first
        for running in waiting:
            chunk = settings.prefill_chunk_tokens if len(waiting) > 1 else settings.max_batch_tokens
            tokens = tuple(running.todo[: min(chunk, left)])
            if not tokens:
                break
            if not self._reserve(running, running.start + len(tokens)):
                continue
            sequence = running.sequence
            assert sequence.handle is not None
            whole = len(tokens) == len(running.todo)
            judge = self._judge(running) if whole else None
            spans.append(
                Span(sequence=sequence.handle, tokens=tokens, start=running.start, rows=int(whole), judge=judge)
            )
            chosen.append(running)
            left -= len(tokens)
            sequence.agreed = min(sequence.agreed, running.start)
            sequence.kv[running.start :] = tokens
            running.start += len(tokens)
            del running.todo[: len(tokens)]
        if not spans and waiting:
            self._finish(waiting[0])  # there is no room for it, and nobody else will make any
        return spans, chosen

    def _reserve(self, running: _Running, length: int) -> bool:
        """Have pages for `length` positions; idle sessions lose theirs to those that draft, longest unused first."""
        engine, sequence = self._engine, running.sequence
        if sequence.handle is None:
            sequence.handle = engine.open_sequence()
        while not engine.reserve(sequence.handle, length):
            idle = next(
                (
                    other
                    for other in self._sequences.values()
                    if other.handle is not None and (other.running is None or _dropped(other.running))
                ),
                None,
            )
            if idle is None:
                return False
            assert idle.handle is not None
            engine.close_sequence(idle.handle)
            idle.dropped()
        return True

    def _take(self, sequence: _Sequence) -> None:
        """Open the sequence in the engine, with the longest run of blocks of its context that are in pages."""
        blocks, engine = self._engine.blocks, self._engine
        sequence.handle = engine.open_sequence()
        if blocks is None or sequence.chain is None:
            return
        context, size = sequence.context, blocks.block_tokens
        for place, name in enumerate(sequence.chain.up_to((len(context) - 1) // size, lambda: context)):
            page = blocks.store.page_of(name)
            if page is None:
                break
            blocks.place(sequence.handle, place, page)
            blocks.store.taken(name, self._clock.now())
            sequence.published = place + 1
        sequence.agreed = sequence.published * size
        sequence.kv = context[: sequence.agreed]

    def _publish(self, sequence: _Sequence) -> None:
        """A pass of it has ended: full blocks of committed tokens, all before the last, are everybody's."""
        blocks, context = self._engine.blocks, sequence.context
        if blocks is None or sequence.chain is None or sequence.handle is None:
            return
        sequence.extend(())
        count = min(sequence.agreed, len(context) - 1) // blocks.block_tokens
        if count <= sequence.published:
            return
        names, pages = sequence.chain.up_to(count, lambda: context), blocks.pages(sequence.handle)
        for place in range(sequence.published, count):
            blocks.store.publish(names[place], sequence.scope, pages[place], self._clock.now())
        sequence.published = count

    def _distrust(self, sequence: _Sequence) -> None:
        blocks = self._engine.blocks
        if blocks is not None and sequence.chain is not None:
            blocks.store.distrust(sequence.chain.names)
            sequence.chain = None

    def _judge(self, running: _Running) -> Judge | None:
        """How the job's next token is chosen."""
        order, count = running.job.order, len(running.tokens)
        if order.rule == Rule.REPLAYABLE_SAMPLING and order.profile.seed is not None:
            return Drawn(profile=order.profile, uniforms=(replay_draw(order.profile.seed, order.place + count + 1),))
        if order.rule != Rule.SPECULATIVE_SAMPLING or (order.ahead and count == 0):
            return None
        return Sampled(profile=self._own_profile(order.profile), uniform=self._draws.uniform())

    def _own_profile(self, session: Profile) -> Profile:
        """The settings' temperature, top-k and top-p, the session's where they say nothing."""
        settings = self._settings
        temperature, top_p = settings.temperature_milli, settings.top_p_milli
        return Profile(
            temperature_milli=session.temperature_milli if temperature is None else temperature,
            top_k=min(settings.top_k, session.top_k or settings.top_k),
            top_p_milli=session.top_p_milli if top_p is None else top_p,
        )

    def _settle(self, running: _Running, row: Row) -> None:
        """Step 3. A row that cannot be trusted ends the draft with what there is."""
        job = running.job
        if not row.finite:
            self._distrust(running.sequence)
            self._finish(running)
            return
        running.tokens.append(row.token)
        job.drafted += 1
        if row.drafted is not None:
            running.rows.append(row.drafted)
        if job.order.ahead and job.guess is None:
            job.guess = row.token
        if len(running.tokens) == running.wanted or row.token in job.order.stop:
            self._finish(running)
        else:
            running.todo = [row.token]

    def _finish(self, running: _Running) -> None:
        order = running.job.order
        tokens = tuple(running.tokens[order.ahead :])
        rows = tuple(running.rows) if order.rule == Rule.SPECULATIVE_SAMPLING else None
        running.job.finish(Draft(tokens=tokens, matched=MODEL, rows=rows))
