"""The operator's socket: who may open it, whose file it replaces, what it answers."""

import http.client
import json
import logging
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import Struct

from sdcpd.edge.admin import COMMANDS, Admin, SocketRefused, bind_admin_socket, serve_admin
from sdcpd.protocol.problems import UnknownResource
from sdcpd.protocol.terms import session_path_id

FIRST, SECOND = b"A" * 16, b"A" * 8 + b"B" * 8


class SessionRow(Struct, frozen=True):
    session: bytes
    round: int
    digest: bytes = b"\x01" * 32
    age_s: float = float("inf")


class Snapshot(Struct, frozen=True):
    sessions: tuple[SessionRow, ...] = ()


class InstanceRow(Struct, frozen=True):
    instance: str
    load: int


class RouterSnapshot(Struct, frozen=True):
    sessions: tuple[SessionRow, ...]
    instances: tuple[InstanceRow, ...]


def admin() -> Admin:
    return Admin(
        {
            "router": lambda: RouterSnapshot((SessionRow(FIRST, 1),), (InstanceRow("http://n/verifier/", 3),)),
            "verifier": lambda: Snapshot((SessionRow(FIRST, 2), SessionRow(SECOND, 5))),
            "cache": Snapshot,
        },
        "1.2.3",
    )


def test_what_the_roles_know_of_a_session_stands_side_by_side() -> None:
    status, body = admin().answer("GET", "/sessions")
    assert status == 200
    first, second = body["sessions"]
    assert first["session"] == session_path_id(FIRST)
    assert (first["router"]["round"], first["verifier"]["round"]) == (1, 2)
    assert first["router"]["digest"] == "01" * 32
    assert first["router"]["age_s"] is None
    assert set(second) == {"session", "verifier"}


def test_one_session_by_its_beginning() -> None:
    answer = admin().answer
    assert answer("GET", f"/sessions/{session_path_id(SECOND)}")[1]["verifier"]["round"] == 5
    assert answer("GET", f"/sessions/{session_path_id(SECOND)[:14]}")[1]["verifier"]["round"] == 5
    status, body = answer("GET", f"/sessions/{session_path_id(FIRST)[:3]}")
    assert (status, len(body["sessions"])) == (409, 2)
    for path in ("/sessions/zzz", "/sessions/", "/sessions//", "//sessions"):
        assert answer("GET", path)[0] == 404


def test_the_rest() -> None:
    answer = admin().answer
    assert answer("GET", "/instances") == (200, {"instances": [{"instance": "http://n/verifier/", "load": 3}]})
    status, body = answer("GET", "/version")
    assert (status, body["version"], body["roles"]) == (200, "1.2.3", ["cache", "router", "verifier"])
    assert answer("GET", "/nothing")[0] == 404
    assert answer("POST", "/sessions")[0] == 405


def test_only_the_owner_may_open_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "sdcpd.sock"
    with bind_admin_socket(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sdcpd.sock"
    bind_admin_socket(path).close()  # closed without unlinking, as after a kill
    assert path.exists()
    with bind_admin_socket(path):
        pass


def test_a_living_socket_and_a_foreign_file_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sdcpd.sock"
    with bind_admin_socket(path) as living:
        with pytest.raises(SocketRefused, match="another process listens"):
            bind_admin_socket(path)
        assert living.getsockname() == str(path)
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(SocketRefused, match="is no socket"):
        bind_admin_socket(other)
    assert other.read_text() == "mine"


def test_a_place_that_cannot_be_had_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SocketRefused, match=r"node\.runtime_dir"):
        bind_admin_socket(tmp_path / "file" / "sdcpd.sock")
    with pytest.raises(SocketRefused, match="108"):
        bind_admin_socket(tmp_path / ("x" * 120))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Path]:
    path = tmp_path / "sdcpd.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_admin, admin(), bind_admin_socket(path), logging.getLogger("test"))
        yield path
        nursery.cancel_scope.cancel()
    assert not path.exists()


def get(path: Path, resource: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("localhost", timeout=20)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", resource)
    response = connection.getresponse()
    body = json.load(response)
    connection.close()
    return response.status, body


async def test_over_the_socket(served: Path) -> None:
    status, body = await trio.to_thread.run_sync(get, served, "/sessions")
    assert status == 200
    assert len(body["sessions"]) == 2
    assert (await trio.to_thread.run_sync(get, served, "/sessions/zzz"))[0] == 404


class Done(Struct, frozen=True):
    session: str
    command: str
    to: str | None = None


class Commands:
    """Notes what it is told; refuses what is unknown."""

    def __init__(self) -> None:
        self.told: list[Done] = []

    def _note(self, command: str, session: str, to: str | None = None) -> Done:
        if session == session_path_id(b"C" * 16):
            raise UnknownResource("not in the care of this router")
        self.told.append(Done(session, command, to))
        return self.told[-1]

    async def fail_over(self, session: str, to: str | None = None) -> Done:
        return self._note("failover", session, to)

    async def switch(self, session: str) -> Done:
        return self._note("switch", session)

    async def cancel(self, session: str) -> Done:
        return self._note("cancel", session)

    async def fence(self, session: str) -> Done:
        return self._note("fence", session)


def commanded() -> tuple[Admin, Commands]:
    commands = Commands()
    snapshot = RouterSnapshot((SessionRow(FIRST, 1), SessionRow(SECOND, 2)), ())
    return Admin({"router": lambda: snapshot}, "1", lambda: commands), commands


@pytest.mark.parametrize("name", COMMANDS)
async def test_commands_go_to_the_router_with_the_whole_id(name: str) -> None:
    admin_, commands = commanded()
    status, body = await admin_.command(f"/sessions/{session_path_id(SECOND)[:14]}/{name}", "")
    assert (status, body["command"], body["session"]) == (200, name, session_path_id(SECOND))
    assert [done.command for done in commands.told] == [name]


async def test_a_target_is_passed_on() -> None:
    admin_, commands = commanded()
    await admin_.command(f"/sessions/{session_path_id(FIRST)}/failover", "to=https%3A%2F%2Fv%2Fverifier%2F")
    assert commands.told == [Done(session_path_id(FIRST), "failover", "https://v/verifier/")]


async def test_commands_that_cannot_be_carried_out() -> None:
    admin_, commands = commanded()
    first, other = session_path_id(FIRST), session_path_id(b"C" * 16)
    assert (await admin_.command(f"/sessions/{first}/explode", ""))[0] == 404
    assert (await admin_.command("/sessions//fence", ""))[0] == 404
    assert (await admin_.command(f"/sessions/{first[:2]}/fence", ""))[0] == 409
    assert (await admin_.command("/sessions/zz/fence", ""))[0] == 404
    status, body = await admin_.command(f"/sessions/{other}/fence", "")
    assert (status, body) == (404, {"detail": "not in the care of this router"})
    status, body = await admin().command(f"/sessions/{first}/fence", "")
    assert status == 409
    assert "no router" in body["detail"]
    assert commands.told == []
