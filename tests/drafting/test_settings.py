"""Settings of drafting: their limits, and the digest that stands for a lookup drafter's model."""

import msgspec
import pytest

from sdcpd.drafting.settings import LengthSettings, LookupSettings, method_digest


@pytest.mark.parametrize(
    "table",
    [
        {"prompt_lookup_min": 0},
        {"prompt_lookup_min": 6, "prompt_lookup_max": 5},
        {"num_speculative_tokens": 65},
        {"method": "suffix"},
        {"history_tokens": 1},
        {"prompt_lookup": 3},
    ],
)
def test_what_cannot_be_meant_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, LookupSettings)


@pytest.mark.parametrize("table", [{"ema_alpha": 0.0}, {"cost_ema_alpha": 1.5}, {"row_cost_ratio": -0.1}])
def test_weights_are_shares(table: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, LengthSettings)


def test_the_digest_names_what_decides_the_drafts() -> None:
    default = method_digest(LookupSettings())
    assert len(default) == 32
    assert default == method_digest(LookupSettings(num_speculative_tokens=4, history_tokens=128))
    assert default != method_digest(LookupSettings(prompt_lookup_min=1))
    assert default != method_digest(LookupSettings(prompt_lookup_max=12))
