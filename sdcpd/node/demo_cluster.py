"""Several sdcpd, one role each, for a demonstration: real processes, real certificates, nothing shared but the network.

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
ONE_OF_EACH: Final = {"cache": "cache", "router": "router", "drafter": "drafter", "verifier": "verifier"}
"""Node to role, in the order of starting. Any order works; this one has the least to wait for."""
HOST: Final = "127.0.0.1"


class DemoCluster:
    """`with DemoCluster(model) as cluster:` starts it; `address` (host, port) is the router's client port.

    `settings`: more `section.key=value` for each node. `nodes`: the role of each node by its name; one of them is
    called `router`, and one `cache`.
    """

    def __init__(
        self,
        model: Path,
        settings: Mapping[str, Sequence[str]] | None = None,
        nodes: Mapping[str, str] = ONE_OF_EACH,
    ) -> None:
        self._model = model
        self._settings = settings or {}
        self._nodes = dict(nodes)
        self._folder = tempfile.TemporaryDirectory(prefix="sdcpd-quickstart-")
        self._ports = {node: free_port() for node in nodes}
        self._metrics_ports = {node: free_port() for node in nodes}
        self._daemons: dict[str, DemoProcess] = {}
        self.address = (HOST, free_port())

    def __enter__(self) -> "DemoCluster":
        try:
            self._make_certificates(time.time())
            for node in self._nodes:
                self.start(node)
        except BaseException:  # an interrupt: those that were started must not stay
            self.__exit__(None, None, None)
            raise
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

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes."""
        return tuple(self._nodes)

    def start(self, node: str) -> DemoProcess:
        """Start a node, or start it again after it has ended, with the state it left."""
        file = CONFIG_FOLDER / f"{self._nodes[node]}.toml"
        arguments = ["--config", str(file), *set_arguments(self._overrides(node))]
        self._daemons[node] = DemoProcess(f"the {node}", arguments, Path(self._folder.name) / f"{node}.log")
        return self._daemons[node]

    def daemon(self, node: str) -> DemoProcess:
        """The process of a node."""
        return self._daemons[node]

    def base_uri(self, node: str) -> str:
        """Where a node's role is reached by others."""
        return f"https://{HOST}:{self._ports[node]}/{self._nodes[node]}/"

    def socket(self, node: str) -> Path:
        """The admin socket of a node."""
        return self._place(node) / "run" / "sdcpd.sock"

    @property
    def authority(self) -> Path:
        """Folder of the authority and of all certificates."""
        return Path(self._folder.name) / "ca"

    def metrics_address(self, node: str) -> tuple[str, int]:
        """The operators' port of a node."""
        return HOST, self._metrics_ports[node]

    def wait_ready(self, limit_s: float) -> None:
        """Block until all are ready. Raises DaemonFailed when one ends first or `limit_s` passes."""
        until = time.monotonic() + limit_s
        for node in sorted(self._nodes, key=lambda node: self._nodes[node] == "router"):  # which waits for a verifier
            tail = self._daemons[node].tail
            wait_ready(self.metrics_address(node), self.check, tail, max(0.0, until - time.monotonic()))

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
        for node, port in self._ports.items():
            issue(authority, [self._nodes[node]], CertHost(HOST, port), now=now, out=authority / node)

    def _overrides(self, node: str) -> list[str]:
        place, ca, role = self._place(node), self.authority, self._nodes[node]
        own = [
            f"node.base_uri=https://{HOST}:{self._ports[node]}/",
            f"node.state_dir={place / 'state'}",
            f"node.runtime_dir={place / 'run'}",
            f"sdcp.listen={HOST}:{self._ports[node]}",
            f"tls.certificate={ca / f'{node}.pem'}",
            f"tls.key={ca / f'{node}.key'}",
            f"tls.ca={ca / 'ca.pem'}",
            f"metrics.listen={HOST}:{self._metrics_ports[node]}",
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
        return [*own, *self._settings.get(node, ())]

    def _place(self, node: str) -> Path:
        return Path(self._folder.name) / node


__all__ = ["DaemonFailed", "DemoCluster"]
