"""sdcpctl against a real admin socket, as an operator meets it."""

import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from msgspec import Struct

from sdcpd.edge.admin import Admin, bind_admin_socket, serve_admin
from sdcpd.node import ctl
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.traffic import ClassView

FIRST, SECOND = b"A" * 16, b"A" * 8 + b"B" * 8
DASHED = (b"\xf8" + b"C" * 15, b"\xfb\xe1" + b"D" * 14)
"""Their identifiers begin with one dash, and with two."""


class SessionRow(Struct, frozen=True):
    session: bytes
    round: int
    state: str = "drafting"
    committed_tokens: int = 20
    max_new: int = 64


class VerifierSnapshot(Struct, frozen=True):
    sessions: tuple[SessionRow, ...] = ()


class InstanceRow(Struct, frozen=True):
    instance: str
    load: int


CODE = ClassView(
    name="code",
    speculation=False,
    reason="acceptance",
    running=2,
    with_sessions=3,
    with_ms_per_token=20.0,
    without_sessions=1,
    without_ms_per_token=10.0,
    ratio=0.5,
    acceptance=0.25,
)


class RouterSnapshot(Struct, frozen=True):
    sessions: tuple[SessionRow, ...] = ()
    instances: tuple[InstanceRow, ...] = ()
    classes: tuple[ClassView, ...] = (CODE,)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[str]:
    """A node with two sessions; the socket's path."""
    async with serving(tmp_path, VerifierSnapshot((SessionRow(FIRST, 2), SessionRow(SECOND, 5)))) as path:
        yield path


@asynccontextmanager
async def serving(folder: Path, verifier: VerifierSnapshot) -> AsyncIterator[str]:
    path = folder / "sdcpd.sock"
    router = RouterSnapshot((SessionRow(FIRST, 1, "open"),), (InstanceRow("http://n/verifier/", 3),))
    async with trio.open_nursery() as nursery:
        admin = Admin({"router": lambda: router, "verifier": lambda: verifier}, "1.2.3")
        await nursery.start(serve_admin, admin, bind_admin_socket(path), logging.getLogger("test"))
        yield str(path)
        nursery.cancel_scope.cancel()


async def run(*arguments: str) -> int:
    return await trio.to_thread.run_sync(ctl.main, arguments)


