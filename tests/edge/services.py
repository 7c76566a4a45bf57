"""Role services that record what they were called with and answer what a test wants."""

from collections.abc import Callable

from sdcpd.protocol.messages import (
    Assignment,
    Event,
    Output,
    Policy,
    Proposal,
    SessionOpen,
    SessionState,
    Status,
    Verdict,
)
from sdcpd.protocol.terms import Action
from sdcpd.roles.ports import Peer
from tests.support.messages import SESSION

STATE = SessionState(session=SESSION, epoch=1, round=3, committed=7, digest=b"\x07" * 32, state=0)
VERDICT = Verdict(
    session=SESSION,
    epoch=1,
    round=1,
    accepted=1,
    emitted=(5, 6),
    committed=2,
    digest=b"\x08" * 32,
    action=Action.CONTINUE,
    m_cap=8,
    low=0,
    load=3,
)
OUTPUT = Output(session=SESSION, epoch=1, from_=2, tokens=(5, 6), final=False)

PEERS = {
    role: Peer(uri=f"https://h.example/{role}/", role=role)
    for role in ("router", "verifier", "drafter", "cache", "operator", "client")
}


class Recorder:
    """All four roles at once. `hook` runs first in every method and may raise."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.created = True
        self.hook: Callable[[], None] = lambda: None

    def note(self, *call: object) -> None:
        self.calls.append(call)
        self.hook()

    async def open_session(self, peer: Peer, message: SessionOpen) -> tuple[SessionState, bool]:
        self.note("open_session", peer, message)
        return STATE, self.created

    async def name_drafter(self, peer: Peer, session: bytes, message: Assignment) -> SessionState:
        self.note("name_drafter", peer, session, message)
        return STATE

    async def propose(self, peer: Peer, message: Proposal) -> Verdict:
        self.note("propose", peer, message)
        return VERDICT

    async def read_output(self, peer: Peer, session: bytes, from_: int, wait_s: float) -> Output:
        self.note("read_output", peer, session, from_, wait_s)
        return OUTPUT

    async def set_policy(self, peer: Peer, session: bytes, message: Policy) -> SessionState:
        self.note("set_policy", peer, session, message)
        return STATE

    async def session_state(self, peer: Peer, session: bytes) -> SessionState:
        self.note("session_state", peer, session)
        return STATE

    async def cancel_session(self, peer: Peer, session: bytes) -> None:
        self.note("cancel_session", peer, session)

    async def assign(self, peer: Peer, message: Assignment) -> None:
        self.note("assign", peer, message)

    async def drop_assignment(self, peer: Peer, session: bytes) -> None:
        self.note("drop_assignment", peer, session)

    async def report_status(self, peer: Peer, instance: str, message: Status) -> None:
        self.note("report_status", peer, instance, message)

    async def report_event(self, peer: Peer, message: Event) -> None:
        self.note("report_event", peer, message)
