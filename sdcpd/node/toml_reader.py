"""TOML into frozen Structs, with every fault found at once and each said so that it can be mended.

Theory: msgspec checks types and ranges, but stops at the first fault and knows no nearest name. So the tables are
walked here, Struct beside table: an unknown key is reported with its dotted place and the nearest known name (or the
section where that name belongs), each value is converted by itself, and only what is whole becomes a Struct. Values
are taken as they stand: no variable is expanded, no default comes from the environment.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct

S = TypeVar("S", bound=Struct)

_SHOWN_CHARACTERS: Final = 60
"""Of a wrong value in a message; a path fits, a pasted blob does not."""


class Fault(Struct, frozen=True):
    """One thing wrong with the configuration: where (dotted), what, and what to do about it."""

    place: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}" + (f" {self.remedy}" if self.remedy else "")


class ConfigRefused(Exception):
    """The configuration cannot be used; `faults` holds all that was found."""

    def __init__(self, source: str, faults: Sequence[Fault]) -> None:
        self.source = source
        self.faults = tuple(faults)
        lines = [f"{source} cannot be used:", *(f"  {fault}" for fault in faults)]
        super().__init__("\n".join(lines))


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables. Raises ConfigRefused when it cannot be read or is no TOML (with line and column)."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        fault = Fault("file", f"cannot be read ({error.strerror}).", "Name another one with --config FILE.")
        raise ConfigRefused(str(path), [fault]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigRefused(str(path), [Fault("file", f"is not TOML: {error}.")]) from error


def apply_override(tables: dict[str, Any], override: str) -> None:
    """Lay one `dotted.name=value` over `tables`, in place.

    The value is read as TOML (`4`, `0.5`, `true`, `["a", "b"]`, `"text"`); what is no TOML value, such as a path,
    stands for itself as text. Raises ConfigRefused when the form is wrong or the name runs through a value.
    """
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(re.fullmatch(r"[A-Za-z0-9_-]+", key) for key in keys):
        raise ConfigRefused(f"--set {override}", [Fault(name or "name", "write it as --set section.key=value.")])
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = tables
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigRefused(f"--set {override}", [Fault(name, f"{key} is a value, not a section.")])
    table[keys[-1]] = value


def build(kind: type[S], table: Mapping[str, Any], place: str = "") -> tuple[S | None, list[Fault]]:
    """A `kind` out of a table, or None with all faults found in it and below. Pure."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    faults = [_unknown(key, fields, place) for key in table if key not in fields]
    values: dict[str, object] = {}
    for key, field in fields.items():
        where = f"{place}.{key}" if place else key
        if key not in table:
            if field.default is NODEFAULT and field.default_factory is NODEFAULT:
                faults.append(Fault(where, "is missing and has no default."))
            continue
        value, below = _value(field.type, table[key], where)
        faults += below
        values[field.name] = value
    if faults:
        return None, faults
    try:
        return kind(**values), []
    except ValueError as error:  # a Struct's own check of fields against each other
        return None, [Fault(place or "file", f"{error}")]


def _value(kind: Any, raw: object, where: str) -> tuple[object, list[Fault]]:
    """`raw` as `kind`: a section (Struct, perhaps optional), a table of sections (dict), or a leaf."""
    section = _struct_in(kind)
    if section is not None:
        if not isinstance(raw, dict):
            return None, [Fault(where, f"is {_show(raw)}, but a section is wanted.", f"Write [{where}].")]
        return build(section, raw, where)
    if get_origin(kind) is dict and _struct_in(get_args(kind)[1]) is not None and isinstance(raw, dict):
        built = {key: _value(get_args(kind)[1], value, f"{where}.{key}") for key, value in raw.items()}
        return {key: value for key, (value, _) in built.items()}, [f for _, below in built.values() for f in below]
    try:
        return msgspec.convert(raw, kind, dec_hook=_decode), []
    except msgspec.ValidationError as error:
        if get_origin(kind) is Literal:
            wanted = f"Choose one of {', '.join(map(repr, get_args(kind)))}"
        else:
            wanted = re.sub(r"`([^`]*)`", r"\1", str(error)).replace(" - at $", " at position ")
        return None, [Fault(where, f"is {_show(raw)}.", f"{wanted}.")]


def _struct_in(kind: Any) -> type[Struct] | None:
    """The Struct that a field's type is or may be (`X | None`), or None for a leaf."""
    for candidate in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if isinstance(candidate, type) and issubclass(candidate, Struct):
            return candidate
    return None


def _decode(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"settings of type {kind}")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _unknown(key: str, fields: Mapping[str, object], place: str) -> Fault:
    where = f"{place}.{key}" if place else key
    near = difflib.get_close_matches(key, fields, n=1, cutoff=0.6)
    if near:
        return Fault(where, "is no known setting.", f"Did you mean {near[0]}?")
    return Fault(where, "is no known setting.", f"Known here: {', '.join(sorted(fields))}.")


def setting_names(kind: type[Struct], place: str = "") -> Iterator[str]:
    """All dotted names below a Struct, `*` for the name of a table of sections (for hints and documentation)."""
    for field in msgspec.structs.fields(kind):
        where = f"{place}.{field.encode_name}" if place else field.encode_name
        section = _struct_in(field.type)
        if section is not None:
            yield from setting_names(section, where)
        elif get_origin(field.type) is dict and (entry := _struct_in(get_args(field.type)[1])) is not None:
            yield from setting_names(entry, f"{where}.*")
        else:
            yield where
