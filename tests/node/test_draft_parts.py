"""What a node's drafter is made of: the method's parts, what it says of itself, models and corpora that do not fit."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sdcpd.drafting.lookup_source import LookupSource
from sdcpd.drafting.settings import hybrid_digest, lookup_digest, suffix_digest
from sdcpd.drafting.suffix_source import SuffixSource
from sdcpd.engine.model_config import ModelRefused
from sdcpd.engine.model_digest import tokenizer_digest
from sdcpd.engine.spans import EngineInfo
from sdcpd.node.config import Config, load_config
from sdcpd.node.draft_parts import drafter_identity, drafter_settings, make_lookup
from sdcpd.node.start import shares_thread
from tests.support.real_node import CONFIG

SESSION = b"s" * 16


def config_of(folder: Path, method: str, *overrides: str, roles: str | None = None) -> Config:
    places = [f"engine.model={folder}", f"drafter.method={method}", f"drafter.draft_model.model={folder}"]
    return load_config(CONFIG, [*places, *overrides], roles)


def info_of(folder: Path, **changes: Any) -> EngineInfo:
    info = EngineInfo(
        model=b"m" * 32,
        tokenizer=tokenizer_digest(folder),
        vocabulary=300,
        context_tokens=256,
        page_tokens=64,
        pages=8,
        dtype="fp32",
        device="cpu",
    )
    return replace(info, **changes)


def test_the_status_names_the_method_or_the_model(tiny_llama: Path) -> None:
    """Decision 10."""
    drafts = info_of(tiny_llama)
    settings = config_of(tiny_llama, "ngram").drafter
    expected = {
        "ngram": (lookup_digest(settings.lookup), None),
        "suffix": (suffix_digest(settings.suffix), None),
        "draft_model": (drafts.model, drafts),
        "frequency_hybrid": (hybrid_digest(settings.suffix, drafts.model), drafts),
    }
    for method, (digest, engine) in expected.items():
        identity = drafter_identity(config_of(tiny_llama, method), None, engine)
        assert identity.model == digest
        assert (identity.tokenizer, identity.vocabulary) == (tokenizer_digest(tiny_llama), 300)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": b"t" * 32}, "is not that of the target"),
        ({"vocabulary": 320}, "has a vocabulary of 320 tokens, the target .* one of 300"),
    ],
)
def test_a_model_of_other_tokens_is_refused(tiny_llama: Path, changes: dict[str, Any], words: str, named: bool) -> None:
    overrides = [f"drafter.tokenizer={tiny_llama}"] if named else []
    config = config_of(tiny_llama, "draft_model", *overrides)
    with pytest.raises(ModelRefused, match=words):
        drafter_identity(config, info_of(tiny_llama), info_of(tiny_llama, **changes))


def test_sessions_are_no_longer_than_the_model_can_follow(tiny_llama: Path) -> None:
    drafts = info_of(tiny_llama)
    assert drafter_settings(config_of(tiny_llama, "draft_model"), drafts).session_tokens == 256
    assert drafter_settings(config_of(tiny_llama, "frequency_hybrid"), drafts).session_tokens > 256, "the lookup can"
    assert drafter_settings(config_of(tiny_llama, "suffix"), None).session_tokens > 256


def test_undivided_cores_are_taken_in_turns(tiny_llama: Path) -> None:
    assert shares_thread(config_of(tiny_llama, "draft_model"))
    assert not shares_thread(config_of(tiny_llama, "draft_model", "drafter.draft_model.threads=1"))
    config = load_config(CONFIG, [f"engine.model={tiny_llama}"])
    assert not shares_thread(config)


def test_the_lookup_of_each_method(tiny_llama: Path) -> None:
    assert isinstance(make_lookup(config_of(tiny_llama, "ngram")), LookupSource)
    for method in ("suffix", "frequency_hybrid"):
        assert isinstance(make_lookup(config_of(tiny_llama, method)), SuffixSource)


def with_corpus(folder: Path, tmp_path: Path, lines: Sequence[object], *overrides: str) -> Config:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return config_of(folder, "suffix", f"drafter.suffix.corpus={corpus}", *overrides)


def test_a_corpus_of_texts_and_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    source = make_lookup(with_corpus(tiny_llama, tmp_path, [[1, 2, 3, 4], "", json.dumps("in the thing")]))
    source.open(SESSION, [1, 2])
    assert source.propose(SESSION, 2).tokens == (3, 4)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([[1, 2], "{}"], "line 2: .*string or an array"),
        ([[1, 300]], "line 1: a token is outside the target's vocabulary of 300"),
        ([[1, -1]], "line 1: a token is outside"),
        ([[1] * 30, [2] * 30], "line 2: the corpus has more than max_corpus_tokens = 50"),
    ],
)
def test_a_corpus_that_cannot_be_used(tiny_llama: Path, tmp_path: Path, lines: list[object], words: str) -> None:
    config = with_corpus(tiny_llama, tmp_path, lines, "drafter.suffix.max_corpus_tokens=50")
    with pytest.raises(ModelRefused, match=words):
        make_lookup(config)


def test_a_corpus_that_is_not_there(tiny_llama: Path) -> None:
    with pytest.raises(ModelRefused, match="cannot be read"):
        make_lookup(config_of(tiny_llama, "suffix", "drafter.suffix.corpus=/none.jsonl"))
