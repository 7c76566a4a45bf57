"""What each key may use: requests open at once, and tokens a minute.

Theory: tokens are a bucket that holds a minute's worth, is full at first, and refills evenly. How long an answer will
be is not known before, so a request is let in while anything is left, and pays as it goes: its prompt when it is
admitted (a refused one costs nothing), each token of the answer as it is delivered. So the bucket may go below empty;
whoever comes then is told when something will be in it again. Over a long time nobody gets more than his rate.

Counters live as long as the process and are kept across reloads, by name: a reload does not forgive what was used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Final

from sdcpd.frontend.errors import RETRY_AFTER_S, ApiError, too_many
from sdcpd.frontend.keys import Caller

MINUTE_S: Final = 60.0


class _Account:
    """One caller's counters. `spent`: tokens that have not been refilled, at the time `at`."""

    def __init__(self, at: float) -> None:
        self.open = 0
        self.spent = 0.0
        self.at = at

    def refill(self, tokens_per_minute: int, now: float) -> None:
        self.spent = max(0.0, self.spent - (now - self.at) * tokens_per_minute / MINUTE_S)
        self.at = now


class Allowances:
    """One for the process. Accounts are as many as names in the key files that were read."""

    def __init__(self) -> None:
        self._accounts: Final[dict[str, _Account]] = {}

    @contextmanager
    def request(self, caller: Caller, now: float) -> Iterator[None]:
        """For the length of a request. Raises ApiError 429 on entering."""
        if caller.name is None:
            yield
            return
        account = self._account(caller, now)
        refusal = _refusal(caller, account)
        if refusal is not None:
            raise refusal
        account.open += 1
        try:
            yield
        finally:
            account.open -= 1

    def charge(self, caller: Caller, tokens: int, now: float) -> None:
        """Tokens of a prompt that was taken, or of an answer that were delivered."""
        if caller.name is not None and caller.tokens_per_minute is not None:
            self._account(caller, now).spent += tokens

    def _account(self, caller: Caller, now: float) -> _Account:
        assert caller.name is not None
        account = self._accounts.setdefault(caller.name, _Account(now))
        if caller.tokens_per_minute is not None:
            account.refill(caller.tokens_per_minute, now)
        return account


def _refusal(caller: Caller, account: _Account) -> ApiError | None:
    limit = caller.max_open_requests
    if limit is not None and account.open >= limit:
        return too_many(f"{account.open} requests of this key are open, which is its limit", "requests", RETRY_AFTER_S)
    rate = caller.tokens_per_minute
    if rate is not None and account.spent >= rate:
        wait_s = (account.spent - rate) * MINUTE_S / rate
        return too_many(f"this key has used its {rate} tokens a minute", "tokens", max(RETRY_AFTER_S, ceil(wait_s)))
    return None
