"""The draft's messages (5.2) as frozen Structs, one per CDDL production, field names as printed there.

Theory: a message is checked once, while it is decoded, and is a plain value from then on. The contract is
closed (an unknown key changes its digest, 4.1); all other messages are open (unknown keys are ignored, 5.2).
An absent member is UNSET, never None and never its default: filling a default in would change the contract
digest (decision 5). Members that the draft does not have are our extensions; each names its decision.
"""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, field

from sdcpd.protocol.logprobs import PAIR_BYTES
from sdcpd.protocol.terms import (
    LOGPROBS_LIMIT,
    M_MAX_LIMIT,
    Action,
    BaseUri,
    CacheRef,
    Hash32,
    LadderAction,
    Percent,
    ScopeId,
    SessionId,
    Uint,
)

LADDER_ENTRIES_LIMIT = 1024
"""Array cap of `contract.fallback` (decision 103)."""

INLINE_ENTRIES_LIMIT = 256
"""Non-zero entries of a draft row that still travel inside a proposal (decision 101)."""


LogprobsEntry = Annotated[bytes, Meta(max_length=PAIR_BYTES * (1 + LOGPROBS_LIMIT))]
"""Log-probabilities of one token, packed (decision 114); empty where they are not to be had."""


class Message(Struct, frozen=True, kw_only=True):
    """Base of all open messages: unknown keys are ignored (5.2)."""


class Sampling(Message, frozen=True, kw_only=True):
    """Sampling profile outside the contract (policy, assignment): open (decision 6)."""

    temperature_milli: Uint | UnsetType = UNSET
    top_k: Uint | UnsetType = UNSET
    top_p_milli: Annotated[int, Meta(ge=0, le=1000)] | UnsetType = UNSET
    seed: Uint | UnsetType = UNSET


class ContractSampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling profile inside the contract: closed, as all of the contract (decision 6)."""

    temperature_milli: Uint | UnsetType = UNSET
    top_k: Uint | UnsetType = UNSET
    top_p_milli: Annotated[int, Meta(ge=0, le=1000)] | UnsetType = UNSET
    seed: Uint | UnsetType = UNSET


class Contract(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The immutable Session Contract (4.1).

    `m_max` 0 and `self_max` 0 are refused although CDDL admits them (decision 14).
    """

    target: Hash32
    tokenizer: Hash32
    drafters: Annotated[tuple[Hash32, ...], Meta(min_length=1, max_length=1024)] | UnsetType = UNSET
    rule: Uint
    sampling: ContractSampling | UnsetType = UNSET
    m_max: Annotated[int, Meta(ge=1, le=M_MAX_LIMIT)]
    max_new: Uint
    stop: Annotated[tuple[Uint, ...], Meta(max_length=1024)]
    low_rounds: Annotated[int, Meta(ge=1)]
    low_ratio: Percent | UnsetType = UNSET
    fallback: Annotated[tuple[LadderAction, ...], Meta(min_length=1, max_length=LADDER_ENTRIES_LIMIT)]
    self_load: Percent | UnsetType = UNSET
    self_max: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    scope: ScopeId | UnsetType = UNSET


class Resume(Message, frozen=True, kw_only=True):
    """Where a replacement verifier takes a session up (5.2, 6.9)."""

    round: Uint
    committed: Uint
    digest: Hash32
    committed_tokens: CacheRef
    target_kv: CacheRef | UnsetType = UNSET


class SessionOpen(Message, frozen=True, kw_only=True):
    """POST sessions: router to verifier (6.1)."""

    session: SessionId
    epoch: Uint
    contract: Contract
    prompt: tuple[Uint, ...] | CacheRef
    prompt_kv: CacheRef | UnsetType = UNSET
    commit_log: CacheRef
    resume: Resume | UnsetType = UNSET
    router: BaseUri | UnsetType = UNSET  # decision 49: where events of this session go
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_LIMIT)] | UnsetType = field(
        default=UNSET, name="sdcpd_logprobs"
    )  # decision 114: alternatives wanted beside each token's own value


class SessionState(Message, frozen=True, kw_only=True):
    """Answer to session-open, PUT drafter and policy; also the body of a 409 (6.3)."""

    session: SessionId
    epoch: Uint
    round: Uint
    committed: Uint
    digest: Hash32
    state: Uint | UnsetType = UNSET  # terms.State (decision 40)
    seq: Uint | UnsetType = UNSET  # decision 111: the highest accepted
    reason: str | UnsetType = UNSET  # decision 83


class Assignment(Message, frozen=True, kw_only=True):
    """PUT sessions/{id}/drafter at the verifier, then POST assignments at the drafter (6.1)."""

    session: SessionId
    epoch: Uint
    contract: Contract
    verifier: BaseUri
    drafter: BaseUri
    prompt: tuple[Uint, ...] | CacheRef
    round: Uint
    sampling: Sampling | UnsetType = UNSET
    committed: Uint
    digest: Hash32
    committed_tokens: CacheRef | UnsetType = UNSET
    m_init: Uint
    seq: Uint | UnsetType = UNSET  # decision 111


