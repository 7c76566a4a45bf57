"""The cache role: one queue, one sync for many, who may write what, what a caller that leaves does not undo."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sdcpd.cache.files import StateInUse
from sdcpd.cache.log_requests import LogContent
from sdcpd.cache.log_store import LogStore
from sdcpd.cache.object_store import object_tag
from sdcpd.cache.refs import LogName, ObjectKind, ObjectName, RecordName
from sdcpd.cache.settings import KIB, MIB, CacheSettings
from sdcpd.protocol.commit_log import log_tag
from sdcpd.protocol.problems import (
    Conflict,
    Forbidden,
    IllFormed,
    NoRoom,
    Overloaded,
    PreconditionFailed,
    StaleEpoch,
    TooLarge,
    UnknownResource,
)
from sdcpd.protocol.terms import Action
from sdcpd.roles.cache import AppendUnsettled, Cache
from sdcpd.roles.object_cache import ScopePurged
from sdcpd.roles.ports import Peer, Peers, Ports, Workers
from tests.cache.log_tools import EMPTY, commit, end, fence
from tests.cache.sim_disk import SimDisk
from tests.support.ports import CountingMeters, InlineWorkers, MemoryLogs, RecordedPeers, SeededRandomness, TrioClock

T = TypeVar("T")

LOG = LogName(scope=None, session=bytes(16))
OTHER = LogName(scope=None, session=bytes(15) + b"\1")
RECORD = RecordName(scope=None, session=bytes(16))
TOKENS = ObjectName(scope=None, session=bytes(16), epoch=1, round=0, kind=ObjectKind.TOKENS)
ROWS = ObjectName(scope=None, session=bytes(16), epoch=1, round=1, kind=ObjectKind.Q)

VERIFIER, ROUTER, DRAFTER, CACHE, OPERATOR, CLIENT = (
    Peer(uri=f"https://h.example/{role}/", role=role)
    for role in ("verifier", "router", "drafter", "cache", "operator", "client")
)


class GatedWorkers:
    """Runs functions inline, but holds writes of batches back while the gate is shut."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.gate.set()

    def shut(self) -> None:
        self.gate = trio.Event()

    async def run(self, function: Callable[..., T], *args: object) -> T:
        if getattr(function, "__name__", "") == LogStore.write_batch.__name__:
            await self.gate.wait()
        return function(*args)

    async def run_short(self, function: Callable[..., T], *args: object) -> T:
        return await self.run(function, *args)


def ports(workers: Workers, meters: CountingMeters) -> Ports:
    return Ports(
        clock=TrioClock(),
        randomness=SeededRandomness(),
        workers=workers,
        meters=meters,
        peers=cast(Peers, RecordedPeers()),
        objects=MemoryLogs(),
    )


class Running:
    def __init__(self, cache: Cache, disk: SimDisk, workers: GatedWorkers, meters: CountingMeters) -> None:
        self.cache, self.disk, self.workers, self.meters = cache, disk, workers, meters

    async def tag(self, name: LogName = LOG) -> str:
        return (await self.cache.read_log(ROUTER, name)).tag


@asynccontextmanager
async def running(disk: SimDisk | None = None, settings: CacheSettings | None = None) -> AsyncIterator[Running]:
    disk = SimDisk() if disk is None else disk
    workers, meters = GatedWorkers(), CountingMeters()
    cache = Cache(settings or CacheSettings(), ports(workers, meters), disk)
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        yield Running(cache, disk, workers, meters)
        nursery.cancel_scope.cancel()


