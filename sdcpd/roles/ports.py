"""All that a role can touch, as Protocols (design: the world is passed in, whole).

A role is built from (settings, ports). In production node/real_ports.py and edge/peers.py supply these; in the
simulation other classes do. Calls to peers end in exactly three ways: the answer, a Refusal (the peer said no,
with its problem), or Unreachable (which includes "maybe delivered"). Deadlines are cancel scopes at the call site.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from msgspec import Struct

from sdcpd.cache.bandwidth import Bandwidth
from sdcpd.engine.kv_blocks import KvBlocks
from sdcpd.engine.spans import EngineInfo, Row, Shelf, Span, Weighed
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

T = TypeVar("T")


class Peer(Struct, frozen=True):
    """Who is calling: base URI (decision 31) and role name, settled before any byte of the message (design 2.1)."""

    uri: str
    role: str  # "router" | "drafter" | "verifier" | "cache" | "operator" | "client"


class Refusal(Struct, frozen=True):
    """A peer answered with a problem. `suffix` is the draft's problem type suffix, None for about:blank."""

    status: int
    suffix: str | None
    detail: str
    state: SessionState | None = None
    retry_after_s: int | None = None
    m_cap: int | None = None


class Unreachable(Struct, frozen=True):
    """No answer. The call may or may not have been carried out."""

    reason: str


class Done(Struct, frozen=True):
    """A 2xx without a body."""


class Appended(Struct, frozen=True):
    """The record is durable; `tag` is the log's new entity tag."""

    tag: str


class TagMismatch(Struct, frozen=True):
    """412: the log is not at the tag that was named. Somebody else wrote, or an earlier append of ours did."""


class BelowFence(Struct, frozen=True):
    """409: the record's epoch is below a fence in the log (6.8)."""


class StoreRefused(Struct, frozen=True):
    """The store said no for good or for now (full, forbidden, over a limit); nothing was written."""

    status: int
    detail: str


class Missing(Struct, frozen=True):
    """No such object: an ordinary miss."""


class Content(Struct, frozen=True):
    """An object's octets and strong entity tag."""

    octets: bytes
    tag: str


class Leased(Struct, frozen=True):
    """A lease as it stands. `lease` is its URI, None when none of the objects was there; `missed` are the references
    of those that were not. `ttl_ms` is what was granted, which may be less than was asked for."""

    lease: str | None
    missed: tuple[str, ...]
    ttl_ms: int


class ListedRecord(Struct, frozen=True):
    """A directory record of a session. A damaged one has no tag: it can only be removed."""

    session: bytes
    tag: str | None


class Listed(Struct, frozen=True):
    """A page of a directory; where there is `more`, it begins behind the last session of this one."""

    records: tuple[ListedRecord, ...]
    more: bool


AppendOutcome = Appended | TagMismatch | BelowFence | StoreRefused | Unreachable
ReadOutcome = Content | Missing | StoreRefused | Unreachable
RemoveOutcome = Done | StoreRefused | Unreachable
"""Done: it is gone, by this call or before it."""
LeaseOutcome = Leased | StoreRefused | Unreachable
RenewOutcome = Leased | Missing | StoreRefused | Unreachable
"""Missing: the lease has ended, and its objects may be gone."""
RecordOutcome = Appended | TagMismatch | StoreRefused | Unreachable
"""Appended: the record is durable with this content. TagMismatch: it is not at the tag that was named, or is (not)
there against what was said."""
ListOutcome = Listed | StoreRefused | Unreachable

FETCH_LIMIT_BYTES = 16 * 1024 * 1024
"""What a fetch takes where its caller knows no better: a cache's own default limit of an object."""


class Clock(Protocol):
    """Monotonic seconds. Roles never ask any other clock."""

    def now(self) -> float: ...
    async def sleep_until(self, at: float) -> None: ...


class RandomStream(Protocol):
    """One named source; an added draw in one stream does not shift the others."""

    def octets(self, count: int) -> bytes: ...
    def uniform(self) -> float: ...


class Randomness(Protocol):
    def stream(self, name: str) -> RandomStream: ...


