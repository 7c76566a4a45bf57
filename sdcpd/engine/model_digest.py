"""Digests by which peers know that they mean the same model and tokenizer (draft 4.1; decision 8). No torch here.

Target: SHA-256("SDCPD-TARGET-1" || 00 || deterministic_cbor({config, dtype, files})), where `files` maps the name of
each weight file to the SHA-256 of its octets, `dtype` is the effective one, and `config` holds the fields of
config.json that enter the forward pass, as read: two spellings of one meaning have one digest. Where weights are
quantised at load there is a fourth member, `quantization`. KV computed by one target is of no use to another: whoever
stores it names it by this digest.
Tokenizer: SHA-256("SDCPD-TOKENIZER-1" || 00 || octets of tokenizer.json).

Hashing gigabytes at each start would be felt, so a file's hash is kept in a small record, valid while the file's size
and times stand. The times include ctime, which a copy that keeps mtime cannot forge by accident.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import cbor2
import msgspec
from msgspec import Struct

from sdcpd.engine.model_config import ModelConfig, ModelRefused

TARGET_TAG: Final = b"SDCPD-TARGET-1\x00"
TOKENIZER_TAG: Final = b"SDCPD-TOKENIZER-1\x00"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
TOKENIZER_FILE: Final = "tokenizer.json"
_PIECE_BYTES: Final = 1 << 22


class _Index(Struct):
    """model.safetensors.index.json: which shard holds which tensor."""

    weight_map: dict[str, str]


class _Kept(Struct, frozen=True, forbid_unknown_fields=True):
    """The record of one file's hash, and what the file was like when it was taken."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: bytes


def weight_files(folder: Path) -> tuple[str, ...]:
    """Names of the files that hold `folder`'s weights, in order. Raises ModelRefused."""
    if (folder / SINGLE_FILE).is_file():
        return (SINGLE_FILE,)
    index = folder / INDEX_FILE
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except FileNotFoundError:
        raise ModelRefused(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}. Only safetensors weights are read (other formats "
            "can carry code): save the model with save_pretrained(..., safe_serialization=True)."
        ) from None
    except OSError as error:
        raise ModelRefused(f"{index} cannot be read ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise ModelRefused(f"{index}: {error}. Fetch the model again.") from error
    for name in names:
        if name != Path(name).name or not (folder / name).is_file():
            raise ModelRefused(f"{index} names {name!r}, which is not a file beside it. Fetch the model again.")
    return tuple(names)


def target_digest(
    folder: Path,
    config: ModelConfig,
    dtype: str,
    cache: Path | None = None,
    progress: Callable[[float], None] | None = None,
    quantization: str = "none",
) -> bytes:
    """32 octets that name this model as it is run here. Raises ModelRefused.

    `cache` is a folder for kept hashes; `progress` is told the fraction of the weights that is hashed.
    """
    names = weight_files(folder)
    sizes = [(folder / name).stat().st_size for name in names]
    files: dict[str, bytes] = {}
    for place, name in enumerate(names):
        before = sum(sizes[:place])

        def hashed(done: int, before: int = before) -> None:
            if progress is not None:
                progress((before + done) / max(1, sum(sizes)))

        files[name] = _file_hash(folder / name, cache, hashed)
    described: dict[str, object] = {"config": config.pass_fields, "dtype": dtype, "files": files}
    if quantization != "none":
        described["quantization"] = quantization
    return hashlib.sha256(TARGET_TAG + cbor2.dumps(described, canonical=True)).digest()


def tokenizer_digest(folder: Path) -> bytes:
    """32 octets that name `folder`'s tokenizer. Raises ModelRefused."""
    file = folder / TOKENIZER_FILE
    try:
        return hashlib.sha256(TOKENIZER_TAG + file.read_bytes()).digest()
    except OSError as error:
        raise ModelRefused(
            f"{file} cannot be read ({error.strerror}). A model is a Hugging Face folder: config.json, safetensors "
            "weights, tokenizer.json."
        ) from error


def _file_hash(file: Path, cache: Path | None, progress: Callable[[int], None]) -> bytes:
    """SHA-256 of a file's octets, from the record in `cache` if that still holds."""
    found = file.stat()
    record = None if cache is None else cache / f"{hashlib.sha256(os.fsencode(file.absolute())).hexdigest()[:32]}.json"
    if (
        record is not None
        and (kept := _read_record(record)) is not None
        and kept == _describe(file, found, kept.sha256)
    ):
        return kept.sha256
    digest = hashlib.sha256()
    done = 0
    with open(file, "rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            progress(done)
    if _describe(file, file.stat(), b"") != _describe(file, found, b""):
        raise ModelRefused(f"{file} changed while it was read. Let whatever writes it finish, then try again.")
    if record is not None:
        _write_record(record, _describe(file, found, digest.digest()))
    return digest.digest()


def _describe(file: Path, found: os.stat_result, sha256: bytes) -> _Kept:
    return _Kept(str(file.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, sha256)


def _read_record(record: Path) -> _Kept | None:
    """A record that cannot be read or understood is one that is not there."""
    try:
        return msgspec.json.decode(record.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return None


def _write_record(record: Path, kept: _Kept) -> None:
    """Keep a hash, whole or not at all. Failing is harmless: the file is hashed again next time."""
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{record.name}.", dir=record.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(msgspec.json.encode(kept))
            os.replace(name, record)
        except OSError:
            os.unlink(name)
    except OSError:
        return
