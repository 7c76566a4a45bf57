"""Log lines: JSON away from a terminal, readable on one, never user data."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from sdcpd.node.logs import USER_DATA_KEYS, LogSettings, configure_logs, library_logger, wants_json


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


@pytest.mark.parametrize(
    ("form", "terminal", "environment", "json_lines"),
    [
        ("auto", True, {}, False),
        ("auto", True, {"JOURNAL_STREAM": "8:1"}, True),
        ("auto", False, {}, True),
        ("console", False, {}, False),
        ("json", True, {}, True),
    ],
)
def test_form_follows_who_reads(form: str, terminal: bool, environment: dict[str, str], json_lines: bool) -> None:
    settings = LogSettings(format=form)  # type: ignore[arg-type]  # parametrized over the literal's values
    assert wants_json(settings, Terminal() if terminal else io.StringIO(), environment) is json_lines


def test_a_json_line_carries_its_fields() -> None:
    out = io.StringIO()
    configure_logs(LogSettings(format="json"), out)
    structlog.get_logger().bind(session="AAAA", epoch=1).info("round settled", round=7, append_ms=1.5)
    line = json.loads(out.getvalue())
    assert line["event"] == "round settled"
    assert (line["session"], line["epoch"], line["round"], line["append_ms"]) == ("AAAA", 1, 7, 1.5)
    assert line["level"] == "info"
    assert line["timestamp"].endswith("Z")


def test_level_is_kept() -> None:
    out = io.StringIO()
    configure_logs(LogSettings(level="warning", format="json"), out)
    structlog.get_logger().info("not this")
    structlog.get_logger().warning("but this")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["but this"]


@pytest.mark.parametrize("form", ["json", "console"])
def test_user_data_is_withheld(form: str) -> None:
    out = io.StringIO()
    configure_logs(LogSettings(format=form), out)  # type: ignore[arg-type]  # parametrized over the literal's values
    secrets = {key: ["the secret"] for key in sorted(USER_DATA_KEYS)}
    structlog.get_logger().info("careless", **secrets)
    logging.getLogger("a.library").warning("careless too", extra={"prompt": "the secret"})
    assert "secret" not in out.getvalue()
    assert "withheld: 1 items" in out.getvalue()


def test_counts_stay_but_a_token_does_not() -> None:
    out = io.StringIO()
    configure_logs(LogSettings(format="json"), out)
    structlog.get_logger().info("round", emitted=3, token=3)
    line = json.loads(out.getvalue())
    assert (line["emitted"], line["token"]) == (3, "<withheld: a value>")


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_shows_no_local_values(form: str) -> None:
    out = io.StringIO()
    configure_logs(LogSettings(format=form), out)  # type: ignore[arg-type]  # parametrized over the literal's values
    words = "".join(["the ", "sec", "ret"])
    try:
        raise RuntimeError(len(words))
    except RuntimeError:
        structlog.get_logger().exception("crashed")
    assert "RuntimeError" in out.getvalue()
    assert "the secret" not in out.getvalue()


def test_library_loggers_share_the_form() -> None:
    out = io.StringIO()
    configure_logs(LogSettings(format="json"), out)
    library_logger().error("no such %s", "thing")
    line = json.loads(out.getvalue())
    assert (line["event"], line["level"]) == ("no such thing", "error")
