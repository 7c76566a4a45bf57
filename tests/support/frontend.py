"""A router that plays scripts, small tokenizers, and an ASGI client in memory, for tests of the client port."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import trio
from msgspec import UNSET
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sdcpd.frontend.api import FrontendApp
from sdcpd.frontend.chat_template import ChatTemplate
from sdcpd.frontend.keys import KeyRing
from sdcpd.frontend.ports import FrontendPorts
from sdcpd.frontend.settings import FrontendSettings
from sdcpd.frontend.text import ModelText
from sdcpd.protocol.messages import Output, SpeculationStats
from sdcpd.protocol.terms import Action
from sdcpd.roles.generation import GenerationRefused, GenerationRequest, ModelCard, Passage
from tests.support.ports import CountingMeters, InlineWorkers, SeededRandomness, TrioClock

SESSION = bytes(range(16))
NOW = 1_764_547_200  # 2025-12-01
STATS = SpeculationStats(
    rounds=5, drafts=4, draft_tokens=20, accepted_tokens=8, accepted_histogram=(1, 1, 0, 1, 1), cached_tokens=2
)
EOS = 1
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)


def byte_tokenizer(*, words: Sequence[str] = ()) -> Tokenizer:
    """Byte level: <s> 0, </s> 1, then the 256 octets in order of value (2 to 257), then `words`."""
    alphabet = _octets_in_order()
    names = ["<s>", "</s>", *alphabet, *("".join(alphabet[octet] for octet in word.encode()) for word in words)]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """The older sentencepiece style with byte fallback: <unk> 0, <s> 1, </s> 2, octets 3 to 258, then pieces."""
    pieces = ["▁", "▁Hello", "▁world", "a", "b", "é", "▁▁", ".", "▁the", "lo", "日"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{octet:02X}>" for octet in range(256)), *pieces]
    tokenizer = Tokenizer(
        models.BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def tokens_of(text: str) -> tuple[int, ...]:
    """One token an octet, in `byte_tokenizer`."""
    return tuple(octet + 2 for octet in text.encode())


def model_text(name: str = "m", *, template: str | None = TEMPLATE, words: Sequence[str] = ()) -> ModelText:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ModelText(
        name,
        byte_tokenizer(words=words),
        stop=(EOS,),
        template=None if template is None else ChatTemplate(template, special),
    )


def page(tokens: Sequence[int], *, final: bool = False, finish: Action = Action.FINISH, reason: str = "") -> Output:
    """A page; a final one carries STATS. `from_` is not looked at by the front end."""
    return Output(
        session=SESSION,
        epoch=1,
        from_=0,
        tokens=tuple(tokens),
        final=final,
        finish=finish if final else UNSET,
        reason=reason or UNSET,
        stats=STATS if final and finish is Action.FINISH else UNSET,
    )


Step = Output | float | trio.Event | Literal["hang"]
"""A page to deliver, seconds to wait, something to wait for, or waiting without end."""


class ScriptedGeneration:
    session = SESSION

    def __init__(self, script: Sequence[Step]) -> None:
        self._script = script
        self.finished = False

    def passage(self) -> Passage:
        return Passage(failovers=1, drafter_switches=2)

    async def pages(self) -> AsyncIterator[Output]:
        for step in self._script:
            match step:
                case Output():
                    await trio.lowlevel.checkpoint()
                    self.finished = step.final
                    yield step
                case trio.Event():
                    await step.wait()
                case "hang":
                    await trio.sleep_forever()
                case seconds:
                    await trio.sleep(seconds)


class FakeGenerations:
    """Plays `script` for each request. `left_early`: blocks left before the final page; `open`: blocks entered now."""

    def __init__(self, script: Sequence[Step] = (), *, context_tokens: int = 4096, vocabulary: int = 300) -> None:
        self.script: Sequence[Step] = script
        self.card = ModelCard(name="m", context_tokens=context_tokens, vocabulary=vocabulary, ready=True)
        self.refusal: GenerationRefused | None = None
        self.not_ready = ""
        self.enter_s = 0.0
        self.requests: list[GenerationRequest] = []
        self.open = 0
        self.left_early = 0
        self.changed = trio.Event()

    def models(self) -> tuple[ModelCard, ...]:
        return (self.card,)

    def ready(self) -> tuple[bool, str]:
        return not self.not_ready, self.not_ready

    @asynccontextmanager
    async def generation(self, request: GenerationRequest) -> AsyncIterator[ScriptedGeneration]:
        await trio.sleep(self.enter_s)
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        generation = ScriptedGeneration(self.script)
        self._move(1)
        try:
            yield generation
        finally:
            self.left_early += not generation.finished
            self._move(-1)

    async def wait_open(self, count: int) -> None:
        while self.open != count:
            await self.changed.wait()

    def _move(self, by: int) -> None:
        self.open += by
        self.changed.set()
        self.changed = trio.Event()


class Meters(CountingMeters):
    """Keeps labels and observations as well."""

    def __init__(self) -> None:
        super().__init__()
        self.labelled: list[tuple[str, float, dict[str, str]]] = []
        self.observed: dict[str, list[float]] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        super().count(name, amount, **labels)
        self.labelled.append((name, amount, labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.observed.setdefault(name, []).append(value)


@dataclass
class World:
    """An application with everything around it faked but its own parts."""

    generations: FakeGenerations
    meters: Meters
    app: FrontendApp

    async def call(self, method: str, path: str, **options: Any) -> "Answer":
        return await call(self.app, method, path, **options)

    async def chat(self, **fields: Any) -> "Answer":
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.call("POST", "/v1/chat/completions", json_body=body)

    async def complete(self, **fields: Any) -> "Answer":
        return await self.call("POST", "/v1/completions", json_body={"model": "m", "prompt": "hi", **fields})


def make_world(
    script: Sequence[Step] = (),
    *,
    settings: FrontendSettings | None = None,
    text: ModelText | None = None,
    keys: KeyRing | None = None,
    **card: int,
) -> World:
    generations = FakeGenerations(script, **card)
    meters = Meters()
    app = FrontendApp(
        settings or FrontendSettings(),
        make_ports(meters),
        generations,
        {"m": text if text is not None else model_text()},
        keys,
    )
    return World(generations, meters, app)


def make_ports(meters: Meters | None = None) -> FrontendPorts:
    return FrontendPorts(
        clock=TrioClock(),
        randomness=SeededRandomness(),
        workers=InlineWorkers(),
        meters=meters or Meters(),
        wall_clock=lambda: NOW + 0.9,
        metrics_page=lambda: b"sdcpd_up 1\n",
    )


@dataclass
class Answer:
    """What came back over ASGI. `chunks`: the body as it was sent, with the time of each piece."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of each event, decoded; "[DONE]" as it is. Comments are left out."""
        return read_events(self.body)


