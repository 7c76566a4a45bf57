"""Opening one session at one verifier, for the first time or to resume it (draft 6.1, 6.9; 29, 30, 36, 106).

First a long prompt is published, then the directory is told where the session will be, so that a router which restarts
finds it; then it is opened.
An open that got no answer may have been carried out. So it is repeated with the identical body, and only to the same
verifier: at another one the session is opened at another, fenced epoch (30), which is `Unopened`'s meaning. At the
first epoch the verifier's word is final where it refuses, as it speaks of the request, unless it says that it lost the
session to a fence; at a later one it may be that verifier alone (full, out of step with the log), and another is asked
if there is one.
"""

from msgspec import Struct
from msgspec.structs import replace

from sdcpd.protocol.directory import read_directory_record, write_directory_record
from sdcpd.protocol.failover import Resumable
from sdcpd.protocol.messages import SessionState
from sdcpd.protocol.placement_values import (
    FIRST_EPOCH,
    NO_ROOM,
    Ending,
    Lost,
    Open,
    Outcome,
    Patience,
    Plan,
    Publish,
    ReadRecord,
    RecordText,
    Refused,
    Stored,
    WriteRecord,
    passing,
    retry_after_s,
    words,
)
from sdcpd.protocol.policy_lane import PolicyLane
from sdcpd.protocol.problems import Problem, StaleEpoch
from sdcpd.protocol.prompt_object import PromptObject
from sdcpd.protocol.retry_lane import MainLane
from sdcpd.protocol.terms import Action


class Unopened(Struct, frozen=True):
    """Not here: the session is to be taken to another verifier, at a new epoch."""


class Overtaken(Struct, frozen=True):
    """The directory record tells a higher incarnation: another router has taken the session up (111)."""


Opened = SessionState | Unopened | Overtaken | Ending | None


