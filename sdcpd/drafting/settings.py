"""Settings of the draft sources and of the choice of M (each floor declares its own; node/config.py composes them)."""

import hashlib
from typing import Annotated, Literal

from msgspec import Meta, Struct

from sdcpd.engine.settings import EngineSettings
from sdcpd.protocol.terms import M_MAX_LIMIT

Method = Literal["draft_model", "ngram", "suffix", "frequency_hybrid"]
"""Where drafts come from."""


class LookupSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt lookup: draft what followed the last tokens when they stood earlier in the prompt or the output.

    The names are those that operators know from other engines. An n-gram of `prompt_lookup_max` tokens is looked for
    first, then shorter ones down to `prompt_lookup_min`.
    """

    prompt_lookup_min: Annotated[int, Meta(ge=1, le=32)] = 2
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=32)] = 5
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=M_MAX_LIMIT)] = M_MAX_LIMIT
    """Our own bound on M. The contract's `m_max` and the verdicts' `m_cap` bind as well, so it rarely needs setting."""
    history_tokens: Annotated[int, Meta(ge=64, le=1 << 20)] = 32_768
    """How far back a session is indexed. Bounds memory (about 0.7 KiB a token) and the time of one re-indexing."""

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}"
            )


class SuffixSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Suffix decoding: what followed the longest known ends of the context, by frequency. Names as in other engines,
    where they carry the prefix suffix_decoding_."""

    max_tree_depth: Annotated[int, Meta(ge=2, le=128)] = 24
    """Tokens that a match is followed back; longer ones are all alike. (The name is that of other engines, which keep
    a tree.)"""
    max_spec_factor: Annotated[float, Meta(gt=0.0, le=64.0)] = 4.0
    """Longest draft, in matched tokens."""
    min_token_prob: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """A draft ends where the chance that all of it is right would fall below this, by frequency."""
    max_cached_requests: Annotated[int, Meta(ge=0, le=1 << 20)] = 10_000
    """Outputs of ended sessions that are remembered; 0: none."""
    max_cached_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 262_144
    """Their tokens. Bounds memory: 0.13 to 0.35 KiB a token."""
    history_tokens: Annotated[int, Meta(ge=64, le=1 << 20)] = 32_768
    """How far back a session's own text is indexed; as many octets a token."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=M_MAX_LIMIT)] = M_MAX_LIMIT
    corpus: str | None = None
    """A file of texts to draft from beside: JSON lines, each an array of tokens or a text. Read at the start."""
    max_corpus_tokens: Annotated[int, Meta(ge=1, le=1 << 22)] = 262_144
    """A larger corpus is refused at the start rather than cut."""


class DraftModelSettings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A draft model: [engine]'s settings for a model of its own, and how it samples under acceptance rule 2.

    It samples from what is left of its distribution after these; without a value the session's own counts. The rows it
    publishes are exactly what it sampled from, so none of this can change what the target's answers are like.
    """

    kv_cache_share: Annotated[float, Meta(gt=0, le=0.95)] = 0.2
    temperature_milli: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=256)] = 64
    """Entries of a row, so that it travels inside its proposal (decisions 54, 101)."""
    top_p_milli: Annotated[int, Meta(ge=0, le=1000)] | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=M_MAX_LIMIT)] = M_MAX_LIMIT
    max_batch_tokens: Annotated[int, Meta(ge=16, le=1 << 16)] = 1024
    """Tokens of one pass over all sessions."""
    prefill_chunk_tokens: Annotated[int, Meta(ge=16, le=1 << 16)] = 256
    """How much of one session's prompt may delay the drafts of others."""


class HybridSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a lookup's draft is verified instead of one by the model."""

    min_score: Annotated[float, Meta(ge=0.0, le=float(M_MAX_LIMIT))] | None = None
    """Expected tokens from which the lookup's draft is taken. None: where it promises more tokens a second than the
    model's draft would, by what both cost."""


class LengthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choice of M (draft 6.2)."""

    ema_alpha: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1
    """Weight of the newest round in the estimate of alpha."""
    cost_ema_alpha: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.05
    """Weight of the newest verdict in the estimates of t_d and t_v."""
    row_cost_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.02
    """Cost of one more proposed token as a share of the fixed cost of a round, until it has been measured. 0 is the
    draft's own assumption: then a source whose tokens are free always proposes as many as it may."""


def lookup_digest(settings: LookupSettings) -> bytes:
    """What stands for the SHA-256 of the draft model's weights when there is none, 32 octets (decision 10).

    A domain tag, the method, and the parameters that decide what it drafts, so that `drafters` of a contract can
    permit a lookup drafter by name like any model. Bounds on M and on memory are left out: they are the operator's.
    """
    return _method_digest("ngram", settings.prompt_lookup_min, settings.prompt_lookup_max)


def suffix_digest(settings: SuffixSettings) -> bytes:
    """The same for suffix decoding. What it remembers is left out as well: that changes all the time."""
    return _method_digest("suffix", settings.max_tree_depth, settings.max_spec_factor, settings.min_token_prob)


def hybrid_digest(suffix: SuffixSettings, model: bytes) -> bytes:
    """The same for the frequency hybrid over a draft model with this digest."""
    return _method_digest("frequency_hybrid", suffix_digest(suffix).hex(), model.hex())


def _method_digest(*parts: object) -> bytes:
    return hashlib.sha256(b"SDCPD-DRAFT-METHOD-1\x00" + "\x00".join(map(str, parts)).encode()).digest()
