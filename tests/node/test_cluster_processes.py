"""Four daemons, one a role, over mutual TLS: the same answers as one daemon, and what each other's failures cost.

A tiny random model: nothing it says stands in a prompt, so nearly all drafts are wrong, which no answer may show. The
ladder never escalates here, so that a drafter carries each session when it is killed.
"""

import http.client
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sdcpd.node.demo_cluster import DemoCluster
from sdcpd.node.demo_daemon import DemoDaemon
from sdcpd.node.demo_process import DemoProcess, free_port, get, set_arguments, wait_ready
from tests.support.processes import read_log, sessions_of, stream

pytestmark = pytest.mark.process
log = logging.getLogger(__name__)  # figures, seen with: pytest -o log_cli=true -o log_cli_level=INFO

READY_LIMIT_S = 120
TTL_S = 1.5
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 240, "ignore_eos": True, "stream": True}
ENGINE = ("engine.kv_cache_bytes=4194304", "engine.threads=1", "verifier.speculation=on")
UNHURRIED = ("verifier.proposal_deadline_ms=600000", "verifier.first_proposal_deadline_ms=600000")
"""The verifier would wait ten minutes for a drafter: only the router's judgement can bring the next token."""
ENDED = ("finished", "failed", "cancelled")
NO_ESCALATION = ("ladder.default.low_rounds=1000",)


@pytest.fixture(scope="module")
def shared(tiny_llama: Path) -> Iterator[DemoCluster]:
    settings = {
        "verifier": [*ENGINE, *UNHURRIED],
        "drafter": [f"drafter.ttl_ms={TTL_S * 1000:.0f}"],
        "router": NO_ESCALATION,
    }
    with DemoCluster(tiny_llama, settings) as running:
        yield running


@pytest.fixture
def cluster(shared: DemoCluster) -> Iterator[DemoCluster]:
    """All four running; whichever a test has ended is started again."""
    shared.wait_ready(READY_LIMIT_S)
    yield shared
    for role in ("cache", "router", "drafter", "verifier"):
        shared.daemon(role).process.send_signal(signal.SIGCONT)
        if shared.daemon(role).process.poll() is not None:
            shared.start(role)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path) -> str:
    """The answer of one daemon with all roles."""
    with DemoDaemon(tiny_llama, [*ENGINE, *NO_ESCALATION]) as one:
        one.wait_ready(READY_LIMIT_S)
        return "".join(text_of(chunk) for chunk in stream(one.address, tiny_llama.name, LONG))


def text_of(chunk: dict[str, Any]) -> str:
    assert "error" not in chunk, chunk
    return "".join(choice["text"] for choice in chunk["choices"])


def answer(cluster: DemoCluster, model: Path, disturb: Callable[[], None] = lambda: None, at: int = 20) -> str:
    """A streamed answer, its disturbance after some chunks."""
    text = ""
    for count, chunk in enumerate(stream(cluster.address, model.name, LONG)):
        text += text_of(chunk)
        if count == at:
            disturb()
    return text


def running_session(cluster: DemoCluster) -> dict[str, Any]:
    entry: dict[str, Any]
    (entry,) = [one for one in sessions_of(cluster.socket("router")) if one["router"]["state"] not in ENDED]
    return entry


def wait_for(condition: Callable[[], bool], limit_s: float = 30) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def metric(cluster: DemoCluster, role: str, name: str) -> float:
    host, port = cluster.metrics_address(role)
    with closing(http.client.HTTPConnection(host, port, timeout=10)) as connection:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    found = re.findall(rf"^sdcpd_{name}(?:{{[^}}]*}})? (\S+)$", page, flags=re.MULTILINE)
    assert found, name
    return sum(float(value) for value in found)


