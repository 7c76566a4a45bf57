"""One placement stepped by hand: its fleet, the calls it wants made, and a commit log that answers when asked to."""

from typing import Any, TypeVar

from msgspec import UNSET

from sdcpd.protocol import digests
from sdcpd.protocol.commit_log import CommitRecord, Control, FenceRecord, Record, log_tag, read_records, write_record
from sdcpd.protocol.fleet import Fleet
from sdcpd.protocol.messages import Contract, Event, Output, SessionState, Status
from sdcpd.protocol.placement import Placement
from sdcpd.protocol.placement_values import (
    Accepted,
    Assign,
    Call,
    Ending,
    FailingOver,
    LogText,
    Lost,
    Moved,
    Name,
    Open,
    Outcome,
    Patience,
    Phase,
    Plan,
    Publish,
    Read,
    ReadLog,
    Refused,
    Stored,
    WriteLog,
    WriteRecord,
)
from sdcpd.protocol.retry_lane import Step
from sdcpd.protocol.terms import Action, LadderAction, State

SESSION, BOOT = b"s" * 16, b"b" * 16
V, V2, V3 = "http://v/verifier/", "http://v2/verifier/", "http://v3/verifier/"
D1, D2 = "http://d1/drafter/", "http://d2/drafter/"
ROUTER, LOG, OBJECTS = "http://r/router/", "http://c/cache/v1/s/-/l/x", "http://c/cache/v1/s/-/o/x/"
NONCE, RECORD = "n1", "http://c/cache/v1/s/-/d/x"
CONTRACT = Contract(
    target=b"m" * 32,
    tokenizer=b"t" * 32,
    rule=1,
    m_max=8,
    max_new=40,
    stop=(2,),
    low_rounds=4,
    fallback=(LadderAction.SELF_DECODE,),
    self_load=100,
    self_max=64,
)
PROMPT = (11, 12, 13)
D0 = digests.prompt_digest(digests.contract_digest(CONTRACT), PROMPT)
INCARNATION = 5
A = TypeVar("A", bound=Call)
VERIFIER: dict[str, Any] = {"role": 2, "model": b"m" * 32}


