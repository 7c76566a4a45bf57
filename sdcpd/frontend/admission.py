"""Who may come in: the key of a request, and what its holder may still use.

| | |
|---|---|
| /health, /ready | open to all: probes carry no keys, and the answers name nobody |
| all else | with a key file: `Authorization: Bearer KEY`, else 401 |
| completions | within the key's limits, else 429 |
"""

from contextlib import AbstractContextManager
from typing import Final

from sdcpd.frontend.allowance import Allowances
from sdcpd.frontend.errors import wrong_key
from sdcpd.frontend.exchange import Exchange
from sdcpd.frontend.keys import ANYBODY, Caller, KeyRing
from sdcpd.roles.ports import Clock

SCHEME: Final = "bearer"


class Admission:
    """One for the port."""

    def __init__(self, ring: KeyRing | None, clock: Clock) -> None:
        """`ring` None: nobody is asked for a key."""
        self._ring = ring
        self._clock: Final = clock
        self._allowances: Final = Allowances()

    def take(self, ring: KeyRing) -> None:
        """Another file was read. Requests under way keep what they were admitted with."""
        assert self._ring is not None, "whether there are keys is decided at the start"
        self._ring = ring

    def caller(self, exchange: Exchange) -> Caller:
        """Whose request it is. Raises ApiError 401."""
        if self._ring is None:
            return ANYBODY
        scheme, _, key = (exchange.header("authorization") or "").partition(" ")
        if scheme.lower() != SCHEME or not key.strip():
            raise wrong_key("this port wants an API key; send Authorization: Bearer KEY")
        caller = self._ring.find(key.strip())
        if caller is None:
            raise wrong_key("the API key is not known here")
        return caller

    def request(self, caller: Caller) -> AbstractContextManager[None]:
        """For the length of a completion. Raises ApiError 429 on entering."""
        return self._allowances.request(caller, self._clock.now())

    def charge(self, caller: Caller, tokens: int) -> None:
        """Tokens that were used."""
        self._allowances.charge(caller, tokens, self._clock.now())
