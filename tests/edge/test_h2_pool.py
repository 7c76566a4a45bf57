"""Connections found, opened and opened again: places, lines of bounded length, backoff, and what is asked twice."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import h2.errors
import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from sdcpd.edge.h2_client import AnswerLost, NotProcessed
from sdcpd.edge.h2_pool import LAST_BACKOFF_S, PeerPool
from sdcpd.edge.identity import CertificateNames
from sdcpd.edge.transport import Response, TransportError
from sdcpd.edge.wire_settings import PeerClientSettings
from tests.edge.wire.raw import REQUEST, Raw
from tests.support.ports import TrioClock

HEAD = [(name.encode(), value.encode()) for name, value in REQUEST]
Script = Callable[[Raw], Awaitable[None]]


async def answers(peer: Raw) -> None:
    """A peer that answers everything."""
    while True:
        await peer.answer(await peer.next_request(), b"ok")


async def silent(peer: Raw) -> None:
    while True:
        await peer.read()


class Stand:
    """`scripts`: what the peer does on each new connection, the last one for all that follow; None refuses it."""

    def __init__(self, scripts: list[Script | None], peer_settings: dict[str, int]) -> None:
        self.scripts = scripts
        self.dials: list[float] = []
        self.peers: list[Raw] = []
        self.pool: PeerPool
        self.nursery: trio.Nursery
        self._peer_settings = peer_settings

    async def dial(self) -> tuple[trio.abc.Stream, CertificateNames | None]:
        self.dials.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if script is None:
            raise TransportError("refused")
        ours, theirs = memory_stream_pair()
        peer = Raw(theirs, client=False, **self._peer_settings)
        self.peers.append(peer)
        self.nursery.start_soon(self._play, script, peer)
        return ours, CertificateNames(uris=(f"peer {len(self.dials)}",))

    async def _play(self, script: Script, peer: Raw) -> None:
        try:
            await peer.start()
            await script(peer)
        except (AssertionError, trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def ask(self, repeatable: bool = False) -> Response:
        return await self.pool.exchange(HEAD, b"", repeatable, lambda names: None)

    def ask_soon(self, nursery: trio.Nursery, done: list[object], repeatable: bool = False) -> trio.CancelScope:
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                try:
                    done.append(await self.ask(repeatable))
                except TransportError as error:
                    done.append(error)

        nursery.start_soon(run)
        return scope


@asynccontextmanager
async def stand(*scripts: Script | None, peer: dict[str, int] | None = None, **settings: Any) -> AsyncIterator[Stand]:
    made = Stand(list(scripts), peer or {})
    with trio.fail_after(1000):
        async with trio.open_nursery() as made.nursery, trio.open_nursery() as nursery:
            made.pool = PeerPool(made.dial, PeerClientSettings(**settings), TrioClock(), nursery)
            yield made
            made.pool.close()
            nursery.cancel_scope.cancel()
            made.nursery.cancel_scope.cancel()


async def test_one_connection_serves_many(autojump_clock: Any) -> None:
    async with stand(answers) as s:
        assert s.pool.unused
        for _ in range(3):
            assert (await s.ask()).body == b"ok"
        assert (len(s.dials), s.pool.connections, s.pool.unused) == (1, 1, False)


async def test_a_further_connection_is_opened_before_a_limit_blocks(autojump_clock: Any) -> None:
    async with stand(silent, peer={"max_concurrent_streams": 10}, max_connections=3) as s:
        done: list[object] = []
        async with trio.open_nursery() as nursery:
            for _ in range(25):
                s.ask_soon(nursery, done)
            await wait_all_tasks_blocked()
            await trio.sleep(1)
            assert [len(peer.h2.streams) for peer in s.peers] == [10, 10, 5]
            nursery.cancel_scope.cancel()


async def test_who_waits_gets_the_place_that_becomes_free(autojump_clock: Any) -> None:
    async with stand(silent, peer={"max_concurrent_streams": 2}, max_connections=1, max_waiting=2) as s:
        done: list[object] = []
        async with trio.open_nursery() as nursery:
            first = [s.ask_soon(nursery, done) for _ in range(2)]
            await trio.sleep(1)
            waiting = [s.ask_soon(nursery, done) for _ in range(2)]
            await trio.sleep(1)
            with pytest.raises(TransportError, match="2 requests wait"):
                await s.ask()
            assert len(s.peers[0].h2.streams) == 2
            waiting[0].cancel()  # whoever leaves the line does not take a place along
            first[0].cancel()
            await trio.sleep(1)
            assert s.peers[0].h2.highest_inbound_stream_id == 5
            nursery.cancel_scope.cancel()


async def test_all_that_wait_are_told_of_a_failed_attempt_and_the_next_is_a_while_away(autojump_clock: Any) -> None:
    async with stand(None, None, None, None, None, None, answers) as s:
        done: list[object] = []
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                s.ask_soon(nursery, done)
        assert len(done) == 50
        assert {str(one) for one in done} == {"refused"}
        assert len(s.dials) == 1
        for _ in range(5):
            with pytest.raises(TransportError, match="refused"):
                await s.ask()
        assert (await s.ask()).body == b"ok"
        gaps = [later - earlier for earlier, later in zip(s.dials, s.dials[1:], strict=False)]
        assert [round(gap, 3) for gap in gaps] == [0.05, 0.1, 0.2, 0.4, 0.8, LAST_BACKOFF_S]


async def test_a_peer_that_says_nothing_is_given_up_in_time(autojump_clock: Any) -> None:
    ours, _theirs = memory_stream_pair()

    async def dial() -> tuple[trio.abc.Stream, CertificateNames | None]:
        return ours, None

    async with trio.open_nursery() as nursery:
        pool = PeerPool(dial, PeerClientSettings(connect_timeout_s=3), TrioClock(), nursery)
        begin = trio.current_time()
        with pytest.raises(TransportError, match="no connection within 3 s"):
            await pool.exchange(HEAD, b"", False, lambda names: None)
        assert trio.current_time() - begin == pytest.approx(3)
        assert pool.connections == 0


async def goes_away(peer: Raw) -> None:
    await peer.next_request()
    await peer.goaway(0)


async def refuses(peer: Raw) -> None:
    await peer.reset(await peer.next_request(), h2.errors.ErrorCodes.REFUSED_STREAM)


async def breaks(peer: Raw) -> None:
    await peer.next_request()
    await peer.stream.aclose()


@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize(
    ("script", "kind", "calls"),
    [(goes_away, NotProcessed, 3), (refuses, NotProcessed, None), (breaks, AnswerLost, 3)],
)
async def test_what_is_asked_again(
    script: Script, kind: type[TransportError], calls: int | None, repeatable: bool, autojump_clock: Any
) -> None:
    """What was provably not looked at, always; what may have been carried out, only if it changes nothing."""
    async with stand(script, answers) as s:
        if script is breaks and not repeatable:
            with pytest.raises(AnswerLost):
                await s.ask(repeatable)
            assert len(s.dials) == 1
            return
        if script is refuses:
            s.scripts[0:1] = [_refuses_once]
        assert (await s.ask(repeatable)).body == b"ok"
    async with stand(script) as s:
        if script is not refuses:
            with pytest.raises(kind):
                await s.ask(repeatable)
            assert len(s.dials) == calls


async def _refuses_once(peer: Raw) -> None:
    await refuses(peer)
    await answers(peer)


async def test_a_peer_that_is_not_the_one_called_keeps_its_place(autojump_clock: Any) -> None:
    def admit(names: CertificateNames | None) -> None:
        assert names is not None
        raise TransportError(f"not {names.uris[0]}")

    async with stand(answers, peer={"max_concurrent_streams": 1}) as s:
        for _ in range(3):
            with pytest.raises(TransportError, match="not peer 1"):
                await s.pool.exchange(HEAD, b"", True, admit)
        assert (await s.ask()).body == b"ok"
        assert len(s.dials) == 1


async def test_a_place_that_is_not_taken_goes_to_the_next_in_line(autojump_clock: Any) -> None:
    def refuse(names: CertificateNames | None) -> None:
        raise TransportError("another peer")

    async with stand(silent, peer={"max_concurrent_streams": 1}, max_connections=1) as s:
        done: list[object] = []
        async with trio.open_nursery() as nursery:
            first = s.ask_soon(nursery, done)
            await trio.sleep(1)

            async def call_another() -> None:
                with pytest.raises(TransportError, match="another peer"):
                    await s.pool.exchange(HEAD, b"", False, refuse)

            nursery.start_soon(call_another)
            await trio.sleep(1)
            s.ask_soon(nursery, done)
            await trio.sleep(1)
            first.cancel()
            await trio.sleep(1)
            assert s.peers[0].h2.highest_inbound_stream_id == 3
            nursery.cancel_scope.cancel()


async def test_retired_connections_are_replaced_and_end_by_themselves(autojump_clock: Any) -> None:
    async with stand(silent, answers, max_connections=1) as s:
        done: list[object] = []
        async with trio.open_nursery() as nursery:
            scope = s.ask_soon(nursery, done)
            await trio.sleep(1)
            s.pool.retire()
            assert (await s.ask()).body == b"ok"
            assert (len(s.dials), s.pool.connections) == (2, 2)
            scope.cancel()
        await trio.sleep(1)
        assert s.pool.connections == 1


async def test_when_the_node_stops_nobody_is_left_waiting(autojump_clock: Any) -> None:
    async with stand(silent, peer={"max_concurrent_streams": 1}, max_connections=1) as s:
        done: list[object] = []
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                s.ask_soon(nursery, done)
            await trio.sleep(1)
            s.pool.close()
            await trio.sleep(1)
            assert [str(one) for one in done] == ["the node stops", "the node stops"]
            with pytest.raises(TransportError, match="the node stops"):
                await s.ask()
            nursery.cancel_scope.cancel()
