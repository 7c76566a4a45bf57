"""Drafting ahead: the next proposal is made while this one is out (draft 6.2, decision 59).

It is made for the one outcome that can be foreseen: all proposed tokens are accepted, and the verifier adds the token
that this drafter would have drafted next, its *guess*. Both together make an expected digest, d[base + M + 1]. When the
verdict comes, one comparison decides: the same digest, and the draft is sent at once, or as soon as it is ready; any
other, and it is given up on the spot.

It pays where drafting takes time, and costs the drafter's work where the outcome is another one. So each session keeps
an account: while less than `worth` of its drafts ahead are hits, only every eighth round tries again.
"""

from typing import Final

from sdcpd.protocol.digests import extend
from sdcpd.protocol.messages import Proposal
from sdcpd.roles.drafting import DraftJob
from sdcpd.roles.ports import Meters

RETRY_ROUNDS: Final = 8
WEIGHT: Final = 0.1
"""Of the newest round in a session's share of hits."""


class Ahead:
    """One session's drafting ahead."""

    def __init__(self, meters: Meters, *, worth: float) -> None:
        self._meters = meters
        self._worth = worth
        self._share = 1.0
        self._skipped = 0
        self._sent: Proposal | None = None
        self._job: DraftJob | None = None

    def due(self) -> bool:
        """Whether to draft ahead in the round that begins now."""
        if self._job is not None:
            return False
        self._skipped += 1
        if self._share < self._worth and self._skipped < RETRY_ROUNDS:
            return False
        self._skipped = 0
        return True

    def begun(self, job: DraftJob, sent: Proposal) -> None:
        """`job` drafts for full acceptance of `sent` and its own guess."""
        assert self._job is None
        self._job, self._sent = job, sent

    def take(self, digest: bytes) -> DraftJob | None:
        """The job, if it was made for just the prefix with this digest; else it is cancelled. Either way it is gone."""
        job, sent = self._job, self._sent
        self._job = self._sent = None
        if job is None or sent is None:
            return None
        hit = job.guess is not None and extend(sent.base_digest, (*sent.tokens, job.guess)) == digest
        self._share += WEIGHT * (hit - self._share)
        self._meters.count("draft_ahead_total", outcome="hit" if hit else "miss")
        if hit:
            return job
        self._meters.count("draft_ahead_wasted_tokens_total", job.drafted)
        job.cancel()
        return None

    def drop(self) -> None:
        """The round came to nothing that a draft could be sent after."""
        self.take(b"")
