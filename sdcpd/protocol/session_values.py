"""What goes into and comes out of the verifier's session machine (protocol/session.py), as plain values."""

from msgspec import Struct

from sdcpd.protocol.commit_log import CommitRecord, EndRecord
from sdcpd.protocol.distributions import Profile
from sdcpd.protocol.draft_rows import CheckedRow
from sdcpd.protocol.escalation import Counters
from sdcpd.protocol.messages import Verdict
from sdcpd.protocol.terms import Action


class SessionLimits(Struct, frozen=True, kw_only=True):
    """Waits and bounds of one session at its verifier, all in seconds unless the name says otherwise (decision 82)."""

    proposal_deadline_s: float = 5.0
    first_proposal_deadline_s: float = 60.0  # a drafter must first bring its own state to the prefix
    switch_repeat_s: float = 5.0
    waiting_limit_s: float = 60.0
    refusals_limit: int = 3
    round_row_bytes: int = 16 << 20  # dense draft rows of one proposal that are worth fetching (decision 99)
    output_page_tokens: int = 4096  # decision 39
    appends_ahead: int = 2  # self-decoded tokens computed before the first of them is durable (decision 81)


class Work(Struct, frozen=True):
    """Tokens to score in one pass: the last token of the prefix, then the proposed ones; all rows are wanted.

    `start` is the position of `tokens[0]`, which is also the number of positions whose KV must be valid. `ticket`
    names this piece of work: an answer with an old ticket is dropped. `rule` and `profile` say how the rows are judged;
    `committed` output tokens precede the round.
    """

    ticket: int
    round: int
    start: int
    tokens: tuple[int, ...]
    committed: int
    rule: int
    profile: Profile


class Replay(Struct, frozen=True):
    """The round is decided: this is its verdict (6.3 step 3)."""

    verdict: Verdict


class Join(Struct, frozen=True):
    """An identical request is being verified: wait for that verdict (6.3 step 3)."""

    round: int


class Begin(Struct, frozen=True):
    """A new round: score this.

    `rows` are its checked draft rows, () where the rule needs none. None: they have to be obtained, and nothing may be
    drawn before (6.3 step 5); `rows_obtained` or `rows_refused` says how that ended.
    """

    work: Work
    rows: tuple[CheckedRow, ...] | None


class Append(Struct, frozen=True):
    """Append these octets to the commit log, if it still has this tag. Nothing is committed until that is reported."""

    octets: bytes
    epoch: int
    if_match: str
    acknowledged: int  # records in the log before this one


class Busy(Struct, frozen=True):
    """A round or append is open; ask again once it has settled (decision 43)."""


class Stopped(Struct, frozen=True):
    """This verifier must stop serving the session: it was fenced, or the log contradicts us (6.8, decisions 64, 65)."""

    reason: str


class Point(Struct, frozen=True):
    """A committed position: what `appended` moves as one (6.3 step 8)."""

    round: int
    committed: int
    digest: bytes
    counters: Counters


class Pending(Struct, frozen=True):
    """A record handed out for appending, and what becomes true once it is durable. `logprobs`: an entry for each
    emitted token, where the session was opened with them (114)."""

    record: CommitRecord | EndRecord
    octets: bytes
    after: Point
    action: Action
    self_decoded: bool
    logprobs: tuple[bytes, ...] = ()


class Settled(Struct, frozen=True):
    """A record became durable. `proposed` is M of a proposal round; `closed` says that the session is over."""

    record: CommitRecord | EndRecord
    proposed: int | None
    closed: bool
