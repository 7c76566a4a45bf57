"""Which device a node takes: the demanded one or none, and it says which (bug 29)."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdcpd.node.demo_daemon import DemoDaemon

pytestmark = pytest.mark.process

EXIT_LIMIT_S = 10.0
READY_LIMIT_S = 120
SETTINGS = ("engine.kv_cache_bytes=4194304", "engine.threads=1")


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The service manager's socket, on a machine whose GPUs are hidden."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


@contextmanager
def started(model: Path, place: Path, *settings: str) -> Iterator[DemoDaemon]:
    places = (f"node.state_dir={place / 'state'}", f"node.runtime_dir={place / 'run'}")
    with DemoDaemon(model, [*places, *SETTINGS, *settings]) as daemon:
        yield daemon


def told(manager: socket.socket) -> str:
    """All messages so far."""
    messages: list[str] = []
    while True:
        try:
            messages.append(manager.recv(1000).decode())
        except BlockingIOError:
            return "\n".join(messages)


def listens(daemon: DemoDaemon) -> bool:
    try:
        socket.create_connection(daemon.address, timeout=1).close()
    except OSError:
        return False
    return True


def test_a_demanded_device_that_is_not_there_ends_the_node_before_anything_listens(
    tiny_llama: Path, tmp_path: Path, manager: socket.socket
) -> None:
    """In 10 s: the best of three starts, on a busy machine."""
    took: list[float] = []
    while len(took) < 3 and (not took or min(took) >= EXIT_LIMIT_S):
        begin = time.monotonic()
        with started(tiny_llama, tmp_path, 'engine.device="cuda"') as daemon:
            assert daemon.process is not None
            while daemon.process.poll() is None:
                assert not listens(daemon)
                assert not (tmp_path / "run" / "sdcpd.sock").exists()
                time.sleep(0.02)
            took.append(time.monotonic() - begin)
            assert daemon.wait() == 3
            assert 'device = "cuda", but there is no CUDA device' in daemon.log()
            assert "CUDA_VISIBLE_DEVICES" in daemon.log(), "the remedy"
            assert "Traceback" not in daemon.log()
    assert min(took) < EXIT_LIMIT_S
    assert "READY=1" not in told(manager)


def test_auto_says_and_exports_what_it_took(tiny_llama: Path, tmp_path: Path, manager: socket.socket) -> None:
    with started(tiny_llama, tmp_path, 'engine.device="auto"') as daemon:
        daemon.wait_ready(READY_LIMIT_S)
        (line,) = [line for line in daemon.log().splitlines() if "model loaded" in line]
        assert json.loads(line)["device"] == "cpu"
        connection = http.client.HTTPConnection(*daemon.address, timeout=5)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        (series,) = [line for line in page.splitlines() if line.startswith("sdcpd_build_info{")]
        assert 'device="cpu"' in series
        assert series.endswith(" 1.0")
