"""The form of a scenario file: a command, a line `----`, and the answer, up to an empty line.

    # what this is about
    propose 20,21
    ----
    begins round 1: scores [1, 20, 21] at position 2

Lines that begin with `#` stand before a command and explain. A command is a word, then words and `name=value` pairs;
a value is a number, numbers with commas, or a word.
"""

from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

RULE = "----"


class Player(Protocol):
    """What carries commands out. Each returns the answer, one or more lines, none of them empty."""

    def do(self, command: "Command") -> list[str]: ...


class Command(Struct):
    """One command line. `words` come first, `members` are its `name=value` pairs."""

    verb: str
    words: list[str]
    members: dict[str, Any]

    def tokens(self, index: int = 0) -> tuple[int, ...]:
        """The word at `index` as token ids; none at all where there is no such word."""
        return as_tokens(self.words[index]) if index < len(self.words) else ()


class Entry(Struct):
    """A command with what is written above and below it."""

    comments: list[str]
    line: str
    answer: list[str]


def as_tokens(text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in text.split(",") if token)


def _value(text: str) -> Any:
    if text.lstrip("-").isdigit():
        return int(text)
    return as_tokens(text) if "," in text else text


def command(line: str) -> Command:
    verb, *rest = line.split()
    pairs = [word.split("=", 1) for word in rest if "=" in word]
    return Command(verb, [word for word in rest if "=" not in word], {name: _value(text) for name, text in pairs})


def read(path: Path) -> list[Entry]:
    """Raises ValueError, with the line's number, for what is no scenario."""
    entries: list[Entry] = []
    comments: list[str] = []
    place = "before"
    for number, line in enumerate([*path.read_text("utf-8").splitlines(), ""], 1):
        if place == "answer" and line:
            entries[-1].answer.append(line)
        elif place == "rule":
            if line != RULE:
                raise ValueError(f"{path.name}:{number}: {RULE} must follow a command")
            place = "answer"
        elif line.startswith("#") or (not line and comments and place == "before"):
            comments.append(line)
        elif line:
            entries.append(Entry(comments, line, []))
            comments, place = [], "rule"
        else:
            place = "before"
    return entries


def play(entries: list[Entry], player: Player) -> list[Entry]:
    """The same scenario with the answers that `player` gives now."""
    return [Entry(entry.comments, entry.line, player.do(command(entry.line))) for entry in entries]


def write(entries: list[Entry]) -> str:
    blocks = ["\n".join([*entry.comments, entry.line, RULE, *entry.answer]) for entry in entries]
    return "\n\n".join(blocks) + "\n"
