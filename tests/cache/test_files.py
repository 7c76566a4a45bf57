"""The real files: whole writes, private files, a lock that ends with its process."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sdcpd.cache.files import RealFiles, StateInUse


def test_writing_reading_cutting(tmp_path: Path) -> None:
    files = RealFiles(tmp_path / "a" / "b")
    file = files.open("one")
    file.write_at(3, b"defg")
    file.write_at(0, b"abc")
    file.sync()
    assert files.read("one") == b"abcdefg"
    assert files.read("one", 2, 3) == b"cde"
    assert files.read("one", 5, 100) == b"fg"
    assert files.read("one", 100, 5) == b""
    file.truncate(2)
    assert files.read("one") == b"ab"
    file.close()


def test_names_renames_and_removals(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    (tmp_path / "directory").mkdir()
    files.open("b").close()
    files.open("a").close()
    assert files.names() == ["a", "b"]
    files.rename("a", "c")
    files.remove("b")
    files.sync_directory()
    assert files.names() == ["c"]
    with pytest.raises(FileNotFoundError):
        files.read("a")
    with pytest.raises(FileNotFoundError):
        files.remove("a")


def test_only_the_owner_reads(tmp_path: Path) -> None:
    """Logs hold users' tokens (decision 98)."""
    files = RealFiles(tmp_path / "log")
    files.open("one").close()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "log" / "one").stat().st_mode) == 0o600


def test_a_write_in_parts_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take fewer octets than it was given."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, octets, offset: real(descriptor, octets[:3], offset))
    files = RealFiles(tmp_path)
    files.open("one").write_at(0, b"0123456789")
    assert files.read("one") == b"0123456789"


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from sdcpd.cache.files import RealFiles\n"
        "lock = RealFiles(pathlib.Path(sys.argv[1])).lock('lock'); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(StateInUse, match=rf"process {process.pid}: stop that one first"):
            RealFiles(tmp_path).lock("lock")
        process.kill()
    lock = RealFiles(tmp_path).lock("lock")
    with pytest.raises(StateInUse):
        RealFiles(tmp_path).lock("lock")
    lock.close()
    RealFiles(tmp_path).lock("lock").close()
