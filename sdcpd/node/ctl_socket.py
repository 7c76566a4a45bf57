"""How sdcpctl asks a node: HTTP/1.1 with JSON over the node's admin socket (edge/admin.py)."""

import http.client
import json
import socket
from typing import Any, Final

ANSWER_TIMEOUT_S: Final = 10
"""Answers are read from memory; a node that needs longer hangs."""


class NodeUnreachable(Exception):
    """Nobody answers on the socket. The text says what to do."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask(path: str, resource: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    """One request over the socket at `path`: status and JSON body. Raises NodeUnreachable."""
    connection = _UnixConnection(path)
    try:
        connection.request(method, resource)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except PermissionError as error:
        raise NodeUnreachable(
            f"{path} belongs to another user. Run sdcpctl as the user that runs sdcpd, or as root."
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NodeUnreachable(
            f"no sdcpd answers on {path} ({error}). Is it running? Its socket is sdcpd.sock in node.runtime_dir; "
            "name another one with --socket PATH."
        ) from error
    finally:
        connection.close()
