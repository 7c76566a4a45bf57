"""Real daemons as an operator meets them: start, answer, stop, being killed, and refusing to start."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sdcpd.frontend.text import load_model_text
from sdcpd.node.demo_daemon import CONFIG, DemoDaemon
from sdcpd.protocol import digests
from tests.support.processes import read_log, sessions_of, stream

pytestmark = pytest.mark.process

READY_LIMIT_S = 120
LONG = {"prompt": "hello", "max_tokens": 240, "ignore_eos": True, "stream": True}


@pytest.fixture
def daemon(tiny_llama: Path, tmp_path: Path) -> Iterator[Callable[..., DemoDaemon]]:
    """Start a daemon on the tiny model whose state outlives it; all are ended after the test."""
    started: list[DemoDaemon] = []

    def start(*settings: str, config: Path = CONFIG) -> DemoDaemon:
        places = [f"node.state_dir={tmp_path / 'state'}", f"node.runtime_dir={tmp_path / 'run'}"]
        one = DemoDaemon(tiny_llama, [*places, "engine.kv_cache_bytes=4194304", "engine.threads=1", *settings], config)
        started.append(one)
        return one.__enter__()

    yield start
    for one in started:
        one.__exit__(None, None, None)


def until_error(chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The chunks up to an error; the connection stays open after one."""
    for chunk in chunks:
        yield chunk
        if "error" in chunk:
            return


def test_killed_in_mid_answer_and_started_again(
    daemon: Callable[..., DemoDaemon], tiny_llama: Path, tmp_path: Path
) -> None:
    """No committed record is lost or torn, and nobody has seen a token that is not in the log."""
    first = daemon()
    first.wait_ready(READY_LIMIT_S)
    seen = ""
    session = ""
    for count, chunk in enumerate(stream(first.address, tiny_llama.name, LONG)):
        seen += "".join(choice["text"] for choice in chunk["choices"])
        if count == 20:
            (entry,) = sessions_of(tmp_path / "run" / "sdcpd.sock")
            session = entry["session"]
            assert first.process is not None
            first.process.send_signal(signal.SIGKILL)
    assert first.stop() == -signal.SIGKILL

    records = read_log(tmp_path / "state", session)
    tokens = [token for record in records for token in record.emitted]
    written = load_model_text(tiny_llama.name, tiny_llama).detokenizer()
    text = "".join([*map(written.push, tokens), written.finish()])
    assert len(seen) > 20
    assert text.startswith(seen)
    assert [record.round for record in records] == list(range(1, len(records) + 1))
    for before, after in pairwise(records):
        assert after.committed == before.committed + len(after.emitted)
        assert after.digest == digests.extend(before.digest, after.emitted)

    second = daemon()
    second.wait_ready(READY_LIMIT_S)
    answer = "".join(
        choice["text"]
        for chunk in stream(second.address, tiny_llama.name, LONG | {"max_tokens": 60})
        for choice in chunk["choices"]
    )
    assert answer.startswith(text[:15])  # the same prompt, the same beginning
    assert second.stop() == 0
    # The router took the session up again: behind a fence it went on from exactly there (decision 106).
    resumed = read_log(tmp_path / "state", session)
    assert resumed[: len(records)] == records
    assert all(record.epoch > records[-1].epoch for record in resumed[len(records) :])
    for before, then in pairwise(resumed):
        assert (then.round, then.committed) == (before.round + 1, before.committed + len(then.emitted))
        assert then.digest == digests.extend(before.digest, then.emitted)


def test_told_to_stop_in_mid_answer(daemon: Callable[..., DemoDaemon], tiny_llama: Path, tmp_path: Path) -> None:
    one = daemon("frontend.grace_s=0.5")
    one.wait_ready(READY_LIMIT_S)
    told = 0.0
    for count, _ in enumerate(stream(one.address, tiny_llama.name, LONG)):
        if count == 5:
            assert one.process is not None
            one.process.send_signal(signal.SIGTERM)
            told = time.monotonic()
    assert one.wait() == 0
    assert time.monotonic() - told < 8
    assert not (tmp_path / "run" / "sdcpd.sock").exists()
    assert "the node fails" not in one.log()


def test_told_twice_ends_at_once(daemon: Callable[..., DemoDaemon], tiny_llama: Path) -> None:
    one = daemon("frontend.grace_s=60")
    one.wait_ready(READY_LIMIT_S)
    assert one.process is not None
    for count, _ in enumerate(stream(one.address, tiny_llama.name, LONG | {"max_tokens": 250})):
        if count == 5:
            one.process.send_signal(signal.SIGINT)
            wait_for(lambda: "told to stop" in one.log(), one)
            one.process.send_signal(signal.SIGINT)
    assert one.wait() == 128 + signal.SIGINT


