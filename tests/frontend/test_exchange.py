"""Bodies, limits and clients that leave: what the skin over ASGI does about them, in virtual time."""

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from sdcpd.frontend.errors import ApiError
from sdcpd.frontend.exchange import SKIP_FACTOR, ClientGone, Exchange

LIMIT = 1000


class Client:
    """The ASGI side of one exchange. `pieces` are sent, then the client waits, hangs up or dribbles for ever."""

    def __init__(self, pieces: list[bytes], *, then: str = "end", takes_s: float = 0) -> None:
        self.pieces = pieces
        self.then = then
        self.takes_s = takes_s
        self.closes_itself = False
        self.read_bytes = 0
        self.sent: list[dict[str, Any]] = []
        self.gone = trio.Event()

    async def receive(self) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        if self.pieces:
            piece = self.pieces.pop(0)
            self.read_bytes += len(piece)
            return {"type": "http.request", "body": piece, "more_body": bool(self.pieces) or self.then != "end"}
        if self.then == "flood":
            self.read_bytes += 100
            return {"type": "http.request", "body": b"x" * 100, "more_body": True}
        if self.then == "leave":
            return {"type": "http.disconnect"}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if self.closes_itself and not message.get("more_body", True):
            self.gone.set()
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(self.takes_s)
        self.sent.append(message)

    def exchange(self) -> Exchange:
        scope = {"method": "POST", "path": "/", "headers": [(b"A-b", b"1")]}
        return Exchange(scope, self.receive, self.send, request_id="r", body_limit=LIMIT, body_s=30, send_s=20)


async def test_a_body_in_pieces() -> None:
    exchange = Client([b"ab", b"", b"c"]).exchange()
    assert await exchange.read_body() == b"abc"
    assert exchange.header("a-b") == "1"
    assert exchange.header("c") is None


async def test_a_body_over_its_limit_is_refused_while_it_is_read() -> None:
    client = Client([b"x" * 400] * 100)
    exchange = client.exchange()
    with pytest.raises(ApiError) as caught:
        await exchange.read_body()
    assert caught.value.status == 413
    assert client.read_bytes == 1200


async def test_the_rest_is_dropped_before_answering() -> None:
    """An honest client would otherwise see a reset connection in place of the answer."""
    client = Client([b"x" * 400] * 5)
    exchange = client.exchange()
    with pytest.raises(ApiError):
        await exchange.read_body()
    await exchange.answer(413, b"{}")
    assert client.read_bytes == 2000
    assert [message["type"] for message in client.sent] == ["http.response.start", "http.response.body"]


async def test_a_body_without_end_is_cut_off() -> None:
    client = Client([], then="flood")
    exchange = client.exchange()
    with pytest.raises(ApiError):
        await exchange.read_body()
    await exchange.answer(413, b"{}")
    assert client.read_bytes < (SKIP_FACTOR + 2) * LIMIT
    assert client.sent[0]["status"] == 413


async def test_a_body_that_dribbles_is_cut_off(autojump_clock: MockClock) -> None:
    client = Client([b"{"], then="wait")
    exchange = client.exchange()
    with pytest.raises(ApiError) as caught:
        await exchange.read_body()
    assert caught.value.status == 408
    assert trio.current_time() == pytest.approx(30)
    await exchange.answer(408, b"{}")
    assert client.sent[0]["status"] == 408


async def test_a_client_that_leaves_while_it_sends() -> None:
    with pytest.raises(ClientGone):
        await Client([b"{"], then="leave").exchange().read_body()
    with pytest.raises(ClientGone):
        await Client([b"{"], then="leave").exchange().answer(404, b"{}")


async def test_work_is_dropped_when_the_client_leaves(autojump_clock: MockClock) -> None:
    client = Client([b""])
    exchange = client.exchange()
    await exchange.read_body()
    dropped_at = None

    async def work(nursery: trio.Nursery) -> None:
        nonlocal dropped_at
        nursery.start_soon(trio.sleep_forever)
        try:
            await trio.sleep_forever()
        finally:
            dropped_at = trio.current_time()

    async def leave() -> None:
        await trio.sleep(3)
        client.gone.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        with pytest.raises(ClientGone):
            await exchange.until_gone(work)
    assert dropped_at == pytest.approx(3)


async def test_an_answer_that_ends_its_connection_has_reached_the_client() -> None:
    """hypercorn says that the client has left as soon as it has closed the connection itself."""
    client = Client([b""])
    client.closes_itself = True
    exchange = client.exchange()
    await exchange.read_body()

    async def work(_: trio.Nursery) -> None:
        await exchange.answer(200, b"{}")

    await exchange.until_gone(work)
    assert len(client.sent) == 2


@pytest.mark.parametrize("error", [ApiError(400, "no"), ClientGone()])
async def test_what_work_says_passes_as_it_is(error: Exception) -> None:
    exchange = Client([b""]).exchange()
    await exchange.read_body()

    async def work(nursery: trio.Nursery) -> None:
        nursery.start_soon(trio.sleep_forever)
        raise error

    with pytest.raises(type(error)):
        await exchange.until_gone(work)


@pytest.mark.parametrize(
    "reached", [lambda exchange: exchange.answer(200, b"x"), lambda exchange: exchange.write(b"x")]
)
async def test_a_client_that_takes_nothing_is_gone(
    reached: "Callable[[Exchange], Any]", autojump_clock: MockClock
) -> None:
    exchange = Client([b""], takes_s=1000).exchange()
    await exchange.read_body()
    with pytest.raises(ClientGone):
        await reached(exchange)
    assert trio.current_time() == pytest.approx(20)
