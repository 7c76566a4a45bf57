"""One real sdcpd for a demonstration: a process of its own, a temporary state directory, a free port, and no leftovers.

The process stands in a group of its own, so that Ctrl-C reaches only who started it, and that one ends it in order. If
the starter is killed outright, the kernel tells the daemon to stop (PR_SET_PDEATHSIG).
"""

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

CONFIG: Final = Path(__file__).parents[2] / "config" / "all-in-one.toml"
ROLES: Final = "router,verifier,drafter,cache"

STOP_LIMIT_S: Final = 10
STARTED_LIMIT_S: Final = 120
LOG_LINES_SHOWN: Final = 12
_POLL_S: Final = 0.05

_LAUNCH: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.executable, [sys.executable, "-m", "sdcpd.node.main", *sys.argv[2:]])
"""


class DaemonFailed(Exception):
    """The daemon did not start or went away. The text holds its last log lines and says what to do."""


class DemoDaemon:
    """`with DemoDaemon(model) as daemon:` starts it; `address` (host, port) is its client port once it is ready."""

    def __init__(self, model: Path, settings: Sequence[str] = (), config: Path = CONFIG) -> None:
        self._model = model
        self._config = config
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="sdcpd-quickstart-")
        self._log_file = Path(self._folder.name) / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ("127.0.0.1", _free_port())

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
        arguments = ["--role", ROLES, "--config", str(self._config)]
        for setting in settings:
            arguments += ["--set", setting]
        with self._log_file.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603  # our own interpreter and arguments
                [sys.executable, "-c", _LAUNCH, str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._folder.cleanup()

    def wait_ready(self, limit_s: float) -> None:
        """Block until /ready says 200. Raises DaemonFailed when the process ends first or `limit_s` passes."""
        until = time.monotonic() + limit_s
        answer = "no answer yet"
        while time.monotonic() < until:
            self.check()
            try:
                status, answer = self.get("/ready")
            except OSError:
                status = 0
            if status == 200:
                return
            time.sleep(_POLL_S)
        raise DaemonFailed(
            f"sdcpd was not ready within {limit_s:.0f} s ({answer}). The machine may be busy or short of memory; "
            f"its last log lines:\n{self._tail()}"
        )

    def check(self) -> None:
        """Raise DaemonFailed if the process has ended."""
        assert self.process is not None
        status = self.process.poll()
        if status is not None:
            raise DaemonFailed(f"sdcpd ended (exit code {status}); its last log lines:\n{self._tail()}")

    def wait(self) -> int:
        """Block until the process ends by itself; its exit code."""
        assert self.process is not None
        return self.process.wait(STARTED_LIMIT_S)

    def log(self) -> str:
        """All that the process has said."""
        return self._log_file.read_text("utf-8", "replace")

    def stop(self) -> int | None:
        """End the process: asked first, forced after `STOP_LIMIT_S`. Its exit code, None if it never ran."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def get(self, path: str) -> tuple[int, str]:
        """One GET at the client port: status and body. Raises OSError while nobody listens."""
        connection = http.client.HTTPConnection(*self.address, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read(500).decode("utf-8", "replace")
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()

    def _tail(self) -> str:
        lines = self.log().splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join(f"  {line}" for line in lines) or "  (none)"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
