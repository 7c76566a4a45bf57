"""langchain-openai against a real daemon: a framework that sends what its authors found in one service only."""

import httpx2
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.conftest import ClientPort

pytestmark = pytest.mark.process


def chat(port: ClientPort, http: httpx2.Client, **options: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{port.url}/v1",
        api_key=port.key,  # type: ignore[arg-type]  # it is made a secret
        model=port.model,
        http_client=http,
        max_retries=0,
        **({"max_tokens": 8, "temperature": 0} | options),  # type: ignore[arg-type]
    )


def test_a_chat_whole_and_streamed(client_port: ClientPort, http: httpx2.Client) -> None:
    model = chat(client_port, http)
    messages = [("system", "be brief"), ("user", "the rain in the other land")]
    answer = model.invoke(messages)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(str(chunk.content) for chunk in model.stream(messages)) == answer.content


def test_options_of_the_framework(client_port: ClientPort, http: httpx2.Client) -> None:
    model = chat(client_port, http, temperature=1.0, seed=3, n=2, stop=["zz"], logprobs=True)
    (both,) = model.generate([[HumanMessage("hi")]]).generations
    assert len(both) == 2
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        chat(client_port, http, presence_penalty=1.0).invoke("hi")


def test_a_batch_of_prompts(client_port: ClientPort, http: httpx2.Client) -> None:
    model = OpenAI(
        base_url=f"{client_port.url}/v1",
        api_key=client_port.key,  # type: ignore[arg-type]
        model=client_port.model,
        http_client=http,
        max_tokens=4,
        max_retries=0,
        temperature=0,
    )
    answers = model.generate(["the rain", "other land"]).generations
    assert [len(one) for one in answers] == [1, 1]
