"""A router that starts takes up the sessions which the directory says are its own (decisions 106, 111).

Whose they are stands in the record: the router that the verifiers send their events to. Taking one up begins with the
record, in which the incarnation is raised by compare-and-set. So a router that runs on elsewhere under the same name,
as one that was only paused, finds its late assignments refused; and of two that start at once only one has the session.
"""

from collections.abc import Callable

import structlog
from msgspec import Struct
from msgspec.structs import replace

from sdcpd.cache.refs import record_reference
from sdcpd.protocol.directory import DirectoryRecord, read_directory_record
from sdcpd.protocol.encoding import encode
from sdcpd.protocol.problems import Problem
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.ports import Appended, Content, Listed, Missing, Ports, StoreRefused, TagMismatch, Unreachable
from sdcpd.roles.waits import within

log = structlog.get_logger(__name__)

CALL_LIMIT_S = 10.0
"""One page or one record, which holds a whole prompt."""
RETRY_FIRST_S = 0.5
RETRY_LAST_S = 5.0
"""The directory is asked until it answers: sessions wait there, and the cache may start after the router."""
TRIES = 5
"""Of one record; then the session is left where it is, and its verifier's own limits end it (82)."""


class Claimed(Struct, frozen=True):
    """A session that is this router's now. `record` is as it stands at `ref`, with the tag `tag`."""

    record: DirectoryRecord
    ref: str
    tag: str


async def claim_sessions(
    ports: Ports, *, instance: str, cache: str, known: Callable[[bytes], bool], take: Callable[[Claimed], None]
) -> None:
    """Go through the directory once. `known` tells sessions that were begun since the start; `take` gets all others."""
    after: bytes | None = None
    claimed = 0
    while True:
        page = await _page(ports, cache, after)
        for listed in page.records:
            after = listed.session
            if known(listed.session):
                continue
            ref = record_reference(cache, None, listed.session)
            if listed.tag is None:
                await _remove(ports, ref, listed.session, "damaged in its store")
                continue
            one = await _claim(ports, ref, listed.session, instance)
            if one is not None:
                claimed += 1
                take(one)
        if not page.more:
            break
    log.info("directory read", sessions=claimed)


async def _page(ports: Ports, cache: str, after: bytes | None) -> Listed:
    wait_s = RETRY_FIRST_S
    while True:
        page = await within(CALL_LIMIT_S, lambda: ports.objects.list_records(cache, None, after))
        if isinstance(page, Listed):
            return page
        log.info("the directory does not answer yet", detail=_words(page))
        await ports.clock.sleep_until(ports.clock.now() + wait_s)
        wait_s = min(2 * wait_s, RETRY_LAST_S)


async def _claim(ports: Ports, ref: str, session: bytes, instance: str) -> Claimed | None:
    """Make one session ours. None: it is another router's, is gone, or cannot be had."""
    bound = log.bind(session=session_path_id(session))
    for _ in range(TRIES):
        content = await within(CALL_LIMIT_S, lambda: ports.objects.read_record(ref))
        if isinstance(content, Missing):
            return None
        if isinstance(content, Content):
            try:
                record = read_directory_record(content.octets)
            except Problem as problem:
                await _remove(ports, ref, session, problem.detail)
                return None
            if record.open.router != instance or record.open.session != session:
                return None
            raised, tag = replace(record, incarnation=record.incarnation + 1), content.tag
            outcome = await within(CALL_LIMIT_S, lambda: ports.objects.write_record(ref, encode(raised), tag))  # noqa: B023 - called here
            if isinstance(outcome, Appended):
                return Claimed(record=raised, ref=ref, tag=outcome.tag)
            if isinstance(outcome, TagMismatch):
                bound.info("another router has taken the session up")
                return None
            content = outcome
        bound.info("directory record not claimed yet", detail=_words(content))
        await ports.clock.sleep_until(ports.clock.now() + RETRY_FIRST_S)
    bound.error("session left alone: its directory record cannot be had")
    return None


async def _remove(ports: Ports, ref: str, session: bytes, detail: str) -> None:
    log.error("directory record cannot be read; it is removed", session=session_path_id(session), detail=detail)
    await within(CALL_LIMIT_S, lambda: ports.objects.remove_record(ref))


def _words(outcome: StoreRefused | Unreachable) -> str:
    return outcome.detail if isinstance(outcome, StoreRefused) else outcome.reason
