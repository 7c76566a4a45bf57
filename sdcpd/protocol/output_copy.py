"""The router's copy of one session's committed output, chain-checked as it grows (draft 4.2, 6.7; decision 41).

Theory: the verifier owns the committed prefix; a copy carries (n, d[n]) and may be behind. The router needs one for
three ends: pages for the front end, the tokens it hands to a drafter with an assignment (only up to a length whose
digest the verifier stated), and to resume at another verifier; then the log is read, and what it holds beyond the copy
comes in by `resume`. Indices are stable, so a page that overlaps the copy must repeat it token for token, and one that
would leave a gap cannot be used.
"""

from collections.abc import Sequence
from enum import Enum

from sdcpd.protocol import digests
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

    @property
    def breach(self) -> bool:
        return self not in (PageFault.OLD_EPOCH, PageFault.NEW_EPOCH)


class OutputCopy:
    """Committed tokens o[1..n] of one session and d[n].

    `final` is the page that ended the output, once it came; nothing is taken after it.
    """

    def __init__(self, session: bytes, epoch: int, contract: Contract, prompt: tuple[int, ...]) -> None:
        self._session = session
        self._epoch = epoch
        self._max_new = contract.max_new
        self._start = digests.prompt_digest(digests.contract_digest(contract), prompt)
        self._digest = self._start
        self._tokens: list[int] = []
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
        """From now on pages are of a higher epoch; those of the one before are discarded (6.7)."""
        assert epoch > self._epoch
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
        if page.from_ > len(self._tokens):
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
        self._digest = digests.extend(self._digest, added)
        self._tokens.extend(added)
        if page.final:
            if page.from_ + len(page.tokens) < len(self._tokens):
                return PageFault.CHANGED
            self.final = page
        return None
