"""When a drafter writes its rows, and when they go (draft 6.2, 6.3; decisions 36, 101)."""

from dataclasses import replace as with_ports
from typing import Any

import trio
from msgspec import UNSET
from trio.testing import MockClock

from sdcpd.protocol.draft_rows import DraftRow, dense, inline, one_hot, row_of
from sdcpd.protocol.draft_steps import Proceed, Resend
from sdcpd.protocol.messages import Proposal
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.ports import Appended, AppendOutcome, StoreRefused, TagMismatch
from sdcpd.roles.row_shelf import RowShelf, RowsOut
from tests.support.drafter_world import World
from tests.support.messages import CACHE, VERIFIER, proposal
from tests.support.ports import MemoryLogs

REF = f"{CACHE}v1/s/-/o/AAECAwQFBgcICQoLDA0ODw/1/1/q"
V = 600
SHORT = (one_hot(3), one_hot(4))
LONG = (row_of([(token, 1 / 512) for token in range(512)]), one_hot(4))


class OnceOnly(MemoryLogs):
    """Objects are written once, as in a cache."""

    async def publish(self, ref: str, octets: bytes, *, ttl_ms: int) -> AppendOutcome:
        if self.objects.get(ref, octets) != octets:
            return TagMismatch()
        return await super().publish(ref, octets, ttl_ms=ttl_ms)


def made(objects: MemoryLogs) -> RowShelf:
    ports = with_ports(World().ports, objects=objects)
    return RowShelf(DrafterSettings(), ports, cache=CACHE, vocabulary=V)


def message(rows: tuple[DraftRow, ...]) -> Proposal:
    short = inline(rows)
    return proposal((3, 4)[: len(rows)], q_rows=REF, q=UNSET if short is None else short)


def out_of(rows: tuple[DraftRow, ...]) -> RowsOut:
    out = RowsOut()
    out.rows = rows
    return out


async def after(shelf: RowShelf, out: RowsOut, step: Any) -> None:
    async with trio.open_nursery() as nursery:
        await shelf.after(out, VERIFIER, step, nursery)


async def test_short_rows_are_not_written(autojump_clock: MockClock) -> None:
    objects = OnceOnly()
    shelf, out = made(objects), out_of(SHORT)
    await shelf.before(out, VERIFIER, message(SHORT))
    await after(shelf, out, Proceed(after_verdict=True))
    assert objects.objects == {}


async def test_long_rows_are_held_until_the_outcome(autojump_clock: MockClock) -> None:
    objects = OnceOnly()
    shelf, out, sent = made(objects), out_of(LONG), message(LONG)
    await shelf.before(out, VERIFIER, sent)
    assert objects.objects == {REF: dense(LONG, V)}
    assert len(objects.leases) == 1
    await after(shelf, out, Resend(sent))  # no answer: the same proposal again
    await shelf.before(out, VERIFIER, sent)
    assert (len(objects.objects), len(objects.leases)) == (1, 1)
    await after(shelf, out, Proceed(after_verdict=True))
    assert (objects.objects, objects.leases) == ({}, [])


async def test_a_verifier_that_fetches_is_remembered(autojump_clock: MockClock) -> None:
    objects = OnceOnly()
    shelf, out, sent = made(objects), out_of(SHORT), message(SHORT)
    await shelf.before(out, VERIFIER, sent)
    await after(shelf, out, Resend(sent, publish=True))
    await shelf.before(out, VERIFIER, sent)
    assert objects.objects == {REF: dense(SHORT, V)}
    await after(shelf, out, Proceed(after_verdict=True))
    await shelf.before(out, VERIFIER, sent)
    assert objects.objects == {REF: dense(SHORT, V)}


async def test_a_shortened_proposal_has_its_own_rows(autojump_clock: MockClock) -> None:
    """The verifier wants exactly M rows (decision 53)."""
    objects = OnceOnly()
    shelf, out = made(objects), out_of(LONG)
    await shelf.before(out, VERIFIER, message(LONG))
    shorter = message(LONG[:1])
    await after(shelf, out, Resend(shorter, 0))
    await shelf.before(out, VERIFIER, shorter)
    assert objects.objects == {REF: dense(LONG[:1], V)}


async def test_an_object_left_from_before_is_replaced(autojump_clock: MockClock) -> None:
    objects = OnceOnly()
    objects.objects[REF] = b"of this round with other tokens"
    shelf, out = made(objects), out_of(LONG)
    await shelf.before(out, VERIFIER, message(LONG))
    assert objects.objects == {REF: dense(LONG, V)}


async def test_a_cache_that_takes_nothing_stops_nobody(autojump_clock: MockClock) -> None:
    class Full(OnceOnly):
        async def publish(self, ref: str, octets: bytes, *, ttl_ms: int) -> Appended | StoreRefused:
            return StoreRefused(status=507, detail="full")

    shelf, out = made(Full()), out_of(LONG)
    await shelf.before(out, VERIFIER, message(LONG))
    assert out.ref is None
    await after(shelf, out, Proceed(after_verdict=True))