async def test_a_session_s_log_from_beginning_to_end() -> None:
    async with running() as r:
        assert await r.cache.create_log(VERIFIER, LOG, 1) == EMPTY
        first = commit(1, 1)
        assert await r.cache.append_log(VERIFIER, LOG, 1, first, EMPTY) == log_tag([first])
        await r.cache.append_log(ROUTER, LOG, 2, fence(2), log_tag([first]))
        with pytest.raises(StaleEpoch):
            await r.cache.append_log(VERIFIER, LOG, 1, commit(1, 2), log_tag([first]))
        with pytest.raises(PreconditionFailed):
            await r.cache.append_log(VERIFIER, LOG, 2, commit(2, 2), log_tag([first]))
        await r.cache.append_log(VERIFIER, LOG, 2, end(2), await r.tag())
        with pytest.raises(Conflict):
            await r.cache.append_log(VERIFIER, LOG, 2, commit(2, 2), await r.tag())
        assert (await r.cache.read_log(VERIFIER, LOG)).octets == first + fence(2) + end(2)
        assert r.meters.counts["log_records_total"] == 3
        assert r.cache.snapshot().records == 3
    r.disk.crash()
    async with running(r.disk) as again:
        assert (await again.cache.read_log(VERIFIER, LOG)).octets == first + fence(2) + end(2)


async def test_appends_that_wait_share_one_sync() -> None:
    """Decision 109."""
    async with running() as r:
        names = [LogName(scope=None, session=bytes([number]) * 16) for number in range(32)]
        for name in names:
            await r.cache.create_log(VERIFIER, name, 1)
        syncs = r.disk.syncs
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(r.cache.append_log, VERIFIER, name, 1, commit(1, 1), EMPTY)
        assert r.disk.syncs == syncs + 1
        r.workers.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(r.cache.append_log, VERIFIER, names[0], 1, commit(1, 2), log_tag([commit(1, 1)]))
            await wait_all_tasks_blocked()
            for name in names[1:]:
                nursery.start_soon(r.cache.append_log, VERIFIER, name, 1, commit(1, 2), log_tag([commit(1, 1)]))
            await wait_all_tasks_blocked()
            r.workers.gate.set()
        assert r.disk.syncs == syncs + 3, "the one under way, and all that gathered behind it"


async def test_an_append_whose_caller_left_is_carried_out() -> None:
    async with running() as r:
        await r.cache.create_log(VERIFIER, LOG, 1)
        for queued_only in (False, True):
            r.workers.shut()
            async with trio.open_nursery() as nursery:
                if queued_only:
                    nursery.start_soon(r.cache.create_log, VERIFIER, OTHER, 1)
                    await wait_all_tasks_blocked()
                with trio.CancelScope() as scope:
                    nursery.start_soon(_cancel_when_blocked, scope)
                    tag = log_tag([commit(1, 1)]) if queued_only else EMPTY
                    await r.cache.append_log(VERIFIER, LOG, 1, commit(1, 1 + queued_only), tag)
                assert scope.cancelled_caught
                r.workers.gate.set()
            assert (await r.cache.read_log(VERIFIER, LOG)).octets == commit(1, 1) + commit(1, 2) * queued_only


