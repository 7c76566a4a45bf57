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
from hyperframe.frame import Frame, GoAwayFrame

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
CLOSE_S: Final = 0.5
"""What a farewell may take."""


class _Encoder(hpack.Encoder):
    """Fields as they are: Huffman codes save some octets and cost both ends a loop over each of them."""

    def encode(self, headers: Any, huffman: bool = False) -> bytes:
        return super().encode(headers, huffman)


class Frames(h2.connection.H2Connection):
    """h2's connection, which outlives GOAWAY. Fields go out as they are given: lower-case octets."""

    def __init__(self, *, client: bool) -> None:
        super().__init__(
            h2.config.H2Configuration(
                client_side=client,
                header_encoding=None,
                validate_outbound_headers=False,  # they are our own
                normalize_outbound_headers=False,
            )
        )
        self.encoder = _Encoder()

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

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[h2.events.Event]]:
        event = h2.events.ConnectionTerminated()
        event.error_code = frame.error_code  # as a number: not all have a name
        event.last_stream_id = frame.last_stream_id
        return [], [event]
