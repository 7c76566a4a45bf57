"""Who has pages: a session's KV is reserved as it grows, and taken back from the youngest when pages run out.

Sessions stand in the order of their opening, the oldest first, and the order decides everything:

- A session without pages (new or preempted) enters when all before it have theirs and there are enough for all it
  knows and one longest round. Pages that it shares with others count once. No smaller one behind it goes first: nobody
  waits for ever.
- A round that needs a page when none is free takes the pages of the youngest session that is younger than its own. That
  session is preempted: it keeps its state, its records and its place, and what it knows is run again as a prompt later.
- When nobody is younger, the round waits; its session keeps what it has.

So the oldest session always goes on, since it alone fits the pool (longer ones are refused when they open); when it
ends the next is the oldest. A session fails for want of pages never. A preempted one does not come back at once to be
preempted again: it asks for more than it had.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from sdcpd.engine.scheduler import Mix
from sdcpd.roles.session_kv import SessionKv


class Guest(Protocol):
    """What is asked of a hosted session here."""

    kv: SessionKv

    @property
    def id(self) -> bytes: ...
    def enter(self) -> bool: ...
    def preempt(self) -> None: ...


class KvRoom:
    """The page pool among the sessions that `guests` yields, oldest first."""

    def __init__(self, guests: Callable[[], Iterable[Guest]]) -> None:
        self._guests = guests
        self._short = False  # whether somebody may be waiting: asked some times a round, so nothing is walked for a no

    @property
    def waiting(self) -> int:
        """Sessions that wait for pages."""
        return sum(_waits(guest) for guest in self._guests()) if self._short else 0

    def let_in(self) -> None:
        """Give pages to those who wait, in order, as far as they go."""
        self._short = False
        for guest in self._guests():
            if _waits(guest) and not guest.enter():
                self._short = True
                return

    def grant(self, mix: Mix) -> Mix:
        """`mix` with pages for all its rounds, less those that get none and whatever was preempted for the others."""
        guests = list(self._guests())
        ends = {ready.key: ready.span.start + len(ready.span.tokens) for ready in mix.rounds}
        out: set[bytes] = set()
        for place, guest in enumerate(guests):
            if guest.id not in ends or guest.id in out:
                continue
            while not guest.kv.reserve(ends[guest.id]):
                victim = next((one for one in reversed(guests[place + 1 :]) if one.kv.reserved_tokens), None)
                if victim is None:
                    out.add(guest.id)
                    break
                victim.preempt()
                self._short = True
                out.add(victim.id)
        if not out:
            return mix
        return Mix(
            rounds=tuple(ready for ready in mix.rounds if ready.key not in out),
            prefills=tuple((key, span) for key, span in mix.prefills if key not in out),
        )


def _waits(guest: Guest) -> bool:
    return not guest.kv.closed and not guest.kv.reserved_tokens
