"""Prompts by workload family: the project's own small set, or a folder of files FAMILY.jsonl.

A line is an object with `family` and `prompt`, one plain message of a user. The own set lies in `tests/data` and, for
the families that only the benches need, beside this file.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sdcpd.frontend.chat_template import ChatMessage
from sdcpd.frontend.text import ModelText

OWN: Final = (Path(__file__).parents[1] / "data" / "prompts.jsonl", Path(__file__).parent / "prompts.jsonl")


def read_prompts(folder: Path | None) -> dict[str, list[str]]:
    """All prompts by family, families in the order of the alphabet. Raises ValueError for a folder without any."""
    found: dict[str, list[str]] = {}
    for file in OWN if folder is None else sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            found.setdefault(one["family"], []).append(one["prompt"])
    if not found:
        raise ValueError(f"{folder} has no file FAMILY.jsonl")
    return dict(sorted(found.items()))


def spread(prompts: Sequence[str], count: int) -> list[str]:
    """`count` of them (or all there are), evenly from first to last: neighbours in a file are alike."""
    count = min(count, len(prompts))
    return [prompts[place * len(prompts) // count] for place in range(count)]


def encoded(text: ModelText, prompt: str, *, template: bool) -> tuple[int, ...]:
    """Its tokens: as a chat of one message, or bare."""
    if template and text.template is not None:
        return text.encode_chat([ChatMessage(role="user", content=prompt)], {}, 0.0)
    return text.encode(prompt)
