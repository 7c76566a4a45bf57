"""`sdcpctl certs`, as an operator meets it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

from sdcpd.edge.identity import PeerRole
from sdcpd.node import certs_command, ctl
from sdcpd.node.cert_facts import DAY_S
from sdcpd.node.certs import init_authority


def run(*arguments: object) -> int:
    return ctl.main(["certs", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with an authority, made by the command."""
    assert run("init", "--dir", tmp_path / "ca", "--name", "our CA", "--days", 400) == 0
    said = capsys.readouterr().out
    assert "CN=our CA" in said
    assert "certs issue" in said  # what comes next
    return tmp_path / "ca"


def test_issue_and_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = ["--host", "h.example:8470", "--dir", folder]
    assert run("issue", "--role", "verifier, cache", *host, "--days", 100) == 0
    said = capsys.readouterr().out
    assert "https://h.example:8470/verifier/" in said
    assert "tls.certificate" in said
    assert run("show", folder / "verifier-cache-h.example-8470.pem") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith(" "))
    assert rows["roles"].split() == ["verifier,", "cache"]
    assert rows["subject"].strip() == "CN=verifier-cache-h.example-8470"
    assert rows["days_left"].strip() == "100.0"
    assert rows["state"].strip() == "good"
    assert len(rows["sha256"].strip()) == 64


def test_show_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("issue", "--role", "router", "--host", "[::1]:8470", "--dir", folder, "--json")
    issued = json.loads(capsys.readouterr().out)
    assert issued["certificate"] == str(folder / "router---1-8470.pem")
    assert run("show", folder) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["file", "roles", "hosts", "ends", "days_left", "state", "sha256"]
    assert lines[1][:3] == ["ca.pem", "(authority)", "-"]
    assert lines[2][:3] == ["router---1-8470.pem", "router", "::1"]
    assert run("show", folder, "--json") == 0
    shown = json.loads(capsys.readouterr().out)["certificates"]
    assert [entry["authority"] for entry in shown] == [True, False]
    assert shown[1] == {name: value for name, value in issued.items() if name not in ("certificate", "key")}
    assert shown[1]["uris"] == ["https://[::1]:8470/router/"]


@pytest.mark.parametrize(
    ("age_days", "state", "said"),
    [(101, "expired", "issue another one"), (90, "expires soon", "10.0 days"), (-1, "not yet valid", "clock")],
)
def test_what_does_not_hold_is_warned_of(
    folder: Path, capsys: pytest.CaptureFixture[str], age_days: int, state: str, said: str
) -> None:
    run("issue", "--role", "cache", "--host", "h.example", "--dir", folder, "--days", 100, "--out", folder / "c")
    options = ctl.parser().parse_args(["certs", "show", str(folder / "c.pem")])
    capsys.readouterr()
    assert certs_command.run_certs(options, time.time() + age_days * DAY_S) == certs_command.EXPIRING
    shown = capsys.readouterr()
    assert state in shown.out
    assert "warning" in shown.err
    assert said in shown.err


def test_one_bad_certificate_in_a_folder_is_enough(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("issue", "--role", "cache", "--host", "h.example", "--dir", folder, "--days", 5)
    assert run("show", folder, "--json") == certs_command.EXPIRING
    shown = capsys.readouterr()
    assert shown.err.count("warning") == 1
    assert shown.out.endswith("}\n")  # nothing but JSON there


def test_a_hostile_name_gives_a_terminal_no_orders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init_authority(tmp_path / "ca", name="[red]x[/red] \\[bold]", now=time.time())
    assert run("show", tmp_path / "ca" / "ca.pem") == 0
    assert "[red]x[/red]" in capsys.readouterr().out
    assert certs_command._plain("a\x1b[2Jb") == "a\N{REPLACEMENT CHARACTER}[2Jb"


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("init", "--dir", folder) == certs_command.REFUSED
    assert "--force" in capsys.readouterr().err
    assert run("init", "--dir", folder, "--force") == 0
    assert run("issue", "--role", "cache", "--host", "h", "--dir", tmp_path / "none") == certs_command.REFUSED
    assert "certs init" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    for path in ("empty", "none", "ca/ca.key"):
        assert run("show", tmp_path / path) == certs_command.REFUSED
        assert str(tmp_path / path) in capsys.readouterr().err
    assert run("issue", "--role", "cache", "--host", "h", "--dir", folder, "--days", 0) == certs_command.REFUSED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage"),
        (["make"], "invalid choice"),
        (["init"], "--dir"),
        (["issue", "--dir", "x", "--role", "cache"], "--host"),
        (["issue", "--dir", "x", "--role", "boss", "--host", "h"], "'boss' is no role"),
        (["issue", "--dir", "x", "--role", "cache,cache", "--host", "h"], "twice"),
        (["issue", "--dir", "x", "--role", "", "--host", "h"], "is no role"),
        (["issue", "--dir", "x", "--role", "cache", "--host", "*.h"], "wildcards"),
        (["issue", "--dir", "x", "--role", "cache", "--host", "h", "--days", "a"], "invalid int"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run(*arguments)
    assert raised.value.code == certs_command.USAGE
    assert said in capsys.readouterr().err


def test_roles_are_those_of_the_wire() -> None:
    assert sorted(certs_command.ROLES) == sorted(get_args(PeerRole))


def test_the_library_is_loaded_only_when_needed() -> None:
    code = (
        "import sys; from sdcpd.node import ctl\n"
        "ctl.parser().parse_args(['certs', 'show', 'x'])\n"
        "sys.exit('cryptography' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
