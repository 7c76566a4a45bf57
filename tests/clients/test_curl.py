"""curl against a real daemon: TLS, both versions of HTTP, and streams line by line."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.clients.conftest import ClientPort

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]


def curl(port: ClientPort, path: str, *options: str, body: dict[str, Any] | None = None, key: str | None = None) -> str:
    """The answer's body, then a line with status and version of HTTP."""
    words = ["curl", "-sS", "--noproxy", "*", "--cacert", str(port.ca), "-w", "\n%{http_code} %{http_version}"]
    if key is not None:
        words += ["-H", f"Authorization: Bearer {key}"]
    if body is not None:
        words += ["-H", "Content-Type: application/json", "-d", json.dumps({"model": port.model, **body})]
    return subprocess.run(
        [*words, *options, port.url + path], check=True, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.parametrize(
    ("options", "version"),
    [(("--http1.1", "--tls-max", "1.2"), "1.1"), (("--http2", "--tlsv1.3"), "2")],
)
def test_whole_and_streamed(client_port: ClientPort, options: tuple[str, ...], version: str) -> None:
    ask = {"prompt": "the rain", "max_tokens": 4, "ignore_eos": True}
    whole, _, end = curl(client_port, "/v1/completions", *options, body=ask, key=client_port.key).rpartition("\n")
    assert end == f"200 {version}"
    text = json.loads(whole)["choices"][0]["text"]
    lines = curl(
        client_port, "/v1/completions", *options, "-N", body=ask | {"stream": True}, key=client_port.key
    ).splitlines()
    assert lines[-1] == f"200 {version}"
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == text


def test_probes_need_no_key_and_models_do(client_port: ClientPort) -> None:
    assert curl(client_port, "/health").endswith("200 2")
    assert curl(client_port, "/ready").endswith("200 2")
    refused, _, end = curl(client_port, "/v1/models").rpartition("\n")
    assert end == "401 2"
    assert json.loads(refused)["error"]["code"] == "invalid_api_key"


def test_tokens_and_back(client_port: ClientPort) -> None:
    told = json.loads(
        curl(client_port, "/tokenize", body={"prompt": "the rain"}, key=client_port.key).rpartition("\n")[0]
    )
    assert told["count"] == len(told["tokens"])
    body = {"tokens": told["tokens"]}
    back = curl(client_port, "/detokenize", body=body, key=client_port.key).rpartition("\n")[0]
    assert json.loads(back) == {"prompt": "the rain"}
