"""What the assignments of one session say: where it stands, by the verifier's last answer (decisions 41, 91)."""

from collections.abc import Sequence

from msgspec import UNSET

from sdcpd.protocol.encoding import encode_tokens
from sdcpd.protocol.messages import Assignment, SessionState
from sdcpd.protocol.placement_values import Plan, Publish
from sdcpd.protocol.policy_lane import PolicyLane
from sdcpd.protocol.prompt_object import PromptObject


class Assignments:
    """`state` is the verifier's last answer at this epoch, None before the first.

    An assignment that states committed tokens names the object that holds them; it is written once a round.
    """

    def __init__(self, plan: Plan, policies: PolicyLane, prompt: PromptObject) -> None:
        self.state: SessionState | None = None
        self._plan = plan
        self._policies = policies
        self._prompt = prompt
        self._published: int | None = None  # the round whose tokens were published last

    @property
    def known(self) -> SessionState:
        assert self.state is not None, "the verifier answered before anything was placed"
        return self.state

    @property
    def ready(self) -> bool:
        """Whether the tokens that the state speaks of can be read by a drafter."""
        return self.known.committed == 0 or self._published == self.known.round

    def published(self, round_: int) -> None:
        """The tokens committed up to this round are an object now."""
        self._published = round_

    def moved(self, round_: int) -> None:
        """Another verifier goes on from this round, whose tokens were published for it."""
        self.state, self._published = None, round_

    def publish(self, tokens: Sequence[int]) -> Publish:
        """The call that makes an object of the tokens the state speaks of."""
        return Publish(ref=self._ref(self.known), octets=encode_tokens(tuple(tokens)))

    def message(self, verifier: str, target: str, seq: int) -> Assignment:
        """The assignment for `target`, copied from the verifier's answer, with the profile that drafters may know."""
        state = self.known
        return Assignment(
            session=self._plan.session,
            epoch=state.epoch,
            contract=self._plan.contract,
            verifier=verifier,
            drafter=target,
            prompt=self._prompt.member,
            round=state.round,
            committed=state.committed,
            digest=state.digest,
            committed_tokens=self._ref(state) if state.committed > 0 and self.ready else UNSET,
            sampling=self._policies.for_drafters(),
            m_init=self._plan.m_init,
            seq=seq,
        )

    def _ref(self, state: SessionState) -> str:
        return self._plan.tokens_ref(state.epoch, state.round)
