"""Requests: each field of the API is honoured, neutral, or refused by its name (bugs 8 and 13)."""

import json
from typing import Any

import pytest

from sdcpd.drafting.traffic_class import RequestFacts
from sdcpd.frontend.chat_template import ChatMessage
from sdcpd.frontend.errors import ApiError
from sdcpd.frontend.openai import Ask, Conversation, SamplingWish, new_tokens, read_chat, read_completion
from sdcpd.frontend.speculation import SpeculationWish

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> Ask:
    return read_chat(json.dumps(CHAT | fields).encode())


def text(**fields: Any) -> Ask:
    return read_completion(json.dumps(TEXT | fields).encode())


def refusal(body: bytes, *, completion: bool = False) -> ApiError:
    with pytest.raises(ApiError) as caught:
        (read_completion if completion else read_chat)(body)
    assert caught.value.status == 400
    return caught.value


def refused(completion: bool = False, **fields: Any) -> ApiError:
    return refusal(json.dumps((TEXT if completion else CHAT) | fields).encode(), completion=completion)


def test_what_is_absent_is_greedy_and_whole() -> None:
    ask = chat()
    assert (ask.n, ask.speculation) == (1, SpeculationWish())
    assert ask.sources == (Conversation((ChatMessage("user", "hi"),), {}),)
    assert (ask.max_new, ask.stop_strings, ask.stop_tokens, ask.stream) == (None, (), (), False)
    assert text().sources == ("hi",)


def test_what_is_honoured() -> None:
    ask = chat(
        max_tokens=7,
        max_completion_tokens=7,
        stop=["a", "b"],
        stop_token_ids=[9, 3, 9],
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        speculation="off",
        chat_template_kwargs={"enable_thinking": False},
    )
    assert (ask.max_new, ask.max_new_param, ask.stop_strings) == (7, "max_completion_tokens", ("a", "b"))
    assert (ask.stop_tokens, ask.ignore_eos, ask.stream, ask.include_usage, ask.speculation) == (
        (3, 9),
        True,
        True,
        True,
        SpeculationWish(enabled=False),
    )
    (source,) = ask.sources
    assert isinstance(source, Conversation)
    assert source.variables == {"enable_thinking": False}
    assert text(stop="x").stop_strings == ("x",)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.0},
        {"top_p": 0},
        {"top_p": 1},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 0.1},
        {"seed": -5},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
        {"n": 1},
        {"store": False},
        {"tools": []},
        {"tool_choice": "auto"},
        {"logprobs": False, "top_logprobs": 0},
        {"min_tokens": 0},
        {"repetition_penalty": 1.0},
        {"stop": []},
        {"service_tier": "auto"},
        {"modalities": ["text"]},
    ],
)
def test_neutral_values_change_nothing(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({"temperature": 0.7}, SamplingWish(temperature_milli=700)),
        ({"temperature": 0.0001}, SamplingWish(temperature_milli=1)),
        ({"temperature": 2, "min_p": 0, "top_k": -1, "top_p": 1}, SamplingWish(temperature_milli=2000)),
        ({"temperature": 1, "top_k": 40}, SamplingWish(temperature_milli=1000, top_k=40)),
        ({"temperature": 1, "top_p": 0.95}, SamplingWish(temperature_milli=1000, top_p_milli=950)),
        ({"temperature": 1, "top_p": 0}, SamplingWish(temperature_milli=1000, top_p_milli=0)),
        ({"temperature": 1, "seed": 7}, SamplingWish(temperature_milli=1000, seed=7)),
        ({"temperature": 1, "seed": -1}, SamplingWish(temperature_milli=1000, seed=-1)),
        ({"temperature": 0, "seed": 7, "top_k": 3, "top_p": 0.5}, SamplingWish()),
    ],
)
def test_sampling_is_honoured(fields: dict[str, Any], wish: SamplingWish) -> None:
    assert chat(**fields).sampling == wish
    assert text(**fields).sampling == wish


def test_user_and_metadata_are_for_traffic_classes() -> None:
    facts = RequestFacts(user="u", metadata=(("tag", "code"), ("team", "blue")))
    assert chat(user="u", metadata={"tag": "code", "team": "blue"}).facts == facts
    assert chat().facts == RequestFacts()
    assert refused(metadata={str(number): "" for number in range(17)}).param == "metadata"


