"""Files of keys: for their owner only, whole or not at all, never over one that is there."""

import os
from pathlib import Path

import pytest

from sdcpd.node.private_files import make_private_folder, write_private


@pytest.fixture(params=[0o022, 0o000, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> object:
    """Whatever the operator's umask is."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_modes_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    if umask == 0o777:
        (folder := tmp_path / "keys").mkdir()
        folder.chmod(0o700)
    else:
        make_private_folder(folder := tmp_path / "keys")
    write_private({folder / "a": b"1", folder / "b": b"2"}, replace=False)
    assert mode(folder) == 0o700
    assert [(path.name, path.read_bytes(), mode(path)) for path in sorted(folder.iterdir())] == [
        ("a", b"1", 0o600),
        ("b", b"2", 0o600),
    ]


def test_all_or_none_without_replace(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_private({tmp_path / "a": b"1", tmp_path / "b": b"2"}, replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert (tmp_path / "b").read_bytes() == b"old"


def test_replace_replaces_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "a").symlink_to(tmp_path / "other")
    write_private({tmp_path / "a": b"1"}, replace=True)
    assert (tmp_path / "other").read_bytes() == b"other"
    assert not (tmp_path / "a").is_symlink()
    assert mode(tmp_path / "a") == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "other"]


def test_a_reader_never_finds_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails before the content is down leaves the old file, and nothing beside it."""
    (tmp_path / "a").write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_private({tmp_path / "a": b"new"}, replace=True)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


@pytest.mark.parametrize("bits", [0o770, 0o707])
def test_a_folder_in_which_others_may_write_is_refused(tmp_path: Path, bits: int) -> None:
    (folder := tmp_path / "keys").mkdir()
    folder.chmod(bits)
    with pytest.raises(PermissionError, match="chmod go-w"):
        make_private_folder(folder)
    folder.chmod(0o755)
    make_private_folder(folder)
    assert mode(folder) == 0o755  # it is the operator's
    folder.chmod(0o1777)
    make_private_folder(folder)
