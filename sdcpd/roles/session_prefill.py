"""How the keys and values of what a session knows come to be there: taken from blocks, or computed by passes.

A session begins with a context, its prompt and what an earlier verifier committed, and its first round waits until all
of it but the last token has valid KV: that token goes with the round. Blocks that others computed are taken as far as
they go (session_kv.py); the rest is run in the verify loop's passes. A preempted session comes here again.

Where log-probabilities are told (decision 114), a committed token without an entry must be told of by the pass over the
position before it; so such positions are run, whatever blocks there are.
"""

from collections.abc import Callable

from msgspec import UNSET

from sdcpd.engine.scheduler import Prefill
from sdcpd.engine.spans import Row, Span
from sdcpd.protocol.messages import SessionOpen
from sdcpd.protocol.session import Session
from sdcpd.roles.ports import Clock, Meters
from sdcpd.roles.session_kv import SessionKv
from sdcpd.roles.told_rows import first_untold, runnable, telling, told


class SessionPrefill:
    """Of one session. `done` once the whole context was there; it stays so when the session is preempted later.

    `cached_tokens` of the prompt were taken from blocks when the session began. `notify` wakes whoever waits for it.
    """

    def __init__(
        self,
        opened: SessionOpen,
        prompt: tuple[int, ...],
        context: tuple[int, ...],
        *,
        kv: SessionKv,
        clock: Clock,
        meters: Meters,
        notify: Callable[[], None],
    ) -> None:
        self.context = context
        self.done = False
        self.cached_tokens = 0
        self._tells = opened.logprobs is not UNSET
        self._prompt_tokens = len(prompt)
        self._kv = kv
        self._clock = clock
        self._meters = meters
        self._notify = notify
        self._machine: Session | None = None

    def begin(self, machine: Session) -> None:
        """The session has its log, and with it a machine."""
        self._machine = machine
        self._look()
        machine.counts.cached_tokens = self.cached_tokens

    def known(self) -> tuple[int, ...]:
        """All tokens of the session so far."""
        return self.context if self._machine is None else self._machine.prefix.known

    def enter(self, wanted_tokens: int) -> bool:
        """Have pages for `wanted_tokens`, some of them those of others' blocks. False when too few are free."""
        known = self.known()
        entered = self._kv.enter(wanted_tokens, self._reusable(len(known) - 1), lambda: known)
        if entered:
            self._look()
        return entered

    def left(self, key: bytes, promised: set[bytes]) -> Prefill | None:
        """What is known and has no valid KV yet, all but the last token, which goes with the next round.

        None too while blocks of it are on their way, or are in `promised`: about to be computed for an older session.
        """
        machine, kv = self._machine, self._kv
        if kv.closed or machine is None or not kv.reserved_tokens:
            return None
        end = machine.prefix.last_position
        if kv.valid_tokens >= end:
            return None
        known = machine.prefix.known
        goes = kv.catch_up(self._reusable(end), lambda: known, promised)
        self._look()
        if not goes or kv.valid_tokens >= end:
            return None
        if machine.logprobs is not None:
            end = runnable(machine.prefix, kv.valid_tokens, end)
        tokens = known[kv.valid_tokens : end]
        return Prefill(key=key, sequence=kv.sequence, tokens=tokens, start=kv.valid_tokens)

    def telling(self, span: Span) -> Span:
        """The span of a prefill that goes into a pass now, with what its rows are to tell (114)."""
        machine = self._machine
        assert machine is not None
        return span if machine.logprobs is None else telling(machine.prefix, span, machine.logprobs)

    def ran(self, tokens: int, rows: tuple[Row, ...]) -> None:
        """`tokens` more positions of what is known have valid KV; `rows` are those that `telling` asked for.

        Nothing, where the session ended while the pass ran: its pages are others' by now.
        """
        if self._kv.closed:
            return
        self._kv.advance(self._kv.valid_tokens + tokens, self.known)
        if rows:
            assert self._machine is not None
            told(self._machine.prefix, rows)
        self._look()

    def count_waits(self) -> None:
        """Waits for others do not run while the KV is not there (82), whether for want of pages or of passes."""
        machine, now = self._machine, self._clock.now()
        if machine is None:
            return
        if self._kv.valid_tokens < machine.prefix.last_position:
            machine.deadlines.hold(now)
        elif machine.deadlines.go_on(now):
            self._notify()

    def _reusable(self, end: int) -> int:
        """How many of the first `end` positions may come from blocks: a position that is to tell something is run."""
        if not self._tells:
            return end
        if self._machine is not None:
            untold = first_untold(self._machine.prefix)
        else:
            untold = None if len(self.context) == self._prompt_tokens else self._prompt_tokens - 1
        return end if untold is None else min(end, untold)

    def _look(self) -> None:
        """Whether the context is there now."""
        self.count_waits()
        if self.done or self._kv.valid_tokens < len(self.context) - 1:
            return
        self.done = True
        reused = self._kv.reused_tokens
        self.cached_tokens = min(reused.total(), self._prompt_tokens - 1)
        if self._kv.engine.blocks is not None:
            self._meters.count("prefix_cache_queries_total", len(self.context))
            for tier, tokens in reused.items():
                self._meters.count("prefix_cache_hits_total", tokens, tier=tier.value)
        if self._machine is not None:
            self._machine.counts.cached_tokens = self.cached_tokens
        self._notify()