def test_null_is_absent_everywhere() -> None:
    from sdcpd.frontend import fields, openai

    for make, table, kind, needed in (
        (chat, fields.CHAT, openai._ChatRequest, ("model", "messages")),
        (text, fields.COMPLETION, openai._CompletionRequest, ("model", "prompt")),
    ):
        for name in [*table, *kind.__struct_fields__]:
            if name not in needed:
                assert make(**{name: None}) == make(), name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.7, "min_p": 0.1}, "min_p"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 1.0}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"logit_bias": {"5": -100}}, "logit_bias"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"store": True}, "store"),
        ({"user": 5}, "user"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**32]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(600))}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"speculation": True}, "speculation"),
        ({"speculation": "maybe"}, "speculation"),
        ({"speculation": {"enabled": "no"}}, "speculation.enabled"),
        ({"speculation": {"m_max": 0}}, "speculation.m_max"),
        ({"speculation": {"m_max": 65}}, "speculation.m_max"),
        ({"speculation": {"class": ""}}, "speculation.class"),
        ({"speculation": {"stat": True}}, "speculation.stat"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": None}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "Bob"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]}, "messages[1].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}]},
            "messages[0].content[0].cache",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_what_is_not_served_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": ["a", [1, -1]]}, "prompt[1]"),
        ({"prompt": ["a", "b"], "n": 65}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**32]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_what_is_not_served_in_text_completions_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(completion=True, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "sources"),
    [
        ({"prompt": "a"}, ("a",)),
        ({"prompt": ["a"]}, ("a",)),
        ({"prompt": [1, 2]}, ((1, 2),)),
        ({"prompt": [[1, 2]]}, ((1, 2),)),
        ({"prompt": ["a", [1, 2], "b"], "n": 2}, ("a", (1, 2), "b")),
        ({"prompt": []}, ((),)),
        ({"best_of": 1, "echo": False, "suffix": ""}, ("hi",)),
    ],
)
def test_prompts(fields: dict[str, Any], sources: object) -> None:
    assert text(**fields).sources == sources


def test_unknown_fields_come_with_the_nearest_name() -> None:
    error = refused(max_token=5)
    assert (error.param, error.code) == ("max_token", "unknown_parameter")
    assert "'max_tokens'" in error.message
    assert "did you mean" not in refused(quux=1).message
    assert "'include_usage'" in refused(stream=True, stream_options={"include_usge": True}).message
    assert len(refusal(json.dumps({"x" * 10_000: 1}).encode()).message) < 500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "m", "messages": [], "temperature": 1e999}', "temperature"),
        (b'{"model": "m", "messages": [], "temperature": NaN}', None),
        (b'{"model": "m", "messages": [], "top_p": -Infinity}', None),
        (b'{"model": "m", "messages": [], "max_tokens": ' + b"9" * 5000 + b"}", "max_tokens"),
        (b'{"model": "m", "messages": ' + b"[" * 100_000, None),
        (b'{"model": "m", "messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", None),
        (b'{"model": "m"}', "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "model"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}', "messages"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', None),
        (b"[]", None),
        (b"", None),
        (b"{} {}", None),
    ],
)
def test_bodies_that_are_no_request(body: bytes, param: str | None) -> None:
    error = refusal(body)
    if param is not None:
        assert error.param == param


def test_numbers_of_any_size_are_read_as_what_they_are() -> None:
    assert chat(max_tokens=10**30).max_new == 10**30
    with pytest.raises(ApiError) as caught:
        new_tokens(chat(max_tokens=10**30), 5, 64)
    assert caught.value.code == "context_length_exceeded"


def test_roles_and_parts() -> None:
    ask = chat(
        messages=[
            {"role": "developer", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "assistant", "content": "d", "refusal": None, "tool_calls": None, "annotations": []},
        ]
    )
    (source,) = ask.sources
    assert isinstance(source, Conversation)
    assert source.messages == (
        ChatMessage("system", "a"),
        ChatMessage("user", "b\nc"),
        ChatMessage("assistant", "d"),
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "wanted"),
    [(60, 4, 4), (63, None, None), (63, 1, 1), (1, 63, 63)],
)
def test_what_fits_the_context(prompt_tokens: int, max_tokens: int | None, wanted: int | None) -> None:
    """Bug 10, with a context of 64. None is for the router: all that fits."""
    assert new_tokens(chat(max_tokens=max_tokens), prompt_tokens, 64) == wanted


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "param", "code"),
    [
        (64, None, "messages", "context_length_exceeded"),
        (65, None, "messages", "context_length_exceeded"),
        (60, 5, "max_tokens", "context_length_exceeded"),
        (0, None, "messages", None),
    ],
)
def test_what_does_not_fit_is_refused(prompt_tokens: int, max_tokens: int | None, param: str, code: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        new_tokens(chat(max_tokens=max_tokens), prompt_tokens, 64)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_text_completions_are_short_by_default() -> None:
    assert new_tokens(text(), 5, 64) == 16
    assert new_tokens(text(), 60, 64) == 4
