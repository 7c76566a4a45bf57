"""What a node's drafter drafts with, by its configuration; and what it says of itself.

A drafter proposes tokens of one target, so everything that guesses must speak that target's tokens: the tokenizer and
the size of the vocabulary of a draft model are held against the target's before anything serves.
"""

from pathlib import Path
from typing import Final

from msgspec.structs import replace

from sdcpd.drafting.lookup_source import LookupSource
from sdcpd.drafting.payoff import FrequencyPayoff
from sdcpd.drafting.settings import hybrid_digest, lookup_digest, suffix_digest
from sdcpd.drafting.source import DraftSource
from sdcpd.drafting.suffix_source import SuffixSource
from sdcpd.engine.model_config import ModelRefused, read_model_config
from sdcpd.engine.model_digest import tokenizer_digest
from sdcpd.engine.spans import EngineInfo
from sdcpd.node.config import Config
from sdcpd.node.draft_corpus import read_corpus
from sdcpd.protocol.draft_session import Identity
from sdcpd.roles.drafter_settings import DrafterSettings
from sdcpd.roles.drafting import Drafting, LookupDrafting
from sdcpd.roles.hybrid_drafting import HybridDrafting
from sdcpd.roles.model_drafting import ModelDrafting
from sdcpd.roles.ports import Engine, Ports

MODEL_METHODS: Final = ("draft_model", "frequency_hybrid")
"""Those that need a draft engine."""


def make_lookup(config: Config) -> DraftSource:
    """The lookup source of the configured method. Blocks while a corpus is read. Raises ModelRefused."""
    settings = config.drafter
    if settings.method in ("suffix", "frequency_hybrid"):
        if settings.suffix.corpus is None:
            return SuffixSource(settings.suffix)
        return SuffixSource(settings.suffix, read_corpus(settings.suffix, _target_folder(config)))
    return LookupSource(settings.lookup)


def make_drafting(settings: DrafterSettings, ports: Ports, lookup: DraftSource, engine: Engine | None) -> Drafting:
    """`engine` is the draft model's, for the methods that have one."""
    if engine is None:
        return LookupDrafting(lookup, ports.workers)
    assert settings.draft_model is not None, "the configuration was checked"
    draws = ports.randomness.stream("drafts")
    model = ModelDrafting(settings.draft_model, engine, ports.clock, ports.meters, draws)
    if settings.method == "draft_model":
        return model
    return HybridDrafting(settings.hybrid, lookup, model, FrequencyPayoff(), ports.workers)


def drafter_settings(config: Config, drafts: EngineInfo | None) -> DrafterSettings:
    """The drafter's settings, with sessions no longer than its draft model can follow."""
    settings = config.drafter
    if drafts is None or settings.method != "draft_model":
        return settings
    return replace(settings, session_tokens=min(settings.session_tokens, drafts.session_tokens))


def drafter_identity(config: Config, target: EngineInfo | None, drafts: EngineInfo | None) -> Identity:
    """What a drafter says of itself: its method or model, and whose tokens it proposes.

    `target` is the engine's of this node, if it has one, `drafts` the draft model's. Blocks. Raises ModelRefused.
    """
    if config.drafter.tokenizer is None and target is not None:
        tokenizer, vocabulary = target.tokenizer, target.vocabulary
    else:
        folder = _target_folder(config)
        tokenizer, vocabulary = tokenizer_digest(folder), read_model_config(folder).vocabulary
    if drafts is not None:
        _check_fits(config, drafts, tokenizer, vocabulary)
    return Identity(
        instance=config.role_uri("drafter"),
        model=_model_digest(config.drafter, drafts),
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        method=config.drafter.method,
    )


def _check_fits(config: Config, drafts: EngineInfo, tokenizer: bytes, vocabulary: int) -> None:
    assert config.drafter.draft_model is not None
    model, target = config.drafter.draft_model.model, _target_folder(config)
    if drafts.tokenizer != tokenizer:
        raise ModelRefused(
            f"drafter.draft_model.model: the tokenizer.json of {model} is not that of the target {target} (digests "
            f"{drafts.tokenizer.hex()[:12]} and {tokenizer.hex()[:12]}). A draft model must use the target's tokens; "
            'take one of the same family, or method = "suffix", which needs no model.'
        )
    if drafts.vocabulary != vocabulary:
        raise ModelRefused(
            f"drafter.draft_model.model: {model} has a vocabulary of {drafts.vocabulary} tokens, the target {target} "
            f"one of {vocabulary}. Pad the smaller embedding to the other's size, or take another draft model."
        )


def _model_digest(settings: DrafterSettings, drafts: EngineInfo | None) -> bytes:
    """What stands in `status.model` (decision 10)."""
    match settings.method:
        case "ngram":
            return lookup_digest(settings.lookup)
        case "suffix":
            return suffix_digest(settings.suffix)
        case "draft_model":
            assert drafts is not None
            return drafts.model
        case "frequency_hybrid":
            assert drafts is not None
            return hybrid_digest(settings.suffix, drafts.model)


def _target_folder(config: Config) -> Path:
    if config.drafter.tokenizer is not None:
        return Path(config.drafter.tokenizer)
    assert config.engine is not None, "the configuration was checked"
    return Path(config.engine.model)