class Workers(Protocol):
    """Runs a blocking function: in a thread in production, inline in simulation.

    `run_short` is for one that as a rule takes less than handing it to a thread does: in production it runs at once.
    """

    async def run(self, function: Callable[..., T], *args: object) -> T: ...
    async def run_short(self, function: Callable[..., T], *args: object) -> T: ...


class Meters(Protocol):
    """Counters and histograms by the names of node/metrics.py. Never a token, never a text."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None: ...
    def observe(self, name: str, value: float, **labels: str) -> None: ...


class Peers(Protocol):
    """Table 1 and decision 37 as typed calls. The caller's identity is bound in at construction."""

    async def open_session(self, verifier: str, message: SessionOpen) -> SessionState | Refusal | Unreachable: ...
    async def name_drafter(self, verifier: str, message: Assignment) -> SessionState | Refusal | Unreachable: ...
    async def propose(self, verifier: str, message: Proposal) -> Verdict | Refusal | Unreachable: ...
    async def read_output(
        self, verifier: str, session: bytes, from_: int, wait_s: float
    ) -> Output | Refusal | Unreachable: ...
    async def set_policy(self, verifier: str, message: Policy) -> SessionState | Refusal | Unreachable: ...
    async def session_state(self, verifier: str, session: bytes) -> SessionState | Refusal | Unreachable: ...
    async def cancel_session(self, verifier: str, session: bytes) -> Done | Refusal | Unreachable: ...
    async def assign(self, drafter: str, message: Assignment) -> Done | Refusal | Unreachable: ...
    async def drop_assignment(self, drafter: str, session: bytes) -> Done | Refusal | Unreachable: ...
    async def report_status(self, router: str, message: Status) -> Done | Refusal | Unreachable: ...
    async def report_event(self, router: str, message: Event) -> Done | Refusal | Unreachable: ...


class Objects(Protocol):
    """Cache objects, leases, commit logs and directory records by reference, wherever they live. A lease goes by its
    URI."""

    async def create_log(self, ref: str, epoch: int, record: bytes = b"") -> AppendOutcome: ...
    async def append(self, ref: str, record: bytes, *, epoch: int, if_match: str) -> AppendOutcome: ...
    async def read_log(self, ref: str) -> ReadOutcome: ...
    async def publish(self, ref: str, octets: bytes, *, ttl_ms: int) -> AppendOutcome: ...
    async def fetch(
        self, ref: str, wait_s: float = 0.0, *, limit_bytes: int = FETCH_LIMIT_BYTES, also: str | None = None
    ) -> ReadOutcome: ...
    async def remove(self, ref: str) -> RemoveOutcome: ...
    async def lease(self, base: str, refs: Sequence[str], ttl_ms: int) -> LeaseOutcome: ...
    async def renew(self, lease: str, ttl_ms: int) -> RenewOutcome: ...
    async def release(self, lease: str) -> RemoveOutcome: ...
    async def read_record(self, ref: str) -> ReadOutcome: ...
    async def write_record(self, ref: str, octets: bytes, if_match: str | None) -> RecordOutcome: ...
    async def remove_record(self, ref: str) -> RemoveOutcome: ...
    async def list_records(self, base: str, scope: bytes | None, after: bytes | None = None) -> ListOutcome: ...


class Engine(Protocol):
    """A model on its device. Bookkeeping calls are synchronous; only the pass itself suspends.

    `blocks` are those that its sequences may share, None where nothing is kept. `passes_ended` returns when all passes
    that were planned before the call have ended.
    """

    @property
    def info(self) -> EngineInfo: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def blocks(self) -> KvBlocks | None: ...
    def open_sequence(self) -> int: ...
    def close_sequence(self, sequence: int) -> None: ...
    def reserve(self, sequence: int, length: int) -> bool: ...
    async def run_pass(self, spans: Sequence[Span]) -> list[tuple[Row, ...]]: ...
    async def passes_ended(self) -> None: ...
    async def judge(self, shelf: Shelf, tokens: tuple[int, ...], weighed: Weighed) -> tuple[Row, ...]: ...


@dataclass(frozen=True)
class Ports:
    """The bundle a role is built with. `engine` is present where the role runs a model."""

    clock: Clock
    randomness: Randomness
    workers: Workers
    meters: Meters
    peers: Peers
    objects: Objects
    engine: Engine | None = None
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    """Of the node's fetches from others: one for all of its roles."""
