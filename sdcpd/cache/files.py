"""Files: the few operations of a disk that the cache may use, and the real ones. The seam for simulated disks.

All names are plain file names within one directory, so that one sync of that directory covers every creation, rename
and removal. A write is at an explicit offset and ends only when all octets are handed over. Nothing is durable before
`sync` (content and length of a file) or `sync_directory` (which files there are) has returned; after either has
*failed*, nobody knows what is durable, and asking again proves nothing: a system may have dropped the octets.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

_sync_content: Final[Callable[[int], None]] = getattr(os, "fdatasync", os.fsync)
"""fdatasync also writes the file's length, which is all of the metadata that reading back needs."""


class StateInUse(Exception):
    """Another process holds the directory. The message names the remedy."""


class OpenFile(Protocol):
    """A file open for writing. Every method may raise OSError."""

    def write_at(self, offset: int, octets: bytes) -> None: ...
    def truncate(self, length_bytes: int) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Lock(Protocol):
    """Ends with `close`, and by itself when its process ends."""

    def close(self) -> None: ...


class Files(Protocol):
    """One directory. Every method may raise OSError; a missing file is FileNotFoundError."""

    def names(self) -> list[str]: ...
    def read(self, name: str, offset: int = 0, count_bytes: int | None = None) -> bytes: ...
    def open(self, name: str) -> OpenFile: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def sync_directory(self) -> None: ...
    def lock(self, name: str) -> Lock: ...


class RealFile:
    """OpenFile over a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write_at(self, offset: int, octets: bytes) -> None:
        rest = memoryview(octets)
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written

    def truncate(self, length_bytes: int) -> None:
        os.ftruncate(self._descriptor, length_bytes)

    def sync(self) -> None:
        _sync_content(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class RealLock:
    """An advisory lock on a whole file; the system releases it when the process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)


class RealFiles:
    """Files in `directory`, made if missing, readable by its owner alone: logs hold users' tokens (decision 98)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if not directory.is_dir():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sync_directory(directory.parent)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self._directory) if entry.is_file(follow_symlinks=False))

    def read(self, name: str, offset: int = 0, count_bytes: int | None = None) -> bytes:
        """Up to `count_bytes` octets from `offset` on; fewer only where the file ends."""
        with (self._directory / name).open("rb", buffering=0) as file:
            wanted = os.fstat(file.fileno()).st_size - offset if count_bytes is None else count_bytes
            parts: list[bytes] = []
            while wanted > 0 and (part := os.pread(file.fileno(), wanted, offset)):
                parts.append(part)
                wanted, offset = wanted - len(part), offset + len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def open(self, name: str) -> RealFile:
        """Open for writing; created empty if missing."""
        return RealFile(os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def rename(self, old: str, new: str) -> None:
        (self._directory / old).rename(self._directory / new)

    def remove(self, name: str) -> None:
        (self._directory / name).unlink()

    def sync_directory(self) -> None:
        _sync_directory(self._directory)

    def lock(self, name: str) -> RealLock:
        """Raises StateInUse when another process has it."""
        path = self._directory / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise StateInUse(
                f"{self._directory} is in use by process {holder or 'unknown'}: "
                "stop that one first, or give this instance a state directory of its own"
            ) from error
        with contextlib.suppress(OSError):  # the number only helps people; the lock holds without it (a full disk)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return RealLock(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
