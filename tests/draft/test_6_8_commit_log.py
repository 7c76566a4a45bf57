"""Draft 6.8, Commit Log. Each test quotes the sentence it proves, on the real store and the real machines."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from sdcpd.cache.files import RealFiles
from sdcpd.cache.settings import CacheSettings
from sdcpd.edge.dispatch import cache_dispatcher
from sdcpd.edge.objects import ObjectClient
from sdcpd.edge.peers import PeerClient
from sdcpd.edge.transport import LoopbackNetwork, LoopbackTransport
from sdcpd.protocol.commit_log import (
    CommitRecord,
    FencedOff,
    FenceRecord,
    OurRecordStands,
    look_for,
    read_records,
    write_record,
)
from sdcpd.protocol.session import Session
from sdcpd.protocol.session_values import SessionLimits
from sdcpd.protocol.takeover import take_over
from sdcpd.roles.cache import Cache
from sdcpd.roles.ports import Appended, BelowFence, Content, Peer, Ports, StoreRefused, TagMismatch
from tests.protocol.test_takeover import FENCE, PROMPT, TOKENS, first, opening, second
from tests.support.messages import CACHE, LOG, VERIFIER, assignment, contract
from tests.support.ports import CountingMeters, InlineWorkers, SeededRandomness, TrioClock


class Store:
    """A cache role with its files, and what a verifier and a router see of it."""

    def __init__(self, path: Path) -> None:
        self.network, meters = LoopbackNetwork(), CountingMeters()
        self.settings = CacheSettings(commit_durability="page_cache")
        self.verifier = ObjectClient(self._as("verifier"), meters, (CACHE,))
        self.router = ObjectClient(self._as("router"), meters, (CACHE,))
        ports = Ports(
            clock=TrioClock(),
            randomness=SeededRandomness(),
            workers=InlineWorkers(),
            meters=meters,
            peers=PeerClient(self._as("cache"), meters),
            objects=self.router,
        )
        self.cache = Cache(self.settings, ports, RealFiles(path))
        self.network.serve(CACHE, cache_dispatcher(self.cache, self.settings, meters).handle)

    def _as(self, role: str) -> LoopbackTransport:
        return self.network.transport(Peer(uri=f"https://x.example/{role}/", role=role))

    async def tag(self) -> str:
        read = await self.router.read_log(LOG)
        assert isinstance(read, Content)
        return read.tag


@pytest.fixture
async def store(tmp_path: Path, nursery: trio.Nursery) -> Store:
    made = Store(tmp_path)
    await nursery.start(made.cache.run)
    created = await made.verifier.create_log(LOG, 1)
    assert isinstance(created, Appended)
    return made


async def test_conditional_append(store: Store, autojump_clock: MockClock) -> None:
    """ "records are appended with a conditional operation [...] so that an append succeeds only if no other append has
    happened since the writer last read the log" """
    tag = await store.tag()
    assert isinstance(await store.verifier.append(LOG, write_record(first()), epoch=1, if_match=tag), Appended)
    assert isinstance(await store.verifier.append(LOG, write_record(second()), epoch=1, if_match=tag), TagMismatch)
    again = await store.tag()
    assert isinstance(await store.verifier.append(LOG, write_record(second()), epoch=1, if_match=again), Appended)


async def test_appends_below_a_fence_fail(store: Store, autojump_clock: MockClock) -> None:
    """ "after a fence record with epoch E+1, appends carrying an epoch lower than E+1 MUST fail" """
    tag = await store.tag()
    fenced = await store.router.append(LOG, write_record(FENCE), epoch=2, if_match=tag)
    assert isinstance(fenced, Appended)
    stale = await store.verifier.append(LOG, write_record(first()), epoch=1, if_match=fenced.tag)
    assert isinstance(stale, BelowFence)
    blind = await store.verifier.append(LOG, write_record(first()), epoch=1, if_match=tag)
    assert isinstance(blind, BelowFence | TagMismatch)


async def test_a_fence_record_carries_only_an_epoch(store: Store, autojump_clock: MockClock) -> None:
    """ "A fence record carries only an epoch", and its author by decision 85; it is the router's to write (112)."""
    assert [record for record, _ in read_records(write_record(FenceRecord(epoch=2)))] == [FenceRecord(epoch=2)]
    tag = await store.tag()
    refused = await store.verifier.append(LOG, write_record(FENCE), epoch=2, if_match=tag)
    assert isinstance(refused, StoreRefused)
    assert refused.status == 403
    committed = await store.router.append(LOG, write_record(first()), epoch=1, if_match=tag)
    assert isinstance(committed, StoreRefused)
    assert committed.status == 403


async def test_a_fence_alone_begins_a_log_that_nobody_created(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Decision 86."""
    async with trio.open_nursery() as nursery:
        store = Store(tmp_path)
        await nursery.start(store.cache.run)
        assert isinstance(await store.router.create_log(LOG, 2, write_record(FENCE)), Appended)
        assert isinstance(await store.verifier.create_log(LOG, 1), TagMismatch | BelowFence)
        nursery.cancel_scope.cancel()


def test_a_record_carries_the_epoch_of_its_writer_and_follows_its_last_record() -> None:
    """ "A commit record appended by a verifier MUST carry the session's current epoch and follow the last record it
    wrote." """
    log = b"".join(write_record(record) for record in (first(), second(), FENCE))
    session = Session(
        opening(),
        instance=VERIFIER,
        prompt=PROMPT,
        vocabulary=100,
        limits=SessionLimits(),
        now=0.0,
        taken=take_over(opening(), PROMPT, TOKENS, log),
    )
    session.assign(assignment(contract=contract(stop=(2,)), epoch=2, drafter=VERIFIER), now=0.0)
    tags = [f'"{number}"' for number in range(3)]
    for number, tag in enumerate(tags):
        work = session.self_work(0, 0.0)
        assert work is not None
        session.scored(work.ticket, [20 + number], load=0)
        append = session.to_append()
        assert append is not None
        ((record, _),) = read_records(append.octets)
        assert isinstance(record, CommitRecord)
        assert (record.epoch, record.round) == (2, 3 + number)
        assert number == 0 or append.if_match == tags[number - 1], "each is appended at the tag of the one before"
        session.appended(tag, 0.0)


@pytest.mark.parametrize("fence_first", [True, False])
def test_a_writer_reads_where_the_store_cannot_enforce(fence_first: bool) -> None:
    """ "the verifier MUST read the log after its conditional append and treat its append as failed if a fence record
    with a higher epoch precedes its own record" """
    ours = write_record(first())
    log = write_record(FENCE) + ours if fence_first else ours + write_record(FENCE)
    found = look_for(log, record=ours, acknowledged=0, epoch=1)
    if fence_first:
        assert isinstance(found, FencedOff)
    else:
        assert isinstance(found, OurRecordStands)
        assert found.fenced
