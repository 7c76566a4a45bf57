"""What the service manager is told over NOTIFY_SOCKET: READY, STATUS, STOPPING; RELOADING; EXTEND_TIMEOUT, WATCHDOG.

One datagram a message. Without a NOTIFY_SOCKET (no service manager) everything here does nothing, and a failed send is
no reason to stop a node that works otherwise.
"""

import contextlib
import math
import socket
import time
from collections.abc import Mapping
from typing import Final

MICROSECONDS: Final = 1_000_000


def watchdog_limit_s(environment: Mapping[str, str], pid: int) -> float | None:
    """How long after a `watchdog` the manager waits for the next; None when it does not watch this process (`pid`).

    Who says it twice in that time can miss once. (`sd_watchdog_enabled` reads the same variables.)
    """
    microseconds = environment.get("WATCHDOG_USEC", "")
    meant_for = environment.get("WATCHDOG_PID", str(pid))
    if not (microseconds.isascii() and microseconds.isdigit()) or int(microseconds) == 0 or meant_for != str(pid):
        return None
    return int(microseconds) / MICROSECONDS


class Notifier:
    """Speaks to the socket that `environment["NOTIFY_SOCKET"]` names (a path, or an abstract name after `@`)."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def status(self, text: str) -> None:
        """A line for `systemctl status`."""
        self._send(f"STATUS={text}")

    def ready(self, text: str) -> None:
        """All roles serve."""
        self._send(f"READY=1\nSTATUS={text}")

    def stopping(self) -> None:
        """Told to stop; roles are being ended in order."""
        self._send("STOPPING=1\nSTATUS=stopping")

    def reloading(self) -> None:
        """The configuration is being read again. `ready` ends that, with a text that says whether it was taken.

        The time, of the clock that `systemctl reload` was asked by, tells this reload from an earlier one.
        """
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}\nSTATUS=reloading")

    def extend_timeout(self, seconds: float) -> None:
        """While starting or stopping: more time, from now on, before the manager gives the node up.

        To be said again with each step that shows progress, so that a start that hangs is still noticed.
        """
        assert seconds > 0, "no more time is no extension"
        self._send(f"EXTEND_TIMEOUT_USEC={math.ceil(seconds * MICROSECONDS)}")

    def watchdog(self) -> None:
        """The node works. Due at least every `watchdog_limit_s`, from the loop whose standstill should end the node."""
        self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto(message.encode(), self._address)
