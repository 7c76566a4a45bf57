"""One daemon for all tests of official clients: TLS, API keys, a tiny model, and its operators' port."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import pytest
from msgspec import Struct

from sdcpd.node.demo_daemon import CONFIG, ROLES
from sdcpd.node.demo_process import DemoProcess, free_port, set_arguments, wait_ready
from tests.edge.wire.pki import Authority

READY_LIMIT_S = 120
KEY, SMALL_KEY = "sk-of-ann-0123456789", "sk-of-bob-0123456789"
KEYS = f"""
[[keys]]
name = "ann"
key = "{KEY}"
group = "lab"

[[keys]]
name = "bob"
key = "{SMALL_KEY}"
tokens_per_minute = 5
"""


class ClientPort(Struct, frozen=True):
    """What a client of the daemon is told."""

    port: int
    model: str
    ca: Path
    key: str = KEY
    small_key: str = SMALL_KEY

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


@pytest.fixture(scope="session")
def client_port(tiny_llama: Path) -> Iterator[ClientPort]:
    with TemporaryDirectory(prefix="sdcpd-clients-") as name:
        folder = Path(name)
        issued = Authority(folder).issue("127.0.0.1")
        keys = folder / "keys.toml"
        keys.write_text(KEYS)
        keys.chmod(0o600)
        port, operators = free_port(), free_port()
        settings = [
            f"engine.model={tiny_llama}",
            "engine.kv_cache_bytes=4194304",
            "engine.threads=1",
            f"node.state_dir={folder / 'state'}",
            f"node.runtime_dir={folder / 'run'}",
            f"frontend.listen=127.0.0.1:{port}",
            "frontend.insecure_loopback=false",
            f'frontend.tls={{ certificate = "{issued.certificate}", key = "{issued.key}" }}',
            f"frontend.keys={keys}",
            f"metrics.listen=127.0.0.1:{operators}",
        ]
        arguments = ["--role", ROLES, "--config", str(CONFIG), *set_arguments(settings)]
        daemon = DemoProcess("sdcpd", arguments, folder / "log")
        try:
            wait_ready(("127.0.0.1", operators), daemon.check, daemon.tail, READY_LIMIT_S)
            yield ClientPort(port, tiny_llama.name, Path(issued.ca))
            log = daemon.log()
            assert "Traceback" not in log
            assert KEY not in log
        finally:
            assert daemon.stop() == 0


@pytest.fixture(scope="session")
def http(client_port: ClientPort) -> Iterator[httpx2.Client]:
    """What the Python clients are given for connections: it trusts the daemon's authority."""
    trust = ssl.create_default_context(cafile=str(client_port.ca))
    with httpx2.Client(verify=trust, http2=True, trust_env=False) as client:
        yield client