class Opening:
    """Prompt object, record and session-open of one epoch, on the placement's main lane.

    `lost`: some session-open may yet be carried out. `tag` is the entity tag of the record as it was written last.
    """

    def __init__(
        self, plan: Plan, lane: MainLane, patience: Patience, policies: PolicyLane, prompt: PromptObject
    ) -> None:
        self.lost = False
        self.tag: str | None = None
        self._plan = plan
        self._policies = policies
        self._prompt = prompt
        self._lane = lane
        self._patience = patience
        self._epoch = FIRST_EPOCH
        self._verifier = plan.verifier
        self._resumed: Resumable | None = None
        self._opening: Open | None = None  # waits for its record
        self._record = b""
        self._since = 0.0

    def first(self, now: float) -> None:
        """Open it where it was placed first (6.1)."""
        self._send(self._plan.verifier, FIRST_EPOCH, None, now)

    def resume(self, at: Resumable, now: float) -> None:
        """Open it where it goes on (6.9)."""
        self._send(at.verifier, at.epoch, at, now)

    def _send(self, verifier: str, epoch: int, resumed: Resumable | None, now: float) -> None:
        self.lost, self._epoch = False, epoch
        self._verifier, self._resumed = verifier, resumed
        if not self._prompt.publish(now):
            self._tell(now)

    def _tell(self, now: float) -> None:
        """What goes out once the prompt is where the messages say."""
        prompt, verifier, epoch = self._prompt.member, self._verifier, self._epoch
        message = self._plan.opening(FIRST_EPOCH, prompt)
        if self._resumed is not None:
            message = replace(message, epoch=epoch, resume=self._resumed.resume)
        self._opening = Open(verifier=verifier, message=message)
        self._since = now
        if self._plan.record is None:
            self._lane.send(self._opening, now)
            return
        self._record = write_directory_record(
            self._plan,
            prompt=prompt,
            verifier=verifier,
            epoch=epoch,
            drafter=None,
            policies=self._policies.recorded(),
        )
        self._write(now)

    def _write(self, now: float) -> None:
        assert self._plan.record is not None
        self._lane.send(WriteRecord(ref=self._plan.record, octets=self._record, if_match=self.tag), now)

    def outcome(self, outcome: Outcome, now: float, *, elsewhere: bool) -> Opened:
        """How a try ended. `elsewhere`: another verifier could take the session. None: it is being repeated."""
        if isinstance(self._lane.action, Publish):
            return self._published(outcome, now)
        if isinstance(self._lane.action, WriteRecord | ReadRecord):
            return self._recorded(outcome, now)
        if isinstance(outcome, SessionState):
            self._lane.clear()
            return outcome
        self.lost = self.lost or isinstance(outcome, Lost)
        tried_s = now - self._lane.since
        patient = passing(outcome) and tried_s < self._patience.open_give_up_s
        full = isinstance(outcome, Refused) and self._epoch > FIRST_EPOCH
        if patient and not (full and elsewhere):
            self._prompt.doubt(now)
            self._lane.wait(now, retry_after_s(outcome))
            return None
        self._lane.clear()
        if self._may_go_on(outcome, elsewhere):
            return Unopened()
        if not passing(outcome):
            gone = isinstance(outcome, Refused) and outcome.status == 404
            return Ending(finish=Action.FAIL, reason="verifier_refused", detail=words(outcome), gone=gone)
        code = "verifier_unreachable" if isinstance(outcome, Lost) else "verifier_overloaded"
        return Ending(finish=Action.FAIL, reason=code, detail=f"gave up after {tried_s:.1f} s: {words(outcome)}")

    def _published(self, outcome: Outcome, now: float) -> Ending | None:
        settled = self._prompt.published(outcome, self._epoch, now)
        if isinstance(settled, Ending):
            return settled
        if settled:
            self._tell(now)
        return None

    def _recorded(self, outcome: Outcome, now: float) -> Overtaken | Ending | None:
        """A record that holds this already is Stored as well, so a lost answer is settled by writing it again.

        One at another tag (412) may be our own of an earlier epoch, the answer to which was lost: it is read, and only
        a higher incarnation in it is another router's.

        A place in a full store frees within minutes: a client whose session has not begun is told at once, as by any
        full queue (503 at its port); a session that is being resumed waits for it, as it does with its commits.
        """
        match outcome:
            case Stored(tag=tag):
                assert self._opening is not None
                self.tag = tag
                self._lane.send(self._opening, now)
                return None
            case RecordText(octets=octets, tag=tag):
                return self._found(octets, tag, now)
            case Refused(status=404) if isinstance(self._lane.action, ReadRecord):
                self.tag = None
                self._write(now)
                return None
            case Refused(status=412) if now - self._since < self._patience.open_give_up_s:
                assert self._plan.record is not None
                self._lane.send(ReadRecord(ref=self._plan.record), now)
                return None
        full = isinstance(outcome, Refused) and outcome.status == NO_ROOM
        patient = now - self._since < self._patience.open_give_up_s and not (full and self._epoch == FIRST_EPOCH)
        if passing(outcome) and patient:
            self._lane.wait(now, retry_after_s(outcome))
            return None
        return self._unrecorded(words(outcome))

    def _found(self, octets: bytes, tag: str, now: float) -> Overtaken | Ending | None:
        """What stands where ours should."""
        try:
            record = read_directory_record(octets)
        except Problem as problem:
            return self._unrecorded(problem.detail)
        if record.incarnation > self._plan.incarnation:
            self._lane.clear()
            return Overtaken()
        self.tag = tag
        self._write(now)
        return None

    def _unrecorded(self, detail: str) -> Ending:
        self._lane.clear()
        return Ending(finish=Action.FAIL, reason="directory_unreachable", detail=detail, gone=True)

    def _may_go_on(self, outcome: Outcome, elsewhere: bool) -> bool:
        if passing(outcome):
            return elsewhere or self._epoch > FIRST_EPOCH
        if isinstance(outcome, Refused) and outcome.suffix == StaleEpoch.suffix:
            return True  # it had the session and lost it to a fence: the log says where it stands (65)
        out_of_step = isinstance(outcome, Refused) and outcome.status in (404, 409)
        return self._epoch > FIRST_EPOCH and (elsewhere or out_of_step)
