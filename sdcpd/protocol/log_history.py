"""What a commit log says of its session, for whoever takes the session up (draft 6.8, 6.9; decisions 85, 88, 89, 91).

The log is the only thing sure to outlive a verifier, so a router and the next verifier both start from it, and both
believe nothing else: they read all records, drop what a fence precedes (88), and follow the digest chain from the
contract and the prompt to the last commit. A chain that breaks is a fault of the store or of a writer, never something
to go on from.
"""

from msgspec import UNSET, Struct, UnsetType

from sdcpd.protocol import digests
from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, LogView, log_tag, read_records, view
from sdcpd.protocol.messages import Contract, Sampling, SpeculationStats
from sdcpd.protocol.problems import IllFormed
from sdcpd.protocol.round_counts import RoundCounts
from sdcpd.protocol.terms import TOKEN_LIMIT, Action

LADDER_EXHAUSTED = "the fallback ladder is exhausted"
"""`reason` of a session that the ladder failed; its last commit says so by its action alone (decision 83)."""


class LogEnding(Struct, frozen=True):
    """The session behind a log is over for good. `finish` is FINISH or FAIL."""

    finish: Action
    reason: str | None
    stats: SpeculationStats


class History(Struct, frozen=True):
    """A log as it was read.

    `records` counts all that stand in it, `tag` is its entity tag. `epoch` is the highest that any record names, 0 for
    an empty log; `fence` the highest fence, 0 without one, and `fenced_by` the author of that one. `commits` are those
    that count, from round 1 on; `tokens` and `digest` are o[1..n] and d[n] after them.
    """

    tag: str
    records: int
    epoch: int
    fence: int
    fenced_by: str | None
    commits: tuple[CommitRecord, ...]
    tokens: tuple[int, ...]
    digest: bytes
    ending: LogEnding | None

    @property
    def last(self) -> CommitRecord | None:
        return self.commits[-1] if self.commits else None

    @property
    def sampling(self) -> Sampling | UnsetType:
        """The profile that replaced the contract's last, UNSET if none did (85)."""
        told = [one.ctl.sampling for one in self.commits if one.ctl is not UNSET and one.ctl.sampling is not UNSET]
        return told[-1] if told else UNSET

    @property
    def round(self) -> int:
        """The last committed round, 0 before the first."""
        return len(self.commits)


def read_history(log: bytes, contract: Contract, prompt: tuple[int, ...] | None) -> History:
    """Read a log's octets. Raises IllFormed when they are damaged or do not continue the chain of this session.

    Without its prompt (None) the first commit is believed, and the chain checked from there; before it `digest` is
    empty.
    """
    read = read_records(log)
    records = [record for record, _ in read]
    seen = view(records)
    digest = b"" if prompt is None else digests.prompt_digest(digests.contract_digest(contract), prompt)
    tokens: list[int] = []
    for number, commit in enumerate(seen.commits, 1):
        if any(token >= TOKEN_LIMIT for token in commit.emitted):
            raise IllFormed(f"log: round {commit.round} emits a token beyond 2^32")
        tokens += commit.emitted
        digest = digests.extend(digest, commit.emitted) if digest else commit.digest
        if (commit.round, commit.committed, commit.digest) != (number, len(tokens), digest):
            raise IllFormed(f"log: round {commit.round} does not continue the rounds and the digest chain before it")
    fences = [record for record in records if isinstance(record, FenceRecord) and record.epoch == seen.fence]
    author = fences[-1].by if fences else UNSET
    return History(
        tag=log_tag(raw for _, raw in read),
        records=len(records),
        epoch=max((record.epoch for record in records), default=0),
        fence=seen.fence,
        fenced_by=author if isinstance(author, str) else None,
        commits=seen.commits,
        tokens=tuple(tokens),
        digest=digest,
        ending=_ending(seen, contract, tokens),
    )


def _ending(seen: LogView, contract: Contract, tokens: list[int]) -> LogEnding | None:
    """Decision 91: what makes a log closed. The last commit is asked first, since it is what readers were told."""
    last = seen.last
    stats = RoundCounts(contract.m_max, seen.commits).stats()
    action = last.ctl.action if last is not None and last.ctl is not UNSET else None
    if action is Action.FINISH or len(tokens) >= contract.max_new or (tokens and tokens[-1] in contract.stop):
        return LogEnding(finish=Action.FINISH, reason=None, stats=stats)
    if action is Action.FAIL:
        return LogEnding(finish=Action.FAIL, reason=LADDER_EXHAUSTED, stats=stats)
    if seen.ended is not None:
        reason = seen.ended.reason if isinstance(seen.ended.reason, str) else None
        finish = Action.FINISH if seen.ended.end is Action.FINISH else Action.FAIL
        return LogEnding(finish=finish, reason=reason, stats=stats)
    return None
