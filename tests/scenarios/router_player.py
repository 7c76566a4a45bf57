"""Scenarios `router_*.txt`: the router's machine for one session, with its fleet and a clock.

status NAME [NAME=VALUE ...]        v is the verifier, d and e are drafters; repeated by `wait` until `gone`
gone NAME                           reports no more
start [speculation=off]
answer KIND state NAME [seq=N]      to open and name: where the session stands (see `commit`)
answer KIND ok | lost | refused STATUS [SUFFIX] [after=SECONDS]
answer read tokens [final=NAME] [epoch=N]     a page with all that is committed from its start
commit TOKENS                       the verifier has committed a round with these
event KIND [seq=N] [reason=WORD] [committed=N]
wait SECONDS | cancel | show
"""

from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from sdcpd.protocol.fleet import Fleet
from sdcpd.protocol.messages import Event, Output, SessionState, Status
from sdcpd.protocol.placement import Placement
from sdcpd.protocol.placement_values import (
    Accepted,
    Assign,
    Call,
    Drop,
    FailingOver,
    Lost,
    Moved,
    Name,
    Outcome,
    Patience,
    Plan,
    Publish,
    Read,
    Refused,
)
from sdcpd.protocol.problems import Problem
from sdcpd.protocol.retry_lane import Step
from sdcpd.protocol.terms import Action, State
from tests.scenarios.trace import Command
from tests.support.messages import DRAFTER, OTHER_DRAFTER, ROUTER, SESSION, TARGET, TOKENIZER, VERIFIER, contract
from tests.support.verifying import PROMPT, chain

URIS = {"v": VERIFIER, "d": DRAFTER, "e": OTHER_DRAFTER}
SHORT = {uri: name for name, uri in URIS.items()}
INCARNATION = 1
CONTRACT = contract(max_new=40)


