"""The quickstart: its figures, its words, and that it cleans up after itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from sdcpd.node import quickstart
from sdcpd.node.demo_client import Answer
from sdcpd.node.demo_model import DemoModelFailed


def answer(text: str, tokens_per_s: float) -> Answer:
    return Answer(
        text=text,
        prompt_tokens=5,
        output_tokens=40,
        rounds=12,
        mean_acceptance_length=3.3,
        tokens_per_s=tokens_per_s,
        first_token_s=0.1,
        total_s=2.0,
    )


def test_a_comparison() -> None:
    same = quickstart.compare(answer("a", 60.0), answer("a", 20.0), None)
    assert (same.ratio, same.texts_equal, same.first_difference) == (3.0, True, None)
    assert quickstart.compare(answer("a", 60.0), answer("b", 0.0), None).ratio is None


@pytest.mark.parametrize(
    ("left", "right", "place"), [([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0), ([9], [8], 0)]
)
def test_where_answers_part(left: list[int], right: list[int], place: int) -> None:
    assert quickstart.first_difference(left, right) == place


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    difference = quickstart.Difference(token=17, margin=0.0312)
    results = {
        "edit": quickstart.compare(answer("a", 60.0), answer("a", 20.0), None),
        "chat": quickstart.compare(answer("a", 30.0), answer("b", 30.0), difference),
    }
    quickstart.print_table(Console(width=120), results)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ratio", "3.00", "1.00"] in lines
    assert ["mean", "acceptance", "length", "3.30", "3.30"] in lines
    assert ["texts", "equal", "yes", "no,", "from", "token", "17", "(best", "two", "logits", "0.031", "apart)"] in lines


@pytest.mark.parametrize("arguments", [["--max-tokens", "0"], ["--max-tokens", "x"], ["--jsn"]])
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        quickstart.main(arguments)
    assert raised.value.code == 2


def test_a_failed_step_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> Path:
        raise DemoModelFailed("no network. Is this machine online?")

    monkeypatch.setattr(quickstart, "fetch_demo_model", fail)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert quickstart.main([]) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "quickstart: no network. Is this machine online?" in capsys.readouterr().err


def start(*arguments: str) -> "subprocess.Popen[str]":
    """As a shell starts what it runs in the background: with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # is handed down
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "sdcpd.node.quickstart", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def children_of(pid: int) -> list[int]:
    """Process ids whose parent is `pid`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(entry.parent.name))
    return found


@pytest.mark.model
@pytest.mark.process
def test_it_answers_and_compares(demo_model: Path) -> None:
    with start("Write the numbers from one to five as words, one a line.", "--max-tokens", "24", "--json") as process:
        out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    result = json.loads(out.splitlines()[-1])
    assert result["model"] == demo_model.name
    assert 1 <= result["rounds"] <= result["output_tokens"] <= 24
    assert result["tokens_per_s"] > 0
    assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["plain_tokens_per_s"])
    assert result["texts_equal"] or result["first_difference"]["margin"] < 0.5
    assert "chat" not in result
    assert "tokens a second" in out


@pytest.mark.model
@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process(demo_model: Path, number: signal.Signals) -> None:
    with start() as process:
        until = time.monotonic() + 60
        while not children_of(process.pid):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        (daemon,) = children_of(process.pid)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "everything that was started is stopped" in out
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)
