"""Answers as JSON: exactly the members that the OpenAI API prescribes, and ours beside them."""

import json
from collections.abc import Sequence

import msgspec

from sdcpd.frontend.answers import (
    ChatShape,
    ChoiceFigures,
    Finished,
    TextShape,
    metrics_of,
    model_body,
    model_list_body,
    usage_of,
)
from sdcpd.frontend.reply import Delta
from sdcpd.protocol.messages import SpeculationStats
from sdcpd.roles.generation import ModelCard, Passage
from tests.support.frontend import STATS

HEAD = {"id": "x-1", "created": 7, "model": "m"}
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 12},
}
METRICS = {
    "speculative_decoding": {
        "num_rounds": 5,
        "num_spec_steps": 4,
        "num_draft_tokens": 20,
        "num_accepted_draft_tokens": 8,
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 0.4,
        "acceptance_histogram": [1, 1, 0, 1, 1],
        "num_self_decoded_tokens": 1,
        "drafter_switches": 0,
        "failovers": 0,
    }
}


def figures(
    completion_tokens: int = 4, stats: SpeculationStats | None = STATS, passage: Passage | None = None
) -> ChoiceFigures:
    return ChoiceFigures(completion_tokens=completion_tokens, stats=stats, passage=passage or Passage())


def test_a_whole_chat() -> None:
    shape = ChatShape("x-1", 7, "m", include_usage=False)
    assert json.loads(
        shape.whole([Finished(Delta("héllo"), "stop")], usage_of(3, [figures()]), metrics_of([figures()]))
    ) == {
        **HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "héllo", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
        "metrics": METRICS,
    }


def test_a_whole_text() -> None:
    shape = TextShape("x-1", 7, "m", include_usage=False)
    assert json.loads(shape.whole([Finished(Delta("hi"), "length")], usage_of(3, [figures()]), None)) == {
        **HEAD,
        "object": "text_completion",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length"}],
        "usage": USAGE,
    }


def test_chunks_of_a_chat() -> None:
    shape = ChatShape("x-1", 7, "m", include_usage=False)
    first = shape.first(0)
    assert first is not None
    chunks = [json.loads(chunk) for chunk in (first, shape.piece(0, Delta("hi")), shape.last(0, "stop"))]
    for chunk, delta, finish in zip(
        chunks, [{"role": "assistant", "content": ""}, {"content": "hi"}, {}], [None, None, "stop"], strict=True
    ):
        assert chunk == {
            **HEAD,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
        }


def test_chunks_with_usage() -> None:
    """Every chunk says null, one more without choices says it all."""
    shape = TextShape("x-1", 7, "m", include_usage=True)
    assert json.loads(shape.piece(0, Delta("hi"))) == {
        **HEAD,
        "object": "text_completion",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": None}],
        "usage": None,
    }
    assert json.loads(shape.usage(usage_of(3, [figures()]), metrics_of([figures()]))) == {
        **HEAD,
        "object": "text_completion",
        "choices": [],
        "usage": USAGE,
        "metrics": METRICS,
    }


def test_rates_that_do_not_exist_are_null() -> None:
    metrics = metrics_of([figures(stats=SpeculationStats(rounds=3, drafts=0, draft_tokens=0, accepted_tokens=0))])
    assert metrics is not None
    assert metrics.speculative_decoding.num_rounds == 3
    assert metrics.speculative_decoding.mean_acceptance_length is None
    assert metrics.speculative_decoding.draft_acceptance_rate is None
    assert metrics_of([figures(stats=None)]) is None


def test_figures_of_several_choices_are_added_up() -> None:
    short = SpeculationStats(rounds=2, drafts=2, draft_tokens=3, accepted_tokens=2, accepted_histogram=(0, 2))
    passage = Passage(failovers=1, drafter_switches=2)
    both = [figures(4, STATS, passage), figures(5, short, passage)]
    metrics = metrics_of(both)
    assert metrics is not None
    told = metrics.speculative_decoding
    assert (told.num_rounds, told.num_spec_steps, told.num_draft_tokens, told.num_accepted_draft_tokens) == (
        7,
        6,
        23,
        10,
    )
    assert told.acceptance_histogram == (1, 3, 0, 1, 1)
    assert (told.mean_acceptance_length, told.failovers, told.drafter_switches) == (1 + 10 / 6, 2, 4)
    usage = usage_of(3, both, 2)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 9, 12)


def cached_tokens(figures: Sequence[ChoiceFigures], choices: int) -> int | None:
    usage = json.loads(msgspec.json.encode(usage_of(3, figures, choices)))
    return usage.get("prompt_tokens_details", {"cached_tokens": None})["cached_tokens"]  # type: ignore[no-any-return]


def test_cached_tokens_are_those_of_each_prompts_first_choice() -> None:
    """The other choices of a prompt find it cached by the first."""
    one, other = (
        figures(stats=SpeculationStats(rounds=1, drafts=0, draft_tokens=0, accepted_tokens=0, cached_tokens=tokens))
        for tokens in (64, 128)
    )
    cut = figures(1, None)
    assert cached_tokens([one], 1) == 64
    assert cached_tokens([one, other], 2) == 64
    assert cached_tokens([one, other], 1) == 192
    assert cached_tokens([one, cut], 2) == 64
    assert cached_tokens([one, cut], 1) is None, "not known of the second prompt; 0 would be a guess"


def test_details_that_are_not_known_of_all_are_left_out() -> None:
    """A stop string ends a session before its verifier's account of it comes."""
    usage = json.loads(msgspec.json.encode(usage_of(3, [figures(), figures(1, None)])))
    assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}


def test_models() -> None:
    card = ModelCard(name="org/m", context_tokens=64, vocabulary=9, ready=False)
    body = {
        "id": "org/m",
        "object": "model",
        "created": 7,
        "owned_by": "sdcpd",
        "max_model_len": 64,
        "ready": False,
    }
    assert json.loads(model_body(card, 7)) == body
    assert json.loads(model_list_body((card,), 7)) == {"object": "list", "data": [body]}
