"""The operator's surface: what `sdcpctl` asks, as HTTP/1.1 with JSON over a Unix socket of this node.

Theory: who may open the socket file is the operator (mode 0600: the daemon's own user, and root); there is no other
check, so nothing here is served over a network. All answers are read from the roles' snapshots at the moment of the
request; commands are the router's (roles/router_commands.py). A snapshot is a Struct; its member `sessions`, where it
has one, is a list of Structs with a member `session`; likewise `instances` and `instance`, `classes` and `name`. What
several roles of the node know of one session stands side by side in the answer, under the role's name.

| request | answer |
|---|---|
| GET /version | {name, version, roles, pid} |
| GET /sessions | {sessions: [{session, ROLE: {...}, ...}]} |
| GET /sessions/ID | one of these; ID may be shortened while it stays unambiguous: 404 none, 409 several |
| GET /instances | {instances: [{instance, ...}]}, where the router runs |
| GET /classes | {classes: [{name, ...}]}, likewise |
| POST /sessions/ID/COMMAND | failover (`?to=VERIFIER`), switch, cancel, fence, where the router runs: what was begun |
"""

import contextlib
import errno
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from logging import Logger
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import parse_qs

import hypercorn.trio
import msgspec
import trio
from hypercorn.config import Config
from msgspec import Struct

from sdcpd.protocol.problems import Problem
from sdcpd.protocol.terms import session_path_id

SESSION_ID_CHARACTERS: Final = 22
"""Of a whole session identifier; anything shorter is a beginning of one."""

BACKLOG: Final = 16
"""Connections not yet taken up. An operator's tool opens one at a time."""

Snapshots = Mapping[str, Callable[[], Struct]]
"""Role name to that role's `snapshot`."""


class SessionCommands(Protocol):
    """What an operator may do to a session, given by its whole identifier. Methods raise Problem."""

    async def fail_over(self, session: str, to: str | None = None) -> Struct: ...
    async def switch(self, session: str) -> Struct: ...
    async def cancel(self, session: str) -> Struct: ...
    async def fence(self, session: str) -> Struct: ...


COMMANDS: Final = ("failover", "switch", "cancel", "fence")

