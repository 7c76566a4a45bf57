"""The `end` record of a session whose verifier can no longer write it (draft 6.8, 6.9; decisions 83, 85, 112).

    READING -> FENCING -> READING -> ENDING -> READING -> over

Theory. A session that was cancelled while no verifier of it lives would stay open in its log for ever, and whoever
found the log would resume it. So the router writes the end itself. A verifier that is only thought dead must not commit
behind it: a fence goes first, at the next epoch, by compare-and-set. As in failover.py all is settled by reading: each
write is followed by a look at the log, whatever its answer was, and a log that is closed needs nothing more.

Nobody waits for this: the client has long been told. So it is tried for a while and then left to whoever finds the log.
"""

from typing import Final

from sdcpd.protocol.commit_log import EndRecord, FenceRecord, Record, write_record
from sdcpd.protocol.failover import REREAD_S
from sdcpd.protocol.log_history import History, read_history
from sdcpd.protocol.placement_values import LogText, Outcome, Plan, ReadLog, WriteLog, passing, retry_after_s
from sdcpd.protocol.problems import IllFormed
from sdcpd.protocol.retry_lane import Lane, Outbox
from sdcpd.protocol.terms import Action

END_GIVE_UP_S: Final = 60.0
"""A store that is away for longer keeps the router from forgetting sessions."""


class LastRecord:
    """At most one attempt a session; `lane` holds its one call. `done` while there is nothing to be written."""

    def __init__(self, plan: Plan, outbox: Outbox) -> None:
        self.lane: Lane[ReadLog | WriteLog] = Lane(outbox)
        self._plan = plan
        self._author = f"{plan.router}#{plan.nonce}"
        self._epoch = 0
        self._reason = ""
        self._since = 0.0

    @property
    def done(self) -> bool:
        return self.lane.action is None

    def begin(self, epoch: int, reason: str, now: float) -> None:
        """The session ended for `reason` while it was at `epoch`, as far as the router knows."""
        self._epoch, self._reason, self._since = epoch, reason, now
        self._read(now, 0.0)

    def tick(self, now: float) -> None:
        """Time passed. The lane's own repeats are the caller's."""
        if not self.done and now >= self._since + END_GIVE_UP_S:
            self.lane.clear()

    def next_deadline(self) -> float | None:
        return None if self.done else self._since + END_GIVE_UP_S

    def outcome(self, outcome: Outcome, now: float) -> None:
        """How the call of `lane` ended."""
        if isinstance(self.lane.action, WriteLog):
            self._read(now, max(REREAD_S, retry_after_s(outcome) or 0.0) if passing(outcome) else 0.0)
        elif isinstance(outcome, LogText):
            self._look(outcome.octets, now)
        elif passing(outcome):
            self.lane.wait(now, retry_after_s(outcome))
        else:
            self.lane.clear()  # there is no log, hence nothing to be resumed, or none that can be read

    def _read(self, now: float, wait_s: float) -> None:
        self.lane.postpone(ReadLog(ref=self._plan.commit_log), now + wait_s)
        self.lane.repeat(now)

    def _look(self, octets: bytes, now: float) -> None:
        try:
            history = read_history(octets, self._plan.contract, self._plan.prompt)
        except IllFormed:
            self.lane.clear()  # nobody will go on from a damaged log
            return
        ours = history.fence > self._epoch and history.fenced_by == self._author
        if history.ending is not None or (history.epoch > self._epoch and not ours):
            self.lane.clear()  # it is closed, or another router's by now
        elif ours:
            self._write(EndRecord(epoch=history.fence, end=Action.FAIL, reason=self._reason), history, now)
        else:
            self._write(FenceRecord(epoch=self._epoch + 1, by=self._author), history, now)

    def _write(self, record: Record, history: History, now: float) -> None:
        action = WriteLog(
            ref=self._plan.commit_log, record=write_record(record), epoch=record.epoch, if_match=history.tag
        )
        self.lane.send(action, now)
