"""The keys and values of one session in the engine's page pool: which positions are valid, which have pages.

valid_tokens <= reserved_tokens always. Both are 0 for a session that waits for pages, be it new or preempted; what it
knows is run again as a prompt once it has them (roles/kv_room.py says when).
"""

from sdcpd.roles.ports import Engine


class SessionKv:
    """One sequence of the engine. `drop` gives its pages back and keeps the session; `close` is for good."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._sequence: int | None = engine.open_sequence()
        self.valid_tokens = 0
        self.reserved_tokens = 0

    @property
    def closed(self) -> bool:
        return self._sequence is None

    @property
    def sequence(self) -> int:
        """The engine's handle; another one after a `drop`."""
        assert self._sequence is not None
        return self._sequence

    def reserve(self, length: int) -> bool:
        """Have pages for `length` positions. False, and nothing changed, when too few are free."""
        if length <= self.reserved_tokens:
            return True
        if not self.engine.reserve(self.sequence, length):
            return False
        self.reserved_tokens = length
        return True

    def drop(self) -> None:
        """Give all pages back; nothing is valid any more. Between passes only."""
        self.engine.close_sequence(self.sequence)
        self._sequence = self.engine.open_sequence()
        self.valid_tokens = self.reserved_tokens = 0

    def close(self) -> None:
        """Give all pages back for good; repeatable."""
        if self._sequence is not None:
            self.engine.close_sequence(self._sequence)
            self._sequence = None
            self.reserved_tokens = 0
