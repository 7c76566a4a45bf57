"""What the drafter's machine (draft_session.py) asks its role to do next, and why it stops (draft 6.2, 6.5.2)."""

from enum import Enum, StrEnum

from msgspec import Struct

from sdcpd.protocol.messages import Proposal


class StopReason(StrEnum):
    """Why a drafter no longer proposes for a session."""

    SWITCHED = "switched"  # verdict: another drafter takes over
    SELF_DECODING = "self-decoding"  # verdict: the verifier goes on alone
    FINISHED = "finished"  # verdict: end of generation
    FAILED = "failed"  # verdict: end with an error, or an action we do not know
    SESSION_CLOSED = "session-closed"  # 410
    NOT_ASSIGNED = "not-assigned"  # 403
    STALE_EPOCH = "stale-epoch"  # 409: another verifier has the session by now
    UNKNOWN_SESSION = "unknown-session"  # 404
    DROPPED = "dropped"  # the router took the assignment back
    LOST = "lost"  # the committed prefix cannot be reached from what we hold
    REFUSED = "refused"  # an answer that repeating will not change
    BAD_VERDICT = "bad-verdict"  # a verdict that does not follow from the proposal and the chain
    SILENT = "silent"  # no verdict for too long (decision 45)
    EXHAUSTED = "exhausted"  # the source has nothing to say (decision 102)

    @property
    def declined(self) -> bool:
        """The session lives and counts on us: the router has to hear that we left it (decision 102)."""
        return self in _DECLINED


_DECLINED = frozenset(
    {StopReason.LOST, StopReason.REFUSED, StopReason.BAD_VERDICT, StopReason.SILENT, StopReason.EXHAUSTED}
)


class Settled(Struct, frozen=True):
    """What a verdict said about our own proposal. `accepted` is the rule's a, before truncation (decision 52)."""

    proposed: int
    accepted: int


class Proceed(Struct, frozen=True):
    """The machine is READY: draft the next round. `after_verdict` is false when the way here was something else.

    Then the drafter waits a little when it happens again, so that a confused peer is not asked in a tight loop.
    """

    settled: Settled | None = None
    after_verdict: bool = False


class Resend(Struct, frozen=True):
    """Send exactly this proposal (again; decisions 36, 46).

    `retry_after_s` is 0 for a shortened proposal, which need not wait; above 0 it is the time that the verifier
    named; None leaves the wait to the drafter. `publish`: its draft rows first, they were not to be had (36, 63).
    """

    proposal: Proposal
    retry_after_s: int | None = None
    publish: bool = False


class Stop(Struct, frozen=True):
    """The machine is STOPPED."""

    reason: StopReason
    detail: str
    settled: Settled | None = None


class Ignored(Struct, frozen=True):
    """An outcome for which nothing is out: it came late, and changed nothing."""


Step = Proceed | Resend | Stop | Ignored


class Assigned(Enum):
    """What an accepted assignment changed."""

    REPEATED = "repeated"  # nothing: we hold this one (decision 111)
    KEPT = "kept"  # profile and sequence number; prefix, round and cap stand (decision 44)
    ADOPTED = "adopted"  # prefix, round and cap are the assignment's
    PENDING = "pending"  # as ADOPTED, as soon as the proposal that is out has its outcome
    RESTARTED = "restarted"  # as ADOPTED, in a new epoch: forget the proposal that is out
