"""Verifiers and routers that die, stand still and come back, as real processes over mutual TLS, in mid-answer.

What must hold: the client's stream completes, each token once, equal to the undisturbed run.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from sdcpd.edge.peers import PeerClient
from sdcpd.edge.tls import Tls, TlsSettings
from sdcpd.edge.wire_settings import PeerClientSettings
from sdcpd.edge.wire_transport import WireClient, WireDialer
from sdcpd.frontend.text import load_model_text
from sdcpd.node.cert_hosts import CertHost
from sdcpd.node.certs import issue
from sdcpd.node.demo_cluster import DemoCluster
from sdcpd.node.demo_daemon import DemoDaemon
from sdcpd.node.metrics import RegistryMeters
from sdcpd.node.real_ports import SystemClock
from sdcpd.protocol.messages import Output
from sdcpd.protocol.terms import session_from_path_id
from sdcpd.roles.ports import Peer
from tests.support.processes import sessions_of, stream

pytestmark = pytest.mark.process
log = logging.getLogger(__name__)  # figures, seen with: pytest -o log_cli=true -o log_cli_level=INFO

READY_LIMIT_S = 120
TTL_MS = 1500
NODES = {"cache": "cache", "router": "router", "drafter": "drafter", "v1": "verifier", "v2": "verifier"}
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 240, "ignore_eos": True, "stream": True}
ENGINE = ("engine.kv_cache_bytes=4194304", "engine.threads=1", "verifier.speculation=on")
VERIFIER = (*ENGINE, f"verifier.ttl_ms={TTL_MS}")


@pytest.fixture(scope="module")
def shared(tiny_llama: Path) -> Iterator[DemoCluster]:
    with DemoCluster(tiny_llama, {"v1": VERIFIER, "v2": VERIFIER}, NODES) as running:
        yield running


@pytest.fixture
def cluster(shared: DemoCluster) -> Iterator[DemoCluster]:
    """All five running; whichever a test has ended is started again."""
    shared.wait_ready(READY_LIMIT_S)
    yield shared
    for node in NODES:
        shared.daemon(node).process.send_signal(signal.SIGCONT)
        if shared.daemon(node).process.poll() is not None:
            shared.start(node)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path) -> str:
    with DemoDaemon(tiny_llama, [*ENGINE]) as one:
        one.wait_ready(READY_LIMIT_S)
        return "".join(text_of(chunk) for chunk in stream(one.address, tiny_llama.name, LONG))


def text_of(chunk: dict[str, Any]) -> str:
    assert "error" not in chunk, chunk
    return "".join(choice["text"] for choice in chunk["choices"])


def running_session(cluster: DemoCluster) -> dict[str, Any]:
    ended = ("finished", "failed", "cancelled")
    router: dict[str, Any]
    (router,) = [
        one["router"] | {"session": one["session"]}
        for one in sessions_of(cluster.socket("router"))
        if one["router"]["state"] not in ended
    ]
    return router


def verifier_of(cluster: DemoCluster) -> str:
    (node,) = [node for node in ("v1", "v2") if cluster.base_uri(node) == running_session(cluster)["verifier"]]
    return node


def disturbed(cluster: DemoCluster, model: Path, disturb: Callable[[], None], said: str) -> str:
    """The answer, disturbed after some chunks; says how long the next token took."""
    text, struck, next_token = "", 0.0, 0.0
    for count, chunk in enumerate(stream(cluster.address, model.name, LONG)):
        text += text_of(chunk)
        if struck and not next_token and time.monotonic() > struck + 0.3:  # what was on its way is no evidence
            next_token = time.monotonic()
            log.info("next token %.2f s after %s", next_token - struck, said)
        if count == 20:
            struck = time.monotonic()
            disturb()
    assert next_token, "the answer paused"
    return text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_session_of_a_lost_verifier_goes_on_at_the_other(
    cluster: DemoCluster, tiny_llama: Path, undisturbed: str, number: signal.Signals
) -> None:
    moved: list[str] = []

    def strike() -> None:
        node = verifier_of(cluster)
        cluster.daemon(node).process.send_signal(number)
        moved.append(node)

    assert disturbed(cluster, tiny_llama, strike, f"{number.name} of the verifier") == undisturbed
    ended = [one["router"] for one in sessions_of(cluster.socket("router")) if one["router"]["epoch"] == 2]
    assert [one["verifier"] for one in ended][-1:] != [cluster.base_uri(moved[0])]
    if number is signal.SIGSTOP:  # a zombie that goes on must not disturb what was decided without it
        cluster.daemon(moved[0]).process.send_signal(signal.SIGCONT)
        again = "".join(text_of(chunk) for chunk in stream(cluster.address, tiny_llama.name, LONG))
        assert again == undisturbed


def test_a_verifier_that_is_restarted_at_once_on_the_same_address(
    cluster: DemoCluster, tiny_llama: Path, undisturbed: str
) -> None:
    """Decision 95: its new `boot` or its 404 tells, however soon it is back."""

    def restart() -> None:
        node = verifier_of(cluster)
        cluster.daemon(node).process.kill()
        cluster.daemon(node).process.wait()
        cluster.start(node)

    assert disturbed(cluster, tiny_llama, restart, "kill and restart of the verifier") == undisturbed


def test_a_router_that_stands_still_for_ten_seconds(cluster: DemoCluster, tiny_llama: Path, undisturbed: str) -> None:
    """It must not take its own standstill for everybody's death (95)."""

    def stand_still() -> None:
        router = cluster.daemon("router").process
        router.send_signal(signal.SIGSTOP)
        time.sleep(10)
        router.send_signal(signal.SIGCONT)

    text = ""
    for count, chunk in enumerate(stream(cluster.address, tiny_llama.name, LONG)):
        text += text_of(chunk)
        if count == 20:
            stand_still()
    assert text == undisturbed


