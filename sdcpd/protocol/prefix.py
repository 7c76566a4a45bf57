"""The committed prefix of one session, and the records on their way to its commit log (draft 6.3 step 8, 6.8).

A record is handed out for appending first and counts only when its append is reported: until then it is *pending*, and
the prefix, the output and the verdicts are as before. The *tip* is where the prefix will be once all that is pending
is durable; self-decoding computes ahead from there (decision 81).
"""

from collections import deque
from collections.abc import Sequence

from msgspec import UNSET

from sdcpd.protocol.commit_log import CommitRecord, Lookup, OurRecordAbsent, look_for
from sdcpd.protocol.escalation import Counters
from sdcpd.protocol.messages import Verdict
from sdcpd.protocol.session_values import Append, Pending, Point


class Prefix:
    """n, d[n], round and counters of one session, with the tokens and records behind them.

    Invariants: `at.committed == len(output)`; `at.round == len(records)`; `acknowledged` counts the records that the
    log is known to hold: ours, and those it held when the session was taken over; `tag` is its entity tag after them.
    `logprobs` holds the entries of the first tokens of the output: of all, unless the session was taken over and they
    are still to be computed anew, or nobody asked for them (114).
    """

    def __init__(self, *, epoch: int, prompt: tuple[int, ...], digest: bytes, counters: Counters, log_tag: str) -> None:
        self.prompt = prompt
        self.output: list[int] = []
        self.logprobs: list[bytes] = []
        self.at = Point(round=0, committed=0, digest=digest, counters=counters)
        self._epoch = epoch
        self._records: list[CommitRecord] = []  # the writer's copy of the log: old verdicts are rebuilt from it (62)
        self._pending: deque[Pending] = deque()
        self._tag = log_tag
        self._acknowledged = 0

    def take_over(self, commits: Sequence[CommitRecord], *, acknowledged: int) -> None:
        """Start from what other verifiers committed (6.9); the counters stay. The caller has checked the chain."""
        assert not self._records
        assert not self._pending
        self._records.extend(commits)
        self._acknowledged = acknowledged
        for commit in commits:
            self.output.extend(commit.emitted)
            self.at = Point(commit.round, commit.committed, commit.digest, self.at.counters)

    @property
    def tip(self) -> Point:
        return self._pending[-1].after if self._pending else self.at

    @property
    def tip_pending(self) -> Pending | None:
        return self._pending[-1] if self._pending else None

    @property
    def pending(self) -> int:
        """Records handed out and not known to be durable."""
        return len(self._pending)

    @property
    def last_token(self) -> int:
        """The token before the next one: the last of the tip."""
        pending = self.tip_pending
        if pending is not None:
            assert isinstance(pending.record, CommitRecord)
            return pending.record.emitted[-1]
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and output up to the tip: `last_position` + 1 tokens. Its KV can be computed anew from them."""
        ahead = [pending.record for pending in self._pending if isinstance(pending.record, CommitRecord)]
        return (*self.prompt, *self.output, *(token for record in ahead for token in record.emitted))

    @property
    def last_position(self) -> int:
        """Position of `last_token` in prompt and output; the KV before it is what a pass relies on."""
        return len(self.prompt) + self.tip.committed - 1

    def limited(self, counters: Counters) -> None:
        """A new drafter moves m_cap between rounds (decision 42). Only while nothing is pending."""
        assert not self._pending
        self.at = Point(self.at.round, self.at.committed, self.at.digest, counters)

    def push(self, pending: Pending) -> None:
        self._pending.append(pending)

    def to_append(self) -> Append | None:
        """The record to append next; the same value until its outcome is reported."""
        if not self._pending:
            return None
        return Append(
            octets=self._pending[0].octets,
            epoch=self._epoch,
            if_match=self._tag,
            acknowledged=self._acknowledged,
        )

    def appended(self, tag: str) -> Pending:
        """The oldest pending record is durable: move prefix, output and records together."""
        pending = self._pending.popleft()
        self._tag = tag
        self._acknowledged += 1
        if isinstance(pending.record, CommitRecord):
            assert pending.record.round == self.at.round + 1
            self.at = pending.after
            self.output.extend(pending.record.emitted)
            self.logprobs.extend(pending.logprobs)
            self._records.append(pending.record)
            assert self.at.committed == len(self.output)
        return pending

    def look_for_pending(self, log: bytes) -> Lookup:
        """What became of the oldest pending record, by the log's octets as they are now (decision 64)."""
        found = look_for(log, record=self._pending[0].octets, acknowledged=self._acknowledged, epoch=self._epoch)
        if isinstance(found, OurRecordAbsent):
            self._tag = found.tag
        return found

    def drop_pending(self) -> None:
        """The session is over or lost here: what is pending will never be reported."""
        self._pending.clear()

    def verdict(self, session: bytes, round_: int) -> Verdict | None:
        """The verdict of a decided proposal round, the same octets each time; None for a self-decoded one (62).

        A round of an earlier epoch is answered as its record tells it; None where that writer kept no `ctl`.
        """
        if not 1 <= round_ <= len(self._records):
            return None
        record = self._records[round_ - 1]
        ctl = record.ctl
        if ctl is UNSET or ctl.accepted is UNSET or ctl.m_cap is UNSET:
            return None
        return Verdict(
            session=session,
            epoch=record.epoch,
            round=record.round,
            accepted=ctl.accepted,
            emitted=record.emitted,
            committed=record.committed,
            digest=record.digest,
            action=ctl.action,
            m_cap=ctl.m_cap,
            low=ctl.low,
            load=ctl.load,
        )
