"""Settings of the verifier role; the `[verifier]` table."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from sdcpd.protocol.session_values import SessionLimits


class VerifierSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[verifier]`. Bounds keep one node's memory and latency finite; each names what it protects."""

    max_sessions: Annotated[int, Meta(ge=1, le=65536)] = 64
    """Open sessions; one more is answered 503."""
    max_waiting_sessions: Annotated[int, Meta(ge=0, le=65536)] = 32
    """Of them those that may wait for KV pages, in the order of their opening; one more is answered 503."""
    ended_sessions: Annotated[int, Meta(ge=0, le=65536)] = 256
    """Ended sessions whose output is still served from memory."""
    ended_retention_s: Annotated[float, Meta(gt=0)] = 600.0
    """How long (decision 39)."""
    max_batch_tokens: Annotated[int, Meta(ge=128)] = 1024
    """Tokens of one pass over all sessions."""
    prefill_chunk_tokens: Annotated[int, Meta(ge=16)] = 256
    """Prompt tokens that may share a pass with waiting rounds: the bound on how long a prompt delays a round."""
    max_waiters: Annotated[int, Meta(ge=1)] = 1024
    """Requests that may wait (long polls, joined rounds, opens); one more is answered 503."""
    assignment_wait_s: Annotated[float, Meta(gt=0)] = 2.0
    """How long PUT drafter waits for an open round (decision 43)."""
    proposal_deadline_ms: Annotated[int, Meta(ge=1)] = 5_000
    first_proposal_deadline_ms: Annotated[int, Meta(ge=1)] = 60_000
    waiting_limit_s: Annotated[float, Meta(gt=0)] = 60.0
    """Time in state 2 after which the session fails (decision 82)."""
    append_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """After this an append's answer counts as lost and the log is read (decision 64)."""
    append_give_up_s: Annotated[float, Meta(gt=0)] = 120.0
    """How long a session waits for a store that takes no record (full disk, cache node gone) before it is lost here."""
    abandoned_append_s: Annotated[float, Meta(gt=0)] = 2.0
    """The same for a session that was cancelled or failed: only its `end` record is missing then."""
    append_retry_s: Annotated[float, Meta(gt=0)] = 0.5
    rows_timeout_s: Annotated[float, Meta(gt=0)] = 2.0
    """For fetching the draft rows of one proposal under rule 2; after it they count as unavailable (decision 53)."""
    round_row_bytes: Annotated[int, Meta(ge=4 << 20)] = 16 << 20
    """Dense draft rows of one proposal that will be fetched, 4 octets times M times the vocabulary (decision 99). As
    much as a cache takes for one object; a longer proposal is answered with the M that fits."""
    drafter_row_bytes: Annotated[int, Meta(ge=4 << 20)] = 256 << 20
    """Dense draft rows of one drafter that are under way at once (decision 99)."""
    speculation: Literal["auto", "on", "off"] = "auto"
    """Whether this verifier wants drafts: as load, acceptance and the cost of rows have it; always as long as there are
    drafters; or never (decisions 74, 110)."""
    ema_alpha: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Weight of one round in a session's estimate of its acceptance."""
    update_interval: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Passes between two looks at what pays; fewer when many sessions share them."""
    down_hysteresis: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """A session stops drafting when it loses more than this share of the verifier's tokens a second."""
    up_hysteresis: Annotated[float, Meta(ge=0, le=1)] = 0.03
    """It drafts again when that would gain more than this share."""
    near_tie_margin: Annotated[float, Meta(ge=0)] = 0.05
    """Rows whose two best logits are closer than this are counted as near ties (decision 66)."""
    ttl_ms: Annotated[int, Meta(ge=100)] = 3_000
    """Life of a status report (decision 48)."""

    def session_limits(self) -> SessionLimits:
        return SessionLimits(
            proposal_deadline_s=self.proposal_deadline_ms / 1000,
            first_proposal_deadline_s=self.first_proposal_deadline_ms / 1000,
            waiting_limit_s=self.waiting_limit_s,
            round_row_bytes=self.round_row_bytes,
        )
