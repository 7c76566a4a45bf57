"""Settings refuse what they do not know."""

import msgspec
import pytest

from sdcpd.engine.settings import EngineSettings


def test_defaults() -> None:
    settings = msgspec.convert({"model": "/models/a"}, EngineSettings)
    assert (settings.device, settings.dtype, settings.page_tokens, settings.threads) == ("auto", "auto", 64, 0)
    assert settings.kv_cache_bytes is None


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"model": ""},
        {"model": "a", "devise": "cpu"},
        {"model": "a", "device": "tpu"},
        {"model": "a", "dtype": "fp16"},
        {"model": "a", "kv_cache_bytes": 0},
        {"model": "a", "kv_cache_share": 1.5},
        {"model": "a", "page_tokens": 40},
        {"model": "a", "context_tokens": 0},
        {"model": "a", "threads": -1},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, EngineSettings)
