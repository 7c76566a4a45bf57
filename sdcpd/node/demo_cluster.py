"""Four sdcpd, one a role, for a demonstration: real processes, real certificates, nothing shared but the network.

They run from the shipped files `config/ROLE.toml`; what is overridden are addresses, folders and the model, as on hosts
of one's own. Everything lies in a temporary folder, and nothing is left behind.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from sdcpd.node.cert_hosts import CertHost
from sdcpd.node.certs import init_authority, issue
from sdcpd.node.demo_process import DaemonFailed, DemoProcess, free_port, get, set_arguments, wait_ready

CONFIG_FOLDER: Final = Path(__file__).parents[2] / "config"
START_ORDER: Final = ("cache", "router", "drafter", "verifier")
"""Any order works; this one has the least to wait for."""
HOST: Final = "127.0.0.1"


class DemoCluster:
    """`with DemoCluster(model) as cluster:` starts it; `address` (host, port) is the router's client port.

    `settings`: more `section.key=value` for each role.
    """

    def __init__(self, model: Path, settings: Mapping[str, Sequence[str]] | None = None) -> None:
        self._model = model
        self._settings = settings or {}
        self._folder = tempfile.TemporaryDirectory(prefix="sdcpd-quickstart-")
        self._ports = {role: free_port() for role in START_ORDER}
        self._metrics_ports = {role: free_port() for role in START_ORDER}
        self._daemons: dict[str, DemoProcess] = {}
        self.address = (HOST, free_port())

    def __enter__(self) -> "DemoCluster":
        self._make_certificates(time.time())
        for role in START_ORDER:
            self.start(role)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for daemon in self._daemons.values():
                daemon.ask_to_stop()
            for daemon in self._daemons.values():
                daemon.stop()
        finally:
            self._folder.cleanup()

    def start(self, role: str) -> DemoProcess:
        """Start a role, or start it again after it has ended, with the state it left."""
        arguments = ["--config", str(CONFIG_FOLDER / f"{role}.toml"), *set_arguments(self._overrides(role))]
        self._daemons[role] = DemoProcess(f"the {role}", arguments, Path(self._folder.name) / f"{role}.log")
        return self._daemons[role]

    def daemon(self, role: str) -> DemoProcess:
        """The process of a role."""
        return self._daemons[role]

    def base_uri(self, role: str) -> str:
        """Where a role is reached by others."""
        return f"https://{HOST}:{self._ports[role]}/{role}/"

    def socket(self, role: str) -> Path:
        """The admin socket of a role's node."""
        return self._place(role) / "run" / "sdcpd.sock"

    @property
    def authority(self) -> Path:
        """Folder of the authority and of all certificates."""
        return Path(self._folder.name) / "ca"

    def metrics_address(self, role: str) -> tuple[str, int]:
        """The operators' port of a role's node."""
        return HOST, self._metrics_ports[role]

    def wait_ready(self, limit_s: float) -> None:
        """Block until all are ready. Raises DaemonFailed when one ends first or `limit_s` passes."""
        until = time.monotonic() + limit_s
        for role in ("verifier", "drafter", "router"):
            tail = self._daemons[role].tail
            wait_ready(self.metrics_address(role), self.check, tail, max(0.0, until - time.monotonic()))

    def check(self) -> None:
        """Raise DaemonFailed if one of the processes has ended."""
        for daemon in self._daemons.values():
            daemon.check()

    def get(self, path: str) -> tuple[int, str]:
        """One GET at the client port: status and body. Raises OSError while nobody listens."""
        return get(self.address, path)

    def _make_certificates(self, now: float) -> None:
        authority = self.authority
        init_authority(authority, now=now)
        for role, port in self._ports.items():
            issue(authority, [role], CertHost(HOST, port), now=now, out=authority / role)

    def _overrides(self, role: str) -> list[str]:
        place, ca = self._place(role), self.authority
        own = [
            f"node.base_uri=https://{HOST}:{self._ports[role]}/",
            f"node.state_dir={place / 'state'}",
            f"node.runtime_dir={place / 'run'}",
            f"sdcp.listen={HOST}:{self._ports[role]}",
            f"tls.certificate={ca / f'{role}.pem'}",
            f"tls.key={ca / f'{role}.key'}",
            f"tls.ca={ca / 'ca.pem'}",
            f"metrics.listen={HOST}:{self._metrics_ports[role]}",
        ]
        if role != "cache":
            own.append(f'peers.caches=["{self.base_uri("cache")}"]')
        if role in ("verifier", "drafter"):
            own.append(f'peers.routers=["{self.base_uri("router")}"]')
        match role:
            case "router":
                own.append(f"frontend.listen={HOST}:{self.address[1]}")
                own.append(f'frontend.models=[{{ name = "{self._model.name}", path = "{self._model}" }}]')
            case "verifier":
                own.append(f"engine.model={self._model}")
            case "drafter":
                own.append(f"drafter.tokenizer={self._model}")
            case _:
                pass
        return [*own, *self._settings.get(role, ())]

    def _place(self, role: str) -> Path:
        return Path(self._folder.name) / role


__all__ = ["DaemonFailed", "DemoCluster"]
