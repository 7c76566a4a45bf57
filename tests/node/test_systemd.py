"""The files for systemd: what the unit promises, what systemd thinks of it, and that the daemon works under it.

systemd's own tools are needed. Where they are missing these tests fail and say how to get them: a unit that nobody has
checked is what they are there to prevent.
"""

import fnmatch
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sdcpd.node import main
from sdcpd.node.config import load_config
from sdcpd.node.demo_daemon import CONFIG
from tests.support.unit_file import UnitFile

FOLDER = Path(__file__).parents[2] / "systemd"
UNIT = FOLDER / "sdcpd@.service"
DAEMON = "/opt/sdcpd/bin/sdcpd"

EXPOSURE_LIMIT = 20
"""Tenths, of 100. 15 where this was written, by systemd 252, all of it what a service on a network with a GPU does not
give up: network, device access, /proc, its own code at run time. The rest is room for other versions' weights."""


@pytest.fixture(scope="module")
def unit() -> UnitFile:
    return UnitFile(UNIT)


def tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run one of systemd's tools."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(
            f"{name} is missing. Debian, Ubuntu: apt-get install systemd procps. Or leave out: -k 'not systemd'"
        )
    command = [path, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})


# --- What the unit promises


@pytest.mark.parametrize(
    ("key", "value"),
    {
        "Type": "notify",
        "NotifyAccess": "main",
        "User": "sdcpd",
        "Group": "sdcpd",
        "Restart": "on-failure",
        "StateDirectory": "sdcpd/%i",
        "RuntimeDirectory": "sdcpd/%i",
        "CacheDirectory": "sdcpd/%i",
        "ConfigurationDirectory": "sdcpd",
        "LimitMEMLOCK": "infinity",
        "LimitCORE": "0",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "NoNewPrivileges": "yes",
        "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6",
        "SystemCallArchitectures": "native",
        "KillMode": "mixed",
    }.items(),
)
def test_settings(unit: UnitFile, key: str, value: str) -> None:
    assert unit.all("Service", key) == [value]


def test_limits_are_given(unit: UnitFile) -> None:
    assert 30 <= int(unit.one("Service", "WatchdogSec")) <= 300
    assert int(unit.one("Service", "TimeoutStartSec")) >= 60
    assert int(unit.one("Service", "LimitNOFILE")) >= 16_384


def test_the_gpu_stays_visible(unit: UnitFile) -> None:
    """Each of these hides it, and the daemon would run on CPU; the driver's groups differ from version to version."""
    assert unit.one("Service", "PrivateDevices") == "no"
    assert unit.one("Service", "ProcSubset") == "all"
    assert unit.one("Service", "DevicePolicy") == "closed"
    allowed = [value.split() for value in unit.all("Service", "DeviceAllow")]
    groups = ["nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia-nvswitch"]
    for group in groups:
        assert any(fnmatch.fnmatch(f"char-{group}", pattern) and "rw" in access for pattern, access in allowed), group
    assert all(pattern.startswith("char-nvidia") for pattern, _ in allowed)


def test_code_made_at_run_time_is_executed(unit: UnitFile) -> None:
    """oneDNN's kernels; see the unit."""
    assert unit.one("Service", "MemoryDenyWriteExecute") == "no"


def test_no_restart_where_it_cannot_help(unit: UnitFile) -> None:
    """A wrong configuration is as wrong in five seconds; a GPU that is not there yet may be."""
    assert unit.words("Service", "RestartPreventExitStatus") == [str(main.REFUSED)]
    assert main.NOT_STARTED != main.REFUSED
    assert unit.one("Unit", "StartLimitIntervalSec") == "0"
    assert int(unit.one("Service", "RestartSec")) >= 1


def test_passive_waiting(unit: UnitFile) -> None:
    assert set(unit.words("Service", "Environment")) >= {f"{k}={v}" for k, v in main.PASSIVE_WAITING.items()}


def test_reload_checks_before_it_tells(unit: UnitFile) -> None:
    check, tell = unit.all("Service", "ExecReload")
    assert check.split()[:2] == [DAEMON, "--check"]
    assert sorted(check.split()) == sorted([*unit.one("Service", "ExecStart").split(), "--check"])
    assert tell == "kill -HUP $MAINPID"


def test_the_command_line_is_one_that_the_daemon_takes(unit: UnitFile, tmp_path: Path) -> None:
    """It puts state and socket into the directories that systemd makes for the instance, whatever the file says."""
    line = unit.one("Service", "ExecStart")
    for specifier, value in {"%i": "verifier", "%S": "/var/lib", "%t": "/run"}.items():
        line = line.replace(specifier, value)
    assert "%" not in line
    program, *arguments = line.split()
    options = main.parser().parse_args(arguments)
    assert (program, options.config) == (DAEMON, Path("/etc/sdcpd/verifier.toml"))
    (tmp_path / "config.json").touch()  # all that is asked of a model's folder at this point
    config = load_config(CONFIG, [f"engine.model={tmp_path}", *options.set], options.role)
    assert config.node.state_dir == "/var/lib/sdcpd/verifier"
    assert str(config.node.socket) == "/run/sdcpd/verifier/sdcpd.sock"


