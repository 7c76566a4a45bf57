"""Files that only their owner may read, written whole or not at all. For private keys.

Each file is written under a temporary name beside its place, synced, and only then given its name: whoever finds the
name finds all of the content. Without `replace` the name is given by a hard link, which fails where the name is taken,
so that two writers at once cannot destroy each other's key.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def make_private_folder(folder: Path) -> None:
    """Make `folder`, for its owner only, with the folders above it.

    One that is there keeps its mode. Raises PermissionError when others may write in it (they could put files of their
    own in the place of ours, unless its sticky bit is set, as /tmp's is), and any other OSError of making it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(FOLDER_MODE)
    mode = folder.stat().st_mode
    if mode & WRITABLE_BY_OTHERS and not mode & stat.S_ISVTX:
        raise PermissionError(f"others may write in {folder}: chmod go-w {folder}")


def write_private(contents: Mapping[Path, bytes], *, replace: bool) -> None:
    """Write files of mode 0600, in the order of `contents`, which must be in folders that exist.

    Without `replace`: all of them or none, FileExistsError when one is there already. With it, each is replaced as a
    whole, but a crash may leave the later ones as they were. Raises OSError.
    """
    with contextlib.ExitStack() as temporaries:
        written = [(temporaries.enter_context(_temporary(path, octets)), path) for path, octets in contents.items()]
        if replace:
            for temporary, path in written:
                os.replace(temporary, path)
        else:
            _link_all(written)
    for folder in dict.fromkeys(path.parent for path in contents):
        _sync_folder(folder)


@contextmanager
def _temporary(path: Path, octets: bytes) -> Iterator[Path]:
    """A synced file beside `path`, removed at the end unless it has been renamed."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")  # not made from the name, which may be at its limit
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), FILE_MODE)  # whatever the umask is
            file.write(octets)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _link_all(written: list[tuple[Path, Path]]) -> None:
    linked: list[Path] = []
    try:
        for temporary, path in written:
            os.link(temporary, path)
            linked.append(path)
    except OSError:
        for path in linked:
            path.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
