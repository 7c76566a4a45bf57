"""The other end of a connection, as plain h2: it does what a test tells it, and nothing by itself."""

from typing import Any, TypeVar

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import trio
from hyperframe.frame import GoAwayFrame

E = TypeVar("E", bound=h2.events.Event)
REQUEST = [(":method", "GET"), (":scheme", "https"), (":authority", "v.example"), (":path", "/verifier/thing")]


class Raw:
    """`stream`: any byte stream. Events that nobody asked for are kept for the next who asks."""

    def __init__(self, stream: trio.abc.Stream, *, client: bool, **settings: int) -> None:
        self.stream = stream
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=client, header_encoding="utf-8", validate_outbound_headers=False)
        )
        codes = {getattr(h2.settings.SettingCodes, name.upper()): value for name, value in settings.items()}
        self.h2.local_settings = h2.settings.Settings(client=client, initial_values=codes)
        self.events: list[h2.events.Event] = []
        self.keeps_windows_open = True

    async def start(self) -> None:
        self.h2.initiate_connection()
        await self.flush()

    async def flush(self) -> None:
        await self.stream.send_all(self.h2.data_to_send())

    async def read(self) -> None:
        """Take what is there; AssertionError at its end."""
        octets = await self.stream.receive_some()
        assert octets, "the other side closed the connection"
        events = self.h2.receive_data(octets)
        self.events += events
        for event in events:
            if self.keeps_windows_open and isinstance(event, h2.events.DataReceived):
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id or 0)
        await self.flush()

    async def next(self, kind: type[E], number: int | None = None) -> E:
        """The next event of a kind, on a stream if one is named."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and (number is None or getattr(event, "stream_id", None) == number):
                    self.events.remove(event)
                    return event
            await self.read()

    async def next_request(self) -> int:
        """The number of the next request's stream, once it has ended."""
        return (await self.next(h2.events.StreamEnded)).stream_id or 0

    async def ended(self) -> bool:
        """Read until the other side closes."""
        try:
            while octets := await self.stream.receive_some():
                self.events += self.h2.receive_data(octets)
        except trio.BrokenResourceError:
            return True
        return True

    async def ask(
        self, *more: tuple[str, str], method: str = "GET", body: bytes | None = None, end: bool = True, **changes: str
    ) -> int:
        """Send a request, with `end=False` one that is not over."""
        number = self.h2.get_next_available_stream_id()
        fields = dict(REQUEST) | {":method": method} | {f":{name}": value for name, value in changes.items()}
        self.h2.send_headers(number, [*fields.items(), *more], end_stream=body is None and end)
        if body is not None:
            self.h2.send_data(number, body, end_stream=end)
        await self.flush()
        return number

    async def answer(self, number: int, body: bytes = b"", status: str = "200", *, end: bool = True) -> None:
        self.h2.send_headers(number, [(":status", status)], end_stream=not body and end)
        if body:
            self.h2.send_data(number, body, end_stream=end)
        await self.flush()

    async def whole(self, number: int) -> tuple[int, dict[str, str], bytes]:
        """Status, fields and body of an answer."""
        head = await self.next(h2.events.ResponseReceived, number)
        fields = {str(name): str(value) for name, value in head.headers or ()}
        await self.next(h2.events.StreamEnded, number)
        body = b"".join(getattr(e, "data", b"") for e in self.events if _is_data(e, number))
        self.events = [e for e in self.events if not _is_data(e, number)]
        return int(fields.pop(":status")), fields, body

    async def goaway(self, last: int, code: int = 0, then: bytes = b"") -> None:
        """h2's own would be the last that it sends."""
        await self.stream.send_all(GoAwayFrame(0, last_stream_id=last, error_code=code).serialize() + then)

    async def reset(self, number: int, code: Any = h2.errors.ErrorCodes.CANCEL) -> None:
        self.h2.reset_stream(number, code)
        await self.flush()


def _is_data(event: h2.events.Event, number: int) -> bool:
    return isinstance(event, h2.events.DataReceived) and event.stream_id == number
