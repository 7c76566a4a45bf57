"""Taking a session away from a lost verifier, until another one can be asked to open it (draft 6.8, 6.9).

    READING -> FENCING -> READING -> PUBLISHING -> CHOOSING -> Resumable
       |          (a foreign fence) -> STANDING_BACK -> READING -> LOOKING_UP -> ASKING -> Adopted, or FENCING
       +-> ASKING (a router that restarted: does the session live where the directory says?) -> Adopted, or FENCING
       +-> Over: the log is closed, its tokens are the session's last
    any -> GIVING_UP (an `end` record is being written, 83) -> GaveUp

Theory. Nobody can know that a verifier is dead, so it is made harmless instead: a fence with the next epoch goes into
its log by compare-and-set, after which it can commit nothing (6.9). All is settled by reading: whether a fence stands
and whose it is (85, 89), what was committed, whether the session is over (91). A lost or refused answer therefore needs
no case of its own, the log is simply read again. Tokens that were committed and never delivered reach the reader from
the log, before any verifier is found. Every attempt at another verifier begins here anew, with a new epoch (30).

Of two routers that fence at once one loses the compare-and-set; it stands back and looks again, and fences anew unless
the session lives at the other's epoch (89); then it follows. One that was overtaken, because another router has raised
the incarnation in the directory (111), never fences again: it only looks for where it can read on. A session that three
failovers in a row brought no round is given up, so that a poisonous request cannot walk the fleet (91).
"""

from enum import Enum
from typing import Final

from msgspec import Struct, UnsetType

from sdcpd.protocol.commit_log import EndRecord, FenceRecord, write_record
from sdcpd.protocol.directory import read_directory_record
from sdcpd.protocol.encoding import encode_tokens
from sdcpd.protocol.fleet import Fleet, Instance, VerifierNeed
from sdcpd.protocol.log_history import History, LogEnding, read_history
from sdcpd.protocol.messages import Resume, SessionState
from sdcpd.protocol.output_copy import OutputCopy
from sdcpd.protocol.placement_values import (
    FIRST_EPOCH,
    Accepted,
    AskState,
    Ending,
    FailingOver,
    LogText,
    Outcome,
    Patience,
    Plan,
    Publish,
    ReadLog,
    ReadRecord,
    RecordText,
    Refused,
    WriteLog,
    passing,
    retry_after_s,
    words,
)
from sdcpd.protocol.problems import IllFormed, Problem
from sdcpd.protocol.retry_lane import FailoverLane, Lane, Outbox
from sdcpd.protocol.terms import Action

FRUITLESS_LIMIT: Final = 3
"""Failovers in a row that brought no committed round, before the session is given up (decision 91)."""

STAND_BACK_S: Final = 2.0
"""How long a router whose fence lost waits before it looks again (decision 89)."""

END_WRITE_S: Final = 5.0
"""How long the `end` record of a session that is given up is tried; the reader waits for it (decision 83)."""


REREAD_S: Final = 0.5
"""Between a fence that got no answer and the look at what became of it."""


class Stage(Enum):
    """See the module's text."""

    IDLE = "idle"
    READING = "reading"
    FENCING = "fencing"
    STANDING_BACK = "standing_back"
    LOOKING_UP = "looking_up"
    ASKING = "asking"
    PUBLISHING = "publishing"
    CHOOSING = "choosing"
    GIVING_UP = "giving_up"


class Resumable(Struct, frozen=True):
    """Our fence stands and the tokens are published: open the session there, at this epoch."""

    verifier: str
    boot: bytes | None
    epoch: int
    resume: Resume


class Adopted(Struct, frozen=True):
    """The session lives at `verifier`, at the log's epoch. `follow`: another router cares for it."""

    verifier: str
    state: SessionState
    follow: bool


class Over(Struct, frozen=True):
    """The session had ended before it could be taken over; all its tokens are in the copy."""

    ending: LogEnding


class GaveUp(Struct, frozen=True):
    """It cannot be taken over. `reason` is a code of ours."""

    reason: str
    detail: str


Result = Resumable | Adopted | Over | GaveUp