Send = Callable[[Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]


class SocketRefused(Exception):
    """The socket file cannot be had. The text says what to do."""


def bind_admin_socket(path: Path) -> socket.socket:
    """A listening Unix socket at `path`, mode 0600; its directory is made if it is missing.

    A file left behind by a node that was killed is replaced, but only when it is a socket on which nobody listens.
    Raises SocketRefused.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _clear_stale(path)
        mask = os.umask(0o177)  # the mode must hold from the first moment, not from a later chmod
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, SocketRefused) as error:
        listener.close()
        if isinstance(error, SocketRefused):
            raise
        raise SocketRefused(
            f"the admin socket {path} cannot be made ({error.strerror or error}). Set node.runtime_dir to a directory "
            f"that this user (uid {os.getuid()}) may write; a path must stay below 108 characters."
        ) from error
    return listener


def _clear_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketRefused(f"{path} is in the way and is no socket. Remove it, or set another node.runtime_dir.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        outcome = probe.connect_ex(os.fspath(path))
    if outcome == errno.ECONNREFUSED:
        path.unlink()
    elif outcome != errno.ENOENT:
        raise SocketRefused(
            f"another process listens on {path}. Stop that sdcpd, or give this one another node.runtime_dir."
        )


class Admin:
    """The ASGI application behind the socket. `commands` gives the router's, None while none runs here."""

    def __init__(
        self,
        snapshots: Snapshots,
        version: str,
        commands: Callable[[], SessionCommands | None] = lambda: None,
    ) -> None:
        self._snapshots = snapshots
        self._version = version
        self._commands = commands

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """ASGI. The server's own start and stop are acknowledged; there is nothing here to start or stop."""
        if scope["type"] == "lifespan":
            for stage in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{stage}.complete"})
            return
        if scope["type"] != "http":
            return  # a WebSocket request; the server refuses it
        if scope["method"] == "POST":
            status, body = await self.command(scope["path"], scope.get("query_string", b"").decode("ascii", "replace"))
        else:
            status, body = self.answer(scope["method"], scope["path"])
        octets = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(octets)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": octets, "more_body": False})

    def answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON body for one request."""
        if method != "GET":
            return 405, {"detail": f"{method} is not offered here; GET is, and POST for commands"}
        match path.removeprefix("/").split("/"):
            case ["version"]:
                roles = sorted(self._snapshots)
                return 200, {"name": "sdcpd", "version": self._version, "roles": roles, "pid": os.getpid()}
            case ["sessions"]:
                return 200, {"sessions": list(self._sessions().values())}
            case ["sessions", wanted] if wanted:
                return self._session(wanted)
            case ["instances"]:
                return 200, {"instances": self._entries("instances")}
            case ["classes"]:
                return 200, {"classes": self._entries("classes")}
            case _:
                return 404, {
                    "detail": f"no resource {path}; there are /version, /sessions, /sessions/ID, /instances, /classes"
                }

    async def command(self, path: str, query: str) -> tuple[int, dict[str, Any]]:
        """Carry a command out: status and JSON body."""
        match path.removeprefix("/").split("/"):
            case ["sessions", wanted, name] if wanted and name in COMMANDS:
                pass
            case _:
                return 404, {"detail": f"no command {path}; there are /sessions/ID/ with {', '.join(COMMANDS)}"}
        commands = self._commands()
        if commands is None:
            return 409, {"detail": "no router runs on this node; commands are given where the router is"}
        session: str = wanted
        if len(session) < SESSION_ID_CHARACTERS:
            status, found = self._session(session)
            if status != 200:
                return status, found
            session = found["session"]
        to = parse_qs(query).get("to", [None])[0]
        try:
            match name:
                case "failover":
                    done = await commands.fail_over(session, to)
                case "switch":
                    done = await commands.switch(session)
                case "cancel":
                    done = await commands.cancel(session)
                case _:
                    done = await commands.fence(session)
        except Problem as problem:
            return problem.status, {"detail": problem.detail}
        return 200, _plain(done)

    def _session(self, wanted: str) -> tuple[int, dict[str, Any]]:
        sessions = self._sessions()
        found = [key for key in sessions if key.startswith(wanted)]
        if not found:
            return 404, {"detail": f"no session {wanted} on this node; ended ones are kept for a short while only"}
        if len(found) > 1 and wanted not in sessions:
            return 409, {"detail": f"{wanted} is the beginning of several sessions; give more of it", "sessions": found}
        return 200, sessions[wanted if wanted in sessions else found[0]]

    def _sessions(self) -> dict[str, dict[str, Any]]:
        merged: dict[str, dict[str, Any]] = {}
        for role, snapshot in self._snapshots.items():
            for entry in _plain(snapshot()).get("sessions", []):
                session = entry.pop("session")
                merged.setdefault(session, {"session": session})[role] = entry
        return merged

    def _entries(self, member: str) -> list[dict[str, Any]]:
        return [entry for snapshot in self._snapshots.values() for entry in _plain(snapshot()).get(member, [])]


def _plain(snapshot: Struct) -> dict[str, Any]:
    """A snapshot as JSON values: 16 octets are an identifier (base64url), other octets are shown in hex."""
    plain: dict[str, Any] = _printable(msgspec.to_builtins(snapshot, builtin_types=(bytes,)))
    return plain


def _printable(value: Any) -> Any:
    match value:
        case bytes():
            return session_path_id(value) if len(value) == 16 else value.hex()
        case dict():
            return {str(key): _printable(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_printable(entry) for entry in value]
        case float() if value in (float("inf"), float("-inf")) or value != value:
            return None  # JSON has no such numbers
        case _:
            return value


async def serve_admin(
    application: Admin,
    listener: socket.socket,
    log: Logger,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, and remove the socket file then. Takes `listener` over."""
    path = listener.getsockname()
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.errorlog = log
    config.include_server_header = False
    config.graceful_timeout = 0.5  # nothing here takes longer

    async with trio.open_nursery() as nursery:
        try:
            await nursery.start(lambda task_status: hypercorn.trio.serve(application, config, task_status=task_status))
            task_status.started()
            await trio.sleep_forever()
        finally:
            with contextlib.suppress(FileNotFoundError):  # somebody tidied up
                os.unlink(path)
