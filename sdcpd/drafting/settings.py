"""Settings of the draft sources and of the choice of M (each floor declares its own; node/config.py composes them)."""

import hashlib
from typing import Annotated, Literal

from msgspec import Meta, Struct

from sdcpd.protocol.terms import M_MAX_LIMIT


class LookupSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt lookup: draft what followed the last tokens when they stood earlier in the prompt or the output.

    The names are those that operators know from other engines. An n-gram of `prompt_lookup_max` tokens is looked for
    first, then shorter ones down to `prompt_lookup_min`.
    """

    method: Literal["ngram"] = "ngram"
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


class LengthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choice of M (draft 6.2)."""

    ema_alpha: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1
    """Weight of the newest round in the estimate of alpha."""
    cost_ema_alpha: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.05
    """Weight of the newest verdict in the estimates of t_d and t_v."""
    row_cost_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.02
    """Cost of one more proposed token as a share of the fixed cost of a round, until it has been measured. 0 is the
    draft's own assumption: then a source whose tokens are free always proposes as many as it may."""


def method_digest(settings: LookupSettings) -> bytes:
    """What stands for the SHA-256 of the draft model's weights when there is none, 32 octets (decision 10).

    A domain tag, the method, and the parameters that decide what it drafts, so that `drafters` of a contract can
    permit a lookup drafter by name like any model. Bounds on M and on memory are left out: they are the operator's.
    """
    text = f"{settings.method}\x00{settings.prompt_lookup_min}\x00{settings.prompt_lookup_max}"
    return hashlib.sha256(b"SDCPD-DRAFT-METHOD-1\x00" + text.encode()).digest()
