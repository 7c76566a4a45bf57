"""From a request that has been read to its answer: tokens, limits, the generation, and its text on the way out.

A request's life: 1. the model's text side and the router's card of it are looked up; 2. the prompt is tokenized in a
worker and checked against the context, before any session exists; 3. the generation's block is entered; 4. each page
becomes text and goes to the outlet; 5. the block is left, which ends the session if it has not ended by itself, and
only then the answer is finished. Whoever cancels this (a client that leaves, a server that stops) ends the session by
the same way out.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from typing import Final

import structlog
from msgspec.structs import replace

from sdcpd.frontend.answers import metrics_of, usage_of
from sdcpd.frontend.chat_template import ChatRefused
from sdcpd.frontend.errors import failed, from_refusal, invalid, model_not_found, unavailable
from sdcpd.frontend.meter import Ending, RequestMeter
from sdcpd.frontend.openai import Ask, Conversation, new_tokens
from sdcpd.frontend.outlets import Outlet
from sdcpd.frontend.ports import FrontendPorts
from sdcpd.frontend.reply import Reply
from sdcpd.frontend.stops import StopScanner
from sdcpd.frontend.text import ModelText
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.generation import Generation, GenerationRefused, GenerationRequest, Generations, ModelCard

log = structlog.get_logger(__name__)


class Generator:
    """Serves requests that have been read. Holds no state of any."""

    def __init__(
        self,
        ports: FrontendPorts,
        generations: Generations,
        texts: Mapping[str, ModelText],
        *,
        max_prompt_chars: int,
    ) -> None:
        self._ports: Final = ports
        self._generations: Final = generations
        self._texts: Final = texts
        self._max_prompt_chars: Final = max_prompt_chars

    def cards(self) -> tuple[ModelCard, ...]:
        """The models that clients may name: those that both the router and we know."""
        return tuple(card for card in self._generations.models() if card.name in self._texts)

    async def prepare(self, ask: Ask, headers: tuple[tuple[str, str], ...] = ()) -> GenerationRequest:
        """Steps 1 and 2. `headers` are for traffic classes to match. Raises ApiError."""
        card, text = self._look_up(ask.model)
        if not card.ready:  # its sizes may not even be known
            raise unavailable(f"the model {card.name} is not ready yet: {self._generations.ready()[1]}", "not_ready")
        prompt = await self._tokenize(ask, text)
        if prompt and max(prompt) >= card.vocabulary:
            param = ask.source_param
            raise invalid(param, f"{param}: a token id is outside the model's vocabulary of {card.vocabulary}")
        max_new = new_tokens(ask, len(prompt), card.context_tokens)
        stop = set(ask.stop_tokens)
        if not ask.ignore_eos:
            stop.update(text.stop)
        return GenerationRequest(
            model=ask.model,
            prompt=prompt,
            max_new=max_new,
            stop=tuple(sorted(stop)),
            speculation=ask.speculation,
            temperature_milli=ask.sampling.temperature_milli,
            top_k=ask.sampling.top_k,
            top_p_milli=ask.sampling.top_p_milli,
            seed=ask.sampling.seed,
            facts=replace(ask.facts, headers=headers),
        )

    async def answer(
        self, ask: Ask, request: GenerationRequest, outlet: Outlet, *, arrived_at: float, request_id: str
    ) -> None:
        """Steps 3 to 5. Raises ApiError if nothing was sent yet, and ClientGone."""
        text = self._texts[ask.model]
        after = () if isinstance(ask.source, Conversation) else request.prompt
        reply = Reply(text.detokenizer(after=after), StopScanner(ask.stop_strings), frozenset(request.stop))
        try:
            async with self._generations.generation(request) as generation:
                meter = RequestMeter(self._ports.meters, self._ports.clock, arrived_at, len(request.prompt))
                ending: Ending = "abort"
                try:
                    await _follow(generation, reply, outlet, meter)
                    ending = reply.finish or "error"
                finally:
                    took_s = meter.end(ending)
                    log.info(
                        "completion ended",
                        request_id=request_id,
                        session=session_path_id(generation.session),
                        model=ask.model,
                        prompt_tokens=len(request.prompt),
                        completion_tokens=reply.completion_tokens,
                        ending=ending,
                        reason=reply.reason,
                        took_s=round(took_s, 3),
                    )
        except GenerationRefused as refusal:
            await outlet.fail(from_refusal(refusal))
        else:
            await _settle(reply, len(request.prompt), outlet)

    def _look_up(self, name: str) -> tuple[ModelCard, ModelText]:
        cards = self.cards()
        for card in cards:
            if card.name == name:
                return card, self._texts[name]
        raise model_not_found(name, tuple(card.name for card in cards))

    async def _tokenize(self, ask: Ask, text: ModelText) -> tuple[int, ...]:
        source = ask.source
        if isinstance(source, tuple):
            return source
        run = self._ports.workers.run
        if isinstance(source, str):
            self._check_length(len(source), ask.source_param)
            return await run(text.encode, source)
        self._check_length(sum(len(message.content) for message in source.messages), ask.source_param)
        if text.template is None:
            raise invalid(
                "messages",
                "this model has no chat template; use /v1/completions with a prompt, or add chat_template.jinja to "
                "the model's folder",
            )
        for name in source.variables:
            if text.template.reserves(name):
                param = f"chat_template_kwargs.{name}"
                raise invalid(param, f"{param}: this template variable is set by the server")
        try:
            return await run(text.encode_chat, source.messages, source.variables, self._ports.wall_clock())
        except ChatRefused as refusal:
            raise invalid("messages", str(refusal)) from refusal

    def _check_length(self, chars: int, param: str) -> None:
        if chars > self._max_prompt_chars:
            raise invalid(
                param,
                f"{param}: {chars} characters are more than the {self._max_prompt_chars} accepted here",
                "string_above_max_length",
            )


async def _follow(generation: Generation, reply: Reply, outlet: Outlet, meter: RequestMeter) -> None:
    """Pages into text until nothing more is wanted."""
    async with AsyncExitStack() as stack:
        pages = generation.pages()
        if isinstance(pages, AsyncGenerator):  # one that is left early must be closed by hand
            stack.push_async_callback(pages.aclose)
        async for page in pages:
            text = reply.take(page)
            meter.page(reply.completion_tokens, reply.reason)
            if text:
                await outlet.write(text)
            if reply.settled:
                return
    raise AssertionError("the pages of a generation ended without a final one")


async def _settle(reply: Reply, prompt_tokens: int, outlet: Outlet) -> None:
    match reply.finish:
        case "stop" | "length":
            usage = usage_of(prompt_tokens, reply.completion_tokens)
            await outlet.finish(reply.finish, usage, metrics_of(reply.stats))
        case "error":
            await outlet.fail(failed(reply.reason or "failed"))
        case None:
            raise AssertionError("settled without a finish")
