"""A verifier of one session in one page, for tests of those who talk to one: rule 1 over a toy target.

It keeps the order of decision 60 and remembers all verdicts, and has no log, no ladder and no tasks. What it answers
can be bent by tests: `action` and `m_cap` of the next verdict, tokens committed without a proposal.
"""

from hashlib import sha256

from sdcpd.protocol import digests
from sdcpd.protocol.messages import Assignment, Contract, Proposal, SessionState, Verdict
from sdcpd.protocol.problems import LimitExceeded, NotAssigned, Problem, SessionClosed, StaleBase, StaleEpoch
from sdcpd.protocol.terms import Action


def toy_next(context: tuple[int, ...], vocabulary: int) -> int:
    """The toy target's argmax: any function of the last two tokens will do. Never token 2, the tests' stop token."""
    token = sha256(bytes(f"{context[-2:]}", "ascii")).digest()[0] % vocabulary
    return token if token != 2 else 3


class TinyVerifier:
    """One session. `answer` returns the verdict or raises the problem."""

    def __init__(self, contract: Contract, prompt: tuple[int, ...], *, session: bytes, vocabulary: int = 50) -> None:
        self.contract = contract
        self.prompt = prompt
        self.session = session
        self.vocabulary = vocabulary
        self.epoch = 1
        self.round = 0
        self.tokens: tuple[int, ...] = ()
        self.m_cap = contract.m_max
        self.drafter: str | None = None
        self.closed = False
        self.verdicts: dict[int, Verdict] = {}
        self.next_action: Action | None = None
        self.start = digests.prompt_digest(digests.contract_digest(contract), prompt)

    @property
    def digest(self) -> bytes:
        return digests.extend(self.start, self.tokens)

    def state(self) -> SessionState:
        return SessionState(
            session=self.session,
            epoch=self.epoch,
            round=self.round,
            committed=len(self.tokens),
            digest=self.digest,
        )

    def name(self, assignment: Assignment) -> None:
        """PUT drafter."""
        if assignment.drafter != self.drafter:
            self.m_cap = min(assignment.m_init, self.contract.m_max)
        self.drafter = assignment.drafter

    def next_token(self) -> int:
        return toy_next(self.prompt + self.tokens, self.vocabulary)

    def truth(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens of greedy decoding."""
        context = self.prompt + self.tokens
        for _ in range(count):
            context += (toy_next(context, self.vocabulary),)
        return context[len(self.prompt + self.tokens) :]

    def decode_alone(self, count: int) -> None:
        """Rounds without proposals (6.5.2), which leave no verdicts."""
        for _ in range(count):
            self.tokens += (self.next_token(),)
            self.round += 1

    def answer(self, proposal: Proposal) -> Verdict:
        """6.3, in the order of decision 60."""
        self._check(proposal)
        known = self.verdicts.get(proposal.round)
        if known is not None:
            return known
        if self.closed:
            raise SessionClosed("closed")
        base = (proposal.round, proposal.base, proposal.base_digest)
        if base != (self.round + 1, len(self.tokens), self.digest):
            raise StaleBase("stale", state=self.state())
        if len(proposal.tokens) > self.m_cap:
            raise LimitExceeded("limit", m_cap=self.m_cap)
        return self._commit(proposal.tokens)

    def _check(self, proposal: Proposal) -> None:
        problem: Problem | None = None
        if proposal.drafter != self.drafter:
            problem = NotAssigned("not assigned")
        elif proposal.epoch != self.epoch:
            problem = StaleEpoch("stale epoch")
        if problem is not None:
            raise problem

    def _commit(self, tokens: tuple[int, ...]) -> Verdict:
        truth = self.truth(len(tokens) + 1)
        accepted = next((i for i, (x, p) in enumerate(zip(tokens, truth, strict=False)) if x != p), len(tokens))
        emitted = truth[: accepted + 1][: self.contract.max_new - len(self.tokens)]
        for index, token in enumerate(emitted):
            if token in self.contract.stop:
                emitted = emitted[: index + 1]
                break
        self.tokens += emitted
        self.round += 1
        done = len(self.tokens) == self.contract.max_new or self.tokens[-1] in self.contract.stop
        action = Action.FINISH if done else (self.next_action or Action.CONTINUE)
        self.next_action = None
        self.closed = action in (Action.FINISH, Action.FAIL)
        if action in (Action.SWITCH, Action.SELF_DECODE):
            self.drafter = None
        if action is Action.REDUCE:
            self.m_cap = max(1, self.m_cap // 2)
        verdict = Verdict(
            session=self.session,
            epoch=self.epoch,
            round=self.round,
            accepted=accepted,
            emitted=emitted,
            committed=len(self.tokens),
            digest=self.digest,
            action=action,
            m_cap=self.m_cap,
            low=0,
            load=0,
        )
        self.verdicts[self.round] = verdict
        return verdict
