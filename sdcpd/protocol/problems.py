"""What a peer did wrong, as exceptions that carry their own status and problem type (draft Table 2; RFC 9457).

Raised by the machines and the decoder, rendered in one place (edge/problem_body.py). A Problem never says
that *we* failed: that is an assertion. Nor that the world failed: that is a returned outcome.
"""

from typing import ClassVar

from sdcpd.protocol.messages import SessionState

TYPE_BASE = "https://iana.org/assignments/http-problem-types#"
"""Problem type URIs are this plus the suffix; receivers match the suffix alone (decision 34)."""


class Problem(Exception):
    """Base. `suffix` is the draft's type suffix, or None for `about:blank`."""

    status: ClassVar[int] = 400
    suffix: ClassVar[str | None] = None
    title: ClassVar[str] = "Bad request"

    def __init__(
        self,
        detail: str,
        *,
        state: SessionState | None = None,
        retry_after_s: int | None = None,
        m_cap: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.state = state
        self.retry_after_s = retry_after_s
        self.m_cap = m_cap


class IllFormed(Problem):
    """Body is not the one well-formed CBOR item we accept, or breaks its schema outside the contract (decision 7)."""

    title = "Ill-formed message"


class Forbidden(Problem):
    """The peer's role may not call this resource (decision 33)."""

    status = 403
    title = "Not for this role"


class UnknownResource(Problem):
    """No such session, object or path."""

    status = 404
    title = "Not found"


class Conflict(Problem):
    """A state conflict for which the draft has no type (for example: a repeated open with other content)."""

    status = 409
    title = "Conflict"


class PreconditionFailed(Problem):
    """If-Match or If-None-Match did not hold (6.8)."""

    status = 412
    title = "Precondition failed"


class TooLarge(Problem):
    """Body over its limit (decision 117)."""

    status = 413
    title = "Body too large"


class WrongMediaType(Problem):
    """Not `application/sdcp+cbor` (5.1)."""

    status = 415
    title = "Wrong media type"


class Overloaded(Problem):
    """A limit of ours is reached; come again (decision 36)."""

    status = 503
    title = "Overloaded"


class NoRoom(Problem):
    """The store is full (cache part of the decisions)."""

    status = 507
    title = "No room"


class StaleEpoch(Problem):
    """Epoch is not current."""

    status = 409
    suffix = "sdcp-stale-epoch"
    title = "Epoch is not current"


class StaleBase(Problem):
    """Proposal does not extend the committed prefix."""

    status = 409
    suffix = "sdcp-stale-base"
    title = "Proposal does not extend the committed prefix"


class QUnavailable(Problem):
    """Draft probabilities required by the rule are unavailable."""

    status = 409
    suffix = "sdcp-q-unavailable"
    title = "Draft probabilities are unavailable"


class BadContract(Problem):
    """Contract invalid or not supported."""

    status = 422
    suffix = "sdcp-bad-contract"
    title = "Contract invalid or not supported"


class LimitExceeded(Problem):
    """Proposal violates m_cap or m_max; `m_cap` names the limit (decision 36)."""

    status = 422
    suffix = "sdcp-limit"
    title = "Proposal violates m_cap or m_max"


class SessionClosed(Problem):
    """Session has finished or failed."""

    status = 410
    suffix = "sdcp-session-closed"
    title = "Session has finished or failed"


class BadProposal(Problem):
    """Proposal inconsistent with its draft distributions, or with token ids that do not exist (decision 22)."""

    status = 422
    suffix = "sdcp-bad-proposal"
    title = "Proposal inconsistent"


class NotAssigned(Problem):
    """Drafter is not assigned to the session."""

    status = 403
    suffix = "sdcp-not-assigned"
    title = "Drafter is not assigned"


class NotSupported(Problem):
    """A part of the protocol that this version does not serve yet; said loudly rather than done by halves."""

    status = 501
    title = "Not supported by this version"
