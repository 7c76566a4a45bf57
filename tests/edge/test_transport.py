"""The loopback transport: who is calling, what is unknown, and that it suspends as a wire does."""

import pytest
import trio
from trio.testing import assert_checkpoints

from sdcpd.edge import transport
from sdcpd.edge.transport import LoopbackNetwork, Request, Response, TransportError
from sdcpd.roles.ports import Peer
from tests.edge.services import PEERS

BASE = "https://h.example/verifier/"


async def test_the_handler_sees_who_calls_and_what() -> None:
    seen: list[tuple[Peer, Request]] = []

    async def handle(peer: Peer, request: Request) -> Response:
        seen.append((peer, request))
        return Response(status=204)

    network = LoopbackNetwork()
    network.serve("HTTPS://H.example:443/verifier", handle)
    request = Request(method="GET", path="sessions/x", query="from=1", headers={"prefer": "wait=1"})
    for role in ("router", "drafter"):
        with assert_checkpoints():
            response = await network.transport(PEERS[role]).exchange(BASE, request)
        assert response == Response(status=204)
    assert seen == [(PEERS["router"], request), (PEERS["drafter"], request)]


async def test_nobody_there_is_a_transport_error() -> None:
    async def handle(peer: Peer, request: Request) -> Response:
        return Response(status=204)

    network = LoopbackNetwork()
    caller = network.transport(PEERS["router"])
    with pytest.raises(TransportError, match="nothing is served"):
        await caller.exchange(BASE, Request(method="GET", path="x"))
    network.serve(BASE, handle)
    await caller.exchange(BASE, Request(method="GET", path="x"))
    network.withdraw(BASE)
    with pytest.raises(TransportError):
        await caller.exchange(BASE, Request(method="GET", path="x"))


async def test_too_many_at_once_are_refused_and_the_count_comes_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "REQUESTS_LIMIT", 2)

    async def handle(peer: Peer, request: Request) -> Response:
        if request.path == "wait":
            await trio.sleep_forever()
        return Response(status=204)

    network = LoopbackNetwork()
    network.serve(BASE, handle)
    caller = network.transport(PEERS["router"])
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(caller.exchange, BASE, Request(method="GET", path="wait"))
        await trio.testing.wait_all_tasks_blocked()
        assert (await caller.exchange(BASE, Request(method="GET", path="x"))).status == 503
        nursery.cancel_scope.cancel()
    assert (await caller.exchange(BASE, Request(method="GET", path="x"))).status == 204
