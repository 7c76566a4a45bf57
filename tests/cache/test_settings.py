"""Limits that contradict each other are refused with their names; unknown keys are refused."""

import msgspec
import pytest

from sdcpd.cache.settings import KIB, MIB, CacheSettings


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"segment_bytes": 1 * MIB, "journal_bytes": 3 * MIB}, "journal_bytes"),
        ({"max_record_bytes": 64 * KIB, "max_log_bytes": 32 * KIB}, "max_record_bytes"),
        ({"max_object_bytes": 2 * MIB, "object_memory_bytes": 1 * MIB}, "max_object_bytes"),
    ],
)
def test_contradictions(limits: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        CacheSettings(**limits)  # type: ignore[arg-type]  # a table of integers


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="segment_byte"):
        msgspec.convert({"segment_byte": 5}, CacheSettings)
    assert msgspec.convert({}, CacheSettings) == CacheSettings()
