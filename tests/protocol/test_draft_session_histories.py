"""The drafter's machine under any history: nothing but a Problem may leave it, and its invariants always hold."""

from typing import Any, Protocol

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from sdcpd.protocol import digests
from sdcpd.protocol.draft_session import DraftSession
from sdcpd.protocol.draft_steps import Assigned, Ignored, Proceed, Resend, Step, Stop, StopReason
from sdcpd.protocol.messages import Assignment, SessionState, Verdict
from sdcpd.protocol.problems import Problem
from sdcpd.protocol.terms import Action
from tests.support.messages import SESSION, assignment, contract, status

PROMPT = (1, 1, 1)
VOCABULARY = 50
CONTRACT = contract(max_new=24)
START = digests.prompt_digest(digests.contract_digest(CONTRACT), PROMPT)


class Draw(Protocol):
    def __call__(self, strategy: st.SearchStrategy[Any], /) -> Any: ...


def assigned(**changes: Any) -> Assignment:
    return assignment(**({"contract": CONTRACT, "digest": START} | changes))


def session(**changes: Any) -> DraftSession:
    return DraftSession(assigned(**changes), PROMPT, None, vocabulary=VOCABULARY, now=0.0, silence_limit_s=60.0)


small = st.integers(0, 4)
few_tokens = st.lists(st.sampled_from((2, 7, 8, 49, 50, 1 << 33)), max_size=4).map(tuple)


def some_digest(draw: Draw, machine: DraftSession, tokens: tuple[int, ...]) -> bytes:
    if draw(st.integers(0, 4)) == 0 or any(token >= 1 << 32 for token in tokens):
        return b"\x09" * 32
    return digests.extend(draw(st.sampled_from((START, machine.digest))), tokens)


def put_assignment(draw: Draw, machine: DraftSession) -> None:
    tokens = draw(st.one_of(few_tokens, st.just(machine.tokens_from(0)), st.just((*machine.tokens_from(0), 7))))
    committed = len(tokens) if draw(st.booleans()) else draw(small)
    message = assigned(
        epoch=draw(st.integers(0, 3)),
        seq=draw(st.one_of(st.just(UNSET), small)),
        contract=CONTRACT if draw(st.integers(0, 9)) else contract(m_max=3),
        verifier=draw(st.sampled_from((machine.verifier, "https://w.example/verifier/"))),
        round=draw(st.sampled_from((machine.round, machine.round + 1, 0, 3))),
        m_init=draw(small),
    )
    message = replace(message, committed=committed, digest=some_digest(draw, machine, tokens))
    before = snapshot(machine)
    try:
        changed = machine.assign(message, draw(st.sampled_from((tokens, None))), now=draw(st.floats(0, 1e4)))
        assert isinstance(changed, Assigned)
    except Problem:
        assert snapshot(machine) == before, "a problem changes nothing"


def put_verdict(draw: Draw, machine: DraftSession) -> None:
    emitted = draw(few_tokens)
    verdict = Verdict(
        session=SESSION if draw(st.integers(0, 9)) else b"x" * 16,
        epoch=draw(st.sampled_from((machine.epoch, machine.epoch, 2))),
        round=machine.round + draw(st.sampled_from((1, 1, 1, 0, 2))),
        accepted=draw(st.sampled_from((max(0, len(emitted) - 1), len(emitted), 0, 70))),
        emitted=emitted,
        committed=machine.committed + len(emitted) + draw(st.sampled_from((0, 0, 0, 1))),
        digest=some_digest(draw, machine, emitted),
        action=draw(st.sampled_from(Action)),
        m_cap=draw(st.sampled_from((0, 1, 8, 99))),
        low=0,
        load=0,
    )
    if draw(st.booleans()):  # one that verifies, so that histories get anywhere
        good = draw(st.lists(st.sampled_from((7, 8, 49)), min_size=1, max_size=3).map(tuple))
        verdict = replace(
            verdict,
            session=SESSION,
            epoch=machine.epoch,
            round=machine.round + 1,
            accepted=len(good) - 1,
            emitted=good,
            committed=machine.committed + len(good),
            digest=digests.extend(machine.digest, good),
            m_cap=draw(st.sampled_from((1, 8, 99))),
        )
    check_step(machine, machine.verdict(verdict, now=draw(st.floats(0, 1e4))))


