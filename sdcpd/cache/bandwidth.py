"""How fast a node's cache moves octets between nodes: measured, smoothed, for `cache_mbps` in a status (draft 5.2).

Plain arithmetic; times are the caller's. Only what lasts longer than a turn on the processor counts.
"""

from typing import Final

MEASURED_FROM_BYTES: Final = 64 << 10
"""A smaller body is over before a connection has any speed."""
WEIGHT: Final = 0.2
"""Of the newest measurement: one in five moves the mean by two thirds."""
ASSUMED_MBPS: Final = 1_000
"""Until something was measured: an ordinary network of nodes, in 10^6 bits a second."""


class Bandwidth:
    """An exponentially weighted mean over transfers, longer ones of no more weight than shorter ones."""

    def __init__(self) -> None:
        self._mbps = float(ASSUMED_MBPS)
        self._measured = False

    @property
    def mbps(self) -> int:
        """10^6 bits a second, at least 1."""
        return max(1, round(self._mbps))

    @property
    def measured(self) -> bool:
        """Is it more than an assumption?"""
        return self._measured

    def moved(self, size_bytes: int, seconds: float) -> None:
        """A transfer took so long, from the request to the last octet."""
        if size_bytes < MEASURED_FROM_BYTES or seconds <= 0:
            return
        mbps = 8e-6 * size_bytes / seconds
        self._mbps = mbps if not self._measured else (1 - WEIGHT) * self._mbps + WEIGHT * mbps
        self._measured = True
