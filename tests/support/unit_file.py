"""A systemd unit as settings, and a process under the system call filter that a unit asks for."""

import ctypes
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
"""libseccomp's SCMP_ACT_ALLOW and SCMP_ACT_ERRNO(EPERM)."""
SCMP_CMP_EQ = 4
PR_SET_NO_NEW_PRIVS = 38


class UnitFile:
    """`all(section, key)`: every value given to a key, after the last that resets it. An empty value resets."""

    def __init__(self, path: Path) -> None:
        self._values: dict[tuple[str, str], list[str]] = {}
        section = ""
        for line in path.read_text().splitlines():
            if not line or line.startswith("#"):
                continue
            assert not line.endswith("\\"), "continued lines are not read here"
            if line.startswith("["):
                section = line.strip("[]")
                continue
            key, equals, value = line.partition("=")
            assert equals, f"{line!r} is no setting"
            values = self._values.setdefault((section, key), [])
            if value:
                values.append(value)
            else:
                values.clear()

    def all(self, section: str, key: str) -> list[str]:
        return self._values[section, key]

    def one(self, section: str, key: str) -> str:
        """The value that counts where a key takes one: the last."""
        return self.all(section, key)[-1]

    def words(self, section: str, key: str) -> list[str]:
        return [word for value in self.all(section, key) for word in value.split()]


class _Comparison(ctypes.Structure):
    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
    ]


def allowed_calls(unit: UnitFile) -> set[str]:
    """Names of the system calls that SystemCallFilter= lets through, by systemd's own table of groups."""
    allowed = set(_group("@default"))
    for value in unit.all("Service", "SystemCallFilter"):
        names = {name for word in value.removeprefix("~").split() for name in _group(word)}
        allowed = allowed - names if value.startswith("~") else allowed | names
    return allowed


def _group(word: str) -> Iterator[str]:
    if not word.startswith("@"):
        yield word
        return
    command = ["systemd-analyze", "--no-pager", "syscall-filter", word]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines()[1:]:
        if line.strip() and not line.strip().startswith("#"):
            yield from _group(line.strip())


def filter_this_process(unit: UnitFile) -> None:
    """No new privileges, and for good: only the calls and address families of the unit. Inherited by exec."""
    names = allowed_calls(unit)
    families = [getattr(socket, name) for name in unit.words("Service", "RestrictAddressFamilies")]
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(REFUSE)))
    assert context.value is not None
    for name in names:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            continue  # of another architecture
        rules: list[tuple[_Comparison, ...]] = [()]
        if name == "socket":
            rules = [(_Comparison(0, SCMP_CMP_EQ, family, 0),) for family in families]
        for rule in rules:
            arguments = (_Comparison * len(rule))(*rule)
            assert library.seccomp_rule_add_array(context, ctypes.c_uint32(ALLOW), number, len(rule), arguments) == 0
    assert ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert library.seccomp_load(context) == 0


def main(arguments: Sequence[str]) -> None:
    """UNIT COMMAND...: become COMMAND under the filter of UNIT."""
    filter_this_process(UnitFile(Path(arguments[0])))
    os.execv(arguments[1], list(arguments[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
