"""What the front end may touch of the world: a part of the roles' ports, and two things only clients see."""

from collections.abc import Callable
from dataclasses import dataclass

from sdcpd.roles.ports import Clock, Meters, Randomness, Workers


@dataclass(frozen=True)
class FrontendPorts:
    """`wall_clock` gives seconds since 1970, for `created` and for chat templates that print a date; nothing is ever
    measured with it. `metrics_page` renders all metrics of the process in the Prometheus text format."""

    clock: Clock
    randomness: Randomness
    workers: Workers
    meters: Meters
    wall_clock: Callable[[], float]
    metrics_page: Callable[[], bytes]
