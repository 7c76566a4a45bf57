"""Whether the process that serves a session is still there (draft 6.9; decisions 48, 95).

A status tells it: one that expired, or one of another process at the same address, which has forgotten its sessions.
Where the session was just taken to a verifier that may have restarted since it last reported, or where a router that
restarted found it, the next status says which process it is.
"""

from typing import Final

from sdcpd.protocol.fleet import Fleet

UNHEARD_GRACE_S: Final = 10.0
"""A router that restarted has heard of nobody yet, and one that was overtaken may not hear any more: a verifier which
itself said that it serves the session has this long to report."""


class VerifierWatch:
    """The verifier of one session at a time, known by its URI and its `boot` (None: it does not tell)."""

    def __init__(self, fleet: Fleet, verifier: str, boot: bytes | None) -> None:
        self._fleet = fleet
        self._verifier = verifier
        self._boot = boot
        self._spared_until = 0.0
        self._since: float | None = None  # a status received later than this tells the boot; None: it is known

    def moved(self, verifier: str, boot: bytes | None, now: float, *, unsure: bool) -> None:
        """The session is being taken there. `unsure`: its next status tells the boot."""
        self._verifier, self._boot, self._spared_until = verifier, boot, 0.0
        self._since = now if unsure else None

    def found(self, verifier: str, now: float) -> None:
        """The session was found there by asking."""
        self._verifier, self._boot, self._spared_until = verifier, None, now + UNHEARD_GRACE_S
        self._since = now

    def alive(self, now: float) -> bool:
        return self._fleet.alive(self._verifier, now)

    def trouble(self, now: float) -> str | None:
        """Why the session cannot stay, as a label of `failover_total`; None if it can."""
        one = self._fleet.get(self._verifier)
        if one is None or not self.alive(now):
            return "expired" if now >= self._spared_until else None
        if self._since is not None:
            if one.received_at > self._since:
                self._boot, self._since = one.boot, None
            return None
        return "restarted" if self._boot is not None and one.boot != self._boot else None
