"""Messages to the service manager."""

import socket
from pathlib import Path

from sdcpd.node.notify import Notifier


def test_messages_arrive_as_datagrams(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        notifier = Notifier({"NOTIFY_SOCKET": path})
        notifier.status("loading the model")
        notifier.ready("serving")
        notifier.stopping()
        received = [manager.recv(200) for _ in range(3)]
    assert received == [b"STATUS=loading the model", b"READY=1\nSTATUS=serving", b"STOPPING=1\nSTATUS=stopping"]


def test_an_abstract_name_is_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0sdcpd-test-notify")
        Notifier({"NOTIFY_SOCKET": "@sdcpd-test-notify"}).stopping()
        assert manager.recv(200).startswith(b"STOPPING=1")


def test_without_a_manager_nothing_happens(tmp_path: Path) -> None:
    Notifier({}).ready("serving")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("serving")
