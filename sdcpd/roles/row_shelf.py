"""A drafter's rows of its outstanding proposal, for verifiers that fetch them (draft 6.2; decisions 54, 55, 101).

Mostly nobody does: the rows travel inside the proposal as `sdcpd_q`, and the object behind `q_rows` is rendered when
somebody needs it. That is the case when the rows have too many entries for that, and when the verifier says
q-unavailable to a proposal which carried them: it does not know the key, and from then on all its proposals are
preceded by their objects. A lease holds an object until the round has its outcome; then it is removed.
"""

from collections import OrderedDict

import structlog
import trio
from msgspec import UNSET

from sdcpd.cache.refs import ObjectKind, object_reference
from sdcpd.protocol.draft_rows import DraftRow, dense
from sdcpd.protocol.draft_session import DraftSession
from sdcpd.protocol.draft_steps import Resend, Step
from sdcpd.protocol.messages import Proposal
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.ports import Appended, AppendOutcome, Leased, Ports, TagMismatch
from sdcpd.roles.waits import within

log = structlog.get_logger(__name__)

VERIFIERS_LIMIT = 64
"""Verifiers known to fetch; one that is forgotten says q-unavailable once more."""


class RowsOut:
    """The rows of one session's outstanding proposal, and the object that holds them if it was written."""

    def __init__(self) -> None:
        self.rows: tuple[DraftRow, ...] = ()
        self.ref: str | None = None  # None: not written
        self.lease: str | None = None
        self.positions = 0  # rows in the object


class RowShelf:
    """One drafter's. `cache` is the base URI of the cache it writes to."""

    def __init__(self, settings: DrafterSettings, ports: Ports, *, cache: str, vocabulary: int) -> None:
        self._settings = settings
        self._ports = ports
        self._cache = cache
        self._vocabulary = vocabulary
        self._fetching: OrderedDict[str, None] = OrderedDict()

    def name(self, machine: DraftSession) -> str:
        """cache-ref of the rows of the next round."""
        scope = None if machine.contract.scope is UNSET else machine.contract.scope
        return object_reference(self._cache, scope, machine.session, machine.epoch, machine.round + 1, ObjectKind.Q)

    def fetches(self, verifier: str) -> bool:
        """Whether proposals to this verifier are preceded by their objects."""
        return verifier in self._fetching

    async def before(self, out: RowsOut, verifier: str, proposal: Proposal) -> int:
        """Write what has to be there before the proposal is sent; how many rows that were. If they cannot be written,
        the verifier will say so."""
        if out.ref == proposal.q_rows or not isinstance(proposal.q_rows, str):
            return 0
        if isinstance(proposal.q, tuple) and not self.fetches(verifier):
            return 0
        ref, objects, limit_s = proposal.q_rows, self._ports.objects, self._settings.publish_timeout_s
        rows = out.rows[: len(proposal.tokens)]
        octets = await self._ports.workers.run(dense, rows, self._vocabulary)
        ttl_ms = self._settings.rows_ttl_ms

        async def write() -> AppendOutcome:
            return await objects.publish(ref, octets, ttl_ms=ttl_ms)

        outcome = await within(limit_s, write)
        if isinstance(outcome, TagMismatch):  # of this round with other tokens
            await within(limit_s, lambda: objects.remove(ref))
            outcome = await within(limit_s, write)
        if not isinstance(outcome, Appended):
            log.warning("draft rows could not be written", outcome=type(outcome).__name__)
            return 0
        lease = await within(limit_s, lambda: objects.lease(self._cache, [ref], ttl_ms))
        out.ref, out.positions = ref, len(rows)
        out.lease = lease.lease if isinstance(lease, Leased) else None
        return len(rows)

    async def after(self, out: RowsOut, verifier: str, step: Step, nursery: trio.Nursery) -> None:
        """The proposal has an outcome. The object stays while the same proposal is out; else it may go (6.3)."""
        if isinstance(step, Resend):
            if step.publish:
                self._remember(verifier)
            elif len(step.proposal.tokens) == out.positions:
                return
        ref, lease, out.ref, out.lease = out.ref, out.lease, None, None
        if ref is None:
            return
        if isinstance(step, Resend):
            await self._remove(ref, lease)  # its name is about to be written again
        else:
            nursery.start_soon(self._remove, ref, lease)

    async def _remove(self, ref: str, lease: str | None) -> None:
        objects, limit_s = self._ports.objects, self._settings.publish_timeout_s
        if lease is not None:
            await within(limit_s, lambda: objects.release(lease))
        await within(limit_s, lambda: objects.remove(ref))

    def _remember(self, verifier: str) -> None:
        """This verifier could not use a proposal's inline rows."""
        self._fetching[verifier] = None
        self._fetching.move_to_end(verifier)
        while len(self._fetching) > VERIFIERS_LIMIT:
            self._fetching.popitem(last=False)
