"""Limits of keys: requests open at once, tokens a minute, and when to come again."""

import pytest

from sdcpd.frontend.allowance import Allowances
from sdcpd.frontend.errors import ApiError
from sdcpd.frontend.keys import ANYBODY, Caller


def refused(allowances: Allowances, caller: Caller, now: float) -> tuple[str, int]:
    with pytest.raises(ApiError) as raised, allowances.request(caller, now):
        pass
    error = raised.value
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    return error.type, int(dict(error.headers)["retry-after"])


def test_open_requests() -> None:
    allowances, caller = Allowances(), Caller(name="a", max_open_requests=2)
    with allowances.request(caller, 0), allowances.request(caller, 0):
        assert refused(allowances, caller, 0) == ("requests", 1)
        with allowances.request(Caller(name="b", max_open_requests=1), 0):
            pass
    with allowances.request(caller, 0):
        pass


def test_tokens_a_minute() -> None:
    """A full bucket at first; what goes beyond is paid back by waiting."""
    allowances, caller = Allowances(), Caller(name="a", tokens_per_minute=60)
    with allowances.request(caller, 0):
        allowances.charge(caller, 50, 0)
    with allowances.request(caller, 0):
        allowances.charge(caller, 40, 0)  # 90 in all: it was let in with 10 left
    assert refused(allowances, caller, 0) == ("tokens", 30)
    assert refused(allowances, caller, 29) == ("tokens", 1)
    with allowances.request(caller, 31):
        pass
    with allowances.request(caller, 1000):  # no more than a minute's worth is saved up
        allowances.charge(caller, 60, 1000)
    assert refused(allowances, caller, 1000) == ("tokens", 1)


def test_a_reload_forgives_nothing_and_takes_the_new_limit() -> None:
    allowances = Allowances()
    allowances.charge(Caller(name="a", tokens_per_minute=10), 10, 0)
    assert refused(allowances, Caller(name="a", tokens_per_minute=10), 0)[0] == "tokens"
    with allowances.request(Caller(name="a", tokens_per_minute=20), 0):
        pass


def test_without_keys_there_are_no_limits() -> None:
    allowances = Allowances()
    allowances.charge(ANYBODY, 10**9, 0)
    with allowances.request(ANYBODY, 0):
        pass