class World:
    """One placement, its fleet, and what it wants done. Statuses are renewed by `wait`, for those in `alive`."""

    def __init__(
        self,
        *drafters: str,
        speculation: bool = True,
        patience: Patience | None = None,
        nonce: str = NONCE,
        record: str | None = None,
        prompt_ref: str | None = None,
    ) -> None:
        self.now = 1000.0
        self.fleet = Fleet()
        self.alive: dict[str, dict[str, Any]] = {V: VERIFIER}
        self.alive |= {drafter: {"role": 1} for drafter in drafters}
        self.report()
        plan = Plan(
            session=SESSION,
            contract=CONTRACT,
            prompt=PROMPT,
            verifier=V,
            verifier_boot=BOOT,
            vocabulary=100,
            router=ROUTER,
            commit_log=LOG,
            objects=OBJECTS,
            m_init=8,
            incarnation=INCARNATION,
            speculation=speculation,
            nonce=nonce,
            record=record,
            prompt_ref=prompt_ref,
        )
        self.machine = Placement(plan, self.fleet, patience or Patience())
        self.todo: list[Step] = []
        self.moves: list[tuple[str, str | None]] = []
        self.failovers: list[str] = []
        self.output: list[int] = []  # what the verifier has committed
        self.round = 0
        self.epoch = 1  # of whoever commits
        self.log: bytes | None = b""
        self.published: dict[str, bytes] = {}
        self.record = b""  # the directory record as it was written last

    def report(self) -> None:
        for uri, members in self.alive.items():
            fields: dict[str, Any] = {
                "instance": uri,
                "load": 0,
                "queue": 0,
                "ttl_ms": 3000,
                "tokenizer": b"t" * 32,
                "vocabulary": 100,
                "boot": BOOT,
            }
            self.fleet.report(Status(**fields | members), self.now)

    def take(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Moved):
                self.moves.append((step.reason, step.to))
            elif isinstance(step, FailingOver):
                self.failovers.append(step.kind)
            else:
                self.todo.append(step)

    def next(self, kind: type[A]) -> A:
        """The oldest call of this kind that is to be made; it is taken off the list."""
        for index, step in enumerate(self.todo):
            if isinstance(step, kind):
                del self.todo[index]
                return step
        raise AssertionError(f"no {kind.__name__} in {self.todo}")

    def wants(self) -> list[str]:
        return [type(step).__name__ for step in self.todo]

    def answer(self, call: Call, outcome: Outcome) -> None:
        self.take(self.machine.outcome(call.call, outcome, self.now))

    def event(self, kind: Action, *, seq: int | None = -1, **members: Any) -> None:
        """An event of the verifier as things stand; `seq` -1 means the current one, None leaves it out."""
        number = self.machine.seq if seq == -1 else seq
        fields: dict[str, Any] = {
            "session": SESSION,
            "epoch": self.epoch,
            "kind": kind,
            "committed": len(self.output),
            "digest": self.digest(),
            "round": self.round,
            "seq": UNSET if number is None else number,
        }
        self.take(self.machine.event(Event(**fields | members), self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass as the router does: statuses come, the fleet and the machine are ticked."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.25, end)
            self.report()
            self.fleet.tick(self.now)
            self.take(self.machine.tick(self.now))

    def retry(self) -> None:
        """Jump to the next moment the machine asks for."""
        due = self.machine.next_deadline()
        assert due is not None
        self.wait(max(due - self.now, 0) + 1e-6)

    def commit(self, *tokens: int, action: Action = Action.CONTINUE) -> None:
        self.output += tokens
        self.round += 1
        control = Control(c=0, g=self.round, j=0, accepted=len(tokens) - 1, action=action, m_cap=8, low=0, load=0)
        record = CommitRecord(
            epoch=self.epoch,
            round=self.round,
            emitted=tokens,
            committed=len(self.output),
            digest=self.digest(),
            ctl=control,
        )
        self.append(record)

    def append(self, record: Record) -> None:
        """Somebody else writes to the log."""
        self.log = (self.log or b"") + write_record(record)

    def fences(self) -> list[FenceRecord]:
        return [record for record, _ in read_records(self.log or b"") if isinstance(record, FenceRecord)]

    def tag(self) -> str:
        return log_tag(raw for _, raw in read_records(self.log or b""))

    def adopted(self, epoch: int = 1) -> "World":
        """Taken up by a router that restarted, instead of `opened`; the log has been read."""
        self.take(self.machine.adopt(epoch, '"record"', self.now))
        return self.store()

    def store(self, *, lose: int = 0, records: bool = True, spare: str | None = None) -> "World":
        """Answer all calls to the log, for objects and (`records`) to write the directory until there are none; the
        first `lose` writes to the log get no answer, and those of the object `spare` stay as they are."""
        kinds = ReadLog | WriteLog | Publish | WriteRecord if records else ReadLog | WriteLog | Publish
        while True:
            open_ = (step for step in self.todo if not (isinstance(step, Publish) and step.ref == spare))
            call = next((step for step in open_ if isinstance(step, kinds)), None)
            if call is None:
                return self
            self.todo.remove(call)
            outcome = self.stored(call)
            if isinstance(call, WriteLog) and lose > 0:
                lose, outcome = lose - 1, Lost("?")
            self.answer(call, outcome)

    def stored(self, call: ReadLog | WriteLog | Publish | WriteRecord) -> Outcome:
        match call:
            case WriteRecord(octets=octets):
                self.record = octets
                return Stored('"record"')
            case ReadLog():
                return LogText(self.log) if self.log is not None else Refused(status=404)
            case Publish(ref=ref, octets=octets):
                self.published[ref] = octets
                return Accepted()
            case WriteLog(if_match=tag, record=record):
                if tag != (None if self.log is None else self.tag()):
                    return Refused(status=412)
                self.log = (self.log or b"") + record
                return Accepted()

    def digest(self, count: int | None = None) -> bytes:
        return digests.extend(D0, self.output[:count])

    def state(self, state: State | None, **members: Any) -> SessionState:
        fields: dict[str, Any] = {
            "session": SESSION,
            "epoch": self.epoch,
            "round": self.round,
            "committed": len(self.output),
            "digest": self.digest(),
            "state": UNSET if state is None else int(state),
            "seq": self.machine.seq,
        }
        return SessionState(**fields | members)

    def page(self, read: Read, final: Action | None = None, **members: Any) -> None:
        """Answer an output poll with all that is committed behind its start."""
        fields: dict[str, Any] = {
            "session": SESSION,
            "epoch": self.epoch,
            "from_": read.start,
            "tokens": tuple(self.output[read.start :]),
            "final": final is not None,
            "finish": UNSET if final is None else final,
        }
        self.answer(read, Output(**fields | members))

    def read(self, final: Action | None = None, **members: Any) -> None:
        self.page(self.next(Read), final, **members)

    def opened(self) -> "World":
        self.take(self.machine.start(self.now))
        self.store()
        self.answer(self.next(Open), self.state(State.WAITING))
        return self

    def drafting(self) -> "World":
        """Opened, a drafter named and assigned."""
        self.opened()
        self.answer(self.next(Name), self.state(State.DRAFTING))
        self.answer(self.next(Assign), Accepted())
        assert self.machine.phase is Phase.SETTLED
        return self

    def self_decoding(self) -> "World":
        self.opened()
        self.answer(self.next(Name), self.state(State.SELF_DECODING))
        assert self.machine.phase is Phase.SETTLED
        return self

    def ending(self) -> Ending | None:
        return self.machine.ending

    def done(self) -> bool:
        return self.machine.done

    def failed(self, reason: str) -> None:
        ending = self.machine.ending
        assert ending is not None
        assert (ending.finish, ending.reason) == (Action.FAIL, reason)
