"""One answer in the making: pages of committed tokens in, text out (pure; the callers do the waiting and sending).

The states are those of `finish`: None while tokens may follow, then once and for all

- `stop`: a stop token came, whose own text is not part of the answer, or a stop string became complete, which is cut
  off together with what follows it;
- `length`: the generation ended otherwise, at `max_new` or the end of the context;
- `error`: it broke off, for `reason`.

Tokens are counted as the client pays them: up to and including the stop token or the token that completed the stop
string. Tokens committed behind that (others of the same page) never reach text or count.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import zip_longest
from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType

from sdcpd.frontend.detokenizer import Detokenizer
from sdcpd.frontend.logprobs import TokenLogprobs, read_entry
from sdcpd.frontend.stops import StopScanner
from sdcpd.protocol.messages import Output, SpeculationStats
from sdcpd.protocol.terms import Action

Finish = Literal["stop", "length", "error"]


class Delta(Struct, frozen=True):
    """What a page adds to an answer. False where that is nothing."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs)


class Reply:
    """Feed `take` page after page until `settled`."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        scanner: StopScanner,
        stop_tokens: AbstractSet[int],
        octets: Callable[[int], bytes] = lambda _: b"",
    ) -> None:
        """`octets` of a token, for log-probabilities where pages have them."""
        self._octets: Final = octets
        self._chars = 0
        self._detokenizer: Final = detokenizer
        self._scanner: Final = scanner
        self._stop_tokens: Final = stop_tokens
        self._string_matched = False
        self._final_seen = False
        self.completion_tokens = 0
        self.finish: Finish | None = None
        self.reason: str | None = None
        self.stats: SpeculationStats | None = None

    @property
    def settled(self) -> bool:
        """Nothing more is wanted of the generation. After a stop string this holds before its final page, and leaving
        then is what ends the session; after a stop token the final page is on its way and carries the statistics."""
        return self._final_seen or self._string_matched

    def take(self, page: Output) -> Delta:
        """What this page adds, possibly nothing. Must not be called once `settled`."""
        assert not self.settled, "a page after the last one"
        parts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        entries: Sequence[bytes] = () if isinstance(page.logprobs, UnsetType) else page.logprobs
        for token, entry in zip_longest(page.tokens, entries):
            if self.finish is not None:
                break
            self.completion_tokens += 1
            if entry is not None:
                logprobs.append(read_entry(entry, token, self._chars, self._octets))
            if token in self._stop_tokens:
                parts.append(self._end("stop"))
            else:
                text = self._detokenizer.push(token)
                self._chars += len(text)
                parts.append(self._scan(text))
        if page.final:
            self._final_seen = True
            self.stats = page.stats or None
            if self.finish is None:
                if page.finish is not UNSET and page.finish == Action.FINISH:
                    parts.append(self._end("length"))
                else:
                    self.finish = "error"
                    self.reason = page.reason or "failed"
        return Delta("".join(parts), tuple(logprobs))

    def _scan(self, text: str) -> str:
        scanned = self._scanner.push(text)
        if scanned.matched:
            self._string_matched = True
            self.finish = "stop"
        return scanned.text

    def _end(self, finish: Finish) -> str:
        """The tokens are at their end: let go what was held back, which may yet complete a stop string."""
        shown = self._scan(self._detokenizer.finish())
        if self.finish is None:
            self.finish = finish
            shown += self._scanner.finish()
        return shown
