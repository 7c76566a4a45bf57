"""A router that starts takes up the sessions which the directory says are its own (decisions 106, 111).

Whose they are stands in the record: the router that the verifiers send their events to. Taking one up begins with the
record, in which the incarnation is raised by compare-and-set. So a router that runs on elsewhere under the same name,
as one that was only paused, finds its late assignments refused; and of two that start at once only one has the session:
a nonce makes their claims differ, since a store takes octets that it holds already for done.
"""

from collections.abc import Awaitable, Callable

import structlog
from msgspec import Struct
from msgspec.structs import replace

from sdcpd.cache.refs import record_reference
from sdcpd.protocol.directory import DirectoryRecord, read_directory_record
from sdcpd.protocol.encoding import decode_tokens, encode
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
CONTESTED_TRIES = 5
"""Of a record that others keep changing under the same incarnation; then its verifier's own limits end the session."""


class Claimed(Struct, frozen=True):
    """A session that is this router's now. `record` is as it stands at `ref`, with the tag `tag`. `prompt`: what its
    open holds or refers to, None where that object is gone."""

    record: DirectoryRecord
    ref: str
    tag: str
    prompt: tuple[int, ...] | None


async def claim_sessions(
    ports: Ports,
    *,
    instance: str,
    cache: str,
    known: Callable[[bytes], bool],
    take: Callable[[Claimed], None],
    lost: Callable[[Claimed], Awaitable[None]],
) -> None:
    """Go through the directory once. `known` tells sessions that were begun since the start; `take` gets all others,
    `lost` those of which the prompt cannot be had any more."""
    after: bytes | None = None
    claimed = 0
    nonces = ports.randomness.stream("claims")
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
            one = await _claim(ports, ref, listed.session, instance, nonces.octets(8).hex())
            if one is not None:
                claimed += 1
                if one.prompt is None:
                    await lost(one)
                else:
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


async def _claim(ports: Ports, ref: str, session: bytes, instance: str, nonce: str) -> Claimed | None:
    """Make one session ours. None: it is another router's, or gone. A store that does not answer is asked until it
    does, as readers of the session wait for no less.

    A record that changed meanwhile is another router's if its incarnation rose, and `nonce` is not in it. If it did
    not, a write of our earlier life was still on its way.
    """
    bound = log.bind(session=session_path_id(session))
    contested, incarnation, wait_s = 0, None, RETRY_FIRST_S
    while True:
        content = await within(CALL_LIMIT_S, lambda: ports.objects.read_record(ref))
        if isinstance(content, Missing):
            return None
        if isinstance(content, Content):
            record, tag = await _ours(ports, ref, session, instance, content.octets), content.tag
            if record is None:
                return None
            if record.claim == nonce:
                return await _claimed(ports, record, ref, tag)  # the answer to our write was lost
            incarnation = record.incarnation if incarnation is None else incarnation
            if record.incarnation != incarnation or contested >= CONTESTED_TRIES:
                bound.info("another router has taken the session up")
                return None
            raised = replace(record, incarnation=incarnation + 1, claim=nonce)
            outcome = await within(CALL_LIMIT_S, lambda: ports.objects.write_record(ref, encode(raised), tag))  # noqa: B023 - called here
            if isinstance(outcome, Appended):
                return await _claimed(ports, raised, ref, outcome.tag)
            if isinstance(outcome, TagMismatch):
                contested += 1
                continue
            content = outcome
        if isinstance(content, StoreRefused) and content.status < 500:
            bound.error("session left alone: its directory record cannot be had", detail=content.detail)
            return None
        bound.info("directory record not claimed yet", detail=_words(content))
        await ports.clock.sleep_until(ports.clock.now() + wait_s)
        wait_s = min(2 * wait_s, RETRY_LAST_S)


async def _claimed(ports: Ports, record: DirectoryRecord, ref: str, tag: str) -> Claimed:
    return Claimed(record=record, ref=ref, tag=tag, prompt=await _prompt(ports, record))


async def _prompt(ports: Ports, record: DirectoryRecord) -> tuple[int, ...] | None:
    """The prompt of a session. One that is published is read; a cache that does not answer is asked until it does."""
    prompt, wait_s = record.open.prompt, RETRY_FIRST_S
    if not isinstance(prompt, str):
        return prompt
    bound = log.bind(session=session_path_id(record.open.session))
    while True:
        content = await within(CALL_LIMIT_S, lambda: ports.objects.fetch(prompt))
        match content:
            case Content(octets=octets):
                try:
                    return decode_tokens(octets)
                except Problem as problem:
                    bound.error("the object of the prompt cannot be read", detail=problem.detail)
                    return None
            case Missing():
                return None
            case StoreRefused(status=status, detail=detail) if status < 500:
                bound.error("the object of the prompt cannot be had", detail=detail)
                return None
            case _:
                bound.info("prompt not read yet", detail=_words(content))
        await ports.clock.sleep_until(ports.clock.now() + wait_s)
        wait_s = min(2 * wait_s, RETRY_LAST_S)


async def _ours(ports: Ports, ref: str, session: bytes, instance: str, octets: bytes) -> DirectoryRecord | None:
    """What a record says, None if it is another router's. One that nobody can read is removed."""
    try:
        record = read_directory_record(octets)
    except Problem as problem:
        await _remove(ports, ref, session, problem.detail)
        return None
    return record if record.open.router == instance and record.open.session == session else None


async def _remove(ports: Ports, ref: str, session: bytes, detail: str) -> None:
    log.error("directory record cannot be read; it is removed", session=session_path_id(session), detail=detail)
    await within(CALL_LIMIT_S, lambda: ports.objects.remove_record(ref))


def _words(outcome: StoreRefused | Unreachable) -> str:
    return outcome.detail if isinstance(outcome, StoreRefused) else outcome.reason
