"""Settings of the router role: the `[router]` table. Models and ladders are tables of their own, put in by the node."""

from typing import Annotated

from msgspec import Meta, Struct

from sdcpd.protocol.affinity import Affinity
from sdcpd.protocol.ladder import SHIPPED
from sdcpd.protocol.placement_values import Patience
from sdcpd.protocol.terms import Hash32

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class RoutedModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that clients may name.

    Verifiers serve it when they report this tokenizer digest and, where `target` is given, this model digest. Without
    a `target` any model with that tokenizer is taken to be it, which suits a fleet of one model. `ladder` names the
    ladder of its sessions, None for the router's default.
    """

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    tokenizer: Hash32
    target: Hash32 | None = None
    ladder: str | None = None


class RouterSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[router]`. Deadlines are those of one call; how often a call is repeated stands in `[router.patience]`."""

    max_sessions: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Sessions in the care of this router, those being closed included; one more is refused as overloaded. The router
    holds prompt and output of each."""
    default_max_new_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Longest answer to a request that names no limit. A verifier reserves what a session can need when it opens, so
    an unlimited one would take the whole context from all others."""
    default_ladder: str = SHIPPED
    """`[ladder.NAME]` for sessions of models that name none."""
    inline_prompt_tokens: Annotated[int, Meta(ge=0, le=786_432)] = 4096
    """A longer prompt is published once, as an object of the cache, and messages refer to it (draft 5.2). Shorter ones
    go within them: 16 KiB a message cost less than a further write and two reads. The most still fits into the 4 MiB
    of a message, whatever its token ids."""
    max_instances: Annotated[int, Meta(ge=1, le=65536)] = 1024
    """Instances known at once; one more status is answered 503."""
    ended_sessions: Annotated[int, Meta(ge=0, le=65536)] = 1024
    """Ended sessions remembered for `sdcpctl` and for late events: figures only, no tokens."""
    ended_retention_s: Seconds = 600.0
    """How long."""
    max_readers: Annotated[int, Meta(ge=1, le=65536)] = 1024
    """Polls for output that may wait at the router, of all sessions; one more is answered 503."""
    unread_limit_s: Seconds = 30.0
    """A session taken up after a restart is cancelled when nobody has read its output for so long (decision 106)."""
    open_deadline_s: Seconds = 60.0
    """One session-open, which is answered after the prefill of the prompt."""
    name_deadline_s: Seconds = 5.0
    """One PUT drafter; a verifier answers it within 2 s or with 503 (decision 43)."""
    assign_deadline_s: Seconds = 2.0
    """One POST assignments; a drafter answers it before it works (decision 44)."""
    publish_deadline_s: Seconds = 5.0
    """One write of a `committed_tokens` or `prompt` object."""
    log_deadline_s: Seconds = 5.0
    """One read of a commit log, or one fence."""
    close_deadline_s: Seconds = 5.0
    """One DELETE of a session or assignment."""
    read_grace_s: Seconds = 5.0
    """What an output poll may take beyond the wait it asks for."""
    tokens_ttl_ms: Annotated[int, Meta(ge=1000, le=86_400_000)] = 600_000
    """Life of a `committed_tokens` object, which its drafter reads at once, with retries; and of a `prompt` object, the
    life of which is prolonged while its session lives."""
    affinity: Affinity = Affinity()
    """How much it counts where a conversation was before, against load."""
    patience: Patience = Patience()