# --- What systemd thinks of it


def verified(text: str, folder: Path) -> str:
    """Complaints of `systemd-analyze verify`, with the daemon where it is here."""
    path = folder / UNIT.name
    path.write_text(text.replace(DAEMON, str(Path(sys.executable).with_name("sdcpd"))))
    result = tool("systemd-analyze", "verify", "--man=no", path)
    assert result.stderr or result.returncode == 0
    return result.stderr


def test_verify_is_clean(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert verified(text, tmp_path) == ""
    assert "Unknown key" in verified(text.replace("\nKillMode=", "\nKilMode="), tmp_path)


def test_security_score() -> None:
    judged = tool("systemd-analyze", "--no-pager", "security", "--offline=true", f"--threshold={EXPOSURE_LIMIT}", UNIT)
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", judged.stdout)
    assert found, judged.stdout + judged.stderr
    assert float(found[1]) * 10 <= EXPOSURE_LIMIT, judged.stdout
    assert judged.returncode == 0


def test_users_and_folders(tmp_path: Path) -> None:
    """As root they are made for real, below a folder; else systemd says what it would make."""
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    if os.geteuid() != 0:
        said = tool("systemd-sysusers", "--dry-run", FOLDER / "sysusers.d" / "sdcpd.conf")
        assert said.returncode == 0, said.stderr
        return
    for name in ("sysusers", "tmpfiles"):
        create = ["--create"] if name == "tmpfiles" else []
        said = tool(f"systemd-{name}", f"--root={root}", *create, FOLDER / f"{name}.d" / "sdcpd.conf")
        assert said.returncode == 0, said.stderr
    user = next(line.split(":") for line in (root / "etc/passwd").read_text().splitlines() if line.startswith("sdcpd:"))
    gid = int(user[3])
    assert (user[5], user[6]) == ("/var/lib/sdcpd", "/usr/sbin/nologin")
    members = [line.split(":") for line in (root / "etc/group").read_text().splitlines()]
    assert {group[0] for group in members if group[3] == "sdcpd"} == {"video", "render"}
    for name in ("etc/sdcpd", "etc/sdcpd/tls"):
        status = (root / name).stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (0, gid, 0o750), name


# --- That the daemon works under it


@pytest.mark.process
def test_the_daemon_serves_under_the_units_filter(tiny_llama: Path, tmp_path: Path) -> None:
    """The unit's system calls and address families, its environment, READY over a real socket, an answer, the end."""
    tool("systemd-analyze", "--version")
    unit = UnitFile(UNIT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [
        f"engine.model={tiny_llama}",
        "engine.kv_cache_bytes=4194304",
        "engine.threads=1",
        f"frontend.listen=127.0.0.1:{port}",
        f"node.state_dir={tmp_path / 'state'}",
        f"node.runtime_dir={tmp_path / 'run'}",
    ]
    command = [sys.executable, "-m", "tests.support.unit_file", str(UNIT), sys.executable, "-m", "sdcpd.node.main"]
    command += ["--config", str(CONFIG), *(word for setting in settings for word in ("--set", setting))]
    words = (word.replace("%C/sdcpd/%i", str(tmp_path / "cache")) for word in unit.words("Service", "Environment"))
    environment = os.environ | dict(word.split("=", 1) for word in words)
    environment |= {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, (tmp_path / "log").open("wb") as log:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(120)
        process = subprocess.Popen(command, env=environment, cwd=FOLDER.parent, stdout=log, stderr=log)
        try:
            while not manager.recv(1000).startswith(b"READY=1"):
                assert process.poll() is None, (tmp_path / "log").read_text()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = {"model": tiny_llama.name, "prompt": "hello", "max_tokens": 8}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert "\nSeccomp:\t2\n" in status
            assert "\nNoNewPrivs:\t1\n" in status
            connection.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()


def test_the_filter_refuses_something() -> None:
    """Else the test above would say nothing."""
    tool("systemd-analyze", "--version")
    code = (
        "import os, socket, sys\n"
        "for call in (lambda: os.chown('.', 0, 0), lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)):\n"
        "    try: call()\n"
        "    except PermissionError: continue\n"
        "    sys.exit(1)\n"
        "socket.getaddrinfo('localhost', 80)\n"
    )
    command = [sys.executable, "-m", "tests.support.unit_file", str(UNIT), sys.executable, "-c", code]
    assert subprocess.run(command, cwd=FOLDER.parent, check=False).returncode == 0
