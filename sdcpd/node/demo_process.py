"""A real sdcpd for a demonstration: a process of its own that leaves nothing behind, and how to ask its client port.

The process stands in a group of its own, so that Ctrl-C reaches only who started it, and that one ends it in order. If
the starter is killed outright, the kernel tells the daemon to stop (PR_SET_PDEATHSIG).
"""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

STOP_LIMIT_S: Final = 10
STARTED_LIMIT_S: Final = 120
LOG_LINES_SHOWN: Final = 12
_POLL_S: Final = 0.05
_ENDINGS: Final = (signal.SIGINT, signal.SIGTERM)

_LAUNCH: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
os.execv(sys.executable, [sys.executable, "-m", "sdcpd.node.main", *sys.argv[2:]])
"""


class DaemonFailed(Exception):
    """A daemon did not start or went away. The text holds its last log lines and says what to do."""


class DemoProcess:
    """One sdcpd. `name` is what people are told it is; `arguments` are its command line; its log goes to a file."""

    def __init__(self, name: str, arguments: Sequence[str], log_file: Path) -> None:
        self._name: Final = name
        self._log_file: Final = log_file
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
        try:
            with log_file.open("ab") as log:
                self.process: Final = subprocess.Popen(  # noqa: S603  # our own interpreter and arguments
                    [sys.executable, "-c", _LAUNCH, str(os.getpid()), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        finally:
            self._unblock()

    def _unblock(self) -> None:
        """An interrupt that came while the process was being started ends both."""
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
        except KeyboardInterrupt:
            if hasattr(self, "process"):
                self.stop()
            raise

    def check(self) -> None:
        """Raise DaemonFailed if the process has ended."""
        status = self.process.poll()
        if status is not None:
            raise DaemonFailed(f"{self._name} ended (exit code {status}); its last log lines:\n{self.tail()}")

    def wait(self) -> int:
        """Block until the process ends by itself; its exit code."""
        return self.process.wait(STARTED_LIMIT_S)

    def ask_to_stop(self) -> None:
        """As the service manager would. A stopped (SIGSTOP) process goes on first, or it could not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """End the process: asked first, forced after `STOP_LIMIT_S`. Its exit code."""
        self.ask_to_stop()
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return self.process.wait()

    def log(self) -> str:
        """All that the process has said, and those before it that wrote to the same file."""
        return self._log_file.read_text("utf-8", "replace")

    def tail(self) -> str:
        """The last lines of the log, for a message."""
        lines = self.log().splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join(f"  {line}" for line in lines) or "  (none)"


def wait_ready(address: tuple[str, int], check: Callable[[], None], tail: Callable[[], str], limit_s: float) -> None:
    """Block until /ready says 200 at `address`. Raises DaemonFailed after `limit_s`, and what `check` raises."""
    until = time.monotonic() + limit_s
    answer = "no answer yet"
    while time.monotonic() < until:
        check()
        try:
            status, answer = get(address, "/ready")
        except OSError:
            status = 0
        if status == 200:
            return
        time.sleep(_POLL_S)
    raise DaemonFailed(
        f"sdcpd was not ready within {limit_s:.0f} s ({answer}). The machine may be busy or short of memory; "
        f"its last log lines:\n{tail()}"
    )


def get(address: tuple[str, int], path: str) -> tuple[int, str]:
    """One GET: status and body. Raises OSError while nobody listens."""
    connection = http.client.HTTPConnection(*address, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(500).decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from error
    finally:
        connection.close()


def free_port() -> int:
    """A port on loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def set_arguments(settings: Sequence[str]) -> list[str]:
    """`--set` for each of `section.key=value`."""
    return [word for setting in settings for word in ("--set", setting)]