async def _cancel_when_blocked(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()


async def test_a_read_waits_for_the_appends_before_it() -> None:
    """So that a caller whose answer was lost finds its record, not a log that is about to change (decision 64)."""
    async with running() as r:
        await r.cache.create_log(VERIFIER, LOG, 1)
        await r.cache.create_log(VERIFIER, OTHER, 1)
        r.workers.shut()
        found: list[LogContent] = []

        async def read() -> None:
            found.append(await r.cache.read_log(VERIFIER, LOG))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(r.cache.append_log, VERIFIER, LOG, 1, commit(1, 1), EMPTY)
            await wait_all_tasks_blocked()
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            assert not found
            assert (await r.cache.read_log(VERIFIER, OTHER)).octets == b"", "others do not wait"
            r.workers.gate.set()
        assert found == [LogContent(octets=commit(1, 1), tag=log_tag([commit(1, 1)]))]


async def test_a_repeated_append_is_refused_and_leaves_one_record() -> None:
    """Bug 22."""
    async with running() as r:
        await r.cache.create_log(VERIFIER, LOG, 1)
        await r.cache.append_log(VERIFIER, LOG, 1, commit(1, 1), EMPTY)
        with pytest.raises(PreconditionFailed):
            await r.cache.append_log(VERIFIER, LOG, 1, commit(1, 1), EMPTY)
        assert (await r.cache.read_log(VERIFIER, LOG)).octets == commit(1, 1)


async def test_the_whole_log_may_be_put_again_with_more() -> None:
    """Decision 87: "whole-object PUT from the writer's own cached copy"; 5.3: one that "does not begin with the stored
    octets is 412"."""
    async with running() as r:
        first, second = commit(1, 1), commit(1, 2)
        with pytest.raises(UnknownResource):
            await r.cache.replace_log(VERIFIER, LOG, 1, first, EMPTY)
        await r.cache.create_log(VERIFIER, LOG, 1)
        tag = await r.cache.replace_log(VERIFIER, LOG, 1, first, EMPTY)
        assert await r.cache.replace_log(VERIFIER, LOG, 1, first, tag) == tag, "nothing added, nothing changed"
        for content, if_match in (
            (first + second, EMPTY),
            (commit(1, 1, 99) + second, tag),
            (first[:-1], tag),
            (b"", tag),
            (commit(1, 1, 99) + second, log_tag([commit(1, 1, 99)])),
        ):
            with pytest.raises(PreconditionFailed):
                await r.cache.replace_log(VERIFIER, LOG, 1, content, if_match)
        with pytest.raises(IllFormed):
            await r.cache.replace_log(VERIFIER, LOG, 1, first + second[:-1], tag)
        with pytest.raises(Forbidden):
            await r.cache.replace_log(ROUTER, LOG, 1, first + second, tag)
        assert await r.cache.replace_log(VERIFIER, LOG, 1, first + second, tag) == log_tag([first, second])


@pytest.mark.parametrize(
    ("body", "writers"),
    [
        (commit(1, 1), {"verifier"}),
        (commit(1, 1, action=Action.FINISH), {"verifier"}),
        (fence(1), {"router"}),
        (end(1), {"verifier", "router"}),
        (commit(1, 1) + end(1), {"verifier"}),
        (fence(1) + end(1), {"router"}),
        (commit(1, 1) + fence(1), set()),
    ],
)
async def test_who_may_append_what(body: bytes, writers: set[str]) -> None:
    """Decision 112: commits are verifiers', fences routers', ends both's, drafters have no log; all else 403."""
    async with running() as r:
        for number, peer in enumerate((VERIFIER, ROUTER, DRAFTER, CACHE, OPERATOR, CLIENT)):
            name = LogName(scope=None, session=bytes([number]) * 16)
            await r.cache.create_log(VERIFIER, name, 1)
            if peer.role in writers:
                await r.cache.append_log(peer, name, 1, body, EMPTY)
            else:
                with pytest.raises(Forbidden):
                    await r.cache.append_log(peer, name, 1, body, EMPTY)
                assert await r.tag(name) == EMPTY


async def test_who_may_begin_read_and_remove_a_log() -> None:
    async with running() as r:
        for peer in (ROUTER, DRAFTER, CACHE, OPERATOR, CLIENT):
            with pytest.raises(Forbidden):
                await r.cache.create_log(peer, LOG, 1)
        await r.cache.create_log(ROUTER, LOG, 2, fence(2))
        for peer in (VERIFIER, ROUTER, DRAFTER, CACHE, CLIENT):
            with pytest.raises(Forbidden):
                await r.cache.remove_log(peer, LOG)
        for peer in (DRAFTER, CACHE, OPERATOR, CLIENT):
            with pytest.raises(Forbidden):
                await r.cache.read_log(peer, LOG)
        await r.cache.remove_log(OPERATOR, LOG)
        await r.cache.remove_log(OPERATOR, LOG)
        with pytest.raises(UnknownResource):
            await r.cache.read_log(VERIFIER, LOG)


async def test_who_may_write_read_and_remove_objects() -> None:
    async with running() as r:
        for peer in (VERIFIER, ROUTER, DRAFTER, CACHE, OPERATOR, CLIENT):
            for name, writer in ((TOKENS, "router"), (ROWS, "drafter")):
                if peer.role == writer:
                    await r.cache.create_object(peer, name, b"\x80")
                else:
                    with pytest.raises(Forbidden):
                        await r.cache.create_object(peer, name, b"\x80")
        for peer in (VERIFIER, ROUTER, DRAFTER):
            assert (await r.cache.read_object(peer, TOKENS)).octets == b"\x80"
        for peer in (CACHE, OPERATOR, CLIENT):
            with pytest.raises(Forbidden):
                await r.cache.read_object(peer, TOKENS)
        with pytest.raises(Forbidden):
            await r.cache.remove_object(VERIFIER, TOKENS)
        await r.cache.remove_object(OPERATOR, TOKENS)
        await r.cache.remove_object(DRAFTER, ROWS)
        with pytest.raises(UnknownResource):
            await r.cache.read_object(VERIFIER, TOKENS)


async def test_directory_records_are_the_routers_alone() -> None:
    """Decision 106: "class log, routers only, listable"; they hold prompts."""
    async with running() as r:
        for peer in (VERIFIER, DRAFTER, CACHE, OPERATOR, CLIENT):
            with pytest.raises(Forbidden):
                await r.cache.write_record(peer, RECORD, b"x", None)
            with pytest.raises(Forbidden):
                await r.cache.read_record(peer, RECORD)
            with pytest.raises(Forbidden):
                await r.cache.list_records(peer, None, None)
            if peer is not OPERATOR:
                with pytest.raises(Forbidden):
                    await r.cache.remove_record(peer, RECORD)
        tag = await r.cache.write_record(ROUTER, RECORD, b"x", None)
        assert await r.cache.read_record(ROUTER, RECORD) == LogContent(octets=b"x", tag=tag)
        with pytest.raises(PreconditionFailed, match="record exists"):
            await r.cache.write_record(ROUTER, RECORD, b"y", None)
        with pytest.raises(PreconditionFailed):
            await r.cache.write_record(ROUTER, RECORD, b"y", EMPTY)
        with pytest.raises(TooLarge):
            await r.cache.write_record(ROUTER, RECORD, bytes(5 * MIB), tag)
        second = await r.cache.write_record(ROUTER, RECORD, b"y", tag)
        assert await r.cache.list_records(ROUTER, None, None) == ([(RECORD, second)], False)
        assert (r.cache.snapshot().directory_records, r.cache.snapshot().logs, r.cache.snapshot().records) == (1, 0, 0)
        await r.cache.remove_record(OPERATOR, RECORD)
        await r.cache.remove_record(ROUTER, RECORD)
        with pytest.raises(UnknownResource, match="record"):
            await r.cache.read_record(ROUTER, RECORD)
    async with running(r.disk) as again:
        assert await again.cache.list_records(ROUTER, None, None) == ([], False)


async def test_records_outlive_the_process_and_are_listed_page_by_page() -> None:
    scope = b"s" * 16
    async with running() as r:
        for number in range(600):
            name = RecordName(scope=scope, session=number.to_bytes(16, "big"))
            await r.cache.write_record(ROUTER, name, b"%d" % number, None)
        await r.cache.write_record(ROUTER, RECORD, b"x", None)
    r.disk.crash()
    async with running(r.disk) as again:
        sizes: list[int] = []
        sessions: list[bytes] = []
        more = True
        while more:
            page, more = await again.cache.list_records(ROUTER, scope, sessions[-1] if sessions else None)
            sizes.append(len(page))
            sessions += [name.session for name, _ in page]
        assert sizes == [256, 256, 88]
        assert sorted(sessions) == [number.to_bytes(16, "big") for number in range(600)]
        assert len(set(sessions)) == 600


async def test_a_listing_waits_for_the_writes_before_it() -> None:
    async with running() as r:
        r.workers.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(r.cache.write_record, ROUTER, RECORD, b"x", None)
            await wait_all_tasks_blocked()
            found: list[int] = []

            async def look() -> None:
                found.append(len((await r.cache.list_records(ROUTER, None, None))[0]))

            nursery.start_soon(look)
            await wait_all_tasks_blocked()
            assert not found
            r.workers.gate.set()
        assert found == [1]


async def test_a_record_of_its_full_size_fits_a_queue_of_less() -> None:
    async with running(settings=CacheSettings(max_waiting_bytes=1 * MIB)) as r:
        await r.cache.write_record(ROUTER, RECORD, bytes(4 * MIB + 64 * KIB), None)
        assert len((await r.cache.read_record(ROUTER, RECORD)).octets) == 4 * MIB + 64 * KIB


async def test_objects_are_written_once_and_expire(autojump_clock: MockClock) -> None:
    async with running() as r:
        stored = await r.cache.create_object(ROUTER, TOKENS, b"\x81\x01", ttl_s=30)
        assert (stored.tag, stored.created) == (object_tag(b"\x81\x01"), True)
        assert not (await r.cache.create_object(ROUTER, TOKENS, b"\x81\x01", ttl_s=30)).created
        with pytest.raises(PreconditionFailed):
            await r.cache.create_object(ROUTER, TOKENS, b"\x81\x02")
        with pytest.raises(TooLarge):
            await r.cache.create_object(ROUTER, TOKENS, bytes(17 * MIB))
        await trio.sleep(29)
        await r.cache.read_object(VERIFIER, TOKENS)
        await trio.sleep(2)
        with pytest.raises(UnknownResource):
            await r.cache.read_object(VERIFIER, TOKENS)
        await trio.sleep(20)
        assert r.cache.snapshot().object_bytes == 0


async def test_a_body_must_be_records_of_the_epoch_that_was_named() -> None:
    async with running() as r:
        await r.cache.create_log(VERIFIER, LOG, 1)
        for body in (b"", b"\x01", commit(1, 1)[:-1], commit(2, 1), commit(1, 1) + b"\xff", b"\xa1\x65epoch\x20"):
            with pytest.raises(IllFormed):
                await r.cache.append_log(VERIFIER, LOG, 1, body, EMPTY)
        with pytest.raises(TooLarge):
            await r.cache.append_log(VERIFIER, LOG, 1, commit(1, 1, *range(10_000)), EMPTY)
        assert await r.tag() == EMPTY


async def test_a_full_queue_answers_at_once() -> None:
    settings = CacheSettings(max_waiting_appends=2)
    async with running(settings=settings) as r:
        await r.cache.create_log(VERIFIER, LOG, 1)
        r.workers.shut()
        async with trio.open_nursery() as nursery:
            for round_ in range(3):  # one under way, two waiting
                nursery.start_soon(_ignore_precondition, r.cache, commit(1, round_ + 1))
                await wait_all_tasks_blocked()
            with pytest.raises(Overloaded) as refused:
                await r.cache.append_log(VERIFIER, LOG, 1, commit(1, 9), EMPTY)
            assert refused.value.retry_after_s is not None
            r.workers.gate.set()
        assert r.cache.snapshot().waiting_appends == 0


async def _ignore_precondition(cache: Cache, body: bytes) -> None:
    try:
        await cache.append_log(VERIFIER, LOG, 1, body, EMPTY)
    except PreconditionFailed:
        return


async def test_too_many_octets_in_the_queue_answer_at_once() -> None:
    settings = CacheSettings(max_waiting_bytes=1 * MIB)
    async with running(settings=settings) as r:
        r.workers.shut()
        big = b"".join(commit(1, number, *range(4000)) for number in range(45))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(r.cache.create_log, VERIFIER, LOG, 1)
            await wait_all_tasks_blocked()
            nursery.start_soon(r.cache.create_log, VERIFIER, OTHER, 1, big)
            await wait_all_tasks_blocked()
            with pytest.raises(Overloaded):
                await r.cache.create_log(VERIFIER, LogName(scope=None, session=b"x" * 16), 1, big)
            r.workers.gate.set()


async def test_a_full_disk_is_507_and_a_broken_one_500_then_503() -> None:
    async with running() as r:
        await r.cache.create_log(VERIFIER, LOG, 1)
        r.disk.capacity_bytes = r.disk.used_bytes
        with pytest.raises(NoRoom):
            await r.cache.append_log(VERIFIER, LOG, 1, commit(1, 1), EMPTY)
        r.disk.capacity_bytes = None
        r.disk.fail_sync = lambda name: True
        with pytest.raises(AppendUnsettled):
            await r.cache.append_log(VERIFIER, LOG, 1, commit(1, 1), EMPTY)
        with pytest.raises(Overloaded):
            await r.cache.append_log(VERIFIER, LOG, 1, commit(1, 1), EMPTY)
        assert await r.tag() == EMPTY
        assert r.cache.snapshot().stopped is not None


async def test_a_rotten_log_is_refused_not_served() -> None:
    async with running() as r:
        await r.cache.create_log(VERIFIER, LOG, 1, commit(1, 1))
        name = "journal-0000000000000001.log"
        r.disk.flip(name, r.disk.read(name).index(commit(1, 1)))
        for _ in range(2):
            with pytest.raises(Conflict, match="damaged"):
                await r.cache.read_log(ROUTER, LOG)
        assert r.cache.snapshot().damaged_logs == 1


async def test_closed_logs_go_and_their_space_comes_back(autojump_clock: MockClock) -> None:
    settings = CacheSettings(segment_bytes=4 * KIB, journal_bytes=64 * KIB, max_log_bytes=32 * KIB)
    async with running(settings=settings) as r:
        await r.cache.create_log(VERIFIER, LOG, 1)
        while r.cache.snapshot().segments < 3:
            await r.cache.append_log(VERIFIER, LOG, 1, commit(1, 1, *range(40)), await r.tag())
        await r.cache.append_log(VERIFIER, LOG, 1, end(1), await r.tag())
        await trio.sleep(settings.log_retention_s - 1)
        await r.tag()
        await trio.sleep(60)
        with pytest.raises(UnknownResource):
            await r.cache.read_log(VERIFIER, LOG)
        assert r.cache.snapshot().segments == 1


async def test_a_stopped_role_answers_503_and_leaves_nobody_waiting() -> None:
    disk, workers, meters = SimDisk(), GatedWorkers(), CountingMeters()
    cache = Cache(CacheSettings(), ports(workers, meters), disk)
    with pytest.raises(Overloaded):
        await cache.create_log(VERIFIER, LOG, 1)
    ends: list[type[BaseException]] = []

    async def create(name: LogName) -> None:
        try:
            await cache.create_log(VERIFIER, name, 1)
        except (AppendUnsettled, Overloaded) as error:
            ends.append(type(error))

    async with trio.open_nursery() as callers, trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        workers.shut()
        callers.start_soon(create, LOG)
        await wait_all_tasks_blocked()
        callers.start_soon(create, OTHER)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert ends == [AppendUnsettled, Overloaded] or ends == [Overloaded, AppendUnsettled]
    with pytest.raises(Overloaded):
        await cache.read_log(VERIFIER, LOG)
    assert not disk.locked


async def test_two_roles_never_share_a_directory() -> None:
    async with running() as r:
        second = Cache(CacheSettings(), ports(InlineWorkers(), CountingMeters()), r.disk)
        with pytest.raises(StateInUse):
            await second.run()


async def test_a_scope_is_purged_of_logs_and_records_too() -> None:
    """5.3, Purge: "Tenant erasure; refused while logs are open unless forced"."""
    scope = bytes(range(16))
    there = LogName(scope=scope, session=bytes(16)), RecordName(scope=scope, session=bytes(16))
    async with running() as r:
        for name in (LOG, there[0]):
            await r.cache.create_log(VERIFIER, name, 1)
        await r.cache.write_record(ROUTER, there[1], b"\xa0", None)
        with pytest.raises(Forbidden):
            await r.cache.purge(ROUTER, scope, force=True)
        with pytest.raises(Conflict, match="1 logs of this scope are open"):
            await r.cache.purge(OPERATOR, scope, force=False)
        await r.cache.append_log(ROUTER, there[0], 1, end(1), EMPTY)
        assert await r.cache.purge(OPERATOR, scope, force=False) == ScopePurged(logs=1, records=1)
        with pytest.raises(UnknownResource):
            await r.cache.read_log(VERIFIER, there[0])
        assert (await r.cache.read_log(VERIFIER, LOG)).tag == EMPTY
        assert await r.cache.purge(OPERATOR, None, force=True) == ScopePurged(logs=1)


async def test_a_purge_that_the_disk_refuses_says_so() -> None:
    async with running() as r:
        await r.cache.create_log(VERIFIER, LOG, 1)
        r.disk.fail_sync = lambda name: True
        with pytest.raises(AppendUnsettled):
            await r.cache.purge(OPERATOR, None, force=True)
        with pytest.raises(Overloaded):
            await r.cache.purge(OPERATOR, None, force=True)