async def test_sessions(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("sessions", "--socket", served) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["session", "state", "round", "tokens", "m_cap", "drafter", "age_s"]
    assert lines[1].split() == [session_path_id(FIRST), "drafting", "2", "20/64", "-", "-", "-"]
    assert lines[2].split() == [session_path_id(SECOND), "drafting", "5", "20/64", "-", "-", "-"]


async def test_show_by_a_beginning(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("show", session_path_id(SECOND)[:14], "--socket", served) == 0
    assert ["round", "5"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert await run("show", session_path_id(FIRST)[:3], "--socket", served) == ctl.NOT_FOUND
    said = capsys.readouterr().err
    assert session_path_id(FIRST) in said
    assert session_path_id(SECOND) in said
    assert await run("show", "zzz/..", "--socket", served) == ctl.NOT_FOUND


@pytest.mark.parametrize("octets", DASHED)
@pytest.mark.parametrize("chars", [22, 3])
async def test_show_an_id_that_begins_with_a_dash(
    octets: bytes, chars: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = session_path_id(octets)
    assert session.startswith("-")
    async with serving(tmp_path, VerifierSnapshot((SessionRow(octets, 7), SessionRow(FIRST, 2)))) as served:
        for arguments in ((session[:chars], "--socket", served), ("--socket", served, session[:chars])):
            assert await run("show", *arguments) == 0
            assert ["round", "7"] in [line.split() for line in capsys.readouterr().out.splitlines()]
        assert await run("show", "--js", session[:chars], "--sock", served) == 0
        assert json.loads(capsys.readouterr().out)["session"] == session
        assert await run("show", "--socket", served, "--", session[:chars]) == 0


@pytest.mark.parametrize("wanted", ["", "/", "//", "x/", "\udcff"])
async def test_show_what_is_no_id(served: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("show", wanted, "--socket", served) in (ctl.NOT_FOUND, ctl.USAGE)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sdcpctl: ")


async def test_json_is_the_answer_itself(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("instances", "--json", "--socket", served) == 0
    assert json.loads(capsys.readouterr().out) == {"instances": [{"instance": "http://n/verifier/", "load": 3}]}
    assert await run("show", session_path_id(FIRST), "--json", "--socket", served) == 0
    assert json.loads(capsys.readouterr().out)["router"]["state"] == "open"


async def test_instances(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("instances", "--socket", served) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["instance", "role", "method", "load", "queue", "placed", "accept_milli", "age_ms", "ttl_ms", "expired"],
        ["http://n/verifier/", "-", "-", "3", "-", "-", "-", "-", "-", "-"],
    ]


async def test_classes(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("classes", "--socket", served) == 0
    head, code = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:4] == ["class", "speculation", "reason", "running"]
    assert code == ["code", "off", "acceptance", "2", "0.25", "3", "20", "1", "10", "0.5"]
    assert await run("classes", "--json", "--socket", served) == 0
    assert json.loads(capsys.readouterr().out)["classes"][0]["name"] == "code"


def test_no_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["sessions", "--socket", str(tmp_path / "none")]) == ctl.UNREACHABLE
    said = capsys.readouterr().err
    assert "Is it running?" in said
    assert "--socket" in said


@pytest.mark.parametrize(
    "arguments", [[], ["sesions"], ["show"], ["show", "--json"], ["show", "-x", "y"], ["sessions", "--jsn"]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        ctl.main(arguments)
    assert raised.value.code == ctl.USAGE
    assert "usage: sdcpctl" in capsys.readouterr().err


def test_it_starts_without_torch() -> None:
    code = (
        "import sys; from sdcpd.node import ctl\n"
        "try: ctl.main(['--version'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'hypercorn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("command", ["failover", "switch", "cancel", "fence"])
async def test_commands(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[str, str | None]] = []

    class Done(Struct, frozen=True):
        session: str
        command: str
        state: str = "drafting"
        epoch: int = 1
        verifier: str | None = "http://v/verifier/"
        drafter: str | None = None

    class Commands:
        async def fail_over(self, session: str, to: str | None = None) -> Done:
            told.append((session, to))
            return Done(session, "failover")

        async def switch(self, session: str) -> Done:
            return await self.fail_over(session)

        async def cancel(self, session: str) -> Done:
            return await self.fail_over(session)

        async def fence(self, session: str) -> Done:
            return await self.fail_over(session)

    path = tmp_path / "sdcpd.sock"
    async with trio.open_nursery() as nursery:
        snapshot = RouterSnapshot((SessionRow(DASHED[0], 1),))
        admin = Admin({"router": lambda: snapshot}, "1.2.3", Commands)
        await nursery.start(serve_admin, admin, bind_admin_socket(path), logging.getLogger("test"))
        session = session_path_id(DASHED[0])
        target = ("--to", "http://w/verifier/") if command == "failover" else ()
        assert await run(command, session[:6], *target, "--socket", str(path)) == 0
        assert told == [(session, "http://w/verifier/" if target else None)]
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["session", "command", "state", "epoch", "verifier", "drafter"]
        assert lines[1].split() == [session, "failover", "drafting", "1", "http://v/verifier/", "-"]
        assert await run(command, session, "--json", "--socket", str(path)) == 0
        assert json.loads(capsys.readouterr().out)["session"] == session
        assert await run(command, "zzz", "--socket", str(path)) == ctl.NOT_FOUND
        assert "no session" in capsys.readouterr().err
        nursery.cancel_scope.cancel()


async def test_a_command_where_no_router_runs(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("fence", session_path_id(FIRST), "--socket", served) == ctl.NOT_FOUND
    assert "no router runs on this node" in capsys.readouterr().err
