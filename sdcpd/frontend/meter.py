"""What is measured of one request, under the names of node/metrics.py.

Latencies count from the arrival of the request. A page brings several tokens at once: the time since the page before
is shared evenly among them, so that a sum over tokens is time, and rates are comparable with servers that send each
token by itself. Tokens of the first page belong to the time to first token.

A prompt counts once a verifier is known to have taken it: with the first page, unless that only says that no verifier
did. A client that leaves before any page does not let us know.
"""

from typing import Final, Literal

from sdcpd.roles.ports import Clock, Meters

Ending = Literal["stop", "length", "abort", "error"]

UNTAKEN: Final = frozenset(
    {
        "verifier_overloaded",
        "verifier_unreachable",
        "verifier_refused",
        "directory_unreachable",
        "prompt_unpublished",
        "router_stopped",
    }
)
"""Reasons with which the router ends a generation whose session no verifier has opened, as far as is known."""


class RequestMeter:
    """From the moment the generation runs to its end. `end` must be called exactly once."""

    def __init__(self, meters: Meters, clock: Clock, arrived_at: float, prompt_tokens: int) -> None:
        self._meters: Final = meters
        self._clock: Final = clock
        self._arrived_at: Final = arrived_at
        self._first_at: float | None = None
        self._latest_at = arrived_at
        self._prompt_tokens: Final = prompt_tokens
        self._taken = False
        self.tokens = 0

    def page(self, tokens: int, reason: str | None = None) -> None:
        """The answer now has `tokens` tokens in all. `reason`: why it broke off with this page, if it did."""
        if not self._taken and (tokens > 0 or reason not in UNTAKEN):
            self._taken = True
            self._meters.count("prompt_tokens_total", self._prompt_tokens)
            self._meters.observe("request_prompt_tokens", self._prompt_tokens)
        new = tokens - self.tokens
        if new == 0:
            return
        now = self._clock.now()
        if self._first_at is None:
            self._first_at = now
            self._meters.observe("time_to_first_token_seconds", now - self._arrived_at)
        else:
            share_s = (now - self._latest_at) / new
            for _ in range(new):
                self._meters.observe("inter_token_latency_seconds", share_s)
        self._meters.count("generation_tokens_total", new)
        self._latest_at = now
        self.tokens = tokens

    def end(self, ending: Ending) -> float:
        """Settle the books; the request's seconds."""
        now = self._clock.now()
        self._meters.count("request_success_total", 1, finished_reason=ending)
        if ending in ("stop", "length"):
            self._meters.observe("request_generation_tokens", self.tokens)
            self._meters.observe("e2e_request_latency_seconds", now - self._arrived_at)
            if self._first_at is not None and self.tokens > 1:
                per_token_s = (self._latest_at - self._first_at) / (self.tokens - 1)
                self._meters.observe("request_time_per_output_token_seconds", per_token_s)
        return now - self._arrived_at
