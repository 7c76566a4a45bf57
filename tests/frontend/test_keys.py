"""API keys: the file, what of it is refused, and who is known by which key."""

import hashlib
from pathlib import Path

import pytest

from sdcpd.frontend.keys import ANYBODY, Caller
from sdcpd.frontend.keys_file import KeysRefused, read_keys

KEY = "sk-0123456789abcdef"


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_plain_and_hashed_keys(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"another-key-of-mine").hexdigest()
    ring = read_keys(
        write(
            tmp_path,
            f'[[keys]]\nname = "ann"\nkey = "{KEY}"\ngroup = "lab"\nmax_open_requests = 2\ntokens_per_minute = 60\n'
            f'[[keys]]\nname = "bob"\nsha256 = "{digest.upper()}"\n',
        )
    )
    assert len(ring) == 2
    assert ring.find(KEY) == Caller(name="ann", group="lab", max_open_requests=2, tokens_per_minute=60)
    assert ring.find("another-key-of-mine") == Caller(name="bob", group="bob")
    for wrong in ("", KEY[:-1], KEY + "x", digest, "\udcff"):
        assert ring.find(wrong) is None


def test_a_group_has_a_scope_of_its_own() -> None:
    one, other = Caller(name="a", group="g").scope, Caller(name="b", group="h").scope
    assert one is not None
    assert len(one) == 16
    assert one == Caller(name="c", group="g").scope != other
    assert ANYBODY.scope is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing required field `keys`"),
        ("keys = []", "holds no"),
        ("[[keys", "is not TOML"),
        ('[[keys]]\nname = "a"', "either key or sha256"),
        (f'[[keys]]\nname = "a"\nkey = "{KEY}"\nsha256 = "00"', "either key or sha256"),
        ('[[keys]]\nname = "a"\nsha256 = "00"', "64 hexadecimal digits"),
        ('[[keys]]\nname = "a"\nkey = "short"', "16 printable"),
        (f'[[keys]]\nname = "a"\nkey = "{KEY} "', "16 printable"),
        (f'[[keys]]\nname = "a"\nkey = "{KEY}"\nlimit = 1', "unknown field"),
        (f'[[keys]]\nname = "a"\nkey = "{KEY}"\ntokens_per_minute = 0', ">= 1"),
        (f'[[keys]]\nname = "a"\nkey = "{KEY}"\n[[keys]]\nname = "b"\nkey = "{KEY}"', r"keys\[1\] \(b\): the key is"),
        (f'[[keys]]\nname = "a"\nkey = "{KEY}"\n[[keys]]\nname = "a"\nkey = "{KEY}2"', "the name is there twice"),
    ],
)
def test_what_is_wrong_is_named_without_the_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(KeysRefused, match=words) as raised:
        read_keys(write(tmp_path, text))
    assert KEY not in str(raised.value)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    good = f'[[keys]]\nname = "a"\nkey = "{KEY}"'
    for mode in (0o640, 0o604, 0o660):
        with pytest.raises(KeysRefused, match="chmod 600"):
            read_keys(write(tmp_path, good, mode))
    with pytest.raises(KeysRefused, match="cannot be read"):
        read_keys(tmp_path / "none")
