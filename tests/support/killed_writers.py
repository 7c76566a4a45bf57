"""A hundred writers of blocks that are killed in the middle of it: `python -m tests.support.killed_writers DIR`.

Each is a forked child whose process gets SIGKILL at one operation of its disk, a later one each time, and each goes on
where the last one died. After each death the directory must hold whole blocks and nothing else. Prints how many died.
(A process of its own, without torch: forking a large one a hundred times takes long.)
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from sdcpd.cache.disk_tier import LOCK, DiskTier, Written
from sdcpd.cache.files import OpenFile, RealFiles
from tests.support.block_names import LAYOUT, file_of, name_of

NAMES = [name_of(number) for number in range(8)]


class MortalFiles(RealFiles):
    """A real directory whose process is killed in the middle of its n-th operation on a disk, counted from 0."""

    def __init__(self, directory: Path, dies_at: int) -> None:
        super().__init__(directory)
        self.left = dies_at

    def live(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def open(self, name: str) -> "MortalFile":  # type: ignore[override]
        self.live()
        return MortalFile(super().open(name), self)

    def rename(self, old: str, new: str) -> None:
        self.live()
        super().rename(old, new)

    def remove(self, name: str) -> None:
        self.live()
        super().remove(name)

    def sync_directory(self) -> None:
        self.live()  # what a killed process has written is there, synced or not


class MortalFile:
    def __init__(self, file: OpenFile, files: MortalFiles) -> None:
        self._file, self._files = file, files

    def write_at(self, offset: int, octets: bytes) -> None:
        self._files.live()
        self._file.write_at(offset, octets[: len(octets) // 2])
        self._files.live()
        self._file.write_at(offset, octets)

    def truncate(self, length_bytes: int) -> None:
        self._file.truncate(length_bytes)

    def sync(self) -> None:
        self._files.live()

    def close(self) -> None:
        self._file.close()


def in_child(work: Callable[[], bool]) -> int:
    """Run `work` in a child process; its exit status: 0 when `work` was true."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def write(directory: Path, dies_at: int) -> bool:
    """What a child does: all blocks that are missing; when none is, all are removed first."""
    tier = DiskTier(MortalFiles(directory, dies_at), LAYOUT)
    there = {name for name, _ in tier.scan(8).blocks}
    if len(there) == len(NAMES):
        tier.remove(tuple(NAMES))
        there = set()
    return all(tier.write(name, file_of(name)) is Written.DONE for name in NAMES if name not in there)


def main(directory: Path) -> None:
    killed = 0
    for round_ in range(100):
        killed += os.WIFSIGNALED(in_child(lambda dies_at=round_ % 33: write(directory, dies_at)))  # type: ignore[misc]
        tier = DiskTier(RealFiles(directory), LAYOUT)
        found = tier.scan(8)
        assert found.damaged == found.foreign == found.over == 0
        assert found.unfinished <= 1
        for name, scope in found.blocks:
            assert scope is None
            assert tier.read(name) == file_of(name)
        files = {f"{name.hex()}.safetensors" for name, _ in found.blocks}
        assert {path.name for path in directory.iterdir()} == files | {LOCK}, "nothing else is left behind"
        tier.close()
    print(killed)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
