"""The typed client against the real dispatch, and against answers that no one should give (design: three ends)."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sdcpd.edge.dispatch import drafter_dispatcher, router_dispatcher, verifier_dispatcher
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.transport import LoopbackNetwork, Request, Response, TransportError
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.messages import Event, Policy, Sampling
from sdcpd.protocol.problems import BadContract, LimitExceeded, Overloaded, SessionClosed, StaleBase
from sdcpd.protocol.terms import Action
from sdcpd.roles.ports import Done, Peers, Refusal, Unreachable
from tests.edge.services import OUTPUT, PEERS, STATE, VERDICT, Recorder
from tests.support.messages import DRAFTER, ROUTER, SESSION, VERIFIER, assignment, proposal, session_open, status
from tests.support.ports import CountingMeters

POLICY = Policy(session=SESSION, from_round=9, sampling=Sampling())
EVENT = Event(session=SESSION, epoch=1, kind=Action.SWITCH, committed=7, digest=bytes(32))

CALLS: list[tuple[str, Callable[[Peers], Awaitable[object]], object, tuple[object, ...]]] = [
    # caller, call, answer, what the role is called with
    ("router", lambda p: p.open_session(VERIFIER, session_open()), STATE, ("open_session", session_open())),
    ("router", lambda p: p.name_drafter(VERIFIER, assignment()), STATE, ("name_drafter", SESSION, assignment())),
    ("drafter", lambda p: p.propose(VERIFIER, proposal((1, 2))), VERDICT, ("propose", proposal((1, 2)))),
    ("router", lambda p: p.read_output(VERIFIER, SESSION, 2, 0.0), OUTPUT, ("read_output", SESSION, 2, 0.0)),
    ("router", lambda p: p.read_output(VERIFIER, SESSION, 0, 1.2), OUTPUT, ("read_output", SESSION, 0, 2.0)),
    ("router", lambda p: p.read_output(VERIFIER, SESSION, 0, 60.0), OUTPUT, ("read_output", SESSION, 0, 20.0)),
    ("router", lambda p: p.set_policy(VERIFIER, POLICY), STATE, ("set_policy", SESSION, POLICY)),
    ("router", lambda p: p.session_state(VERIFIER, SESSION), STATE, ("session_state", SESSION)),
    ("router", lambda p: p.cancel_session(VERIFIER, SESSION), Done(), ("cancel_session", SESSION)),
    ("router", lambda p: p.assign(DRAFTER, assignment()), Done(), ("assign", assignment())),
    ("router", lambda p: p.drop_assignment(DRAFTER, SESSION), Done(), ("drop_assignment", SESSION)),
    ("drafter", lambda p: p.report_status(ROUTER, status()), Done(), ("report_status", DRAFTER, status())),
    ("verifier", lambda p: p.report_event(ROUTER, EVENT), Done(), ("report_event", EVENT)),
]
ASKS = [call for call in CALLS if not isinstance(call[2], Done)]


class Scripted:
    """A transport that answers what it was given."""

    def __init__(self, end: Response | TransportError) -> None:
        self.end = end
        self.requests: list[tuple[str, Request]] = []

    async def exchange(self, base_uri: str, request: Request) -> Response:
        self.requests.append((base_uri, request))
        if isinstance(self.end, TransportError):
            raise self.end
        return self.end


def loopback(recorder: Recorder, caller: str) -> PeerClient:
    network, meters = LoopbackNetwork(), CountingMeters()
    network.serve(VERIFIER, verifier_dispatcher(recorder, meters).handle)
    network.serve(DRAFTER, drafter_dispatcher(recorder, meters).handle)
    network.serve(ROUTER, router_dispatcher(recorder, meters).handle)
    return PeerClient(network.transport(PEERS[caller]), meters)


def scripted(end: Response | TransportError) -> PeerClient:
    return PeerClient(Scripted(end), CountingMeters())


@pytest.mark.parametrize(("caller", "call", "answer", "received"), CALLS)
async def test_every_call_arrives_and_is_answered(
    caller: str, call: Callable[[Peers], Awaitable[object]], answer: object, received: tuple[object, ...]
) -> None:
    recorder = Recorder()
    assert await call(loopback(recorder, caller)) == answer
    assert recorder.calls == [(received[0], PEERS[caller], *received[1:])]


@pytest.mark.parametrize(("caller", "call", "answer", "received"), CALLS)
async def test_every_call_may_be_refused(
    caller: str, call: Callable[[Peers], Awaitable[object]], answer: object, received: tuple[object, ...]
) -> None:
    for problem in (
        StaleBase("base", state=STATE),
        Overloaded("full", retry_after_s=2),
        LimitExceeded("M", m_cap=3),
        SessionClosed("over"),
        BadContract("rule"),
    ):
        recorder = Recorder()

        def refuse(problem: Exception = problem) -> None:
            raise problem

        recorder.hook = refuse
        assert await call(loopback(recorder, caller)) == Refusal(
            status=problem.status,
            suffix=problem.suffix,
            detail=problem.detail,
            state=problem.state,
            retry_after_s=problem.retry_after_s,
            m_cap=problem.m_cap,
        )


@pytest.mark.parametrize(("caller", "call", "answer", "received"), CALLS)
async def test_no_answer_is_unreachable_and_nothing_is_repeated(
    caller: str, call: Callable[[Peers], Awaitable[object]], answer: object, received: tuple[object, ...]
) -> None:
    transport = Scripted(TransportError("connection reset"))
    assert await call(PeerClient(transport, CountingMeters())) == Unreachable(reason="connection reset")
    assert len(transport.requests) == 1
    assert await call(PeerClient(LoopbackNetwork().transport(PEERS[caller]), CountingMeters())) != answer


@pytest.mark.parametrize(("caller", "call", "answer", "received"), ASKS)
async def test_an_answer_that_cannot_be_read_is_unreachable(
    caller: str, call: Callable[[Peers], Awaitable[object]], answer: Any, received: tuple[object, ...]
) -> None:
    """The peer said yes; what it said besides is lost, so it may have been carried out."""
    good = encode(answer)
    for body in (b"", b"\x00", good[:-1], good + b"\x00", b"<html>", good.replace(SESSION, bytes(16))):
        for status_ in (200, 204):
            assert isinstance(await call(scripted(Response(status=status_, body=body))), Unreachable)


@pytest.mark.parametrize(("caller", "call", "answer", "received"), CALLS)
@pytest.mark.parametrize("status_", [200, 201, 202, 204, 299])
async def test_any_2xx_is_taken(
    caller: str, call: Callable[[Peers], Awaitable[object]], answer: Any, received: tuple[object, ...], status_: int
) -> None:
    """Decision 28."""
    body = b"" if isinstance(answer, Done) else encode(answer)
    assert await call(scripted(Response(status=status_, body=body))) == answer


@pytest.mark.parametrize("status_", [100, 199, 300, 301, 307, 400, 404, 500, 599])
async def test_any_other_status_is_a_refusal(status_: int) -> None:
    for _, call, _, _ in CALLS:
        assert await call(scripted(Response(status=status_, body=b"..."))) == Refusal(
            status=status_, suffix=None, detail=f"status {status_}"
        )


async def test_an_unknown_action_is_read_as_fail() -> None:
    """5.2: "A receiver that encounters an unknown action value MUST treat it as fail"."""
    body = encode(VERDICT).replace(b"\x66action\x00", b"\x66action\x18\x63")
    verdict = await scripted(Response(status=200, body=body)).propose(VERIFIER, proposal((1,)))
    assert not isinstance(verdict, Refusal | Unreachable)
    assert verdict.action is Action.FAIL


async def test_calls_are_counted_by_operation_and_end() -> None:
    ends: list[dict[str, str]] = []

    class Meters(CountingMeters):
        def count(self, name: str, amount: float = 1, **labels: str) -> None:
            assert name == "peer_calls_total"
            ends.append(labels)

    for end in (Response(status=204), Response(status=503), TransportError("gone")):
        await PeerClient(Scripted(end), Meters()).cancel_session(VERIFIER, SESSION)
    assert ends == [
        {"operation": "cancel_session", "outcome": outcome} for outcome in ("answered", "refused", "unreachable")
    ]
