"""What both ends of a connection between peers ask of `h2`: windows and frames for large bodies, and GOAWAY as RFC 9113
has it.

To h2 a connection is over when either side has said GOAWAY: it sends nothing any more, and takes what comes for a
breach of the protocol. Here GOAWAY is the beginning of the end (section 6.8): what is under way goes on, both ways.
"""

from typing import Any, Final

import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack
from hpack.table import HeaderTable
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame

STREAM_WINDOW_BYTES: Final = 1 << 20
"""What a peer may send on one stream before we have taken it: fills 1 Gbit/s over 8 ms."""
FRAME_BYTES: Final = 64 << 10
"""Each frame of a large body costs a turn of the loop; small messages wait behind one."""
DEFAULT_WINDOW_BYTES: Final = 65_535
"""A connection's window until it is opened (RFC 9113 section 6.9.2)."""
OUTBOX_BYTES: Final = 256 << 10
"""How much of large bodies waits to be written: small messages wait behind it, some milliseconds at most."""
READ_BYTES: Final = 32 << 10
"""At a time. A TLS record holds 16 KiB, and a buffer is made for each read."""
UNSENT_LIMIT_BYTES: Final = 1 << 20
"""Of all that waits to be written. A peer that asks, or pings, and takes nothing is read no further from there on."""
KNOWN_BLOCKS: Final = 64
KNOWN_BLOCK_LIMIT: Final = 256
"""Field blocks kept for each direction of a connection, and their length, in octets or in fields."""
CLOSE_S: Final = 0.5
"""What a farewell may take."""


class _Table(HeaderTable):
    """A header table that keeps the blocks which read the same in its present state, and bring it nothing new.

    Peers say the same again and again: such a block is then neither taken apart nor put together field by field.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Final[dict[Any, Any]] = {}
        self.sound: Final[set[Any]] = set()  # those of them that began a message, as RFC 9113 section 8 has it
        self._changed = False

    def add(self, name: bytes, value: bytes) -> None:
        super().add(name, value)
        self.change()

    def change(self) -> None:
        self._forget()
        self._changed = True

    def begin(self) -> None:
        """A block is being read or written."""
        self._changed = False

    def keep(self, key: Any, block: Any) -> None:
        """It was."""
        if not self._changed and len(key) <= KNOWN_BLOCK_LIMIT:
            if len(self.blocks) >= KNOWN_BLOCKS:
                self._forget()
            self.blocks[key] = block

    def _forget(self) -> None:
        self.blocks.clear()
        self.sound.clear()


class _Encoder(hpack.Encoder):
    """Fields as they are: Huffman codes save some octets and cost both ends a loop over each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.header_table = self.table = _Table()

    def encode(self, headers: Any, huffman: bool = False) -> bytes:
        fields, table = tuple(headers), self.table
        if table.resized:  # the block will say so
            table.change()
        block: bytes | None = table.blocks.get(fields)
        if block is None:
            table.begin()
            resized = table.resized
            block = super().encode(fields, huffman)
            if not resized:
                table.keep(fields, block)
        return block


class _Decoder(hpack.Decoder):
    """Hands out the same list for the same block; h2 makes its own of it."""

    def __init__(self) -> None:
        super().__init__()
        self.header_table = self.table = _Table()

    def decode(self, data: bytes, raw: bool = False) -> Any:
        assert raw, "as h2 asks"
        block, table = bytes(data), self.table
        fields = table.blocks.get(block)
        if fields is None:
            table.begin()
            fields = super().decode(block, raw)
            table.keep(block, fields)
        return fields

    def _update_encoding_context(self, data: bytes | memoryview) -> int:
        self.table.change()
        return super()._update_encoding_context(data)


class Frames(h2.connection.H2Connection):
    """h2's connection, which outlives GOAWAY. Fields go out as they are given: lower-case octets."""

    def __init__(self, *, client: bool) -> None:
        super().__init__(
            h2.config.H2Configuration(
                client_side=client,
                header_encoding=None,
                validate_outbound_headers=False,  # they are our own
                normalize_outbound_headers=False,
                normalize_inbound_headers=False,  # it joins cookies, and there are none
            )
        )
        self.encoder = _Encoder()
        self.decoder = _Decoder()
        self._known: Final = self.decoder.table

    def greet(self, settings: dict[h2.settings.SettingCodes, int], window_bytes: int) -> None:
        """Our settings, those for large bodies added, and a connection's window of `window_bytes`."""
        codes = h2.settings.SettingCodes
        values = {codes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES, codes.MAX_FRAME_SIZE: FRAME_BYTES} | settings
        self.local_settings = h2.settings.Settings(client=self.config.client_side, initial_values=values)
        self.max_inbound_frame_size = FRAME_BYTES
        self.decoder.max_header_list_size = values[codes.MAX_HEADER_LIST_SIZE]
        self.initiate_connection()
        self.increment_flow_control_window(window_bytes - DEFAULT_WINDOW_BYTES)

    @property
    def unsent_bytes(self) -> int:
        """What `data_to_send` would return."""
        return len(self._data_to_send)

    def say_goaway(self) -> None:
        """No request beyond those that came so far will be looked at."""
        self._prepare_for_sending([GoAwayFrame(0, last_stream_id=self.highest_inbound_stream_id)])

    def send_some(self, number: int, rest: memoryview, room_bytes: int) -> int:
        """Move as much of a stream's body into the buffer as its windows and `room_bytes` allow. How many octets.

        The stream ends with the last of them. Raises h2's ProtocolError: the peer has reset it, of which we are about
        to hear.
        """
        moved = 0
        while moved < len(rest):
            window = self.local_flow_control_window(number)
            size = min(len(rest) - moved, window, self.max_outbound_frame_size, room_bytes - moved)
            if size <= 0:
                break
            self.send_data(number, rest[moved : moved + size], end_stream=moved + size == len(rest))
            moved += size
        return moved

    def _receive_headers_frame(self, frame: HeadersFrame) -> tuple[list[Frame], list[h2.events.Event]]:
        """A block that was found sound is not looked at again where it begins a message again. Trailers always are."""
        stream, known = self.streams.get(frame.stream_id), self._known
        begins = stream is None or not stream.state_machine.headers_received
        self.config.validate_inbound_headers = not begins or frame.data not in known.sound
        received = super()._receive_headers_frame(frame)
        if begins and frame.data in known.blocks:
            known.sound.add(frame.data)
        return received

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[h2.events.Event]]:
        event = h2.events.ConnectionTerminated()
        event.error_code = frame.error_code  # as a number: not all have a name
        event.last_stream_id = frame.last_stream_id
        return [], [event]
