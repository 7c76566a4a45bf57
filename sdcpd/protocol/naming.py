"""Having a session carried on by somebody: named at the verifier, then assigned (draft 6.1, 6.5.2; 41, 91, 110, 111).

    NAMING -> SETTLED                                           the verifier itself (110)
    NAMING -> [GATHERING -> PUBLISHING ->] ASSIGNING -> SETTLED a drafter

Theory. Only the verifier's answer to PUT drafter yields the assignment for the drafter, with round, committed and
digest copied from that answer (41). Where it states committed tokens, the assignment waits until the output read so far
reaches that length and its digest chain agrees (41), and until these tokens are published as an object (91).

Whatever goes wrong on this way is the drafter's, the store's or another router's, and is told to the placement, which
chooses who is named instead: nothing is chosen here.
"""

from msgspec import Struct

from sdcpd.protocol.assigning import Assignments
from sdcpd.protocol.drafter_choice import DrafterChoice
from sdcpd.protocol.messages import SessionState
from sdcpd.protocol.naming_order import NamingOrder
from sdcpd.protocol.output_reader import OutputReader
from sdcpd.protocol.placement_values import (
    Accepted,
    Assign,
    Ending,
    Name,
    Outcome,
    Patience,
    Phase,
    Plan,
    Refused,
    passing,
    retry_after_s,
)
from sdcpd.protocol.prompt_object import PromptObject
from sdcpd.protocol.retry_lane import MainLane
from sdcpd.protocol.terms import Action, State


class Another(Struct, frozen=True):
    """The target will not carry the session on: name somebody else, or the same one anew. `reason` is a label."""

    reason: str


class Yielded(Struct, frozen=True):
    """The verifier obeys a router that has taken the session up since (111)."""


class Gone(Struct, frozen=True):
    """The verifier says that the session is over (410)."""


class Unnamed(Struct, frozen=True):
    """The verifier did not take the naming, and it is not the naming's fault: see what became of the verifier."""

    outcome: Outcome


Progress = Phase | Another | Yielded | Gone | Unnamed | Ending | None
"""A phase that was reached, what stands against it, or None: the call is being repeated."""


class Naming:
    """One target at a time, on the placement's main lane.

    `assigned` is the drafter that may hold the latest assignment sent, `named_at` the committed length when the target
    was named. `may_self_decode` until the answer to a 110 lacks state 3.
    """

    def __init__(
        self,
        plan: Plan,
        lane: MainLane,
        patience: Patience,
        reader: OutputReader,
        assignments: Assignments,
        choice: DrafterChoice,
        prompt: PromptObject,
    ) -> None:
        self.order = NamingOrder(plan.incarnation)
        self.assigned: str | None = None
        self.named_at = 0
        self.may_self_decode = True
        self._lane = lane
        self._patience = patience
        self._reader = reader
        self._assignments = assignments
        self._choice = choice
        self._prompt = prompt
        self._verifier = plan.verifier
        self._target = plan.verifier

    def name(self, verifier: str, target: str, now: float) -> Phase:
        """PUT drafter. Every naming takes a higher `seq` (111), so that late messages lose."""
        self._verifier, self._target = verifier, target
        self.named_at = len(self._reader.copy)
        return self.name_again(now)

    def name_again(self, now: float) -> Phase:
        """The same target, with a profile that the verifier has taken meanwhile (51)."""
        self._put(now)
        return Phase.NAMING

    def _put(self, now: float) -> None:
        self.order.next()
        message = self._assignments.message(self._verifier, self._target, self.order.latest)
        self._lane.send(Name(verifier=self._verifier, message=message), now)

    def answered(self, state: SessionState, now: float) -> Progress:
        """The verifier took the naming, and its word on where the session stands has been noted."""
        self.named_at = state.committed
        if self._target != self._verifier:
            return self.gather(now)
        if state.state == State.SELF_DECODING:
            return Phase.SETTLED
        self.may_self_decode = False
        return Another("self_decode_unknown")

    def not_answered(self, outcome: Outcome, now: float) -> Progress:
        """The naming was refused or got no answer. 5xx and lost answers again with the identical body (36)."""
        if isinstance(outcome, Refused) and outcome.status == 410:
            return Gone()
        if isinstance(outcome, Refused) and outcome.status == 409:
            if self.order.catch_up(outcome.state):
                return Another("seq_overtaken")
            if self.order.overtaken(outcome.state):
                return Yielded()
        if passing(outcome) and now - self._lane.since < self._patience.name_give_up_s:
            self._lane.wait(now, retry_after_s(outcome))
            return None
        self._lane.clear()
        return Unnamed(outcome)

    def gather(self, now: float) -> Progress:
        """Wait for output up to the length the verifier answered, check the chain, publish, assign (41, 91)."""
        state, output = self._assignments.known, self._reader.copy
        if len(output) < state.committed:
            if not self._reader.awaiting:
                self._reader.await_more(self._patience.gather_give_up_s, now)
            return Phase.GATHERING
        self._reader.await_nothing()
        if output.digest_at(state.committed) != state.digest:
            detail = "the output read is not the prefix that the verifier states"
            return Ending(finish=Action.FAIL, reason="digest_mismatch", detail=detail)
        if self._assignments.ready:
            return self._assign(now)
        self._lane.send(self._assignments.publish(output.tokens(0, state.committed)), now)
        return Phase.PUBLISHING

    def published(self, outcome: Outcome, now: float) -> Progress:
        """How the write of the tokens ended."""
        if isinstance(outcome, Accepted):
            self._assignments.published(self._assignments.known.round)
            return self._assign(now)
        if passing(outcome) and self._lane.tries < self._patience.tries:
            self._lane.wait(now, retry_after_s(outcome))
            return None
        self._choice.pause(now)  # without these tokens no drafter can start
        return Another("tokens_unpublished")

    def _assign(self, now: float) -> Phase:
        self.assigned = self._target
        message = self._assignments.message(self._verifier, self._target, self.order.latest)
        self._lane.send(Assign(message=message), now)
        return Phase.ASSIGNING

    def taken(self, drafter: str, outcome: Outcome, now: float) -> Progress:
        """How POST assignments at the drafter ended."""
        if isinstance(outcome, Accepted):
            self._lane.clear()
            return Phase.SETTLED
        reason = self._choice.judged(drafter, outcome, self._lane.tries, now)
        self._prompt.doubt(now)
        if reason is None:
            self._lane.wait(now)
            return None
        if reason != "drafter_unreachable":  # that one may have it, and is to be told otherwise
            self.assigned = None
        return Another(reason)
