"""The router's copy of one session's committed output, chain-checked as it grows (draft 4.2, 6.7; decision 41).

Theory: the verifier owns the committed prefix; a copy carries (n, d[n]) and may be behind. The router needs one for
three ends: pages for the front end, the tokens it hands to a drafter with an assignment (only up to a length whose
digest the verifier stated), and to resume at another verifier; then the log is read, and what it holds beyond the copy
comes in by `resume`. Indices are stable, so a page that overlaps the copy must repeat it token for token, and one that
would leave a gap cannot be used.

With log-probabilities (decision 114) the copy may hold tokens whose entries are still to come: those from a log, until
the next verifier has told of them. What is *complete* goes to the front end; pages are read from there on.
"""

from collections.abc import Sequence
from enum import Enum

from msgspec import UNSET, UnsetType

from sdcpd.protocol import digests
from sdcpd.protocol.logprobs import are_entries, entries_of
from sdcpd.protocol.messages import Contract, Output
from sdcpd.protocol.terms import TOKEN_LIMIT


class PageFault(Enum):
    """Why a page was not taken. An older epoch is weather (6.7: discard, ask again); a newer one is another router's
    doing, and the log tells more. The rest are breaches by the verifier: the session cannot be trusted any further."""

    OLD_EPOCH = "output of an older epoch"
    NEW_EPOCH = "output of a newer epoch"
    GAP = "output behind a gap"
    OTHER_SESSION = "output of another session"
    CHANGED = "output changed at an index delivered before"
    TOO_LONG = "output beyond max_new"
    OUTSIDE_VOCABULARY = "output token outside the vocabulary"
    LOGPROBS = "log-probabilities that are not those of the page's tokens"

    @property
    def breach(self) -> bool:
        return self not in (PageFault.OLD_EPOCH, PageFault.NEW_EPOCH)


class OutputCopy:
    """Committed tokens o[1..n] of one session and d[n].

    `final` is the page that ended the output, once it came; nothing is taken after it. `logprobs` as in Plan.
    """

    def __init__(
        self, session: bytes, epoch: int, contract: Contract, prompt: tuple[int, ...], logprobs: int | None = None
    ) -> None:
        self._session = session
        self._epoch = epoch
        self._max_new = contract.max_new
        self._start = digests.prompt_digest(digests.contract_digest(contract), prompt)
        self._digest = self._start
        self._tokens: list[int] = []
        self._logprobs = logprobs
        self._entries: list[bytes] = []  # of the first tokens; none where nobody asked for them
        self.final: Output | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def digest(self) -> bytes:
        """d[n] of all tokens held."""
        return self._digest

    def digest_at(self, count: int) -> bytes:
        """d[count] for 0 <= count <= n. Costs `count` hashes unless `count` is 0 or n."""
        assert 0 <= count <= len(self._tokens)
        if count == len(self._tokens):
            return self._digest
        return digests.extend(self._start, self._tokens[:count])

    @property
    def complete(self) -> int:
        """Tokens that are held with all that was asked for."""
        return len(self._tokens) if self._logprobs is None else len(self._entries)

    def entries(self, start: int, count: int) -> tuple[bytes, ...] | UnsetType:
        """What goes beside `count` tokens from `start` on; an empty entry where there are no values (114)."""
        return UNSET if self._logprobs is None else entries_of(self._entries, start, count)

    def tokens(self, start: int, end: int | None = None) -> tuple[int, ...]:
        """Tokens at output indices start..end-1, to the end of the copy without `end`."""
        return tuple(self._tokens[start:end])

    def resume(self, tokens: Sequence[int]) -> PageFault | None:
        """Extend the copy to all tokens of the commit log; None unless they contradict what is held."""
        if tuple(tokens[: len(self._tokens)]) != tuple(self._tokens):
            return PageFault.CHANGED
        added = tuple(tokens[len(self._tokens) :])
        self._digest = digests.extend(self._digest, added)
        self._tokens.extend(added)
        return None

    def move(self, epoch: int) -> None:
        """From now on pages are of `epoch`; those of a lower one are discarded (6.7). It never falls, and stays where
        the session turns out to live at it with another verifier than was thought."""
        assert epoch >= self._epoch
        self._epoch = epoch
        self.final = None

    def take(self, page: Output, vocabulary: int | None) -> PageFault | None:
        """Extend the copy by what `page` adds; None when it fits, even if it adds nothing."""
        if page.session != self._session:
            return PageFault.OTHER_SESSION
        if page.epoch > self._epoch:
            return PageFault.NEW_EPOCH
        if page.epoch < self._epoch:
            return PageFault.OLD_EPOCH
        if page.from_ > self.complete:
            return PageFault.GAP
        held = len(self._tokens) - page.from_
        if tuple(self._tokens[page.from_ : page.from_ + len(page.tokens)]) != page.tokens[:held]:
            return PageFault.CHANGED
        added = page.tokens[held:]
        if self.final is not None:
            return PageFault.CHANGED if added else None
        if len(self._tokens) + len(added) > self._max_new:
            return PageFault.TOO_LONG
        limit = TOKEN_LIMIT if vocabulary is None else min(vocabulary, TOKEN_LIMIT)
        if any(token >= limit for token in added):
            return PageFault.OUTSIDE_VOCABULARY
        if not self._told(page):
            return PageFault.LOGPROBS
        self._digest = digests.extend(self._digest, added)
        self._tokens.extend(added)
        if page.final:
            if page.from_ + len(page.tokens) < len(self._tokens):
                return PageFault.CHANGED
            self.final = page
        return None

    def _told(self, page: Output) -> bool:
        """Take the entries that the page adds; False when they are not those of its tokens. A verifier that does not
        know them sends none, and there will be none."""
        if self._logprobs is None:
            return True
        entries = (b"",) * len(page.tokens) if isinstance(page.logprobs, UnsetType) else page.logprobs
        if not are_entries(entries, page.tokens, self._logprobs):
            return False
        self._entries.extend(entries[len(self._entries) - page.from_ :])
        return True