async def test_a_reader_at_a_router_that_is_killed_and_restarted_gets_the_rest(
    cluster: DemoCluster, tiny_llama: Path, undisturbed: str
) -> None:
    """Decision 106: the sessions of a router outlive it, and a reader goes on where it was."""
    issue(cluster.authority, ["client"], CertHost("reader.example"), now=time.time(), out=cluster.authority / "reader")
    files = TlsSettings(
        certificate=str(cluster.authority / "reader.pem"),
        key=str(cluster.authority / "reader.key"),
        ca=str(cluster.authority / "ca.pem"),
    )
    client = WireClient(WireDialer(Tls(files), insecure_loopback=False), PeerClientSettings(), SystemClock())
    transport = client.transport(Peer(uri="https://reader.example/client/", role="client"), named=False)
    calls, router = PeerClient(transport, RegistryMeters()), cluster.base_uri("router")
    tokens: list[int] = []

    async def read(session: bytes) -> Output | None:
        with trio.move_on_after(30):
            page = await calls.read_output(router, session, len(tokens), 5.0)
            if isinstance(page, Output):
                assert page.from_ == len(tokens)
                tokens.extend(page.tokens)
                return page
            log.debug("no page: %s", page)
        await trio.sleep(0.1)  # the router is away
        return None

    async with trio.open_nursery() as nursery:
        await nursery.start(client.run)
        with trio.fail_after(120):
            chunks = stream(cluster.address, tiny_llama.name, LONG)
            for count, _ in enumerate(chunks):
                if count == 20:
                    break
            session = session_from_path_id(running_session(cluster)["session"])
            assert await read(session) is not None
            daemon = cluster.daemon("router").process
            daemon.kill()
            daemon.wait()
            struck, seen = time.monotonic(), len(tokens)
            cluster.start("router")
            while (page := await read(session)) is None or not page.final:
                if len(tokens) > seen:
                    log.info("next page %.2f s after SIGKILL and restart of the router", time.monotonic() - struck)
                    seen = LONG["max_tokens"]
        nursery.cancel_scope.cancel()
    chunks.close()
    written = load_model_text(tiny_llama.name, tiny_llama).detokenizer()
    assert len(tokens) == LONG["max_tokens"]
    assert "".join([*map(written.push, tokens), written.finish()]) == undisturbed