class Status(Message, frozen=True, kw_only=True):
    """PUT instances/{id}/status: an instance's report to the router; also inside a proposal."""

    instance: BaseUri
    role: Annotated[int, Meta(ge=1, le=2)]  # terms.InstanceRole
    load: Percent
    queue: Uint
    accept_milli: Annotated[int, Meta(ge=0, le=1000)] | UnsetType = UNSET
    cache_mbps: Uint | UnsetType = UNSET
    ttl_ms: Uint
    model: Hash32 | UnsetType = UNSET  # decision 10
    tokenizer: Hash32 | UnsetType = field(default=UNSET, name="sdcpd_tokenizer")  # lets a router match instances
    vocabulary: Uint | UnsetType = field(default=UNSET, name="sdcpd_vocabulary")
    context_tokens: Uint | UnsetType = field(default=UNSET, name="sdcpd_context_tokens")
    boot: SessionId | UnsetType = UNSET  # decision 48: 16 random octets, new at each process start
    rules: tuple[Uint, ...] | UnsetType = UNSET  # decisions 12, 115
    declined: tuple[SessionId, ...] | UnsetType = UNSET  # decision 102
    method: Annotated[str, Meta(max_length=64)] | UnsetType = field(default=UNSET, name="sdcpd_method")  # a drafter's
    kv_milli: Annotated[int, Meta(ge=0, le=1000)] | UnsetType = field(default=UNSET, name="sdcpd_kv_milli")  # in use


class InlineRow(Message, frozen=True, kw_only=True):
    """The non-zero entries of one row of q: token ids, and for each a binary32 in little-endian order (101)."""

    ids: Annotated[tuple[Uint, ...], Meta(max_length=INLINE_ENTRIES_LIMIT)]
    values: Annotated[bytes, Meta(max_length=4 * INLINE_ENTRIES_LIMIT)]


class Proposal(Message, frozen=True, kw_only=True):
    """POST proposals: drafter to verifier (6.2). Token ids are range-checked by the session (decision 22)."""

    session: SessionId
    epoch: Uint
    round: Uint
    drafter: BaseUri
    base: Uint
    base_digest: Hash32
    tokens: Annotated[tuple[Uint, ...], Meta(min_length=1)]
    q_rows: CacheRef | UnsetType = UNSET
    q: Annotated[tuple[InlineRow, ...], Meta(max_length=M_MAX_LIMIT)] | UnsetType = field(
        default=UNSET, name="sdcpd_q"
    )  # decision 101: the same rows as q_rows, one a position
    draft_kv: CacheRef | UnsetType = UNSET
    status: Status


class Verdict(Message, frozen=True, kw_only=True):
    """Answer to a proposal (6.3, 6.5)."""

    session: SessionId
    epoch: Uint
    round: Uint
    accepted: Uint
    emitted: tuple[Uint, ...]
    committed: Uint
    digest: Hash32
    action: Action
    m_cap: Uint
    low: Uint
    load: Percent


class SpeculationStats(Message, frozen=True, kw_only=True):
    """What speculation did for one session; rides on its final output page. Counts only, so that they add up.

    `rounds` = `drafts` + self-decoded rounds. Mean acceptance length is 1 + accepted_tokens / drafts.
    """

    rounds: Uint
    drafts: Uint
    draft_tokens: Uint
    accepted_tokens: Uint
    accepted_histogram: tuple[Uint, ...] = ()  # index a: rounds that accepted exactly a


class Output(Message, frozen=True, kw_only=True):
    """Answer to GET sessions/{id}/output?from=n (6.7). `from` is zero-based (decision 23)."""

    session: SessionId
    epoch: Uint
    from_: Uint = field(name="from")
    tokens: tuple[Uint, ...]
    final: bool
    finish: Action | UnsetType = UNSET
    reason: str | UnsetType = UNSET  # decision 83
    stats: SpeculationStats | UnsetType = field(default=UNSET, name="sdcpd_stats")  # ours, on the final page
    logprobs: tuple[LogprobsEntry, ...] | UnsetType = field(
        default=UNSET, name="sdcpd_logprobs"
    )  # decision 114: one entry a token, see protocol/logprobs.py


class Event(Message, frozen=True, kw_only=True):
    """POST events: verifier to router (6.5.2; decisions 49, 110, 111)."""

    session: SessionId
    epoch: Uint
    kind: Action
    committed: Uint
    digest: Hash32
    round: Uint | UnsetType = UNSET
    seq: Uint | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class Policy(Message, frozen=True, kw_only=True):
    """POST sessions/{id}/policy: a new sampling profile from a round on (6.6)."""

    session: SessionId
    from_round: Uint
    sampling: Sampling
