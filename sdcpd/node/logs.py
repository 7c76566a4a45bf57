"""Log set-up: structlog for us, the standard library's loggers (hypercorn) led into the same lines.

One line an event on stderr: JSON under systemd or whenever nobody watches (stderr is no terminal), readable on a
terminal. Field names used everywhere: `session` (base64url), `epoch`, `round`, `role`, `instance`, `peer`; our own
numbers end in their unit. Tokens and texts of users never reach a line (decision 98): code does not pass them, and
`withhold_user_data` below replaces them should somebody forget.
"""

import logging
import os
import sys
from typing import Final, Literal, TextIO

import structlog
from msgspec import Struct
from structlog.typing import EventDict, Processor, WrappedLogger

USER_DATA_KEYS: Final = frozenset(
    {
        "completion",
        "content",
        "emitted",
        "messages",
        "output",
        "proposal",
        "prompt",
        "stop",
        "text",
        "token",
        "tokens",
        "verdict",
    }
)
"""Keys under which user data would come if somebody logged a message of the protocol or of a client as it is."""

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class LogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[log]` of the configuration."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


def withhold_user_data(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Replace what stands under a key of `USER_DATA_KEYS` by its length. The net below the rule, not the rule.

    A number there is a count and stays, except under `token`, where it would be the token itself.
    """
    for key, value in event.items():
        if key in USER_DATA_KEYS and (key == "token" or not isinstance(value, (int, float))):
            size = f"{len(value)} items" if isinstance(value, (str, bytes, list, tuple, dict)) else "a value"
            event[key] = f"<withheld: {size}>"
    return event


def wants_json(settings: LogSettings, stream: TextIO, environment: dict[str, str] | os._Environ[str]) -> bool:
    """Whether lines go out as JSON: asked for, or `auto` under systemd (JOURNAL_STREAM) or away from a terminal."""
    match settings.format:
        case "json":
            return True
        case "console":
            return False
        case "auto":
            return "JOURNAL_STREAM" in environment or not stream.isatty()


def configure_logs(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Set both structlog and the standard library up; `stream` is stderr unless a test passes another.

    Tracebacks are rendered without the values of local variables, which hold user data.
    """
    stream = stream or sys.stderr
    level = _LEVELS[settings.level]
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
        withhold_user_data,
    ]
    renderers: list[Processor]
    if wants_json(settings, stream, os.environ):
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        renderers = [
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=36
            )
        ]
    structlog.configure(
        processors=[*common, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *common],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # Libraries say at "info" what we say better ourselves (for example which address is served).
    root.setLevel(logging.DEBUG if level == logging.DEBUG else max(level, logging.WARNING))
    logging.captureWarnings(True)


def library_logger() -> logging.Logger:
    """The logger to hand to a hypercorn Config as `errorlog`, so that it writes no lines of its own form."""
    return logging.getLogger("hypercorn.error")
