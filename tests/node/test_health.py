"""The operators' port, over a real socket."""

import json

import pytest
import trio

from sdcpd.frontend.server import FrontendServer
from sdcpd.frontend.settings import FrontendSettings
from sdcpd.node.health import HealthApp
from sdcpd.node.metrics import RegistryMeters
from sdcpd.node.real_ports import SystemClock


class World:
    def __init__(self) -> None:
        self.meters = RegistryMeters()
        self.readiness = (False, "verifier: no router has taken its status")
        self.app = HealthApp(lambda: self.readiness, self.meters.scrape)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("HEAD", "/metrics", 200),
        ("POST", "/metrics", 405),
        ("GET", "/", 404),
        ("DELETE", "/sessions", 404),
    ],
)
def test_what_is_there(method: str, path: str, status: int) -> None:
    assert World().app.answer(method, path)[0] == status


def test_readiness_says_what_is_missing() -> None:
    world = World()
    status, kind, body = world.app.answer("GET", "/ready")
    assert (status, kind) == (503, "application/json")
    assert json.loads(body) == {"status": "not ready", "reason": "verifier: no router has taken its status"}
    world.readiness = (True, "")
    assert world.app.answer("GET", "/ready")[0] == 200


async def test_over_a_socket() -> None:
    world = World()
    world.meters.count("rounds_total", kind="proposal")
    settings = FrontendSettings(listen="127.0.0.1:0", allow_non_loopback=True)
    server = FrontendServer(world.app, settings, SystemClock())
    async with trio.open_nursery() as nursery:
        bound = await nursery.start(server.run)
        answers = {}
        for method, path in (("GET", "/metrics"), ("HEAD", "/metrics"), ("POST", "/health")):
            async with await trio.open_tcp_stream(bound.host, bound.port) as stream:
                await stream.send_all(f"{method} {path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n".encode())
                answers[method] = b"".join([piece async for piece in stream]).partition(b"\r\n\r\n")
        server.stop()
    head, _, body = answers["GET"]
    assert head.startswith(b"HTTP/1.1 200")
    assert b'sdcpd_rounds_total{kind="proposal"} 1.0' in body
    assert answers["HEAD"][0].startswith(b"HTTP/1.1 200")
    assert answers["HEAD"][2] == b""
    assert answers["POST"][0].startswith(b"HTTP/1.1 405")
    assert b"allow: get, head" in answers["POST"][0].lower()