def test_the_answer_is_that_of_one_daemon_and_its_log_is_on_the_cache_node(
    cluster: DemoCluster, tiny_llama: Path, undisturbed: str
) -> None:
    session = ""

    def note() -> None:
        nonlocal session
        session = running_session(cluster)["session"]
        assert sessions_of(cluster.socket("drafter")), "a drafter carries the session"

    assert answer(cluster, tiny_llama, note) == undisturbed
    assert metric(cluster, "verifier", "rounds_total") > 0
    assert metric(cluster, "cache", "log_records_total") > 20
    for role in ("router", "verifier", "drafter", "cache"):
        assert metric(cluster, role, "certificate_expiry_seconds") > 300 * 86_400
        assert get(cluster.metrics_address(role), "/ready")[0] == 200
    cache_state = cluster.socket("cache").parents[1] / "state"
    assert cluster.daemon("cache").stop() == 0
    records = read_log(cache_state, session)
    assert records[-1].committed == LONG["max_tokens"]
    assert [record.round for record in records] == list(range(1, len(records) + 1))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_drafter_that_dies_or_stands_still_costs_its_ttl(
    cluster: DemoCluster,
    tiny_llama: Path,
    undisturbed: str,
    number: signal.Signals,
    record_property: Callable[[str, object], None],
) -> None:
    """The next token comes once its status has expired (ttl + 1 s on a machine that is not busy)."""
    drafter = cluster.daemon("drafter").process
    struck, next_token = 0.0, 0.0
    text = ""
    for count, chunk in enumerate(stream(cluster.address, tiny_llama.name, LONG)):
        text += text_of(chunk)
        if struck and not next_token and time.monotonic() > struck + 0.3:  # what was on its way before is no evidence
            next_token = time.monotonic()
        if count == 20:
            assert running_session(cluster)["router"]["drafter"] == cluster.base_uri("drafter")
            drafter.send_signal(number)
            struck = time.monotonic()
    assert text == undisturbed
    assert next_token, "the answer paused: a drafter was carrying it"
    log.info("next token %.2f s after %s, ttl %.1f s", next_token - struck, number.name, TTL_S)
    assert next_token - struck < 10 * TTL_S


def test_a_drafter_that_goes_on_after_standing_still_harms_nothing(
    cluster: DemoCluster, tiny_llama: Path, undisturbed: str
) -> None:
    drafter = cluster.daemon("drafter").process

    def stand_still() -> None:
        drafter.send_signal(signal.SIGSTOP)
        time.sleep(TTL_S + 1)
        drafter.send_signal(signal.SIGCONT)

    assert answer(cluster, tiny_llama, stand_still) == undisturbed
    assert answer(cluster, tiny_llama) == undisturbed
    cluster.check()


def test_without_the_cache_nothing_is_released_and_all_goes_on_when_it_is_back(
    cluster: DemoCluster, tiny_llama: Path, undisturbed: str
) -> None:
    session = ""
    committed: list[int] = []

    def take_away() -> None:
        nonlocal session
        session = running_session(cluster)["session"]
        os.kill(cluster.daemon("cache").process.pid, signal.SIGKILL)
        cluster.daemon("cache").process.wait()
        time.sleep(1.0)
        committed.append(running_session(cluster)["router"]["committed_tokens"])
        time.sleep(1.0)
        committed.append(running_session(cluster)["router"]["committed_tokens"])
        cluster.start("cache")

    assert answer(cluster, tiny_llama, take_away) == undisturbed
    assert committed[0] == committed[1] < LONG["max_tokens"], "commits stopped"
    cache_state = cluster.socket("cache").parents[1] / "state"
    assert cluster.daemon("cache").stop() == 0
    assert read_log(cache_state, session)[-1].committed == LONG["max_tokens"]


def test_a_client_that_leaves_frees_everything(cluster: DemoCluster, tiny_llama: Path) -> None:
    session = ""
    with closing(stream(cluster.address, tiny_llama.name, LONG)) as chunks:
        for count, _ in enumerate(chunks):
            if count == 20:
                session = running_session(cluster)["session"]
                break
    left = time.monotonic()
    wait_for(lambda: metric(cluster, "verifier", "kv_cache_usage_ratio") == 0)
    (ended,) = [one for one in sessions_of(cluster.socket("router")) if one["session"] == session]
    assert ended["router"]["state"] == "cancelled"
    wait_for(lambda: not sessions_of(cluster.socket("drafter")))
    log.info("all free %.2f s after the client left", time.monotonic() - left)


