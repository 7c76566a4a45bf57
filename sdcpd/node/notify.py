"""What the service manager is told over NOTIFY_SOCKET: READY, STATUS, STOPPING.

One datagram a message. Without a NOTIFY_SOCKET (no service manager) everything here does nothing, and a failed send is
no reason to stop a node that works otherwise.
"""

import contextlib
import socket
from collections.abc import Mapping


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

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto(message.encode(), self._address)
