"""The client port as a client sees it, over ASGI with a router that plays scripts, in virtual time."""

import json
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from sdcpd.frontend.chat_template import ChatTemplate
from sdcpd.frontend.exchange import ClientGone
from sdcpd.frontend.settings import FrontendSettings
from sdcpd.frontend.text import ModelText
from sdcpd.protocol.terms import Action, session_path_id
from sdcpd.roles.generation import GenerationRefused, ModelCard
from tests.support.frontend import (
    EOS,
    NOW,
    SESSION,
    Answer,
    Step,
    World,
    call,
    make_world,
    metaspace_tokenizer,
    model_text,
    page,
    tokens_of,
)

JSON = {"content-type": "application/json"}
HELLO = [page(tokens_of("Hel")), page([*tokens_of("lo"), EOS], final=True)]


async def test_a_whole_chat() -> None:
    world = make_world(HELLO)
    answer = await world.chat()
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(answer.body))
    body = answer.json
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", NOW, "m")
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "stop"
    (request,) = world.generations.requests
    prompt = "\x00user\nhi\x01\n\x00assistant\n"
    assert request.prompt == tuple(ord(c) if ord(c) < 2 else ord(c) + 2 for c in prompt)
    assert (request.stop, request.max_new, request.speculation) == ((EOS,), None, True)
    assert body["usage"]["prompt_tokens"] == len(request.prompt)
    assert body["usage"]["completion_tokens"] == 6
    assert "metrics" not in body
    assert answer.headers["x-sdcp-session"] == session_path_id(SESSION)
    assert world.generations.left_early == 0