def test_told_to_stop_while_it_starts(daemon: Callable[..., DemoDaemon], tmp_path: Path) -> None:
    one = daemon()
    wait_for(lambda: "loading the model" in one.log() or "cache ready" in one.log(), one)
    told = time.monotonic()
    assert one.stop() == 0
    assert time.monotonic() - told < 8
    assert not (tmp_path / "run" / "sdcpd.sock").exists()


def test_health_answers_before_the_model_is_there(daemon: Callable[..., DemoDaemon]) -> None:
    one = daemon()
    answers: list[tuple[int, int]] = []

    def look() -> bool:
        try:
            answers.append((one.get("/health")[0], one.get("/ready")[0]))
        except OSError:
            return False
        return answers[-1] == (200, 200)

    wait_for(look, one)
    assert answers[0] == (200, 503)
    one.stop()


def test_a_second_one_on_the_same_places_does_not_start(daemon: Callable[..., DemoDaemon], tmp_path: Path) -> None:
    first = daemon()
    first.wait_ready(READY_LIMIT_S)
    same_socket = daemon()
    assert same_socket.wait() == 3
    assert "another process listens on" in same_socket.log()
    same_state = daemon(f"node.runtime_dir={tmp_path / 'other'}")
    assert same_state.wait() == 3
    assert "in use by process" in same_state.log()
    same_port = daemon(
        f"node.runtime_dir={tmp_path / 'other'}",
        f"node.state_dir={tmp_path / 'other'}",
        f"frontend.listen={first.address[0]}:{first.address[1]}",
    )
    assert same_port.wait() == 3
    assert "cannot listen on" in same_port.log()
    assert first.get("/ready")[0] == 200
    assert first.stop() == 0


def test_a_model_that_is_none_is_refused(daemon: Callable[..., DemoDaemon], tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": {"rope_type": "foo"}}))
    one = daemon(f"engine.model={folder}")
    assert one.wait() == 3
    assert "foo" in one.log()
    assert "Traceback" not in one.log()


def test_a_draft_model_beside_its_target(daemon: Callable[..., DemoDaemon], tiny_llama: Path) -> None:
    """The target as its own draft model, in a thread of its own."""
    one = daemon(
        "drafter.method=frequency_hybrid",
        f"drafter.draft_model.model={tiny_llama}",
        "drafter.draft_model.kv_cache_bytes=4194304",
        "drafter.draft_model.threads=1",
    )
    one.wait_ready(READY_LIMIT_S)
    chunks = list(stream(one.address, tiny_llama.name, LONG | {"max_tokens": 100}))
    assert len(chunks) > 1
    assert one.stop() == 0
    assert one.log().count("model loaded") == 2


def test_nothing_is_left_when_the_starter_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sdcpd.node.demo_daemon import DemoDaemon\n"
        "daemon = DemoDaemon(Path(sys.argv[1]), sys.argv[2:]).__enter__()\n"
        "print(daemon.process.pid, flush=True); sys.stdin.read()"
    )
    settings = [f"node.state_dir={tmp_path / 'state'}", f"node.runtime_dir={tmp_path / 'run'}"]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tiny_llama), *settings], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.kill()
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < until
        time.sleep(0.05)


def wait_for(condition: Callable[[], bool], daemon: DemoDaemon) -> None:
    """Until it holds, or the daemon ends, or it takes too long."""
    until = time.monotonic() + READY_LIMIT_S
    while not condition():
        daemon.check()
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_hang_up_signal_takes_new_ladders_and_keeps_the_old_when_the_file_is_wrong(
    daemon: Callable[..., DemoDaemon], tiny_llama: Path, tmp_path: Path
) -> None:
    config = tmp_path / "node.toml"
    config.write_text(CONFIG.read_text())
    one = daemon(config=config)
    one.wait_ready(READY_LIMIT_S)
    assert one.process is not None

    def hang_up(text: str, said: str) -> None:
        config.write_text(text)
        before = one.log().count(said)
        one.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 20
        while one.log().count(said) == before:
            assert time.monotonic() < until, one.log()
            one.check()
            time.sleep(0.05)

    def failed() -> bool:
        """Whether an answer ends in an error, which is its last event."""
        return any("error" in chunk for chunk in until_error(stream(one.address, tiny_llama.name, LONG)))

    hang_up(CONFIG.read_text().replace('["self_decode*"]', '["nonsense"]'), "the file is wrong")
    assert not failed()
    hang_up(
        CONFIG.read_text().replace('["self_decode*"]', '["fail"]').replace("self_max = 8", "low_rounds = 1"),
        "new sessions get its ladders",
    )
    assert failed(), "random text is not found in the prompt: the first rejected draft fails the session"
