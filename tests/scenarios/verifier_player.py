"""Scenarios `verifier_*.txt`: the verifier's machine for one session, its log, and a clock.

open NAME=VALUE ...                 a session with these contract members
assign d|e|v [seq=N] [m_init=N]     PUT drafter; v is the verifier itself (decision 110)
propose TOKENS [by=e] [round=N] [base=N] [epoch=N]
retry N                             the proposal of round N once more, octet for octet
score TOKENS [load=N]               the target's most probable tokens at the positions scored
append [lost|unanswered]            lost: not written. unanswered: written, its answer lost
self [load=N]                       ask for the next token to decode alone
wait SECONDS [load=N]
fence EPOCH | cancel | output [FROM] | state
"""

from collections.abc import Callable

from msgspec import UNSET

from sdcpd.protocol.commit_log import CommitRecord, EndRecord
from sdcpd.protocol.messages import SessionState, Verdict
from sdcpd.protocol.problems import Problem
from sdcpd.protocol.session_values import Append, Begin, Busy, Join, Replay, Settled, Stopped
from sdcpd.protocol.terms import Action, LadderAction, State
from tests.scenarios.trace import Command, as_tokens
from tests.support.messages import DRAFTER, OTHER_DRAFTER, VERIFIER
from tests.support.verifying import PROMPT, Verifying, chain

NAMES = {"d": DRAFTER, "e": OTHER_DRAFTER, "v": VERIFIER}


def named(action: int) -> str:
    return Action(action).name.lower()


def members_of(command: Command) -> dict[str, object]:
    """Contract members: ladder entries by name, token lists also where there is one token only."""
    found = dict(command.members)
    if "fallback" in found:
        found["fallback"] = tuple(LadderAction[one.upper()] for one in str(found["fallback"]).split("+"))
    if "stop" in found:
        stop = found["stop"]
        found["stop"] = stop if isinstance(stop, tuple) else as_tokens(str(stop).replace("none", ""))
    return found


class VerifierPlayer:
    """Carries one scenario out."""

    def __init__(self) -> None:
        self.bench = Verifying()

    def do(self, command: Command) -> list[str]:
        verbs: dict[str, Callable[[Command], str]] = {
            "open": self.open,
            "assign": self.assign,
            "propose": self.propose,
            "retry": self.retry,
            "score": self.score,
            "append": self.append,
            "self": self.self_decode,
            "wait": self.wait,
            "fence": self.fence,
            "cancel": self.cancel,
            "output": self.output,
            "state": self.state,
        }
        try:
            said = [verbs[command.verb](command)]
        except Problem as problem:
            said = [self.problem(problem)]
        for event in self.bench.events():
            reason = f", {event.reason!r}" if event.reason else ""
            said.append(f"event {named(event.kind)}: round {event.round}, committed {event.committed}{reason}")
        return said

    # Commands

    def open(self, command: Command) -> str:
        self.bench = Verifying(**members_of(command))  # type: ignore[arg-type]
        return self.standing(self.bench.state)

    def assign(self, command: Command) -> str:
        answer = self.bench.assign(NAMES[command.words[0]], **command.members)
        return "busy: a round or append is open" if isinstance(answer, Busy) else self.standing(answer)

    def propose(self, command: Command) -> str:
        members = dict(command.members)
        by = NAMES[str(members.pop("by", "d"))]
        return self.answer(self.bench.propose(*command.tokens(), peer=by, drafter=by, **members))

    def retry(self, command: Command) -> str:
        sent = self.bench.sent[int(command.words[0])]
        return self.answer(self.bench.submit(sent, sent.drafter))

    def score(self, command: Command) -> str:
        wanted = self.bench.score(*command.tokens(), load=command.members.get("load", 0))
        return "a record waits to be appended" if wanted else "the rows are not wanted any more"

    def append(self, command: Command) -> str:
        match self.bench.append(command.words[0] if command.words else "answered"):
            case None:
                return "nothing to append"
            case Append():
                return "the log is as it was: the same octets again"
            case Stopped(reason=reason):
                return f"stops serving: {reason}"
            case Settled(record=record):
                return self.settled(record)

    def settled(self, record: CommitRecord | EndRecord) -> str:
        if isinstance(record, EndRecord):
            return f"the end is durable: {named(record.end)}, {record.reason!r}"
        stopped = self.bench.session.stopped
        proposed = record.ctl is not UNSET and record.ctl.accepted is not UNSET
        verdict = self.bench.session.awaited(record.round) if proposed and stopped is None else None
        if verdict is not None:
            return self.verdict(verdict)
        end = f"; stops serving: {stopped}" if stopped else ""
        return f"round {record.round} is durable: {list(record.emitted)}{end}"

    def self_decode(self, command: Command) -> str:
        work = self.bench.self_work(command.members.get("load", 0))
        return "nothing to decode alone" if work is None else f"decodes round {work.round} after token {work.tokens[0]}"

    def wait(self, command: Command) -> str:
        self.bench.wait(float(command.words[0]), command.members.get("load", 0))
        return self.standing(self.bench.state)

    def fence(self, command: Command) -> str:
        self.bench.fence(int(command.words[0]))
        return "the log is fenced"

    def cancel(self, _: Command) -> str:
        self.bench.session.cancel("cancelled")
        return self.standing(self.bench.state)

    def output(self, command: Command) -> str:
        page = self.bench.session.output(int(command.words[0]) if command.words else 0)
        if page is None:
            return "waits"
        end = f", final: {named(page.finish)}" if page.finish else ""
        return f"from {page.from_}: {list(page.tokens)}{end}"

    def state(self, _: Command) -> str:
        return self.standing(self.bench.state)

    # Answers

    def standing(self, state: SessionState) -> str:
        tokens = tuple(token for one in self.bench.records if isinstance(one, CommitRecord) for token in one.emitted)
        assert state.digest == chain(self.bench.contract, PROMPT, tokens)[state.committed]
        assert isinstance(state.state, int)
        seq = f", seq {state.seq}" if isinstance(state.seq, int) else ""
        return f"{State(state.state).name.lower()}: round {state.round}, committed {state.committed}{seq}"

    def answer(self, answer: Begin | Join | Replay) -> str:
        match answer:
            case Begin(work=work):
                return f"begins round {work.round}: scores {list(work.tokens)} at position {work.start}"
            case Join(round=round_):
                return f"waits for the verdict of round {round_}"
            case Replay(verdict=verdict):
                return f"again: {self.verdict(verdict)}"

    def verdict(self, verdict: Verdict) -> str:
        return (
            f"verdict {verdict.round}: accepted {verdict.accepted}, emitted {list(verdict.emitted)}, "
            f"committed {verdict.committed}, {named(verdict.action)}, m_cap {verdict.m_cap}, low {verdict.low}"
        )

    def problem(self, problem: Problem) -> str:
        cap = f", m_cap {problem.m_cap}" if problem.m_cap is not None else ""
        state = f", {self.standing(problem.state)}" if problem.state is not None else ""
        return f"{problem.status} {problem.suffix or 'about:blank'}{cap}{state}"