class Failover:
    """At most one failover of one session at a time. `epoch` is the highest epoch known to be in use.

    `begin` starts one, also while another is under way; `outcome` and `tick` go on with it until they return how it
    ended. `lane` holds the one call it has under way. `yields` is set for good when another router has taken the
    session up.
    """

    def __init__(self, plan: Plan, fleet: Fleet, patience: Patience, outbox: Outbox, copy: OutputCopy) -> None:
        self.stage = Stage.IDLE
        self.yields = False
        self.lane: FailoverLane = Lane(outbox)
        self._outbox = outbox
        self._plan = plan
        self._fleet = fleet
        self._patience = patience
        self._copy = copy
        self._author = f"{plan.router}#{plan.nonce}"
        self._epoch = 0
        self._to: str | None = None
        self._since = 0.0
        self._counted = False  # this failover has been counted
        self._fruitless = 0
        self._round = -1  # the last committed round at the failover before
        self._troubled: list[str] = []  # verifiers that failed the session since that round, each once
        self._stood_back = 0  # the foreign fence that was stood back for
        self._resume_at = 0.0
        self._follow = False  # the one that is asked was chosen by another router
        self._ask: str | None = None  # the verifier to be asked once the log was read
        self._history: History | None = None
        self._giving_up: GaveUp | None = None

    def next_deadline(self) -> float | None:
        """When `tick` has something to do besides looking at the fleet and repeating calls."""
        match self.stage:
            case Stage.STANDING_BACK:
                return min(self._resume_at, self._since + self._patience.failover_give_up_s)
            case Stage.IDLE:
                return None
            case _ if self._giving_up is not None:
                return self._since + END_WRITE_S
            case _:
                return self._since + self._patience.failover_give_up_s

    def elsewhere(self, now: float, avoid: str) -> bool:
        """Whether a live verifier other than `avoid` could serve the session that has not failed it lately."""
        return any(one.uri != avoid and one.uri not in self._troubled for one in self._fit(now))

    def adopt(self, epoch: int, verifier: str, now: float) -> None:
        """Find out where a session lives that the directory puts at `verifier`, and take it from there if it does not
        (106)."""
        self.begin(epoch, now)
        self._ask = verifier

    def begin(self, epoch: int, now: float, *, avoid: str | None = None, to: str | None = None) -> None:
        """Take the session from whoever serves it at `epoch`. `avoid` is taken only for want of another verifier, `to`
        before all others while it lives."""
        self._ask = None
        self._epoch, self._to, self._since = epoch, to, now
        self._counted, self._stood_back, self._follow = False, 0, False
        self._history = self._giving_up = None
        if avoid is not None:
            self._troubled = [*(one for one in self._troubled if one != avoid), avoid]
        self._read(now)

    def stop(self) -> None:
        """The session ended meanwhile."""
        self.stage = Stage.IDLE
        self.lane.clear()

    def tick(self, now: float) -> Result | None:
        """Time passed or the fleet changed. The lane's own repeats are the caller's."""
        if self.stage is Stage.STANDING_BACK and now >= self._resume_at:
            self._read(now)
        if self.stage is Stage.CHOOSING:
            chosen = self._choose(now)
            if chosen is not None:
                return self._resumable(chosen)
        due = self.next_deadline()
        if due is None or now < due:
            return None
        if self._giving_up is not None:
            return self._end(self._giving_up)  # the record could not be written; the log's own limits end it
        if self.stage is Stage.CHOOSING:
            return self._give_up("verifier_lost", "no other verifier could be found", now)
        if self.yields:
            return self._end(GaveUp("taken_over", "another router has the session, and it cannot be read there"))
        return self._end(GaveUp("log_unreachable", "the commit log could not be read, fenced or published in time"))

    def outcome(self, outcome: Outcome, now: float) -> Result | None:
        """How the call of `lane` ended."""
        if self.stage is Stage.FENCING:
            # Whatever became of it, the log says so.
            self._read(now, max(REREAD_S, retry_after_s(outcome) or 0.0) if passing(outcome) else 0.0)
            return None
        if self.stage is Stage.PUBLISHING and isinstance(outcome, Accepted):
            self.lane.clear()
            self.stage = Stage.CHOOSING
            return self.tick(now)
        if self.stage is Stage.GIVING_UP and isinstance(outcome, Accepted):
            assert self._giving_up is not None
            return self._end(self._giving_up)
        if self.stage is Stage.LOOKING_UP:
            return self._looked_up(outcome, now)
        if self.stage is Stage.ASKING:
            return self._asked(outcome, now)
        if isinstance(outcome, LogText):
            self.lane.clear()
            return self._look(outcome.octets, now)
        if self.stage is Stage.READING and isinstance(outcome, Refused) and outcome.status == 404:
            return self._no_log(now)
        if self.stage is Stage.GIVING_UP and not passing(outcome):
            self._read(now)  # somebody wrote meanwhile
            return None
        if passing(outcome):
            self.lane.wait(now, retry_after_s(outcome))
            return None
        return self._end(GaveUp("log_unusable", words(outcome)))

    # What the log says

    def _read(self, now: float, wait_s: float = 0.0) -> None:
        self.stage = Stage.READING
        self.lane.postpone(ReadLog(ref=self._plan.commit_log), now + wait_s)
        self.lane.repeat(now)

    def _look(self, octets: bytes, now: float) -> Result | None:
        try:
            history = read_history(octets, self._plan.contract, self._plan.prompt)
        except IllFormed as error:
            return self._end(GaveUp("log_damaged", error.detail))
        if self._copy.resume(history.tokens) is not None:
            return self._end(GaveUp("log_damaged", "the log does not hold the tokens that were delivered from it"))
        self._history = history
        if history.ending is not None:
            return self._end(Over(history.ending) if self._giving_up is None else self._giving_up)
        if self._giving_up is not None:
            self._write_end(self._giving_up, now)
            return None
        if self._ask is not None:
            return self._ask_state(now)
        if self.yields:
            return self._look_up(now)
        if history.fence > self._epoch and history.fenced_by == self._author:
            self._epoch = history.fence
            self.stage = Stage.PUBLISHING
            self.lane.send(Publish(ref=self._tokens_ref(history), octets=encode_tokens(history.tokens)), now)
            return None
        if history.epoch > max(self._epoch, self._stood_back):
            self._stood_back = history.epoch
            return self._stand_back(now)
        return self._look_up(now) if history.epoch > self._epoch else self._fence_next(now)

    def _stand_back(self, now: float) -> Result | None:
        self.stage, self._resume_at = Stage.STANDING_BACK, now + STAND_BACK_S
        return None

    def _look_up(self, now: float) -> Result | None:
        if self._plan.record is None:
            return self._fence_next(now)
        self.stage = Stage.LOOKING_UP
        self.lane.send(ReadRecord(ref=self._plan.record), now)
        return None

    def _fence_next(self, now: float) -> Result | None:
        if self.yields:
            return self._stand_back(now)
        history = self._history
        return self._fence(max(history.epoch if history is not None else 0, self._epoch) + 1, history, now)

    # Whether it lives (89, 106)

    def _looked_up(self, outcome: Outcome, now: float) -> Result | None:
        """Where the router that fenced before us means to have it."""
        if isinstance(outcome, RecordText):
            self.lane.clear()
            try:
                record = read_directory_record(outcome.octets)
            except Problem:
                return self._fence_next(now)
            if self._history is None or record.epoch != self._history.epoch:
                return self._fence_next(now)
            self._ask, self._follow = record.verifier, True
            return self._ask_state(now)
        if passing(outcome) and self.lane.tries < self._patience.tries:
            self.lane.wait(now, retry_after_s(outcome))
            return None
        return self._fence_next(now)

    def _ask_state(self, now: float) -> Result | None:
        assert self._ask is not None
        self.stage = Stage.ASKING
        self.lane.send(AskState(verifier=self._ask, session=self._plan.session), now)
        return None

    def _asked(self, outcome: Outcome, now: float) -> Result | None:
        history, verifier, follow = self._history, self._ask, self._follow
        assert verifier is not None
        epoch = max(history.epoch if history is not None else 0, FIRST_EPOCH)
        if isinstance(outcome, SessionState) and outcome.epoch == epoch:
            self.stop()
            return Adopted(verifier, outcome, follow)
        opening = isinstance(outcome, Refused) and outcome.status == 503
        if opening or (passing(outcome) and self.lane.tries < self._patience.tries):
            self.lane.wait(now, retry_after_s(outcome))  # it may be on its way there (503), or was only not heard
            return None
        if not follow:
            self._outbox.put(FailingOver("not_found", verifier, self._epoch))
        self._ask, self._follow = None, False
        return self._fence_next(now)

    def _no_log(self, now: float) -> Result | None:
        """Nothing was ever committed there; the verifier may not even have created it (decision 86)."""
        self.lane.clear()
        if len(self._copy) > 0:
            return self._end(GaveUp("log_lost", "the commit log is gone: store fault"))
        if self._giving_up is not None:
            return self._end(self._giving_up)
        return self._fence_next(now) if self._ask is None else self._ask_state(now)

    def _fence(self, epoch: int, history: History | None, now: float) -> Result | None:
        round_ = history.round if history is not None else 0
        if not self._counted:
            if round_ > self._round:
                self._fruitless, self._round = 0, round_
                del self._troubled[:-1]
            self._counted = True
            self._fruitless += 1
        if self._fruitless > FRUITLESS_LIMIT:
            detail = f"{FRUITLESS_LIMIT} failovers in a row brought no committed round"
            return self._give_up("verifier_lost", detail, now)
        record = write_record(FenceRecord(epoch=epoch, by=self._author))
        self.stage = Stage.FENCING
        self._write(record, epoch, history, now)
        return None

    def _write(self, record: bytes, epoch: int, history: History | None, now: float) -> None:
        tag = history.tag if history is not None else None
        self.lane.send(WriteLog(ref=self._plan.commit_log, record=record, epoch=epoch, if_match=tag), now)

    # Choosing

    def _fit(self, now: float) -> tuple[Instance, ...]:
        """Live verifiers that could take the session, best first."""
        contract = self._plan.contract
        prefix = self._fleet.affinity.prefix(self._plan.prompt)
        need = VerifierNeed(tokenizer=contract.tokenizer, target=contract.target, rule=contract.rule, prefix=prefix)
        length = len(self._plan.prompt) + contract.max_new
        return tuple(one for one in self._fleet.verifiers(need, now) if _holds(one, length, self._plan.vocabulary))

    def _choose(self, now: float) -> Instance | None:
        fit = self._fit(now)
        wanted = [one for one in fit if one.uri == self._to]
        return min(wanted or fit, key=lambda one: one.uri in self._troubled, default=None)

    def _resumable(self, chosen: Instance) -> Resumable:
        history = self._history
        assert history is not None
        self._fleet.placed(chosen.uri)
        self.stop()
        resume = Resume(
            round=history.round,
            committed=len(history.tokens),
            digest=history.digest,
            committed_tokens=self._tokens_ref(history),
        )
        return Resumable(chosen.uri, chosen.boot, self._epoch, resume)

    def _tokens_ref(self, history: History) -> str:
        return f"{self._plan.objects}{self._epoch}/{history.round}/tokens"

    # Giving up

    def _give_up(self, reason: str, detail: str, now: float) -> Result | None:
        """The log gets an `end` record first, so that nobody resumes what the reader was told has failed (83)."""
        self._giving_up, self._since = GaveUp(reason, detail), now
        if self._history is None:
            return self._end(self._giving_up)
        self._write_end(self._giving_up, now)
        return None

    def _write_end(self, giving_up: GaveUp, now: float) -> None:
        history = self._history
        assert history is not None
        epoch = max(history.epoch, self._epoch)
        record = write_record(EndRecord(epoch=epoch, end=Action.FAIL, reason=giving_up.reason))
        self.stage = Stage.GIVING_UP
        self._write(record, epoch, history, now)

    def _end(self, result: Over | GaveUp) -> Over | GaveUp:
        self.stop()
        return result


def _holds(one: Instance, length: int, vocabulary: int | None) -> bool:
    """Whether its context and vocabulary are known to be too small, or not the session's."""
    context, words_ = one.status.context_tokens, one.status.vocabulary
    if not isinstance(context, UnsetType) and context < length:
        return False
    return isinstance(words_, UnsetType) or vocabulary is None or words_ == vocabulary


def ending_of(result: Over | GaveUp) -> Ending:
    """How the session ends for its client when it cannot, or need not, be taken over."""
    if isinstance(result, GaveUp):
        return Ending(finish=Action.FAIL, reason=result.reason, detail=result.detail)
    found = result.ending
    return Ending(finish=found.finish, reason=found.reason, cancelled=found.reason == "cancelled", gone=True)
