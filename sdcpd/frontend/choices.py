"""One choice of an answer: its generation followed to the end, and its figures.

A request may have many choices; each is a session of its own. They run beside each other, a few at a time, and what
they say goes to the same outlet under their index.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from typing import Final

from sdcpd.frontend.answers import ChoiceFigures, FinishReason
from sdcpd.frontend.errors import failed
from sdcpd.frontend.meter import Ending, RequestMeter
from sdcpd.frontend.outlets import Outlet
from sdcpd.frontend.reply import Reply
from sdcpd.roles.generation import Generation, Passage

CHOICES_AT_ONCE: Final = 8
"""Of one request: a client with many choices must not take the places of all others. The rest follow as these end."""


class Choice:
    """Follows one generation. `index` is its place in the answer."""

    def __init__(self, index: int, reply: Reply, outlet: Outlet, charge: Callable[[int], None]) -> None:
        """`charge` is told of tokens as they are delivered."""
        self.index: Final = index
        self.reply: Final = reply
        self._outlet: Final = outlet
        self._charge: Final = charge
        self._passage = Passage()

    @property
    def ending(self) -> Ending:
        """For metrics and logs, once it is over or was left."""
        return self.reply.finish or "abort"

    @property
    def figures(self) -> ChoiceFigures:
        """Once it is over."""
        return ChoiceFigures(
            completion_tokens=self.reply.completion_tokens, stats=self.reply.stats, passage=self._passage
        )

    async def follow(self, generation: Generation, meter: RequestMeter) -> None:
        """Pages into text until nothing more is wanted. Raises ClientGone."""
        reply = self.reply
        async with AsyncExitStack() as stack:
            pages = generation.pages()
            if isinstance(pages, AsyncGenerator):  # one that is left early must be closed by hand
                stack.push_async_callback(pages.aclose)
            async for page in pages:
                before = reply.completion_tokens
                delta = reply.take(page)
                self._charge(reply.completion_tokens - before)
                meter.page(reply.completion_tokens, reply.reason)
                if delta:
                    await self._outlet.write(self.index, delta)
                if reply.settled:
                    self._passage = generation.passage()
                    return
        raise AssertionError("the pages of a generation ended without a final one")

    async def settle(self) -> None:
        """Tell how it ended. Raises ApiError for one that broke off, and ClientGone."""
        finish = self.reply.finish
        assert finish is not None, "settled without a finish"
        if finish == "error":
            raise failed(self.reply.reason or "failed")
        reason: FinishReason = finish
        await self._outlet.end(self.index, reason)
