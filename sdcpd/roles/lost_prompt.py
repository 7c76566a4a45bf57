"""The end of a session of which the prompt is gone (draft 6.8, 6.9; decisions 83, 106).

The directory record of a session with a long prompt holds a reference to it. A router that takes the session up reads
it there. If it cannot be had any more, because the router was away for longer than the object lives or its cache has
restarted too, nobody can open the session again or assign it: it ends. What was committed stays in its log, and often
the session is over already, as it went on at its verifier. So the log is asked first. As in failover.py all is settled
by reading: the `end` is appended by compare-and-set, and the log is read again whatever the answer was.
"""

from typing import Final

import structlog
from msgspec import UnsetType

from sdcpd.protocol.commit_log import EndRecord, write_record
from sdcpd.protocol.log_history import History, read_history
from sdcpd.protocol.problems import IllFormed
from sdcpd.protocol.terms import Action, session_path_id
from sdcpd.roles.adoption import Claimed
from sdcpd.roles.ports import Content, Missing, Ports, StoreRefused
from sdcpd.roles.router_views import RoutedSession
from sdcpd.roles.waits import within

log = structlog.get_logger(__name__)

PROMPT_LOST: Final = "prompt_lost"
CALL_LIMIT_S: Final = 5.0
TRIES: Final = 10
"""Looks at the log. A verifier that commits meanwhile wins some; a store that is away for longer must not keep all
other sessions waiting, and this one's log is left to its own limits."""
RETRY_S: Final = 0.5
"""Before the next look, where there was no answer."""


async def end_without_prompt(ports: Ports, claimed: Claimed) -> RoutedSession:
    """Close the session's log, unless it is closed, and let its verifier go. Returns how it ended."""
    record, ref = claimed.record, claimed.record.open.commit_log
    history, closing = None, False
    for _ in range(TRIES):
        content = await within(CALL_LIMIT_S, lambda: ports.objects.read_log(ref))
        if isinstance(content, Content):
            history = _history(content, claimed)
            if history is None or history.ending is not None:
                break
            closing = True
            epoch, tag = max(history.epoch, record.epoch), history.tag
            await _close(ports, ref, epoch, tag)
        elif isinstance(content, Missing) or (isinstance(content, StoreRefused) and content.status < 500):
            break
        else:
            await ports.clock.sleep_until(ports.clock.now() + RETRY_S)
    over = history is not None and history.ending is not None and not closing
    if not over:
        await within(CALL_LIMIT_S, lambda: ports.peers.cancel_session(record.verifier, record.open.session))
    view = _view(claimed, history)
    (log.info if over else log.error)(
        "session found ended" if over else "session ended: its prompt is gone",
        session=view.session,
        epoch=view.epoch,
        round=view.round,
        state=view.state,
        reason=view.reason,
    )
    return view


async def _close(ports: Ports, ref: str, epoch: int, tag: str) -> None:
    """Append the `end`. Whatever the answer is, the next look at the log tells."""
    end = write_record(EndRecord(epoch=epoch, end=Action.FAIL, reason=PROMPT_LOST))
    await within(CALL_LIMIT_S, lambda: ports.objects.append(ref, end, epoch=epoch, if_match=tag))


def _history(content: Content, claimed: Claimed) -> History | None:
    """What the log says, None when it is damaged."""
    try:
        return read_history(content.octets, claimed.record.open.contract, None)
    except IllFormed:
        return None


def _view(claimed: Claimed, history: History | None) -> RoutedSession:
    record = claimed.record
    finish, reason, detail = Action.FAIL, PROMPT_LOST, "the object that holds its prompt cannot be read any more"
    ending = None if history is None else history.ending
    if ending is not None and ending.reason != PROMPT_LOST:
        finish, reason, detail = ending.finish, ending.reason or "", ""
    state = "finished" if finish is Action.FINISH else "cancelled" if reason == "cancelled" else "failed"
    return RoutedSession(
        session=session_path_id(record.open.session),
        model=record.model,
        state=state,
        epoch=record.epoch if history is None else max(record.epoch, history.epoch),
        round=0 if history is None else history.round,
        prompt_tokens=0,  # nobody knows
        committed_tokens=0 if history is None else len(history.tokens),
        max_new=record.open.contract.max_new,
        verifier=record.verifier,
        drafter=None if isinstance(record.drafter, UnsetType) else record.drafter,
        speculation=record.speculation,
        traffic_class=record.traffic_class or None,
        age_s=0.0,
        reason=reason or None,
        detail=detail or None,
    )