class RouterPlayer:
    """Carries one scenario out."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.fleet = Fleet()
        self.alive: dict[str, dict[str, Any]] = {}
        self.machine: Placement | None = None
        self.calls: dict[str, Call] = {}  # the latest of each kind that has no answer yet
        self.output: tuple[int, ...] = ()
        self.round = 0

    @property
    def placement(self) -> Placement:
        assert self.machine is not None, "not started"
        return self.machine

    def do(self, command: Command) -> list[str]:
        verbs: dict[str, Callable[[Command], tuple[Step, ...]]] = {
            "status": self.status,
            "gone": self.gone,
            "start": self.start,
            "answer": self.answer,
            "commit": self.commit,
            "event": self.event,
            "wait": self.wait,
            "cancel": lambda _: self.placement.cancel(self.now),
            "show": lambda _: (),
        }
        ended = self.machine is not None and self.machine.ending is not None
        try:
            said = [self.step(step) for step in verbs[command.verb](command)]
        except Problem as problem:
            return [f"{problem.status} {problem.suffix or 'about:blank'}: {problem.detail}"]
        if self.machine is not None and (ending := self.machine.ending) is not None and not ended:
            said.append(f"ended: {ending.finish.name.lower()}{f', {ending.reason}' if ending.reason else ''}")
        if command.verb == "show":
            one = self.placement
            said = [f"{one.phase.value}, target {SHORT.get(one.target or '', 'nobody')}, read {len(one.output)} tokens"]
        return said or ["nothing to do"]

    # Commands

    def status(self, command: Command) -> tuple[Step, ...]:
        name = command.words[0]
        self.alive[name] = {**command.members}
        self.report(name)
        return ()

    def gone(self, command: Command) -> tuple[Step, ...]:
        del self.alive[command.words[0]]
        return ()

    def report(self, name: str) -> None:
        members = dict(self.alive[name])
        if members.pop("declined", None):
            members["declined"] = (SESSION,)
        fields: dict[str, Any] = {
            "instance": URIS[name],
            "role": 2 if name == "v" else 1,
            "load": 0,
            "queue": 0,
            "ttl_ms": 3000,
            "model": TARGET,
            "tokenizer": TOKENIZER,
            "boot": bytes([members.pop("boot", 0)]) * 16,
        }
        self.fleet.report(Status(**(fields | members)), self.now)

    def start(self, command: Command) -> tuple[Step, ...]:
        plan = Plan(
            session=SESSION,
            contract=CONTRACT,
            prompt=PROMPT,
            verifier=VERIFIER,
            verifier_boot=bytes(16),
            vocabulary=None,
            router=ROUTER,
            commit_log="https://c.example/cache/v1/s/-/l/x",
            objects="https://c.example/cache/v1/s/-/o/x/",
            m_init=8,
            incarnation=INCARNATION,
            speculation=command.members.get("speculation") != "off",
        )
        self.machine = Placement(plan, self.fleet, Patience())
        return self.machine.start(self.now)

    def answer(self, command: Command) -> tuple[Step, ...]:
        kind, how = command.words[:2]
        call = self.calls.pop(kind)
        return self.placement.outcome(call.call, self.outcome(call, how, command), self.now)

    def outcome(self, call: Call, how: str, command: Command) -> Outcome:
        members = command.members
        match how:
            case "state":
                return self.state(State[command.words[2].upper()], members.get("seq"))
            case "tokens":
                assert isinstance(call, Read)
                return self.page(call.start, members)
            case "ok":
                return Accepted()
            case "lost":
                return Lost("no answer in time")
            case _:
                suffix = command.words[3] if len(command.words) > 3 else None
                state = self.state(State.DRAFTING, members["seq"]) if "seq" in members else None
                after = members.get("after")
                return Refused(status=int(command.words[2]), suffix=suffix, retry_after_s=after, state=state)

    def state(self, state: State, seq: int | None) -> SessionState:
        return SessionState(
            session=SESSION,
            epoch=1,
            round=self.round,
            committed=len(self.output),
            digest=chain(CONTRACT, PROMPT, self.output)[-1],
            state=int(state),
            seq=self.placement.seq if seq is None else (INCARNATION << 32) + seq,
        )

    def page(self, start: int, members: dict[str, Any]) -> Output:
        final = members.get("final")
        return Output(
            session=SESSION,
            epoch=members.get("epoch", 1),
            from_=start,
            tokens=self.output[start:],
            final=final is not None,
            finish=UNSET if final is None else Action[str(final).upper()],
        )

    def commit(self, command: Command) -> tuple[Step, ...]:
        self.output += command.tokens()
        self.round += 1
        return ()

    def event(self, command: Command) -> tuple[Step, ...]:
        members = command.members
        committed = members.get("committed", len(self.output))
        message = Event(
            session=SESSION,
            epoch=members.get("epoch", 1),
            kind=Action[command.words[0].upper()],
            committed=committed,
            digest=chain(CONTRACT, PROMPT, self.output)[committed],
            round=self.round,
            seq=(INCARNATION << 32) + members["seq"] if "seq" in members else self.placement.seq,
            reason=members.get("reason", UNSET),
        )
        return self.placement.event(message, self.now)

    def wait(self, command: Command) -> tuple[Step, ...]:
        end = self.now + float(command.words[0])
        steps: list[Step] = []
        while self.now < end:
            self.now = min(self.now + 0.25, end)
            for name in self.alive:
                self.report(name)
            self.fleet.tick(self.now)
            steps += self.placement.tick(self.now)
        return tuple(steps)

    # Answers

    def step(self, step: Step) -> str:
        if isinstance(step, Moved):
            return f"moved to {SHORT.get(step.to or '', 'nobody')}: {step.reason}"
        if isinstance(step, FailingOver):
            return f"failing over from {SHORT[step.verifier]}: {step.kind}, epoch {step.epoch}"
        kind = type(step).__name__.lower()
        self.calls[kind] = step
        match step:
            case Name(message=message):
                assert isinstance(message.seq, int)
                return f"name {SHORT[message.drafter]} at v, seq {message.seq - (INCARNATION << 32)}"
            case Assign(message=message):
                told = "with tokens" if message.committed_tokens else "without tokens"
                return f"assign {SHORT[message.drafter]}: round {message.round}, committed {message.committed}, {told}"
            case Publish(ref=ref):
                return f"publish {ref.rsplit('/o/x/', 1)[1]}"
            case Drop(drafter=drafter):
                return f"drop the assignment at {SHORT[drafter]}"
            case Read(start=start):
                return f"read from {start}"
            case _:
                return f"{kind} at v"
