"""Who may propose for a session: the drafter of the latest accepted assignment (draft 6.1, 6.3 step 1; 43, 79, 111).

An assignment ends in two ways that its drafter learns differently: another one replaces it (its proposals are not
authorized any more), or it is *void*: the drafter is still the one named, so that retries of decided rounds are
answered, but it may begin no new round.
"""

from msgspec import UNSET

from sdcpd.protocol.messages import Assignment, Contract, Proposal, SessionState
from sdcpd.protocol.problems import BadContract, Conflict, IllFormed, NotAssigned


class NamedDrafter:
    """The latest assignment, as far as the verifier needs it. `uri` is None before the first and under order 110."""

    def __init__(self) -> None:
        self.uri: str | None = None
        self.void = True
        self.seq: int | None = None  # the highest accepted (decision 111)
        self._refusals = 0

    def is_repeat(self, assignment: Assignment, *, instance: str, drafting: bool) -> bool:
        """The assignment accepted last, once more: nothing to do, also when it was voided since (43, 103, 111)."""
        named = self.uri if self.uri is not None else instance
        if assignment.seq is not UNSET:
            return assignment.seq == self.seq and assignment.drafter == named
        return drafting and assignment.drafter == self.uri

    def check(self, assignment: Assignment, contract: Contract) -> None:
        """What every assignment owes. Raises BadContract or IllFormed."""
        if assignment.contract != contract:
            raise BadContract("contract: not the one this session was opened with; a contract never changes (4.1)")
        if assignment.m_init == 0:
            raise IllFormed("m_init: 0 is not allowed; send at least 1")

    def check_seq(self, assignment: Assignment, state: SessionState) -> None:
        """Raises Conflict for an assignment that is late, or that names another drafter under a seq in use (111)."""
        if assignment.seq is UNSET or self.seq is None or assignment.seq > self.seq:
            return
        if assignment.seq < self.seq:
            raise Conflict(f"seq: {assignment.seq} is behind {self.seq}", state=state)
        raise Conflict(f"seq: {self.seq} already named another drafter", state=state)

    def accept(self, assignment: Assignment, *, instance: str) -> None:
        """Take the assignment; one that names the verifier itself orders self-decoding (decision 110)."""
        if assignment.seq is not UNSET:
            self.seq = assignment.seq
        ordered = assignment.drafter == instance
        self.uri = None if ordered else assignment.drafter
        self.void = ordered
        self._refusals = 0

    def authorize(self, peer: str, proposal: Proposal) -> None:
        """6.3 step 1: the authenticated peer is what counts; `proposal.drafter` must agree with it (decision 32)."""
        if self.uri is None or peer != self.uri or proposal.drafter != self.uri:
            raise NotAssigned("this drafter is not the one named in the latest assignment")

    def authorize_new_round(self) -> None:
        if self.void:
            raise NotAssigned("the assignment has ended; wait for the next one")

    def proposed(self) -> None:
        """A proposal was taken: refusals are counted in a row."""
        self._refusals = 0

    def refused(self) -> int:
        """One more refusal in a row; returns their number (decision 82)."""
        self._refusals += 1
        return self._refusals
