"""TOML into Structs: every fault at once, each with its place and what to do."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Meta, Struct

from sdcpd.node.toml_reader import ConfigRefused, apply_override, build, read_toml, setting_names


class Engine(Struct, frozen=True, forbid_unknown_fields=True):
    model: Path
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    kv_cache_bytes: Annotated[int, Meta(ge=1)] = 1 << 30


class Ladder(Struct, frozen=True, forbid_unknown_fields=True):
    fallback: Annotated[tuple[str, ...], Meta(min_length=1)] = ("reduce",)
    low_ratio: float = 0.0


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    low: int = 1
    high: int = 2

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high; raise high")


class Whole(Struct, frozen=True, forbid_unknown_fields=True):
    roles: tuple[str, ...] = ()
    engine: Engine | None = None
    limits: Limits = Limits()
    ladder: dict[str, Ladder] = {}


def faults(table: dict[str, object]) -> list[str]:
    value, found = build(Whole, table)
    assert (value is None) == bool(found)
    return [str(fault) for fault in found]


def test_a_whole_file_becomes_structs() -> None:
    table = {"roles": ["router"], "engine": {"model": "/m"}, "ladder": {"fast": {"low_ratio": 1}}}
    value, found = build(Whole, table)
    assert not found
    assert value == Whole(roles=("router",), engine=Engine(Path("/m")), ladder={"fast": Ladder(low_ratio=1.0)})
    assert build(Whole, {}) == (Whole(), [])


def test_unknown_keys_name_their_place_and_neighbour() -> None:
    found = faults({"engin": {}, "engine": {"model": "/m", "kv_cache_byte": 4}, "ladder": {"x": {"zzz": 1}}})
    assert found == [
        "engin: is no known setting. Did you mean engine?",
        "engine.kv_cache_byte: is no known setting. Did you mean kv_cache_bytes?",
        "ladder.x.zzz: is no known setting. Known here: fallback, low_ratio.",
    ]


def test_all_faults_are_found_at_once() -> None:
    found = faults({"roles": "router", "engine": {"dtype": "fp8", "kv_cache_bytes": 0}, "ladder": {"x": 3}})
    assert found == [
        "roles: is 'router'. Expected array, got str.",
        "engine.model: is missing and has no default.",
        "engine.dtype: is 'fp8'. Choose one of 'auto', 'bf16', 'fp32'.",
        "engine.kv_cache_bytes: is 0. Expected int >= 1.",
        "ladder.x: is 3, but a section is wanted. Write [ladder.x].",
    ]


def test_a_boolean_is_no_number() -> None:
    assert faults({"limits": {"low": True}}) == ["limits.low: is True. Expected int, got bool."]


def test_a_fault_inside_an_array_names_the_element() -> None:
    assert faults({"roles": ["router", 3]}) == ["roles: is ['router', 3]. Expected str, got int at position [1]."]


def test_fields_checked_against_each_other() -> None:
    assert faults({"limits": {"low": 3}}) == ["limits: low is above high; raise high"]


def test_overrides() -> None:
    tables: dict[str, object] = {"engine": {"model": "/old"}}
    for override in (
        "engine.model=/new/path",
        "engine.kv_cache_bytes=4096",
        'roles=["router", "cache"]',
        "limits.low=2",
        'engine.dtype="fp32"',
    ):
        apply_override(tables, override)
    value, found = build(Whole, tables)
    assert not found
    assert value == Whole(("router", "cache"), Engine(Path("/new/path"), "fp32", 4096), Limits(2, 2))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.model", "write it as --set section.key=value"),
        ("=3", "write it as --set section.key=value"),
        ("engine..x=3", "write it as --set section.key=value"),
        ("roles.x=3", "roles is a value, not a section"),
    ],
)
def test_overrides_of_a_wrong_form(override: str, message: str) -> None:
    with pytest.raises(ConfigRefused, match=message):
        apply_override({"roles": ["router"]}, override)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused, match=r"absent\.toml.*\n.*--config FILE"):
        read_toml(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = 1\nb == 2\n")
    with pytest.raises(ConfigRefused, match="line 2, column"):
        read_toml(broken)


def test_names_for_documentation() -> None:
    assert list(setting_names(Whole)) == [
        "roles",
        "engine.model",
        "engine.dtype",
        "engine.kv_cache_bytes",
        "limits.low",
        "limits.high",
        "ladder.*.fallback",
        "ladder.*.low_ratio",
    ]
