"""The official Python client against a real daemon over TLS, as people use it."""

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.clients.conftest import ClientPort

pytestmark = pytest.mark.process
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "the rain in the other land"}]


@pytest.fixture
def client(client_port: ClientPort, http: httpx2.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client_port.url}/v1", api_key=client_port.key, http_client=http, max_retries=0)


def say(client: openai.OpenAI, model: str, **options: object) -> str:
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        model=model, messages=MESSAGES, **({"max_tokens": 8} | options)
    )
    text = answer.choices[0].message.content
    assert isinstance(text, str)
    return text


def test_models(client: openai.OpenAI, client_port: ClientPort) -> None:
    assert [model.id for model in client.models.list()] == [client_port.model]
    assert client.models.retrieve(client_port.model).owned_by == "sdcpd"


def test_chat_and_its_usage(client: openai.OpenAI, client_port: ClientPort) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=client_port.model,
        messages=MESSAGES,
        max_tokens=8,
        extra_body={"speculation": {"stats": True}, "ignore_eos": True},
    )
    answer = raw.parse()
    assert raw.headers["x-sdcp-session"]
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens is not None
    assert answer.model_extra is not None
    figures = answer.model_extra["metrics"]["speculative_decoding"]
    assert figures["num_rounds"] == figures["num_spec_steps"] + figures["num_self_decoded_tokens"]
    assert say(client, client_port.model, extra_body={"speculation": {"enabled": False}, "ignore_eos": True}) == (
        answer.choices[0].message.content
    )


def test_streams_join_to_the_whole(client: openai.OpenAI, client_port: ClientPort) -> None:
    whole = say(client, client_port.model)
    with client.chat.completions.create(
        model=client_port.model,
        messages=MESSAGES,
        max_completion_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    usage = chunks[-1].usage
    assert usage is not None
    assert 0 < usage.completion_tokens <= 8


def test_stop_strings(client: openai.OpenAI, client_port: ClientPort) -> None:
    whole = say(client, client_port.model, max_tokens=16, extra_body={"ignore_eos": True})
    stop = whole[6:8]
    answer = client.chat.completions.create(
        model=client_port.model,
        messages=MESSAGES,
        max_tokens=16,
        stop=[stop, "never said"],
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_choices_and_seeds(client: openai.OpenAI, client_port: ClientPort) -> None:
    """The same request with the same seed says the same, with speculation and without; choices differ."""
    options = {"temperature": 1.0, "seed": 7, "extra_body": {"ignore_eos": True}}
    one = say(client, client_port.model, **options)
    assert say(client, client_port.model, **options) == one
    off = {"temperature": 1.0, "seed": 7, "extra_body": {"ignore_eos": True, "speculation": "off"}}
    assert say(client, client_port.model, **off) == one
    three = client.chat.completions.create(
        model=client_port.model,
        messages=MESSAGES,
        max_tokens=8,
        n=3,
        temperature=1.0,
        seed=7,
        extra_body={"ignore_eos": True},
    )
    texts = [choice.message.content for choice in three.choices]
    assert texts[0] == one
    assert len(set(texts)) == 3
    assert three.usage is not None
    assert three.usage.completion_tokens == 24


def test_logprobs(client: openai.OpenAI, client_port: ClientPort) -> None:
    answer = client.chat.completions.create(
        model=client_port.model, messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].token == entry.token, "greedy"


def test_text_completions(client: openai.OpenAI, client_port: ClientPort) -> None:
    """Texts and tokens, several at once; each answer is what it is alone."""
    prompts = ["the rain", "other land"]
    both = client.completions.create(model=client_port.model, prompt=prompts, max_tokens=6, logprobs=1)
    for choice, prompt in zip(both.choices, prompts, strict=True):
        alone = client.completions.create(model=client_port.model, prompt=prompt, max_tokens=6)
        assert choice.text == alone.choices[0].text
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs
    tokens = client.completions.create(model=client_port.model, prompt=[40, 41, 42], max_tokens=2)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 3


def test_errors(client: openai.OpenAI, client_port: ClientPort) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        say(client, client_port.model, presence_penalty=0.5)
    assert (refused.value.param, refused.value.code) == ("presence_penalty", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as refused:
        say(client, client_port.model, max_tokens=5000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        say(client, "gpt-none")
    with pytest.raises(openai.AuthenticationError):
        say(client.with_options(api_key="sk-wrong-0123456789"), client_port.model)
    small = client.with_options(api_key=client_port.small_key)
    say(small, client_port.model)
    with pytest.raises(openai.RateLimitError) as limited:
        say(small, client_port.model)
    assert int(limited.value.response.headers["retry-after"]) >= 1
