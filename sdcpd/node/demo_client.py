"""A small client of the OpenAI API that measures one streamed answer: blocking, standard library only.

Decode speed is counted from the first piece of text to the last: tokens after the first piece, over the time between.
So the prompt's prefill is left out on both sides of a comparison. The API does not say how many tokens a piece holds;
`count_tokens` does, by the model's own tokenizer.
"""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from msgspec import Struct

ANSWER_LIMIT_S: Final = 300


class RequestFailed(Exception):
    """The node refused or broke off a request. The text says what it said."""


class Answer(Struct, frozen=True, kw_only=True):
    """One streamed answer and what it took. `mean_acceptance_length` is None where nothing was drafted."""

    text: str
    prompt_tokens: int
    output_tokens: int
    rounds: int
    mean_acceptance_length: float | None
    tokens_per_s: float
    first_token_s: float
    total_s: float


def ask(
    address: tuple[str, int],
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    speculation: bool,
    count_tokens: Callable[[str], int],
    show: Callable[[str], None] | None = None,
) -> Answer:
    """One chat request, its text handed to `show` piece by piece as it arrives. Raises RequestFailed."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"enabled": speculation, "stats": True},
    }
    started = time.monotonic()
    pieces: list[str] = []
    first = last = started
    usage: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for chunk in _chunks(address, body):
        if "error" in chunk:
            raise RequestFailed(f"the answer broke off: {chunk['error'].get('message', chunk['error'])}")
        usage, metrics = chunk.get("usage") or usage, chunk.get("metrics") or metrics
        piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        if not piece:
            continue
        last = time.monotonic()
        if not pieces:
            first = last
        pieces.append(piece)
        if show:
            show(piece)
    if not usage:
        raise RequestFailed("the answer ended before its usage was told")
    speculative = metrics.get("speculative_decoding") or {}
    after_first = usage["completion_tokens"] - count_tokens(pieces[0]) if pieces else 0
    return Answer(
        text="".join(pieces),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        rounds=speculative.get("num_rounds", 0),
        mean_acceptance_length=speculative.get("mean_acceptance_length"),
        tokens_per_s=max(0, after_first) / (last - first) if last > first else 0.0,
        first_token_s=first - started,
        total_s=last - started,
    )


def _chunks(address: tuple[str, int], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to its [DONE]."""
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_LIMIT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RequestFailed(f"the node refused the request: {_reason(response.read(4096))}")
        for line in response:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
        raise RequestFailed("the connection was closed in the middle of the answer")
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailed(f"the connection to the node broke: {error!r}") from error
    finally:
        connection.close()


def _reason(octets: bytes) -> str:
    try:
        return str(json.loads(octets)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return octets.decode("utf-8", "replace")
