"""What a proposal must be for its round to begin: steps 3 to 5 of draft 6.3, and the limit before the last (57).

Order: what is known of the round, the base (a stale drafter needs to resynchronise, not a limit), the limit, what the
proposal holds. Draft rows that do not come along are obtained by the role, which then asks `check_rows` as it is asked
here.
"""

from msgspec import UNSET

from sdcpd.protocol.draft_rows import CheckedRow, check_rows, from_inline
from sdcpd.protocol.messages import Contract, Proposal, SessionState
from sdcpd.protocol.prefix import Prefix
from sdcpd.protocol.problems import BadProposal, LimitExceeded, StaleBase
from sdcpd.protocol.rounds import same_proposal
from sdcpd.protocol.session_values import Join, Point, Replay
from sdcpd.protocol.terms import Rule


def known_round(
    proposal: Proposal, prefix: Prefix, open_proposal: Proposal | None, state: SessionState
) -> Replay | Join | None:
    """Step 3: decided, or being verified for an identical request, or (decision 61) for another one: StaleBase."""
    if proposal.round <= prefix.at.round:
        verdict = prefix.verdict(proposal.session, proposal.round)
        return Replay(verdict=verdict) if verdict is not None else None
    if open_proposal is None or proposal.round != open_proposal.round:
        return None
    if same_proposal(proposal, open_proposal):
        return Join(round=proposal.round)
    raise StaleBase("another proposal of this round is being verified", state=state, retry_after_s=1)


def check_base(proposal: Proposal, at: Point, state: SessionState) -> None:
    """Step 4. Raises StaleBase with the session-state."""
    if proposal.base != at.committed or proposal.base_digest != at.digest:
        raise StaleBase(f"base {proposal.base} is not the committed prefix", state=state)
    if proposal.round != at.round + 1:
        raise StaleBase(f"round {proposal.round} is not {at.round + 1}", state=state)


def check_limit(proposal: Proposal, m_cap: int, rows_limit: int) -> None:
    """M against the cap last published (decision 57), and against the rows that we fetch where some have to be (99).

    Raises LimitExceeded.
    """
    proposed = len(proposal.tokens)
    if proposed > m_cap:
        raise LimitExceeded(f"tokens: {proposed} proposed, m_cap is {m_cap}", m_cap=m_cap)
    if proposal.q_rows is not UNSET and proposal.q is UNSET and proposed > rows_limit:
        raise LimitExceeded(f"q_rows: rows of {proposed} positions, at most {rows_limit} are fetched", m_cap=rows_limit)


def check_content(proposal: Proposal, contract: Contract, vocabulary: int) -> tuple[CheckedRow, ...] | None:
    """Step 5, as far as the proposal itself tells: its draft rows under rule 2, () under the others.

    None: the rows have to be obtained from `q_rows`. Raises BadProposal for token ids that do not exist (decision 22),
    for rows that are none (53), and under rule 2 for a proposal without `q_rows`, which it MUST carry (6.4).
    """
    for token in proposal.tokens:
        if token >= vocabulary:
            raise BadProposal(f"tokens: {token} is outside the vocabulary of {vocabulary}")
    if contract.rule != Rule.SPECULATIVE_SAMPLING:
        return ()
    if proposal.q_rows is UNSET:
        raise BadProposal("q_rows: missing; acceptance rule 2 needs the draft distributions")
    if proposal.q is UNSET:
        return None
    return check_rows(from_inline(proposal.q, vocabulary), proposal.tokens)


def scoreable(proposal: Proposal, contract: Contract, committed: int) -> tuple[int, ...]:
    """The proposed tokens that max_new leaves room for; those beyond can never be emitted (decision 58).

    This changes no verdict: if all that remain are accepted the round finishes, whatever follows them.
    """
    return proposal.tokens[: contract.max_new - committed]
