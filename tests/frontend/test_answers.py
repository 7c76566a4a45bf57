"""Answers as JSON: exactly the members that the OpenAI API prescribes, and ours beside them."""

import json

from sdcpd.frontend.answers import (
    ChatShape,
    TextShape,
    metrics_of,
    model_body,
    model_list_body,
    usage_of,
)
from sdcpd.protocol.messages import SpeculationStats
from sdcpd.roles.generation import ModelCard
from tests.support.frontend import STATS

HEAD = {"id": "x-1", "created": 7, "model": "m"}
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
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
    }
}


def test_a_whole_chat() -> None:
    shape = ChatShape("x-1", 7, "m", include_usage=False)
    assert json.loads(shape.whole("héllo", "stop", usage_of(3, 4), metrics_of(STATS))) == {
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
    assert json.loads(shape.whole("hi", "length", usage_of(3, 4), None)) == {
        **HEAD,
        "object": "text_completion",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length"}],
        "usage": USAGE,
    }


def test_chunks_of_a_chat() -> None:
    shape = ChatShape("x-1", 7, "m", include_usage=False)
    first = shape.first()
    assert first is not None
    chunks = [json.loads(chunk) for chunk in (first, shape.piece("hi"), shape.last("stop"))]
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
    assert json.loads(shape.piece("hi")) == {
        **HEAD,
        "object": "text_completion",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": None}],
        "usage": None,
    }
    assert json.loads(shape.usage(usage_of(3, 4), metrics_of(STATS))) == {
        **HEAD,
        "object": "text_completion",
        "choices": [],
        "usage": USAGE,
        "metrics": METRICS,
    }


def test_rates_that_do_not_exist_are_null() -> None:
    metrics = metrics_of(SpeculationStats(rounds=3, drafts=0, draft_tokens=0, accepted_tokens=0))
    assert metrics is not None
    assert metrics.speculative_decoding.num_rounds == 3
    assert metrics.speculative_decoding.mean_acceptance_length is None
    assert metrics.speculative_decoding.draft_acceptance_rate is None
    assert metrics_of(None) is None


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
