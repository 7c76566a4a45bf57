"""Draft rows for the rounds of one verifier: fetched, checked, counted against a budget, audited (6.3 step 5; 53, 99).

What the drafter did wrong is bad-proposal (422); what could not be had, for whatever cause, is q-unavailable (409). In
both cases nothing was drawn, and the round stays open (decision 63).
"""

from collections import OrderedDict

import structlog
from msgspec import Struct

from sdcpd.cache.refs import parse_reference, require_scope
from sdcpd.protocol.draft_audit import DraftAudit, Moments, moments
from sdcpd.protocol.draft_rows import VALUE_BYTES, CheckedRow, check_rows, from_dense
from sdcpd.protocol.messages import Proposal
from sdcpd.protocol.problems import BadProposal, Problem, QUnavailable, TooLarge
from sdcpd.protocol.uris import beside
from sdcpd.roles.ports import Content, Ports, StoreRefused
from sdcpd.roles.verifier_settings import VerifierSettings
from sdcpd.roles.waits import within

log = structlog.get_logger(__name__)

DRAFTERS_LIMIT = 1024
"""Drafters whose account is kept; beyond that the one not heard of for longest is forgotten."""
ROWS_WAIT_S = 1.0
"""How long the drafter's cache may wait for an object that is still being written (cache part 5.3)."""
ERRORS_BYTES = 64 * 1024
"""Room for a cache's words where the rows themselves would be shorter."""


class AuditedDrafter(Struct, frozen=True):
    """One drafter's account for metrics and `sdcpctl`. `z` None: too few rows yet."""

    drafter: str
    rows: int
    z: float | None


class RowSupply:
    """One for all sessions of a verifier."""

    def __init__(self, settings: VerifierSettings, ports: Ports, vocabulary: int) -> None:
        self._settings = settings
        self._ports = ports
        self._vocabulary = vocabulary
        self._held_bytes: dict[str, int] = {}
        self._audits: OrderedDict[str, DraftAudit] = OrderedDict()
        self._alarmed: set[str] = set()

    async def fetch(self, proposal: Proposal, scope: bytes | None) -> tuple[CheckedRow, ...] | Problem:
        """The rows behind `q_rows`, all of them and checked; or why there are none."""
        drafter = proposal.drafter
        needed = VALUE_BYTES * self._vocabulary * len(proposal.tokens)
        held = self._held_bytes.get(drafter, 0)
        if held and held + needed > self._settings.drafter_row_bytes:
            return QUnavailable("too many draft rows of this drafter are under way", retry_after_s=1)
        self._held_bytes[drafter] = held + needed
        try:
            return await self._fetch(proposal, scope)
        except BadProposal as problem:
            return problem
        finally:
            self._held_bytes[drafter] -= needed
            if not self._held_bytes[drafter]:
                del self._held_bytes[drafter]

    async def _fetch(self, proposal: Proposal, scope: bytes | None) -> tuple[CheckedRow, ...] | Problem:
        ref = proposal.q_rows
        assert isinstance(ref, str), "a proposal without q_rows was refused"
        try:
            require_scope(parse_reference(ref), scope)
        except Problem as problem:
            raise BadProposal(f"q_rows: {problem.detail}") from problem
        needed = VALUE_BYTES * self._vocabulary * len(proposal.tokens)
        content = await within(
            self._settings.rows_timeout_s,
            lambda: self._ports.objects.fetch(
                ref, ROWS_WAIT_S, limit_bytes=max(needed, ERRORS_BYTES), also=beside(proposal.drafter, "cache")
            ),
        )
        if isinstance(content, StoreRefused) and content.status == TooLarge.status:
            raise BadProposal(f"q_rows: longer than 4 * {len(proposal.tokens)} positions * {self._vocabulary} tokens")
        if not isinstance(content, Content):
            return QUnavailable("q_rows: the object could not be read")
        rows, seen = await self._ports.workers.run(_read, content.octets, proposal.tokens, self._vocabulary)
        self._audit(proposal.drafter, seen)
        return rows

    def took(self, drafter: str, rows: tuple[CheckedRow, ...]) -> None:
        """Rows that came along inline, and were checked."""
        self._audit(drafter, [moments(row) for row in rows])

    def _audit(self, drafter: str, seen: list[Moments | None]) -> None:
        audit = self._audits.pop(drafter, None) or DraftAudit()
        self._audits[drafter] = audit
        while len(self._audits) > DRAFTERS_LIMIT:
            self._alarmed.discard(self._audits.popitem(last=False)[0])
        for one in seen:
            if one is not None:
                audit.observe(one)
        if audit.alarming and drafter not in self._alarmed:
            self._alarmed.add(drafter)
            self._ports.meters.count("draft_audit_alarms_total")
            log.warning(
                "a drafter does not sample from the rows it shows: under rule 2 it can steer the text",
                drafter=drafter,
                z=audit.z,
                rows=audit.rows,
            )
        elif not audit.alarming:
            self._alarmed.discard(drafter)

    def audits(self) -> tuple[AuditedDrafter, ...]:
        return tuple(AuditedDrafter(uri, audit.rows, audit.z) for uri, audit in sorted(self._audits.items()))


def _read(
    octets: bytes, tokens: tuple[int, ...], vocabulary: int
) -> tuple[tuple[CheckedRow, ...], list[Moments | None]]:
    """In a worker: milliseconds a row where the vocabulary is large."""
    rows = check_rows(from_dense(octets, len(tokens), vocabulary), tokens)
    return rows, [moments(row) for row in rows]
