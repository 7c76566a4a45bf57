"""Settings of the drafter role; the `[drafter]` table."""

from typing import Annotated

from msgspec import Meta, Struct, field

from sdcpd.drafting.settings import (
    DraftModelSettings,
    HybridSettings,
    LengthSettings,
    LookupSettings,
    Method,
    SuffixSettings,
)


class DrafterSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[drafter]`. Bounds keep one node's memory finite and its peers undisturbed; each names what it protects."""

    tokenizer: str | None = None
    """Folder of the target model, of which config.json and tokenizer.json are read: whose tokens are proposed. None:
    the model that this node's engine runs."""

    max_sessions: Annotated[int, Meta(ge=1, le=65536)] = 64
    """Sessions drafted at once; one more is answered 503. Load is their share of this (decision 47)."""
    session_tokens: Annotated[int, Meta(ge=1)] = 262_144
    """Prompt and output of one session that are held in memory; a longer one is refused or given up."""
    verdict_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """After this a proposal is sent again; the verifier joins it to the first (6.3 step 3), so a short one is safe."""
    silence_limit_s: Annotated[float, Meta(gt=0)] = 60.0
    """A session without a verdict for so long is dropped (decision 45)."""
    fetch_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """For each object that an assignment refers to."""
    backoff_first_s: Annotated[float, Meta(gt=0)] = 0.05
    backoff_last_s: Annotated[float, Meta(gt=0)] = 5.0
    """Waits between repeated proposals, doubled from the first to the last, with a jitter of a tenth."""
    rows_ttl_ms: Annotated[int, Meta(ge=1000, le=60_000)] = 60_000
    """Life of draft rows written for a verifier that fetches them; they are removed with the outcome of their round."""
    publish_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """For each call about them."""
    ttl_ms: Annotated[int, Meta(ge=150)] = 3_000
    """Life of a status report (decision 48)."""
    method: Method = "ngram"
    """Where drafts come from; the tables below say how."""
    lookup: LookupSettings = field(default_factory=LookupSettings)
    suffix: SuffixSettings = field(default_factory=SuffixSettings)
    draft_model: DraftModelSettings | None = None
    hybrid: HybridSettings = field(default_factory=HybridSettings)
    draft_ahead: bool = True
    """Draft the next round while one is out, where drafting takes time. Not worth it where the verifier needs the same
    cores."""
    ahead_min_hits: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """Below this share of hits a session drafts ahead in every eighth round only."""
    length: LengthSettings = field(default_factory=LengthSettings)
