"""Scenarios `drafter_*.txt`: the drafter's machine for one session.

assign [tokens=TOKENS] [NAME=VALUE ...]      a router's assignment at that committed output; the first one opens
propose TOKENS
verdict TOKENS accepted=N [action=NAME] [m_cap=N] [lie=1]   emitted tokens; lie: its digest is not of the chain
refused STATUS [SUFFIX] [tokens=TOKENS round=N] [m_cap=N]   a problem, with the session-state of that prefix
unanswered | wait SECONDS | state
"""

from collections.abc import Callable

from sdcpd.protocol.draft_session import DraftSession
from sdcpd.protocol.draft_steps import Ignored, Proceed, Resend, Step, Stop
from sdcpd.protocol.messages import Proposal, SessionState, Verdict
from sdcpd.protocol.problems import Problem
from sdcpd.protocol.terms import Action
from tests.scenarios.trace import Command, as_tokens
from tests.support.draft_sessions import CONTRACT, PROMPT, VOCABULARY, assigned
from tests.support.messages import SESSION, status
from tests.support.verifying import chain


def tokens_of(value: object) -> tuple[int, ...]:
    """`tokens=7` and `tokens=7,8` alike; `tokens=none` for none."""
    return value if isinstance(value, tuple) else as_tokens(str(value).replace("none", ""))


class DrafterPlayer:
    """Carries one scenario out."""

    def __init__(self) -> None:
        self.machine: DraftSession | None = None
        self.now = 0.0

    @property
    def session(self) -> DraftSession:
        assert self.machine is not None, "a scenario begins with an assignment"
        return self.machine

    def do(self, command: Command) -> list[str]:
        verbs: dict[str, Callable[[Command], str]] = {
            "assign": self.assign,
            "propose": self.propose,
            "verdict": self.verdict,
            "refused": self.refused,
            "unanswered": lambda _: self.step(self.session.unanswered()),
            "wait": self.wait,
            "state": lambda _: self.standing(),
        }
        try:
            return [verbs[command.verb](command)]
        except Problem as problem:
            return [f"{problem.status} {problem.suffix or 'about:blank'}: {problem.detail}"]

    def assign(self, command: Command) -> str:
        members = dict(command.members)
        tokens = tokens_of(members.pop("tokens", "none"))
        message = assigned(tokens=tokens, **members)
        if self.machine is None:
            self.machine = DraftSession(
                message, PROMPT, tokens or None, vocabulary=VOCABULARY, now=self.now, silence_limit_s=60.0
            )
            return f"held. {self.standing()}"
        return f"{self.machine.assign(message, tokens or None, now=self.now).value}. {self.standing()}"

    def propose(self, command: Command) -> str:
        return self.sent(self.session.propose(command.tokens(), status()))

    def verdict(self, command: Command) -> str:
        out = self.session.outstanding
        emitted = command.tokens()
        base = out.base if out is not None else self.session.committed
        output = (*self.session.tokens_from(0)[:base], *emitted)
        members = command.members
        return self.step(
            self.session.verdict(
                Verdict(
                    session=SESSION,
                    epoch=members.get("epoch", self.session.epoch),
                    round=out.round if out is not None else self.session.round + 1,
                    accepted=members["accepted"],
                    emitted=emitted,
                    committed=len(output),
                    digest=bytes(32) if members.get("lie") else chain(CONTRACT, PROMPT, output)[-1],
                    action=Action[str(members.get("action", "continue")).upper()],
                    m_cap=members.get("m_cap", 8),
                    low=0,
                    load=0,
                ),
                now=self.now,
            )
        )

    def refused(self, command: Command) -> str:
        code, *suffix = command.words
        members = command.members
        state = None
        if "round" in members:
            output = tokens_of(members.get("tokens", "none"))
            state = SessionState(
                session=SESSION,
                epoch=members.get("epoch", self.session.epoch),
                round=members["round"],
                committed=len(output),
                digest=chain(CONTRACT, PROMPT, output)[-1],
            )
        return self.step(
            self.session.refused(
                int(code),
                suffix[0] if suffix else None,
                state=state,
                retry_after_s=members.get("retry_after_s"),
                m_cap=members.get("m_cap"),
            )
        )

    def wait(self, command: Command) -> str:
        self.now += float(command.words[0])
        step = self.session.expire(self.now)
        return "nothing is due" if step is None else self.step(step)

    # Answers

    def standing(self) -> str:
        one = self.session
        assert one.digest == chain(CONTRACT, PROMPT, one.tokens_from(0))[-1]
        stopped = f", stopped: {one.stopped}" if one.stopped else ""
        return f"epoch {one.epoch}, round {one.round}, {list(one.tokens_from(0))}, at most {one.limit}{stopped}"

    def sent(self, sent: Proposal) -> str:
        return f"proposal: round {sent.round}, base {sent.base}, tokens {list(sent.tokens)}"

    def step(self, step: Step) -> str:
        match step:
            case Proceed():
                return f"goes on. {self.standing()}"
            case Resend(proposal=sent, retry_after_s=after):
                return f"sends{f' after {after} s' if after else ''}: {self.sent(sent)}"
            case Stop(reason=reason, detail=detail):
                return f"stops: {reason} ({detail}). {self.standing()}"
            case Ignored():
                return f"ignored. {self.standing()}"
