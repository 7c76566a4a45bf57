"""One sdcpd with all roles for a demonstration: a temporary state directory, a free port, and no leftovers."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from sdcpd.node.demo_process import DaemonFailed, DemoProcess, free_port, get, set_arguments, wait_ready

CONFIG: Final = Path(__file__).parents[2] / "config" / "all-in-one.toml"
ROLES: Final = "router,verifier,drafter,cache"


class DemoDaemon:
    """`with DemoDaemon(model) as daemon:` starts it; `address` (host, port) is its client port once it is ready."""

    def __init__(self, model: Path, settings: Sequence[str] = (), config: Path = CONFIG) -> None:
        self._model = model
        self._config = config
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="sdcpd-quickstart-")
        self._daemon: DemoProcess | None = None
        self.address = ("127.0.0.1", free_port())

    def __enter__(self) -> "DemoDaemon":
        folder = Path(self._folder.name)
        host, port = self.address
        settings = [
            f"engine.model={self._model}",
            f"node.state_dir={folder / 'state'}",
            f"node.runtime_dir={folder / 'run'}",
            f"frontend.listen={host}:{port}",
            *self._settings,
        ]
        arguments = ["--role", ROLES, "--config", str(self._config), *set_arguments(settings)]
        self._daemon = DemoProcess("sdcpd", arguments, folder / "log")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._folder.cleanup()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The process itself, once started."""
        return self._started.process

    def wait_ready(self, limit_s: float) -> None:
        """Block until /ready says 200. Raises DaemonFailed when the process ends first or `limit_s` passes."""
        wait_ready(self.address, self.check, self._started.tail, limit_s)

    def check(self) -> None:
        """Raise DaemonFailed if the process has ended."""
        self._started.check()

    def wait(self) -> int:
        """Block until the process ends by itself; its exit code."""
        return self._started.wait()

    def log(self) -> str:
        """All that the process has said."""
        return self._started.log()

    def stop(self) -> int | None:
        """End the process in order; its exit code, None if it never ran."""
        return None if self._daemon is None else self._daemon.stop()

    def get(self, path: str) -> tuple[int, str]:
        """One GET at the client port: status and body. Raises OSError while nobody listens."""
        return get(self.address, path)

    @property
    def _started(self) -> DemoProcess:
        assert self._daemon is not None, "the block was entered"
        return self._daemon


__all__ = ["DaemonFailed", "DemoDaemon"]
