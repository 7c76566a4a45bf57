"""From a request that has been read to its answer: tokens, limits, the generations, and their text on the way out.

A request's life: 1. the model's text side and the router's card of it are looked up; 2. its prompts are tokenized in a
worker and checked against the context, before any session exists; 3. the block of each choice's generation is entered;
4. each page becomes text and goes to the outlet; 5. the block is left, which ends the session if it has not ended by
itself, and only then the choice is finished, and after the last one the answer. Whoever cancels this (a client that
leaves, a server that stops, a choice that fails) ends the sessions by the same way out.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio
from msgspec import Struct
from msgspec.structs import replace

from sdcpd.drafting.traffic_class import RequestFacts
from sdcpd.frontend.answers import metrics_of, usage_of
from sdcpd.frontend.choices import CHOICES_AT_ONCE, Choice
from sdcpd.frontend.errors import ApiError, from_refusal, invalid, unavailable
from sdcpd.frontend.exchange import ClientGone
from sdcpd.frontend.keys import Caller
from sdcpd.frontend.meter import RequestMeter
from sdcpd.frontend.model_texts import ModelTexts
from sdcpd.frontend.openai import Ask, Conversation, new_tokens
from sdcpd.frontend.outlets import Outlet
from sdcpd.frontend.ports import FrontendPorts
from sdcpd.frontend.reply import Reply
from sdcpd.frontend.stops import StopScanner
from sdcpd.frontend.text import ModelText
from sdcpd.protocol.draws import choice_seed
from sdcpd.protocol.terms import session_path_id
from sdcpd.roles.generation import GenerationRefused, GenerationRequest, Generations

log = structlog.get_logger(__name__)


class Work(Struct, frozen=True, kw_only=True):
    """A request that is ready to run: one generation for each choice, in the order of the answer."""

    ask: Ask
    text: ModelText
    requests: tuple[GenerationRequest, ...]
    prompt_tokens: int
    """Of all prompts, each once, however many choices it has."""


class Generator:
    """Serves requests that have been read. Holds no state of any."""

    def __init__(self, ports: FrontendPorts, generations: Generations, texts: ModelTexts) -> None:
        self._ports: Final = ports
        self._generations: Final = generations
        self._texts: Final = texts

    async def prepare(self, ask: Ask, caller: Caller, headers: tuple[tuple[str, str], ...] = ()) -> Work:
        """Steps 1 and 2. `headers` are for traffic classes to match. Raises ApiError."""
        card, text = self._texts.find(ask.model)
        if not card.ready:  # its sizes may not even be known
            raise unavailable(f"the model {card.name} is not ready yet: {self._generations.ready()[1]}", "not_ready")
        stop = set(ask.stop_tokens)
        if not ask.ignore_eos:
            stop.update(text.stop)
        facts = replace(ask.facts, headers=headers, group=caller.group, asked=ask.speculation.traffic_class)
        requests: list[GenerationRequest] = []
        for source in ask.sources:
            prompt = await self._texts.tokenize(text, source, ask.source_param)
            if prompt and max(prompt) >= card.vocabulary:
                param = ask.source_param
                raise invalid(param, f"{param}: a token id is outside the model's vocabulary of {card.vocabulary}")
            max_new = new_tokens(ask, len(prompt), card.context_tokens)
            requests += [
                _request(ask, caller, facts, prompt, max_new, tuple(sorted(stop)), choice) for choice in range(ask.n)
            ]
        prompt_tokens = sum(len(request.prompt) for request in requests[:: ask.n])
        return Work(ask=ask, text=text, requests=tuple(requests), prompt_tokens=prompt_tokens)

    async def answer(
        self, work: Work, outlet: Outlet, *, charge: Callable[[int], None], arrived_at: float, request_id: str
    ) -> None:
        """Steps 3 to 5. `charge` is told of tokens of prompts that are taken and of the answer. Raises ApiError if
        nothing was sent yet, and ClientGone."""
        choices = [
            Choice(index, self._reply(work, request), outlet, charge) for index, request in enumerate(work.requests)
        ]

        async def run(choice: Choice) -> None:
            await self._run(choice, work, outlet, charge, arrived_at, request_id)

        try:
            await _run_all(choices, run, outlet)
        except ApiError as error:
            await outlet.fail(error)
            return
        figures = [choice.figures for choice in choices]
        metrics = metrics_of(figures) if work.ask.speculation.stats else None
        await outlet.finish(usage_of(work.prompt_tokens, figures, work.ask.n), metrics)

    def _reply(self, work: Work, request: GenerationRequest) -> Reply:
        after = () if isinstance(work.ask.sources[0], Conversation) else request.prompt
        return Reply(
            work.text.detokenizer(after=after),
            StopScanner(work.ask.stop_strings),
            frozenset(request.stop),
            work.text.octets,
            tells_tokens=work.ask.return_token_ids,
        )

    async def _run(
        self,
        choice: Choice,
        work: Work,
        outlet: Outlet,
        charge: Callable[[int], None],
        arrived_at: float,
        request_id: str,
    ) -> None:
        """One choice; the first of a prompt pays for that. Raises ApiError and ClientGone."""
        request = work.requests[choice.index]
        try:
            async with self._generations.generation(request) as generation:
                if choice.index % work.ask.n == 0:
                    charge(len(request.prompt))
                session = session_path_id(generation.session)
                outlet.name_session(choice.index, session)
                meter = RequestMeter(self._ports.meters, self._ports.clock, arrived_at, len(request.prompt))
                try:
                    await choice.follow(generation, meter)
                finally:
                    took_s = meter.end(choice.ending)
                    log.info(
                        "completion ended",
                        request_id=request_id,
                        session=session,
                        choice=choice.index,
                        model=request.model,
                        prompt_tokens=len(request.prompt),
                        completion_tokens=choice.reply.completion_tokens,
                        ending=choice.ending,
                        reason=choice.reply.reason,
                        took_s=round(took_s, 3),
                    )
        except GenerationRefused as refusal:
            raise from_refusal(refusal) from refusal
        await choice.settle()


def _request(
    ask: Ask,
    caller: Caller,
    facts: RequestFacts,
    prompt: tuple[int, ...],
    max_new: int | None,
    stop: tuple[int, ...],
    choice: int,
) -> GenerationRequest:
    sampling, wish = ask.sampling, ask.speculation
    return GenerationRequest(
        model=ask.model,
        prompt=prompt,
        max_new=max_new,
        stop=stop,
        logprobs=ask.logprobs,
        speculation=wish.enabled,
        m_max=wish.m_max,
        scope=caller.scope,
        facts=facts,
        temperature_milli=sampling.temperature_milli,
        top_k=sampling.top_k,
        top_p_milli=sampling.top_p_milli,
        seed=None if sampling.seed is None else choice_seed(sampling.seed, choice),
    )


async def _run_all(choices: list[Choice], run: Callable[[Choice], Awaitable[None]], outlet: Outlet) -> None:
    """A few at a time; the first that fails ends the others. Raises what it raised: ApiError or ClientGone."""
    if len(choices) == 1:
        await run(choices[0])
        return
    failure: list[ApiError | ClientGone] = []
    places = trio.CapacityLimiter(CHOICES_AT_ONCE)

    async def one(choice: Choice, everything: trio.CancelScope) -> None:
        async with places:
            try:
                await run(choice)
            except ClientGone as gone:
                failure.append(gone)
                everything.cancel()
            except ApiError as error:
                failure.append(error)
                await outlet.halt(everything)  # not in the middle of what another choice sends

    async with trio.open_nursery() as nursery:
        for choice in choices:
            nursery.start_soon(one, choice, nursery.cancel_scope)
    if failure:
        raise failure[0]
