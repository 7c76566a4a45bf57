"""Output of a session that ended a while ago, from its commit log (draft 6.7; decisions 39, 91).

The router keeps figures of ended sessions, not their tokens. Whoever comes late for them costs a read of the log.
"""

from msgspec import UNSET, Struct

from sdcpd.protocol.commit_log import read_records, view
from sdcpd.protocol.messages import Output
from sdcpd.protocol.problems import IllFormed, Overloaded, SessionClosed
from sdcpd.protocol.terms import Action
from sdcpd.roles.ports import Content, Missing, Ports, StoreRefused
from sdcpd.roles.router_views import RoutedSession
from sdcpd.roles.waits import within

READ_LIMIT_S = 5.0


class Ended(Struct, frozen=True):
    """What is remembered of a session that ended."""

    view: RoutedSession
    ended_at: float
    commit_log: str
    record: str | None


async def ended_page(
    ports: Ports, ref: str, session: bytes, ended: RoutedSession, from_: int, wait_s: float, limit_tokens: int
) -> Output:
    """The page from `from_` on. A caller ahead of the end waits for `wait_s`, as if nothing were available.

    Raises SessionClosed when the log is gone, damaged, or shorter than what readers were given, and Overloaded when it
    cannot be read now.
    """
    content = await within(READ_LIMIT_S, lambda: ports.objects.read_log(ref))
    if isinstance(content, Missing):
        raise SessionClosed("the session ended long ago; its commit log is gone")
    if isinstance(content, StoreRefused) and content.status < 500:
        raise SessionClosed(f"the session has ended and its commit log cannot be read: {content.detail}")
    if not isinstance(content, Content):
        raise Overloaded("the commit log cannot be read now", retry_after_s=1)
    try:
        seen = view(record for record, _ in read_records(content.octets))
    except IllFormed as error:
        raise SessionClosed(f"the session has ended and its commit log is damaged: {error.detail}") from error
    known = tuple(token for commit in seen.commits for token in commit.emitted)
    if len(known) < ended.committed_tokens:
        raise SessionClosed("the session has ended and its commit log has lost records: store fault")
    tokens = known[from_ : from_ + limit_tokens]
    final = from_ + len(tokens) == len(known)
    if not tokens and not final:
        await ports.clock.sleep_until(ports.clock.now() + wait_s)
    finished = ended.state == "finished"
    return Output(
        session=session,
        epoch=ended.epoch,
        from_=from_,
        tokens=tokens,
        final=final,
        finish=UNSET if not final else Action.FINISH if finished else Action.FAIL,
        reason=UNSET if not final or ended.reason is None else ended.reason,
    )