def put_refusal(draw: Draw, machine: DraftSession) -> None:
    suffixes = ("sdcp-stale-base", "sdcp-stale-epoch", "sdcp-limit", "sdcp-q-unavailable", "sdcp-not-assigned", None)
    known = draw(st.integers(0, machine.committed))
    state = SessionState(
        session=SESSION if draw(st.integers(0, 9)) else b"x" * 16,
        epoch=draw(st.sampled_from((machine.epoch, 2))),
        round=draw(st.sampled_from((machine.round, machine.round + 1, 0))),
        committed=draw(st.sampled_from((known, machine.committed, machine.committed + 1))),
        digest=draw(
            st.sampled_from((machine.digest, digests.extend(START, machine.tokens_from(0)[:known]), b"\x09" * 32))
        ),
    )
    step = machine.refused(
        draw(st.sampled_from((200, 302, 400, 403, 404, 409, 409, 410, 422, 422, 500, 503))),
        draw(st.sampled_from(suffixes)),
        state=draw(st.sampled_from((state, None))),
        retry_after_s=draw(st.sampled_from((None, 0, 5))),
        m_cap=draw(st.sampled_from((None, 0, 1, 3, 70))),
    )
    check_step(machine, step)


def put_proposal(draw: Draw, machine: DraftSession) -> None:
    if machine.outstanding is None and machine.stopped is None:
        tokens = draw(st.lists(st.sampled_from((2, 7, 8, 49)), min_size=1, max_size=machine.limit))
        sent = machine.propose(tokens, status())
        assert machine.outstanding is sent


def check_step(machine: DraftSession, step: Step) -> None:
    match step:
        case Proceed():
            assert (machine.outstanding, machine.stopped) == (None, None)
        case Resend():
            assert machine.outstanding is step.proposal
            assert machine.stopped is None
        case Stop():
            assert (machine.outstanding, machine.stopped) == (None, step.reason)
        case Ignored():
            pass


def snapshot(machine: DraftSession) -> tuple[object, ...]:
    return (
        machine.order,
        machine.round,
        machine.tokens_from(0),
        machine.digest,
        machine.m_cap,
        machine.outstanding,
        machine.stopped,
        machine.next_deadline(),
    )


def check_invariants(machine: DraftSession) -> None:
    assert machine.digest == digests.extend(START, machine.tokens_from(0))
    assert 1 <= machine.m_cap <= CONTRACT.m_max
    sent = machine.outstanding
    if sent is not None:
        assert machine.stopped is None
        assert 1 <= len(sent.tokens) <= CONTRACT.m_max
        assert (sent.epoch, sent.round, sent.base, sent.base_digest) == (
            machine.epoch,
            machine.round + 1,
            machine.committed,
            machine.digest,
        )


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_any_input_in_any_state_yields_a_step_or_a_problem(data: st.DataObject) -> None:
    draw = data.draw
    machine = session(seq=draw(st.sampled_from((UNSET, 1))))
    for _ in range(draw(st.integers(1, 25))):
        match draw(st.integers(0, 7)):
            case 0:
                put_assignment(draw, machine)
            case 1 | 2:
                put_verdict(draw, machine)
            case 3:
                put_refusal(draw, machine)
            case 4:
                check_step(machine, machine.unanswered())
            case 5 if draw(st.integers(0, 5)) == 0:
                step = machine.expire(draw(st.floats(0, 1e4)))
                assert step is None or machine.stopped is StopReason.SILENT
            case _:
                put_proposal(draw, machine)
        check_invariants(machine)
