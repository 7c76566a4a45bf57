"""What tests of whole daemons share: a client that streams, the operator's view, and a commit log read from disk."""

import json
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

from sdcpd.cache.files import RealFiles
from sdcpd.cache.log_reading import ReadPlan
from sdcpd.cache.log_requests import LogContent
from sdcpd.cache.log_store import LogStore
from sdcpd.cache.refs import LogName
from sdcpd.cache.settings import CacheSettings
from sdcpd.node import ctl_socket
from sdcpd.protocol.commit_log import CommitRecord, read_records, view
from sdcpd.protocol.terms import session_from_path_id


def stream(address: tuple[str, int], model: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
    """Chunks of a streamed completion, until the connection ends, however it ends."""
    octets = json.dumps({"model": model, **body}).encode()
    with socket.create_connection(address, timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: n\r\nContent-Length: {len(octets)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + octets)
        with connection.makefile("rb") as lines:
            try:
                for line in lines:
                    if line.startswith(b"data: {"):
                        yield json.loads(line[6:])
                    elif line.startswith(b"data: [DONE]"):
                        return
            except ConnectionResetError:
                return


def read_log(state: Path, session: str) -> list[CommitRecord]:
    """The commits of a session's log on the disk of a node that does not run, read with the store's own code."""
    store = LogStore.open(CacheSettings(), RealFiles(state / "log"), 0.0)
    try:
        plan = store.plan_read(LogName(None, session_from_path_id(session)).path, 0.0)
        assert isinstance(plan, ReadPlan)
        content = store.read(plan)
        assert isinstance(content, LogContent)
        return list(view(record for record, _ in read_records(content.octets)).commits)
    finally:
        store.close()


def sessions_of(admin_socket: Path) -> list[dict[str, Any]]:
    """What `sdcpctl sessions --json` says."""
    status, answer = ctl_socket.ask(str(admin_socket), "/sessions")
    assert status == 200
    sessions: list[dict[str, Any]] = answer["sessions"]
    return sessions