def read_events(body: bytes) -> list[Any]:
    found: list[Any] = []
    for block in body.decode().split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert block == "" or block.startswith(":")
    return found


async def call(
    app: FrontendApp,
    method: str,
    path: str,
    *,
    json_body: object = None,
    pieces: Sequence[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
    leave: trio.Event | None = None,
    answer: Answer | None = None,
) -> Answer:
    """One request. `leave`: the client hangs up when it is set. `pieces`: the body in that many messages."""
    answer = answer if answer is not None else Answer()
    shown = {"content-type": "application/json"} if headers is None else headers
    body = pieces if pieces is not None else [json.dumps(json_body).encode() if json_body is not None else b""]
    to_come = list(body)

    async def receive() -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        if to_come:
            return {"type": "http.request", "body": to_come.pop(0), "more_body": bool(to_come)}
        await (leave if leave is not None else trio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        assert not answer.ended, "sending after the end"
        if message["type"] == "http.response.start":
            assert answer.status == 0
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.chunks.append((trio.current_time(), message["body"]))
            answer.ended = not message["more_body"]

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in shown.items()],
    }
    await app(scope, receive, send)
    return answer


def _octets_in_order() -> list[str]:
    """The byte-level alphabet by value of the octet, found by asking the library."""
    decoder = decoders.ByteLevel()
    by_octet: dict[int, str] = {}
    for character in pre_tokenizers.ByteLevel.alphabet():
        text = decoder.decode([character])
        if len(text.encode()) == 1:
            by_octet[text.encode()[0]] = character
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    for octet in range(0x80, 0x100):  # no text by themselves: GPT-2's order
        if octet in printable:
            by_octet[octet] = chr(octet)
    others = [octet for octet in range(256) if octet not in printable]
    for position, octet in enumerate(others):
        by_octet.setdefault(octet, chr(0x100 + position))
    assert sorted(by_octet) == list(range(256))
    return [by_octet[octet] for octet in range(256)]
