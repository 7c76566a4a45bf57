"""The measuring client against a small server that speaks the API's stream."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sdcpd.node.demo_client import Answer, RequestFailed, ask

USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
METRICS = {"speculative_decoding": {"num_rounds": 3, "mean_acceptance_length": 2.5}}


class Server:
    """Answers every request with `status` and `lines`, and keeps the bodies it was sent."""

    def __init__(self) -> None:
        self.status = 200
        self.lines: list[bytes] = []
        self.bodies: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(outer.status)
                self.end_headers()
                for line in outer.lines:
                    self.wfile.write(line)

            def log_message(self, format: str, *arguments: object) -> None: ...  # noqa: A002  # the base class has it so

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def event(self, value: object) -> None:
        self.lines.append(
            b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + b"\n\n"
        )

    def pieces(self, *texts: str) -> None:
        for text in texts:
            self.event({"choices": [{"delta": {"content": text}}], "usage": None})


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server()
    yield served
    served.http.shutdown()
    served.thread.join()
    served.http.server_close()


def put(server: Server, show: Callable[[str], None] | None = None, speculation: bool = True) -> Answer:
    address = ("127.0.0.1", server.http.server_address[1])
    return ask(
        address,
        "m",
        "Hello?",
        max_tokens=9,
        speculation=speculation,
        count_tokens=lambda text: len(text.split()),
        show=show,
    )


def test_an_answer_and_its_figures(server: Server) -> None:
    server.event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
    server.lines.append(b": keep-alive\n\n")
    server.pieces("one two ", "three four five ", "six seven")
    server.event({"choices": [], "usage": USAGE, "metrics": METRICS})
    server.event("[DONE]")
    shown: list[str] = []
    answer = put(server, shown.append)
    assert "".join(shown) == answer.text == "one two three four five six seven"
    assert (answer.prompt_tokens, answer.output_tokens, answer.rounds) == (5, 7, 3)
    assert answer.mean_acceptance_length == 2.5
    decode_s = answer.total_s - answer.first_token_s
    assert answer.tokens_per_s == pytest.approx((7 - 2) / decode_s)
    assert server.bodies[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello?"}],
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"enabled": True, "stats": True},
    }


def test_speculation_off_is_asked_for(server: Server) -> None:
    server.pieces("one")
    server.event({"choices": [], "usage": USAGE})
    server.event("[DONE]")
    answer = put(server, speculation=False)
    assert server.bodies[0]["speculation"] == {"enabled": False, "stats": True}
    assert (answer.rounds, answer.mean_acceptance_length, answer.tokens_per_s) == (0, None, 0.0)


def test_a_refusal_is_passed_on(server: Server) -> None:
    server.status = 503
    server.lines = [json.dumps({"error": {"message": "all sessions are taken"}}).encode()]
    with pytest.raises(RequestFailed, match="all sessions are taken"):
        put(server)


def test_a_failure_in_the_middle_is_passed_on(server: Server) -> None:
    server.pieces("one")
    server.event({"error": {"message": "the verifier is lost"}})
    with pytest.raises(RequestFailed, match="the verifier is lost"):
        put(server)


def test_a_cut_stream_is_no_answer(server: Server) -> None:
    server.pieces("one")
    with pytest.raises(RequestFailed, match="in the middle"):
        put(server)


def test_nobody_there(server: Server) -> None:
    with pytest.raises(RequestFailed, match="connection"):
        ask(("127.0.0.1", 1), "m", "x", max_tokens=1, speculation=True, count_tokens=len)