async def test_a_whole_text() -> None:
    world = make_world([page(tokens_of("abcd"), final=True)])
    answer = await world.complete(max_tokens=4, stop_token_ids=[9], ignore_eos=True, speculation="off")
    assert answer.json["object"] == "text_completion"
    assert answer.json["choices"][0] == {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length"}
    (request,) = world.generations.requests
    assert request.prompt == tokens_of("hi")
    assert (request.stop, request.max_new, request.speculation) == ((9,), 4, False)


async def test_a_streamed_chat(autojump_clock: MockClock) -> None:
    world = make_world([page(tokens_of("Hel")), 2.0, *HELLO[1:]])
    answer = await world.chat(stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in answer.headers
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert answer.ended


async def test_text_is_sent_when_it_is_committed(autojump_clock: MockClock) -> None:
    world = make_world([1.0, page(tokens_of("a")), 2.0, page(tokens_of("b")), 3.0, page([], final=True)])
    answer = await world.complete(stream=True)
    assert [(round(at), data.count(b"data:")) for at, data in answer.chunks] == [(1, 1), (3, 1), (6, 2), (6, 0)]


async def test_a_text_keeps_the_space_it_goes_on_with() -> None:
    """Tokenizers of the sentencepiece kind drop a space at the start of a text: right for a chat, wrong here."""
    tokenizer = metaspace_tokenizer()
    text = ModelText("m", tokenizer, stop=(), template=ChatTemplate("a", {}))
    world = make_world([page([tokenizer.get_vocab()["▁world"]], final=True)], text=text)
    assert (await world.complete(prompt="a")).json["choices"][0]["text"] == " world"
    assert (await world.chat()).json["choices"][0]["message"]["content"] == "world"


async def test_a_streamed_text_with_usage() -> None:
    answer = await make_world(HELLO).complete(
        stream=True, stream_options={"include_usage": True}, speculation={"stats": True}
    )
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 8
    assert usage["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 3.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_session_at_once(stream: bool, autojump_clock: MockClock) -> None:
    """Bug 14: no further round for the session, tokens counted to the one that completed the match."""
    words = ("ab ", "x STO", "P yz")
    world = make_world([page([258, 259, 260, 258]), "hang"], text=model_text(words=words))
    with trio.fail_after(1):
        answer = await world.complete(stop="STOP", stream=stream, max_tokens=50, speculation={"stats": True})
    assert (world.generations.open, world.generations.left_early) == (0, 1)
    if stream:
        chunks = [chunk for chunk in answer.events[:-1] if chunk["choices"]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab x "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert answer.json["choices"][0] == {"index": 0, "text": "ab x ", "logprobs": None, "finish_reason": "stop"}
        assert answer.json["usage"]["completion_tokens"] == 3
        assert "metrics" not in answer.json


async def test_a_failure_before_anything_was_sent_has_its_status() -> None:
    for stream in (False, True):
        world = make_world([page([], final=True, finish=Action.FAIL, reason="non-finite-logits")])
        answer = await world.chat(stream=stream)
        assert answer.status == 500
        assert (answer.error["type"], answer.error["code"]) == ("server_error", "non-finite-logits")


@pytest.mark.parametrize("reason", ["verifier_overloaded", "verifier_unreachable", "verifier_lost", "router_stopped"])
async def test_a_failure_that_is_not_the_requests_is_worth_a_retry(reason: str) -> None:
    failure = page([], final=True, finish=Action.FAIL, reason=reason)
    for stream in (False, True):
        answer = await make_world([failure]).chat(stream=stream)
        assert (answer.status, answer.error["type"], answer.error["code"]) == (503, "server_error", reason)
        assert int(answer.headers["retry-after"]) >= 1
    whole = await make_world([page(tokens_of("Hel")), failure]).chat()  # of which nothing was sent
    assert (whole.status, whole.error["code"]) == (503, reason)
    streamed = await make_world([page(tokens_of("Hel")), failure]).chat(stream=True)
    assert (streamed.status, streamed.events[-1]["error"]["code"]) == (200, reason)


@pytest.mark.parametrize(
    ("script", "counted"),
    [
        ([page([], final=True, finish=Action.FAIL, reason="verifier_overloaded")], False),
        ([page([], final=True, finish=Action.FAIL, reason="verifier_unreachable")], False),
        ([page([], final=True, finish=Action.FAIL, reason="verifier_refused")], False),
        ([page([], final=True, finish=Action.FAIL, reason="router_stopped")], False),
        ([page([], final=True, finish=Action.FAIL, reason="verifier_lost")], True),
        ([page([], final=True)], True),
        ([page([2]), page([], final=True, finish=Action.FAIL, reason="router_stopped")], True),
    ],
)
async def test_prompts_count_once_a_verifier_has_taken_them(script: list[Step], counted: bool) -> None:
    world = make_world(script)
    await world.complete(prompt="four")
    assert world.meters.counts.get("prompt_tokens_total") == (4 if counted else None)
    assert world.meters.observed.get("request_prompt_tokens") == ([4] if counted else None)


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_are_halted(stream: bool, autojump_clock: MockClock) -> None:
    """Told as a status where nothing was sent, else as an event; and nothing is begun afterwards."""
    scripts: list[list[Step]] = [["hang"], [page(tokens_of("a")), "hang"]]
    for script in scripts:
        world = make_world(script)
        answers: list[Answer] = []

        async def ask(world: World = world, answers: list[Answer] = answers) -> None:
            answers.append(await world.complete(stream=stream))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await world.generations.wait_open(1)
            await trio.sleep(1)
            world.app.halt()
        (answer,) = answers
        begun = stream and len(script) > 1
        assert answer.status == (200 if begun else 503)
        assert (answer.events[-1]["error"] if begun else answer.error)["code"] == "server_stopping"
        assert answer.ended
        assert ("retry-after" in answer.headers) == (not begun)
        counted = {"endpoint": "/v1/completions", "status": str(answer.status)}
        assert ("requests_total", 1, counted) in world.meters.labelled
        assert (world.generations.open, world.generations.left_early) == (0, 1)
        later = await world.complete(stream=stream)
        assert (later.status, later.error["code"]) == (503, "server_stopping")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_halt_at_the_very_moment_of_the_end(stream: bool, autojump_clock: MockClock) -> None:
    """Finished, or told why not; never both, never half of either."""
    seen = set()
    for turns in range(40):
        world = make_world([page(tokens_of("a")), 1.0, page(tokens_of("b")), page([], final=True)])
        answers: list[Answer] = []

        async def ask(world: World = world, answers: list[Answer] = answers) -> None:
            answers.append(await world.complete(stream=stream))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(1)
            for _ in range(turns % 20):
                await trio.lowlevel.checkpoint()
            world.app.halt()
        (answer,) = answers
        assert answer.ended
        last = answer.events[-1] if stream else answer.json
        finished = last == "[DONE]" or "choices" in last
        assert finished or last["error"]["code"] == "server_stopping"
        assert answer.body.count(b"[DONE]") + answer.body.count(b'"error"') == (1 if stream or not finished else 0)
        seen.add(finished)
    assert seen == {True, False}


async def test_a_key_that_stands_twice() -> None:
    world = make_world(HELLO)
    body = b'{"model":"m","prompt":"hi","max_tokens":1,"max_tokens":2}'
    answer = await world.call("POST", "/v1/completions", pieces=[body])
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "max_tokens", "duplicate_key")
    assert world.generations.requests == []


async def test_a_failure_in_mid_answer() -> None:
    script = [page(tokens_of("Hel")), page([], final=True, finish=Action.FAIL, reason="verifier-lost")]
    whole = await make_world(script).chat()
    assert (whole.status, whole.error["code"]) == (500, "verifier-lost")
    streamed = await make_world(script).chat(stream=True)
    assert streamed.status == 200
    assert streamed.events[-1]["error"]["code"] == "verifier-lost"
    assert streamed.ended
    assert b"[DONE]" not in streamed.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [["hang"], [page(tokens_of("a")), "hang"]], ids=["before", "after"])
async def test_a_client_that_leaves_ends_its_session(
    stream: bool, script: list[Step], autojump_clock: MockClock
) -> None:
    """Bug 21: for answers of both kinds, before the first page and after it."""
    world = make_world(script)
    leave = trio.Event()
    body = {"model": "m", "prompt": "hi", "stream": stream}

    async def request() -> None:
        await world.call("POST", "/v1/completions", json_body=body, leave=leave)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(request)
        await world.generations.wait_open(1)
        await trio.sleep(0.2)
        assert world.app.snapshot().requests_running == 1
        leave.set()
        with trio.fail_after(0.1):
            await world.generations.wait_open(0)
    assert world.generations.left_early == 1
    assert world.app.snapshot().requests_running == 0
    assert ("request_success_total", 1, {"finished_reason": "abort"}) in world.meters.labelled
    assert ("requests_total", 1, {"endpoint": "/v1/completions", "status": "499"}) in world.meters.labelled


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("unknown_model", 404, "model_not_found"),
        ("context_length", 400, "context_length_exceeded"),
        ("invalid", 400, None),
        ("overloaded", 503, "overloaded"),
        ("not_ready", 503, "not_ready"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_router(reason: Any, status: int, code: str | None, stream: bool) -> None:
    world = make_world()
    world.generations.refusal = GenerationRefused(reason, "because", param="model", retry_after_s=7)
    answer = await world.chat(stream=stream)
    assert (answer.status, answer.error["code"], answer.error["message"]) == (status, code, "because")
    assert answer.headers.get("retry-after") == ("7" if status == 503 else None)
    assert world.meters.counts.get("prompt_tokens_total") is None


async def test_a_long_wait_keeps_the_stream_alive(autojump_clock: MockClock) -> None:
    world = make_world([25.0, *HELLO])
    answer = await world.chat(stream=True)
    assert [round(at) for at, piece in answer.chunks if piece == b": keep-alive\n\n"] == [10, 20]
    assert answer.events[1]["choices"][0]["delta"]["content"] == "Hel"


async def test_a_refusal_after_a_long_wait_is_an_event(autojump_clock: MockClock) -> None:
    world = make_world()
    world.generations.enter_s = 12.0
    world.generations.refusal = GenerationRefused("overloaded", "because")
    answer = await world.chat(stream=True)
    assert answer.status == 200
    assert [event["error"]["code"] for event in answer.events] == ["overloaded"]
    assert answer.ended


async def test_a_refusal_at_the_very_moment_of_a_comment(autojump_clock: MockClock) -> None:
    """Whichever comes first: an answer with its status, or a stream with an event; never half of each."""
    seen = set()
    for _ in range(40):
        world = make_world()
        world.generations.enter_s = 10.0
        world.generations.refusal = GenerationRefused("overloaded", "because")
        answer = await world.chat(stream=True)
        error = answer.error if answer.status == 503 else answer.events[-1]["error"]
        assert (error["code"], answer.ended) == ("overloaded", True)
        seen.add(answer.status)
    assert 503 in seen


async def test_sampling_reaches_the_router() -> None:
    world = make_world(HELLO)
    answer = await world.complete(prompt="x", temperature=0.5, top_k=7, top_p=0.25, seed=3)
    assert answer.status == 200
    request = world.generations.requests[0]
    assert (request.temperature_milli, request.top_k, request.top_p_milli, request.seed) == (500, 7, 250, 3)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": "x" * 65}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 60, "max_tokens": 5}, "max_tokens", "context_length_exceeded"),
        ({"prompt": ""}, "prompt", None),
        ({"prompt": []}, "prompt", None),
        ({"prompt": [300]}, "prompt", None),
        ({"prompt": "x" * 10_001}, "prompt", "string_above_max_length"),
        ({"temperature": 1, "min_p": 0.5}, "min_p", "unsupported_parameter"),
    ],
)
async def test_what_cannot_be_served_opens_no_session(fields: dict[str, Any], param: str, code: str | None) -> None:
    world = make_world(HELLO, settings=FrontendSettings(max_prompt_chars=10_000), context_tokens=64)
    answer = await world.complete(**fields)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code)
    assert answer.error["type"] == "invalid_request_error"
    assert world.generations.requests == []


