"""Machines of drafters, with the assignments and verifiers that go with them."""

from typing import Any

from sdcpd.protocol import digests
from sdcpd.protocol.draft_session import DraftSession, Identity
from sdcpd.protocol.draft_steps import Step
from sdcpd.protocol.messages import Assignment
from sdcpd.protocol.problems import (
    Problem,
)
from tests.support.messages import DRAFTER, SESSION, TOKENIZER, assignment, contract
from tests.support.tiny_verifier import TinyVerifier

PROMPT = (1, 1, 1)
VOCABULARY = 50
CONTRACT = contract(max_new=24)
START = digests.prompt_digest(digests.contract_digest(CONTRACT), PROMPT)
IDENTITY = Identity(instance=DRAFTER, model=b"\x07" * 32, tokenizer=TOKENIZER, vocabulary=VOCABULARY)


def verifier() -> TinyVerifier:
    made = TinyVerifier(CONTRACT, PROMPT, session=SESSION, vocabulary=VOCABULARY)
    made.drafter = DRAFTER
    return made


def assigned(**changes: Any) -> Assignment:
    """An assignment of the state in which TinyVerifier starts, or of another: `tokens` sets committed and digest."""
    tokens = changes.pop("tokens", ())
    start = digests.prompt_digest(digests.contract_digest(changes.get("contract", CONTRACT)), PROMPT)
    values = {"contract": CONTRACT, "committed": len(tokens), "digest": digests.extend(start, tokens)}
    return assignment(**(values | changes))


def session(tokens: tuple[int, ...] = (), **changes: Any) -> DraftSession:
    return DraftSession(
        assigned(tokens=tokens, **changes),
        PROMPT,
        tokens or None,
        vocabulary=VOCABULARY,
        now=0.0,
        silence_limit_s=60.0,
    )


def exchange(machine: DraftSession, peer: TinyVerifier, now: float = 1.0) -> Step:
    assert machine.outstanding is not None
    try:
        return machine.verdict(peer.answer(machine.outstanding), now=now)
    except Problem as problem:
        return refuse(machine, problem)


def refuse(machine: DraftSession, problem: Problem) -> Step:
    return machine.refused(
        problem.status,
        problem.suffix,
        state=problem.state,
        retry_after_s=problem.retry_after_s,
        m_cap=problem.m_cap,
    )
