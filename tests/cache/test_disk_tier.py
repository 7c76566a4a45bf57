"""The disk tier against killed writers, full disks, other processes and other people's files."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sdcpd.cache.block_file import Damaged
from sdcpd.cache.disk_tier import LOCK, DiskTier, Written
from sdcpd.cache.files import RealFiles, StateInUse
from tests.cache.sim_disk import SimDisk
from tests.support.block_names import LAYOUT, file_of, name_of
from tests.support.killed_writers import in_child

NAMES = [name_of(number) for number in range(8)]


def test_a_hundred_killed_writers_leave_whole_blocks_or_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_writers", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


def test_a_limit_on_files_is_a_full_disk(tmp_path: Path) -> None:
    def write() -> bool:
        tier = DiskTier(RealFiles(tmp_path), LAYOUT)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        return tier.write(NAMES[0], file_of(NAMES[0])) is Written.NO_ROOM and tier.read(NAMES[0]) is None

    assert in_child(write) == 0
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_one_process_at_a_time_has_the_directory(tmp_path: Path) -> None:
    first = DiskTier(RealFiles(tmp_path), LAYOUT)
    with pytest.raises(StateInUse, match=str(os.getpid())):
        DiskTier(RealFiles(tmp_path), LAYOUT)
    first.close()
    DiskTier(RealFiles(tmp_path), LAYOUT).close()


def test_other_peoples_files_are_left_alone_and_counted() -> None:
    disk = SimDisk()
    tier = DiskTier(disk, LAYOUT)
    for name in NAMES[:3]:
        assert tier.write(name, file_of(name)) is Written.DONE
    for file in ("notes.txt", "0" * 64 + ".part", "1" * 64 + ".safetensors"):
        disk.open(file).write_at(0, b"something")
    found = tier.scan(2)
    assert len(found.blocks) == 2
    assert (found.damaged, found.unfinished, found.foreign, found.over) == (1, 1, 1, 1)
    assert disk.names() == [*sorted(f"{name.hex()}.safetensors" for name, _ in found.blocks), "notes.txt"]


def test_a_write_that_fails_leaves_nothing_and_power_loss_no_half_block() -> None:
    disk = SimDisk()
    tier = DiskTier(disk, LAYOUT)
    disk.fail_write = lambda name: 10
    assert tier.write(NAMES[0], file_of(NAMES[0])) is Written.FAILED
    disk.fail_write = lambda name: None
    disk.fail_sync = lambda name: True
    assert tier.write(NAMES[0], file_of(NAMES[0])) is Written.FAILED
    disk.fail_sync = lambda name: False
    disk.fail_directory_sync = True
    assert tier.write(NAMES[0], file_of(NAMES[0])) is Written.FAILED
    assert disk.names() == []
    disk.fail_directory_sync = False
    assert tier.write(NAMES[0], file_of(NAMES[0])) is Written.DONE
    disk.crash()
    assert DiskTier(disk, LAYOUT).read(NAMES[0]) == file_of(NAMES[0])


def test_a_file_that_cannot_be_read_is_kept_for_better_days() -> None:
    disk = SimDisk()
    tier = DiskTier(disk, LAYOUT)
    tier.write(NAMES[0], file_of(NAMES[0]))
    disk.fail_read = lambda name: True
    assert isinstance(tier.read(NAMES[0]), Damaged)
    disk.fail_read = lambda name: False
    assert tier.read(NAMES[0]) == file_of(NAMES[0])
