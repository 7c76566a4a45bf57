"""Messages to the service manager."""

import socket
import time
from pathlib import Path

import pytest

from sdcpd.node.notify import Notifier, watchdog_limit_s


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


def test_reload_time_and_watchdog(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        notifier = Notifier({"NOTIFY_SOCKET": path})
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        notifier.reloading()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        notifier.extend_timeout(30)
        notifier.extend_timeout(0.0000001)
        notifier.watchdog()
        reloading, *rest = (manager.recv(200).decode() for _ in range(4))
    assert rest == ["EXTEND_TIMEOUT_USEC=30000000", "EXTEND_TIMEOUT_USEC=1", "WATCHDOG=1"]
    fields = dict(line.split("=", 1) for line in reloading.splitlines())
    assert fields.keys() == {"RELOADING", "MONOTONIC_USEC", "STATUS"}
    assert fields["RELOADING"] == "1"
    assert before <= int(fields["MONOTONIC_USEC"]) <= after  # the manager's clock is CLOCK_MONOTONIC


@pytest.mark.parametrize(
    ("environment", "limit_s"),
    [
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "41"}, 60.0),
        ({"WATCHDOG_USEC": "500000"}, 0.5),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "42"}, None),  # inherited from a parent that is watched
        ({"WATCHDOG_USEC": "0", "WATCHDOG_PID": "41"}, None),
        ({"WATCHDOG_USEC": "soon", "WATCHDOG_PID": "41"}, None),
        ({}, None),
    ],
)
def test_watchdog_limit(environment: dict[str, str], limit_s: float | None) -> None:
    assert watchdog_limit_s(environment, 41) == limit_s