async def test_a_model_that_no_verifier_runs_yet() -> None:
    world = make_world()
    world.generations.card = ModelCard(name="m", context_tokens=0, vocabulary=0, ready=False)
    world.generations.not_ready = "no verifier reports yet"
    answer = await world.chat()
    assert (answer.status, answer.error["code"]) == (503, "not_ready")
    assert "no verifier reports yet" in answer.error["message"]
    assert "retry-after" in answer.headers
    (listed,) = (await world.call("GET", "/v1/models")).json["data"]
    assert (listed["max_model_len"], listed["ready"]) == (None, False)


async def test_what_just_fits_the_context() -> None:
    world = make_world(HELLO, context_tokens=64)
    assert (await world.complete(prompt="x" * 63)).status == 200
    assert (await world.complete(prompt="x" * 60, max_tokens=4)).status == 200
    assert [request.max_new for request in world.generations.requests] == [1, 4]


async def test_models_that_do_not_exist() -> None:
    world = make_world()
    for answer in (await world.chat(model="gpt-5"), await world.call("GET", "/v1/models/gpt-5")):
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert "m" in answer.error["message"]


async def test_chat_without_a_template() -> None:
    answer = await make_world(text=model_text(template=None)).chat()
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "/v1/completions" in answer.error["message"]


