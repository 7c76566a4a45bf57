"""A draft model for the world of small verifiers: a toy engine that says what their target would, or often does."""

from collections.abc import Callable, Sequence

from sdcpd.drafting.settings import DraftModelSettings
from sdcpd.roles.model_drafting import ModelDrafting
from tests.support.drafter_world import VOCABULARY
from tests.support.messages import TARGET, TOKENIZER
from tests.support.ports import CountingMeters, SeededStream, TrioClock
from tests.support.tiny_verifier import toy_next
from tests.support.toy_engine import ToyEngine

M = 4
"""The most that it drafts."""
DRAFT_S = 0.002
"""A pass."""


def right(prefix: Sequence[int]) -> int:
    """The target's token."""
    return toy_next(tuple(prefix), VOCABULARY)


def often_wrong(prefix: Sequence[int]) -> int:
    """The target's token, but for every seventh place."""
    return right(prefix) if len(prefix) % 7 else (right(prefix) + 1) % VOCABULARY


def draft_model(target: Callable[[Sequence[int]], int] = right) -> ModelDrafting:
    """Drafting by `target`."""
    engine = ToyEngine(
        TrioClock(), model=TARGET, tokenizer=TOKENIZER, pages=256, context_tokens=2048, pass_s=DRAFT_S, target=target
    )
    settings = DraftModelSettings(model="toy", num_speculative_tokens=M)
    return ModelDrafting(settings, engine, TrioClock(), CountingMeters(), SeededStream("drafts"))
