"""Output pages: committed tokens by stable index, and the final page (draft 6.7; decisions 23, 39)."""

from collections.abc import Sequence

from msgspec import UNSET

from sdcpd.protocol.messages import Output, SpeculationStats
from sdcpd.protocol.terms import Action, State


def page(
    known: Sequence[int],
    from_: int,
    *,
    limit: int,
    session: bytes,
    epoch: int,
    state: State,
    reason: str | None,
    stats: SpeculationStats,
) -> Output | None:
    """The page that starts at index `from_`, of at most `limit` tokens, or None when the caller must wait.

    `known` is the durable output. A caller ahead of it waits, as if nothing were available (decision 39). Only the
    page that reaches the last token of a closed session is final.
    """
    if from_ > len(known):
        return None
    tokens = tuple(known[from_ : from_ + limit])
    final = state in (State.FINISHED, State.FAILED) and from_ + len(tokens) == len(known)
    if not final:
        return Output(session=session, epoch=epoch, from_=from_, tokens=tokens, final=False) if tokens else None
    return Output(
        session=session,
        epoch=epoch,
        from_=from_,
        tokens=tokens,
        final=True,
        finish=Action.FINISH if state is State.FINISHED else Action.FAIL,
        reason=reason if reason is not None else UNSET,
        stats=stats,
    )
