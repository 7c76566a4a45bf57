"""What happened, as lines of (virtual time, node, event), and their running hash.

The hash covers every line that the simulation itself says; lines of the roles' own logs stand between them for the
reader and are left out, so that the wording of a log line changes no hash.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog
import trio

KEPT_LINES = 4000
"""Lines kept for a failing seed. A whole run has a few thousand."""


class Trace:
    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.count = 0
        self._hash = hashlib.sha256()

    def say(self, node: str, event: str) -> None:
        line = f"{trio.current_time():9.4f}  {node:<4} {event}"
        self.count += 1
        self._hash.update(line.encode())
        self.lines.append(line)

    def note(self, text: str) -> None:
        """For the reader only."""
        self.lines.append(f"{trio.current_time():9.4f}       | {text}")

    @property
    def hash(self) -> str:
        return self._hash.hexdigest()[:16]

    def last(self, count: int) -> list[str]:
        return list(self.lines)[-count:]


@contextmanager
def logs_into(trace: Trace) -> Iterator[None]:
    """The roles' log lines become notes of the trace for the length of the block."""

    def note(_: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        said = event.pop("event")
        error = event.pop("exc_info", None)
        fields = " ".join(f"{name}={value}" for name, value in event.items())
        trace.note(f"{method}: {said} {fields}{'' if error is None else f' {error!r}'}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[note],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        context_class=dict,
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)
