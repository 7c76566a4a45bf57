"""What an operator, and the checkers of the simulation, may see of a verifier: lengths and counts, never a token."""

from msgspec import Struct

from sdcpd.roles.row_supply import AuditedDrafter


class HostedSession(Struct, frozen=True):
    """One session for `sdcpctl`: lengths and counts, never a token."""

    session: str
    epoch: int
    state: str
    round: int
    prompt_tokens: int
    committed_tokens: int
    max_new: int
    m_cap: int
    drafter: str | None
    low: int
    rounds: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    age_s: float
    reason: str | None
    cached_tokens: int = 0


class VerifierSnapshot(Struct, frozen=True):
    """What `sdcpctl` shows of a verifier; `full_rows` is the row count at which its load is 100 percent."""

    instance: str
    load: int
    passes: int
    pages: int
    free_pages: int
    waiting_for_pages: int
    full_rows: int
    audits: tuple[AuditedDrafter, ...]
    sessions: tuple[HostedSession, ...]