async def test_chat_that_the_template_refuses() -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}x"
    world = make_world(HELLO, text=model_text(template=template))
    message = {"role": "user", "content": "hi"}
    answer = await world.chat(messages=[message, message])
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "one at a time" in answer.error["message"]
    answer = await world.chat(chat_template_kwargs={"messages": []})
    assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs.messages")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("GET", "/", {}, 404, "unknown_url"),
        ("POST", "/v1/chat/completion", {}, 404, "unknown_url"),
        ("GET", "/v1/completions", {}, 405, "method_not_allowed"),
        ("DELETE", "/v1/models/m", {}, 405, "method_not_allowed"),
        ("POST", "/health", {}, 405, "method_not_allowed"),
        ("POST", "/v1/completions", {}, 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", "/v1/completions", JSON | {"content-encoding": "gzip"}, 415, "unsupported_coding"),
        ("POST", "/v1/completions", JSON, 400, "invalid_json"),
    ],
)
async def test_errors_of_method_path_and_type(
    method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    answer = await make_world().call(method, path, headers=headers)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert ("allow" in answer.headers) == (status == 405)


async def test_json_with_a_charset_is_json() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    answer = await make_world(HELLO).call(
        "POST", "/v1/completions", json_body={"model": "m", "prompt": "hi"}, headers=headers
    )
    assert answer.status == 200


async def test_a_body_over_the_limit() -> None:
    world = make_world(HELLO, settings=FrontendSettings(max_body_bytes=1024))
    answer = await world.call("POST", "/v1/completions", pieces=[b"x" * 1000] * 3)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_more_requests_than_there_are_places(autojump_clock: MockClock) -> None:
    world = make_world([5.0, *HELLO], settings=FrontendSettings(max_requests=2))
    answers: list[int] = []

    async def request() -> None:
        answer = await world.complete()
        answers.append(answer.status)
        if answer.status == 503:
            assert answer.error["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(request)
    assert sorted(answers) == [200, 200, 503]
    assert answers[0] == 503
    assert (await world.complete()).status == 200  # the places are free again


async def test_looking_around() -> None:
    world = make_world()
    assert (await world.call("GET", "/health")).json == {"status": "ok"}
    assert (await world.call("GET", "/ready")).json == {"status": "ready"}
    assert (await world.call("GET", "/metrics")).body == b"sdcpd_up 1\n"
    (listed,) = (await world.call("GET", "/v1/models")).json["data"]
    assert (listed["id"], listed["max_model_len"]) == ("m", 4096)
    assert (await world.call("GET", "/v1/models/m")).json == listed
    world.generations.not_ready = "no verifier reports yet"
    answer = await world.call("GET", "/ready")
    assert (answer.status, answer.error["message"]) == (503, "no verifier reports yet")
    assert "retry-after" in answer.headers
    assert (await world.call("GET", "/health")).status == 200


async def test_request_ids() -> None:
    world = make_world()
    given = await world.call("GET", "/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    for harmful in ("", "a b", "x" * 200, "a\x00"):
        made = await world.call("GET", "/nowhere", headers={"x-request-id": harmful})
        assert made.headers["x-request-id"] not in ("", harmful)


async def test_what_is_measured(autojump_clock: MockClock) -> None:
    script: list[Step] = [1.0, page(tokens_of("ab")), 3.0, page(tokens_of("cde")), 1.0, page([EOS], final=True)]
    world = make_world(script)
    await world.complete()
    assert world.meters.counts["prompt_tokens_total"] == 2
    assert world.meters.counts["generation_tokens_total"] == 6
    observed = {name: [round(value, 6) for value in values] for name, values in world.meters.observed.items()}
    assert observed == {
        "request_prompt_tokens": [2],
        "time_to_first_token_seconds": [1],
        "inter_token_latency_seconds": [1, 1, 1, 1],
        "request_generation_tokens": [6],
        "e2e_request_latency_seconds": [5],
        "request_time_per_output_token_seconds": [0.8],
    }
    assert ("request_success_total", 1, {"finished_reason": "stop"}) in world.meters.labelled
    assert ("requests_total", 1, {"endpoint": "/v1/completions", "status": "200"}) in world.meters.labelled


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_upon_the_last_octet_was_served(stream: bool) -> None:
    """The server below says so even where it closed the connection itself; 499 would count what did not happen."""
    world = make_world(HELLO)
    gone = trio.Event()
    body = [json.dumps({"model": "m", "prompt": "hi", "stream": stream}).encode()]

    async def receive() -> dict[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        if message.get("more_body") is False:
            gone.set()
            await trio.testing.wait_all_tasks_blocked()

    headers = [(b"content-type", b"application/json")]
    await world.app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive, send)
    counted = [labels["status"] for name, _, labels in world.meters.labelled if name == "requests_total"]
    assert counted == ["200"]


async def test_what_is_measured_has_its_names_in_the_nodes_list(autojump_clock: MockClock) -> None:
    from sdcpd.node.metrics import METRICS

    world = make_world([1.0, page(tokens_of("ab")), 3.0, page(tokens_of("cde"), final=True)])
    await world.complete()
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    for name, _, given in world.meters.labelled:
        assert labels[name] == set(given)
    for name in world.meters.observed:
        assert labels[name] == set()


async def test_faults_of_ours_are_answered_and_not_hidden() -> None:
    world = make_world([page(tokens_of("a"))])  # a router that breaks its word: no final page
    answer = Answer()
    with pytest.raises(BaseExceptionGroup) as caught:
        await call(world.app, "POST", "/v1/completions", json_body={"model": "m", "prompt": "hi"}, answer=answer)
    assert caught.group_contains(AssertionError)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")


async def test_websockets_are_refused() -> None:
    sent: list[Any] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise ClientGone

    await make_world().app({"type": "websocket", "path": "/", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close"}]


async def test_texts_of_users_stay_out_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    secret = "Kolibri"
    world = make_world(HELLO)
    await world.chat(messages=[{"role": "user", "content": secret}])
    await world.chat(messages=[{"role": secret, "content": secret}], model=secret)
    await world.complete(prompt=secret, stop=secret, **{secret: 1})
    await world.call("POST", f"/{secret}", pieces=[json.dumps(secret).encode()])
    printed = "".join(capsys.readouterr())
    assert "completion ended" in printed
    assert secret not in printed
