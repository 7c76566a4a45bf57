"""Keys that stand twice in one object of a request: refused, at any depth.

Theory: JSON leaves open what a repeated key means, and readers differ (first, last, refused). A proxy that checks the
first and a server that honours the last are deceived together. The decoder used for requests keeps the last without a
word, so the body is scanned once more here, by one that shows all pairs.
"""

import json
from collections import deque
from typing import Final

from sdcpd.frontend.errors import ApiError, invalid

SHOWN_CHARS: Final = 128


class _Twice(Exception):
    """Found one; where it is costs a second look."""


class _Pairs(tuple[tuple[str, object], ...]):
    """An object as it was written."""


def refuse_duplicates(body: bytes) -> None:
    """Raises ApiError that names the key by its path, as `messages[0].role`. `body` must be valid JSON."""
    text = body.decode(errors="replace")
    try:
        _scan(text, _check)
    except _Twice:
        path = _find(_scan(text, _Pairs))[:SHOWN_CHARS]
        raise invalid(path, f"{path}: this key stands twice in one object; send it once", "duplicate_key") from None
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error


def _scan(text: str, hook: object) -> object:
    # Numbers are not looked at: as text they cost least, and one too long for an int is somebody else's complaint.
    return json.loads(text, object_pairs_hook=hook, parse_int=str, parse_float=str)  # type: ignore[arg-type]  # hook: any callable on pairs


def _check(pairs: list[tuple[str, object]]) -> None:
    if len(pairs) > 1 and len({name for name, _ in pairs}) < len(pairs):
        raise _Twice


def _find(root: object) -> str:
    """The path of the first repeated key, an outer one before those within."""
    pending: deque[tuple[str, object]] = deque([("", root)])
    while pending:
        path, value = pending.popleft()
        if isinstance(value, _Pairs):
            seen = set[str]()
            for name, inner in value:
                at = f"{path}.{name}" if path else name
                if name in seen:
                    return at
                seen.add(name)
                if isinstance(inner, _Pairs | list):
                    pending.append((at, inner))
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                if isinstance(inner, _Pairs | list):
                    pending.append((f"{path}[{index}]", inner))
    raise AssertionError("a repeated key was seen before")