def test_a_hang_up_signal_renews_certificates_under_an_answer(
    cluster: DemoCluster, tiny_llama: Path, undisturbed: str
) -> None:
    """New connections show the new certificate, and nothing under way is lost."""
    from sdcpd.node.cert_hosts import CertHost
    from sdcpd.node.certs import issue

    authority = cluster.authority
    port = int(cluster.base_uri("verifier").split(":")[2].split("/")[0])
    before = metric(cluster, "verifier", "certificate_expiry_seconds")

    def renew() -> None:
        issue(
            authority,
            ["verifier"],
            CertHost("127.0.0.1", port),
            days=800,
            now=time.time(),
            out=authority / "verifier",
            force=True,
        )
        cluster.daemon("verifier").process.send_signal(signal.SIGHUP)

    assert answer(cluster, tiny_llama, renew) == undisturbed
    wait_for(lambda: metric(cluster, "verifier", "certificate_expiry_seconds") > before + 86_400)
    (authority / "verifier.pem").write_text("nonsense")
    cluster.daemon("verifier").process.send_signal(signal.SIGHUP)
    wait_for(lambda: "certificates or keys kept as they were" in cluster.daemon("verifier").log())
    assert answer(cluster, tiny_llama) == undisturbed


def test_on_loopback_without_tls_a_drafter_joins_a_node_with_all_other_roles(
    tiny_llama: Path, tmp_path: Path, undisturbed: str
) -> None:
    """`insecure_loopback = true`, and nothing else: identities are claimed there."""
    ports = [free_port() for _ in range(4)]
    base = [f"http://127.0.0.1:{port}/" for port in ports[:2]]
    others = [
        *ENGINE,
        *UNHURRIED,
        *NO_ESCALATION,
        f"engine.model={tiny_llama}",
        f"node.base_uri={base[0]}",
        "node.single_node=true",
        f"sdcp.listen=127.0.0.1:{ports[0]}",
        f"frontend.listen=127.0.0.1:{ports[2]}",
        "frontend.insecure_loopback=true",
    ]
    drafter = [
        f"node.base_uri={base[1]}",
        f"sdcp.listen=127.0.0.1:{ports[1]}",
        f"metrics.listen=127.0.0.1:{ports[3]}",
        f"drafter.tokenizer={tiny_llama}",
        f'peers.routers=["{base[0]}router/"]',
        f'peers.caches=["{base[0]}cache/"]',
    ]

    def start(name: str, roles: str, settings: list[str]) -> DemoProcess:
        config = tmp_path / f"{name}.toml"
        config.write_text("[sdcp]\ninsecure_loopback = true\n")
        places = [f"node.state_dir={tmp_path / name / 'state'}", f"node.runtime_dir={tmp_path / name / 'run'}"]
        arguments = ["--role", roles, "--config", str(config), *set_arguments([*places, *settings])]
        return DemoProcess(name, arguments, tmp_path / f"{name}.log")

    daemons = start("others", "router,verifier,cache", others), start("drafter", "drafter", drafter)
    try:
        for daemon, port in zip(daemons, ports[2:], strict=True):
            wait_ready(("127.0.0.1", port), daemon.check, daemon.tail, READY_LIMIT_S)
        text, drafters = "", set()
        for count, chunk in enumerate(stream(("127.0.0.1", ports[2]), tiny_llama.name, LONG)):
            text += text_of(chunk)
            if count == 20:
                (session,) = sessions_of(tmp_path / "others" / "run" / "sdcpd.sock")
                drafters.add(session["router"]["drafter"])
        assert text == undisturbed
        assert drafters == {f"{base[1]}drafter/"}
    finally:
        codes = [daemon.stop() for daemon in daemons]
    assert codes == [0, 0]
