"""Items 8 and 11: when values are drawn, who may know a seed, and how long draft rows are held.

A verifier that has no seed draws from a source of its own. Each value that it draws goes at once into a judgement whose
draft rows are all in hand (6.3 step 5): so between two judgements nothing may have been drawn, and no value may be used
that was not drawn for it. What a drafter is told never has a seed of rule 2 in it (decision 18).
"""

from collections.abc import Callable, Sequence

from msgspec import UNSET

from sdcpd.edge.cache_messages import LeaseAnswer, LeaseRequest
from sdcpd.edge.transport import Request, Response
from sdcpd.engine.spans import Drawn, Judge, Weighed
from sdcpd.protocol.encoding import decode
from sdcpd.protocol.messages import Assignment, Proposal
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.ports import RandomStream
from tests.sim.sampling_book import SPECULATIVE


class Draws:
    """The source of one verifier's process, watched. Implements RandomStream."""

    def __init__(self, stream: RandomStream, name: str, wrong: Callable[[str], None]) -> None:
        self._stream = stream
        self._name = name
        self._wrong = wrong
        self._unused: list[float] = []

    def octets(self, count: int) -> bytes:
        return self._stream.octets(count)

    def uniform(self) -> float:
        self._unused.append(self._stream.uniform())
        return self._unused[-1]

    def judged(self, judges: Sequence[Judge | None]) -> None:
        """These judgements are about to be made."""
        needed: list[float] = []
        for judge in judges:
            match judge:
                case Weighed(profile=profile, rows=rows, draws=draws):
                    if len(rows) != len(draws.tests):
                        self._wrong(f"8: {self._name} judges {len(draws.tests)} tokens with {len(rows)} rows in hand")
                    needed += (*draws.tests, *draws.tokens) if profile.seed is None else ()
                case Drawn(profile=profile, uniforms=uniforms):
                    needed += uniforms if profile.seed is None else ()
                case _:
                    pass
        if sorted(needed) != sorted(self._unused):
            self._wrong(f"8: {self._name} drew {len(self._unused)} values and uses {len(needed)} now")
        self._unused.clear()


class RowChecks:
    """What goes over the wire about draft rows. `calm`: nothing was done to the cluster yet.

    An object that is referenced is held until its proposal is answered. Lost answers and nodes that die excuse what is
    missing, so this is asked of a calm cluster alone.
    """

    def __init__(self, wrong: Callable[[str], None], calm: Callable[[], bool]) -> None:
        self._wrong = wrong
        self._calm = calm
        self._written: set[str] = set()  # paths of the objects that are there
        self._leased: dict[str, tuple[str, ...]] = {}  # by lease
        self._out: set[str] = set()  # paths that proposals under way refer to

    def assigned(self, assignment: Assignment) -> None:
        """A drafter is asked to draft."""
        told = [one.seed for one in (assignment.contract.sampling, assignment.sampling) if one is not UNSET]
        if assignment.contract.rule == SPECULATIVE and any(isinstance(seed, int) for seed in told):
            self._wrong(f"8: {session_path_id(assignment.session)}: a drafter is told the seed of rule 2")

    def proposed(self, proposal: Proposal) -> None:
        """A proposal has reached a verifier: rows that it shows by reference alone are there, and held."""
        path = _path(proposal)
        if path is None:
            return
        self._out.add(path)
        held = any(path in paths for paths in self._leased.values())
        if path in self._written and not held and self._calm():
            self._wrong(f"11: {path} is proposed and not leased")

    def answered(self, proposal: Proposal) -> None:
        """It has its verdict, or was refused."""
        path = _path(proposal)
        if path is not None:
            self._out.discard(path)

    def cached(self, request: Request, response: Response) -> None:
        """A cache did what it was asked."""
        gone: tuple[str, ...] = ()
        match request.method, request.path.split("/"):
            case "PUT", [*_, "q"]:
                self._written.add(request.path)
            case "DELETE", [*_, "q"]:
                self._written.discard(request.path)
                gone = (request.path,)
            case "POST", ["leases"]:
                granted = decode(response.body, LeaseAnswer)
                if isinstance(granted.lease, str):
                    self._leased[granted.lease] = decode(request.body, LeaseRequest).objects
            case "DELETE", ["leases", lease]:
                gone = self._leased.pop(lease, ())
            case _:
                pass
        if self._out.intersection(gone) and self._calm():
            self._wrong(f"11: {gone[0]} is let go before its proposal is answered")


def _path(proposal: Proposal) -> str | None:
    """Of the object that the verifier has to fetch, None where it need not."""
    if not isinstance(proposal.q_rows, str) or proposal.q is not UNSET:
        return None
    place = proposal.q_rows.find("v1/s/")
    return None if place < 0 else proposal.q_rows[place:]
