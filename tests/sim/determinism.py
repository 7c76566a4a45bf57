"""Makes a run of trio a function of its seed; the only place that touches trio's internals (trio is pinned to a minor).

trio draws the order of the tasks that can run from a private generator, and it sorts them first only when it was told
to be deterministic (Hypothesis tells it so by being imported). Both are set here for one run and put back afterwards.
The seed of the scheduler is part of the run's seed: it is a free source of interleavings.
"""

import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
from trio._core import _run as trio_run
from trio.testing import MockClock

T = TypeVar("T")


def run(seed: str, main: Callable[[], Awaitable[T]]) -> T:
    """`trio.run(main)` in virtual time, its scheduling decided by `seed` alone."""
    internals: Any = trio_run
    flag, generator = internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r
    internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r = True, random.Random(seed)
    try:
        return trio.run(main, clock=MockClock(autojump_threshold=0))
    finally:
        internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r = flag, generator
