"""What drafts: the interface between the drafter role and whatever it lets guess.

A source keeps one context a session (the prompt and the committed output) and continues it on demand. It never sees
rejected tokens: they were its own guesses, and a guess leaves no trace in a source. It blocks, and it is called from
one task at a time for a session; a slow source (a model) is run through the Workers port by the role.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from sdcpd.protocol.draft_rows import DraftRow


class Draft(Struct, frozen=True):
    """A continuation of the context, at most as long as was asked for, empty when the source has nothing at all.

    `matched` is the source's own confidence: how many tokens at the end of the context agree with the place the draft
    was copied from; 0 for a bare guess. It orders the drafts of one source, and means nothing across sources.

    `rows` are the distributions that the tokens were sampled from, one each, exactly as they were used (draft 5.2).
    None: nothing was sampled, the source is certain of each token (one-hot rows, decision 55). A source that samples
    has a random stream of its own; it is not the verifier's.
    """

    tokens: tuple[int, ...]
    matched: int
    rows: tuple[DraftRow, ...] | None = None


class DraftSource(Protocol):
    def open(self, session: bytes, prompt: Sequence[int]) -> None:
        """Begin a context; replaces one of the same session."""

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        """The output grew by these tokens."""

    def propose(self, session: bytes, limit: int) -> Draft:
        """Continue the context by up to `limit` tokens, limit >= 1. Changes nothing that the next call would see."""

    def close(self, session: bytes) -> None:
        """Forget the context; a session that is not there is no error."""
