"""What is measured of one request, under the names of node/metrics.py.

Latencies count from the arrival of the request. A page brings several tokens at once: the time since the page before
is shared evenly among them, so that a sum over tokens is time, and rates are comparable with servers that send each
token by itself. Tokens of the first page belong to the time to first token.
"""

from typing import Final, Literal

from sdcpd.roles.ports import Clock, Meters

Ending = Literal["stop", "length", "abort", "error"]


class RequestMeter:
    """From the moment the generation runs to its end. `end` must be called exactly once."""

    def __init__(self, meters: Meters, clock: Clock, arrived_at: float, prompt_tokens: int) -> None:
        self._meters: Final = meters
        self._clock: Final = clock
        self._arrived_at: Final = arrived_at
        self._first_at: float | None = None
        self._latest_at = arrived_at
        self.tokens = 0
        meters.count("prompt_tokens_total", prompt_tokens)
        meters.observe("request_prompt_tokens", prompt_tokens)

    def page(self, tokens: int) -> None:
        """The answer now has `tokens` tokens in all."""
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
