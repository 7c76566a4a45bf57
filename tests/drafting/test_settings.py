"""Settings of drafting: their limits, and the digest that stands for a lookup drafter's model."""

import msgspec
import pytest

from sdcpd.drafting.settings import (
    DraftModelSettings,
    LengthSettings,
    LookupSettings,
    SuffixSettings,
    hybrid_digest,
    lookup_digest,
    suffix_digest,
)


@pytest.mark.parametrize(
    "table",
    [
        {"prompt_lookup_min": 0},
        {"prompt_lookup_min": 6, "prompt_lookup_max": 5},
        {"num_speculative_tokens": 65},
        {"method": "ngram"},
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
    default = lookup_digest(LookupSettings())
    assert len(default) == 32
    assert default == lookup_digest(LookupSettings(num_speculative_tokens=4, history_tokens=128))
    assert default != lookup_digest(LookupSettings(prompt_lookup_min=1))
    assert default != lookup_digest(LookupSettings(prompt_lookup_max=12))
    suffix = suffix_digest(SuffixSettings())
    assert suffix == suffix_digest(SuffixSettings(max_cached_tokens=0, num_speculative_tokens=4))
    assert suffix != suffix_digest(SuffixSettings(max_spec_factor=1.0))
    hybrids = {hybrid_digest(SuffixSettings(), bytes([model]) * 32) for model in (1, 2)}
    assert len(hybrids | {default, suffix}) == 4


@pytest.mark.parametrize(
    "table",
    [
        {"max_tree_depth": 1},
        {"max_spec_factor": 0.0},
        {"min_token_prob": 1.5},
        {"max_cached_requests": -1},
        {"suffix_decoding_max_tree_depth": 24},
    ],
)
def test_a_suffix_table_that_cannot_be_meant_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, SuffixSettings)


@pytest.mark.parametrize("table", [{}, {"model": "m", "top_k": 0}, {"model": "m", "top_k": 257}, {"path": "m"}])
def test_a_draft_model_is_named_and_its_rows_are_short(table: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, DraftModelSettings)
    assert msgspec.convert({"model": "m", "threads": 1}, DraftModelSettings).top_k == 64
