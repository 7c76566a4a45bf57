"""Output pages: committed tokens by stable index, and the final page (draft 6.7; decisions 23, 39)."""

from collections.abc import Sequence

from msgspec import UNSET

from sdcpd.protocol.logprobs import entries_of
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
    logprobs: Sequence[bytes] | None = None,
) -> Output | None:
    """The page that starts at index `from_`, of at most `limit` tokens, or None when the caller must wait.

    `known` is the durable output. A caller ahead of it waits, as if nothing were available (decision 39). Only the
    page that reaches the last token of a closed session is final. `logprobs` are the entries of the first tokens where
    the session was opened with them (114); what they lack is not to be had.
    """
    if from_ > len(known):
        return None
    tokens = tuple(known[from_ : from_ + limit])
    final = state in (State.FINISHED, State.FAILED) and from_ + len(tokens) == len(known)
    entries = UNSET if logprobs is None else entries_of(logprobs, from_, len(tokens))
    if not final:
        if not tokens:
            return None
        return Output(session=session, epoch=epoch, from_=from_, tokens=tokens, final=False, logprobs=entries)
    return Output(
        session=session,
        epoch=epoch,
        from_=from_,
        tokens=tokens,
        final=True,
        finish=Action.FINISH if state is State.FINISHED else Action.FAIL,
        reason=reason if reason is not None else UNSET,
        stats=stats,
        logprobs=entries,
    )
