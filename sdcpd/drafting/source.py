"""What drafts: the interface between the drafter role and whatever it lets guess.

A source keeps one context a session (the prompt and the committed output) and continues it on demand. It never sees
rejected tokens: they were its own guesses, and a guess leaves no trace in a source. It blocks, for microseconds; only
`open` is run by a worker. A model is no source of this kind: its passes are shared and awaited, which is the roles'
business (roles/model_drafting.py). It answers with the same `Draft`.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from sdcpd.protocol.draft_rows import DraftRow


class Draft(Struct, frozen=True):
    """A continuation of the context, at most as long as was asked for, empty when the source has nothing at all.

    `matched` is the source's own confidence: how many tokens at the end of the context agree with the place the draft
    was copied from; 0 for a bare guess, MODEL for a model's draft. It orders the drafts of one source, and means
    nothing across sources.

    `rows` are the distributions that the tokens were sampled from, one each, exactly as they were used (draft 5.2).
    None: nothing was sampled, the source is certain of each token (one-hot rows, decision 55). A source that samples
    has a random stream of its own; it is not the verifier's.

    `score` is how many tokens a lookup expects to be right, by the frequencies it saw; 0.0 where it cannot say.
    """

    tokens: tuple[int, ...]
    matched: int
    rows: tuple[DraftRow, ...] | None = None
    score: float = 0.0


MODEL = -1
"""`matched` of a draft that was computed and not copied."""


class DraftSource(Protocol):
    """A lookup: it answers in microseconds, so the role calls it where it stands."""

    def open(self, session: bytes, prompt: Sequence[int], scope: bytes | None = None) -> None:
        """Begin a context; replaces one of the same session. What a source remembers of it for others stays within
        `scope` (draft 4.1)."""

    def extend(self, session: bytes, committed: Sequence[int]) -> None:
        """The output grew by these tokens."""

    def propose(self, session: bytes, limit: int, assumed: Sequence[int] = ()) -> Draft:
        """Continue the context by up to `limit` tokens, limit >= 1; behind `assumed` tokens where those are given.
        Changes nothing that the next call would see."""

    def close(self, session: bytes) -> None:
        """Forget the context; a session that is not there is no error."""
