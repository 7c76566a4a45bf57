"""A disk for tests that tells apart what was written and what is durable, and that fails when it is told to."""

import errno
import random
from collections.abc import Callable

from sdcpd.cache.files import StateInUse

Keep = Callable[["list[Write]"], "list[Write]"]


class SimDisk:
    """Files of one directory as the running system sees them, and as they would be after a loss of power.

    Each file is its durable octets plus the writes since the last sync, in order. `crash` keeps of those whatever its
    caller's `keep` chooses: a prefix, or single pages in any order, as a real disk may.
    """

    def __init__(self) -> None:
        self.durable: dict[str, bytes] = {}  # what the directory would hold after a loss of power
        self.seen: dict[str, _Content] = {}  # what the running system sees
        self.syncs = 0
        self.writes = 0
        self.capacity_bytes: int | None = None
        self.fail_write: Callable[[str], int | None] = lambda name: None  # octets let through before EIO
        self.fail_sync: Callable[[str], bool] = lambda name: False
        self.fail_truncate: Callable[[str], bool] = lambda name: False
        self.fail_directory_sync = False
        self.fail_read: Callable[[str], bool] = lambda name: False
        self.locked: set[str] = set()

    # Files

    def names(self) -> list[str]:
        return sorted(self.seen)

    def read(self, name: str, offset: int = 0, count_bytes: int | None = None) -> bytes:
        if name not in self.seen:
            raise FileNotFoundError(name)
        if self.fail_read(name):
            raise OSError(errno.EMFILE, "too many open files")
        octets = self.seen[name].octets
        return bytes(octets[offset:] if count_bytes is None else octets[offset : offset + count_bytes])

    def open(self, name: str) -> "_SimFile":
        if name not in self.seen:
            self.seen[name] = _Content()
        return _SimFile(self, name, self.seen[name])

    def rename(self, old: str, new: str) -> None:
        if old not in self.seen:
            raise FileNotFoundError(old)
        self.seen[new] = self.seen.pop(old)

    def remove(self, name: str) -> None:
        if name not in self.seen:
            raise FileNotFoundError(name)
        del self.seen[name]

    def sync_directory(self) -> None:
        if self.fail_directory_sync:
            raise OSError(errno.EIO, "directory")
        self.durable = {name: content.synced for name, content in self.seen.items()}

    def lock(self, name: str) -> "_SimLock":
        if name in self.locked:
            raise StateInUse("the simulated directory is in use")
        self.locked.add(name)
        return _SimLock(self, name)

    # The world

    @property
    def used_bytes(self) -> int:
        return sum(len(content.octets) for content in self.seen.values())

    def kill(self) -> None:
        """The process ends: what was written stays visible, whether durable or not."""
        self.locked.clear()

    def crash(self, keep: Keep = lambda writes: []) -> None:
        """Power is lost. `keep` chooses which of each file's unsynced writes had reached the disk all the same."""
        self.locked.clear()
        kept: dict[str, _Content] = {}
        for name in self.durable:
            content = self.seen.get(name)
            octets = bytearray(self.durable[name] if content is None else content.synced)
            for write in keep(list(content.unsynced)) if content is not None else []:
                write.apply(octets)
            kept[name] = _Content(octets)
        self.seen = kept
        self.durable = {name: content.synced for name, content in kept.items()}

    def flip(self, name: str, offset: int, mask: int = 1) -> None:
        """A bit rots, on disk and in memory."""
        content = self.seen[name]
        content.octets[offset] ^= mask
        content.synced = bytes(content.octets)
        content.unsynced.clear()
        self.durable[name] = content.synced


class Write:
    """One unsynced change: octets at an offset, or a truncation (`octets` is None)."""

    def __init__(self, offset: int, octets: bytes | None) -> None:
        self.offset = offset
        self.octets = octets

    def apply(self, content: bytearray) -> None:
        if self.octets is None:
            del content[self.offset :]
            content.extend(bytes(self.offset - len(content)))
            return
        content.extend(bytes(max(0, self.offset - len(content))))
        content[self.offset : self.offset + len(self.octets)] = self.octets


class _Content:
    def __init__(self, octets: bytearray | None = None) -> None:
        self.octets = bytearray() if octets is None else octets
        self.synced = bytes(self.octets)
        self.unsynced: list[Write] = []

    def change(self, write: Write) -> None:
        write.apply(self.octets)
        self.unsynced.append(write)


class _SimLock:
    def __init__(self, disk: SimDisk, name: str) -> None:
        self._disk, self._name = disk, name

    def close(self) -> None:
        self._disk.locked.discard(self._name)


class _SimFile:
    def __init__(self, disk: SimDisk, name: str, content: _Content) -> None:
        self._disk, self._name, self._content = disk, name, content

    def write_at(self, offset: int, octets: bytes) -> None:
        self._disk.writes += 1
        through = self._disk.fail_write(self._name)
        if through is not None:
            self._content.change(Write(offset, octets[:through]))
            raise OSError(errno.EIO, "input/output error")
        growth = max(0, offset + len(octets) - len(self._content.octets))
        if self._disk.capacity_bytes is not None and self._disk.used_bytes + growth > self._disk.capacity_bytes:
            room = max(0, self._disk.capacity_bytes - self._disk.used_bytes)
            self._content.change(Write(offset, octets[:room]))
            raise OSError(errno.ENOSPC, "no space left on device")
        self._content.change(Write(offset, octets))

    def truncate(self, length_bytes: int) -> None:
        if self._disk.fail_truncate(self._name):
            raise OSError(errno.EIO, "input/output error")
        self._content.change(Write(length_bytes, None))

    def sync(self) -> None:
        if self._disk.fail_sync(self._name):
            # As Linux does it: the octets stay visible, count as clean, and are not on the disk.
            self._content.unsynced.clear()
            raise OSError(errno.EIO, "input/output error")
        self._disk.syncs += 1
        durable = bytearray(self._content.synced)
        for write in self._content.unsynced:
            write.apply(durable)
        self._content.synced = bytes(durable)
        self._content.unsynced.clear()
        if self._name in self._disk.durable:
            self._disk.durable[self._name] = self._content.synced

    def close(self) -> None:
        pass


def pages(writes: list[Write], chance: random.Random, page_bytes: int) -> list[Write]:
    """Any choice of the pages that `writes` touch, as a disk may persist them; each page whole or not at all."""
    kept: list[Write] = []
    for write in writes:
        if write.octets is None:
            if chance.random() < 0.5:
                kept.append(write)
            continue
        at = write.offset
        rest = write.octets
        while rest:
            size = page_bytes - at % page_bytes
            if chance.random() < 0.5:
                kept.append(Write(at, rest[:size]))
            at, rest = at + size, rest[size:]
    return kept


def first_octets(writes: list[Write], count_bytes: int) -> list[Write]:
    """The first `count_bytes` octets of what was written, in order."""
    kept: list[Write] = []
    for write in writes:
        if write.octets is None:
            kept.append(write)
            continue
        kept.append(Write(write.offset, write.octets[:count_bytes]))
        if len(write.octets) >= count_bytes:
            break
        count_bytes -= len(write.octets)
    return kept


class PowerLoss(Exception):
    """Not an error of the disk: the machine stops here. `crash` tells what is left."""


def lose_power(name: str) -> bool:
    """A `fail_sync` that ends the machine in the middle of a sync."""
    raise PowerLoss(name)
