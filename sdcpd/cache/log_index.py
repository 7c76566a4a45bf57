"""Which logs there are, what each says of itself, and where its octets lie. Plain bookkeeping, no files.

The index is changed by frames alone, through `apply`, in the order of the journal: when they are written and, by the
same code, when they are read back after a restart. A frame that does not fit what is known of its log (its length or
its SHA-256 does not follow) shows that something is missing before it: the log is *damaged* from then on. A damaged
log is neither read nor appended to; it is kept, by name, until a BASE, CREATE or REMOVE frame settles it.

Space: a log holds `frame_bytes` octets of the journal in segments from `first_segment` on. Segments are given back from
the oldest on only, so that frames which settle a log (CREATE, BASE, REMOVE) always outlive the frames they settle.

Directory records (decision 106) are logs of one frame: each content is a CREATE frame, which settles the one before it.
"""

import bisect
import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import assert_never

from sdcpd.cache.journal_frames import FrameKind, FrameOrder
from sdcpd.cache.refs import is_record

_OFFSET_BITS = 32


class Log:
    """One log. `places` are `segment << 32 | offset` of its payloads, in order; `sizes` their octets."""

    __slots__ = (
        "damage",
        "doubt",
        "final",
        "first_segment",
        "floor",
        "frame_bytes",
        "length",
        "name",
        "places",
        "running",
        "sizes",
        "touched",
    )

    def __init__(self, name: str, segment: int, now: float) -> None:
        self.name = name
        self.places = array("Q")
        self.sizes = array("I")
        self.running = hashlib.sha256()
        """Over all records so far; its digest is the log's entity tag."""
        self.length = 0
        self.floor = 0
        """Highest fence epoch, 0 without one; no record below it is taken (6.8)."""
        self.final = False
        """The session is over: an end record, or a commit that says finish or fail (decision 91)."""
        self.frame_bytes = 0
        self.first_segment = segment
        self.touched = now
        """When it was last appended to or read; once final, when it became so."""
        self.damage: str | None = None
        self.doubt: str | None = None
        """During recovery: octets that may have been this log's were lost, and no later frame has shown otherwise."""

    @property
    def tag(self) -> str:
        """Strong entity tag, quoted as in HTTP (the same as protocol.commit_log.log_tag)."""
        return f'"{self.running.hexdigest()}"'

    def spoil(self, reason: str) -> None:
        """From now on damaged. Its octets in the journal are worthless, but its name holds on to them."""
        self.damage = reason
        self.doubt = None
        self.places, self.sizes = array("Q"), array("I")


class LogIndex:
    """All logs by name, and how much of each segment they still need."""

    def __init__(self) -> None:
        self._logs: dict[str, Log] = {}
        self._beginning_in: Counter[int] = Counter()
        self.live_bytes = 0
        """Octets of frames that logs still need."""
        self.record_bytes = 0
        """Those of them that are of directory records."""
        self._records: list[str] = []
        """Names of the directory records, sorted."""

    def __len__(self) -> int:
        return len(self._logs)

    def __iter__(self) -> Iterator[Log]:
        return iter(self._logs.values())

    def get(self, name: str) -> Log | None:
        return self._logs.get(name)

    @property
    def records(self) -> int:
        """How many of the logs are directory records."""
        return len(self._records)

    def record_names(self, directory: str, after: str, count: int) -> list[str]:
        """The first `count` records below this path whose names sort behind `after`, in their order."""
        prefix = f"{directory}/"
        start = bisect.bisect_right(self._records, max(prefix, after))
        return [name for name in self._records[start : start + count] if name.startswith(prefix)]

    def first_needed_segment(self) -> int | None:
        """The oldest segment that some log still needs; None when there is no log."""
        return min(self._beginning_in, default=None)

    def beginning_in(self, segment: int) -> list[Log]:
        """Logs whose oldest frame is in this segment, in the order of their creation."""
        return [log for log in self._logs.values() if log.first_segment == segment]

    def apply(self, order: FrameOrder, segment: int, payload_offset: int, now: float) -> str | None:
        """Take one frame in. Returns why its log is damaged by it, or None."""
        match order.kind:
            case FrameKind.MARK:
                return None
            case FrameKind.REMOVE:
                self._forget(order.name)
                return None
            case FrameKind.LOST:
                log = self._replace(order, segment, now)
                log.spoil(order.payload.decode("utf-8", "replace"))
                return None
            case FrameKind.CREATE | FrameKind.BASE:
                touched = now
                if order.kind is FrameKind.BASE and (before := self._logs.get(order.name)) is not None:
                    touched = before.touched  # moving a log does not make it younger
                log = self._replace(order, segment, touched)
            case FrameKind.APPEND:
                existing = self._logs.get(order.name)
                if existing is None:
                    log = self._replace(order, segment, now)
                    log.spoil("its beginning is missing")
                    return log.damage
                log = existing
                self._occupy(log, order.frame_bytes)
                if log.damage is not None:
                    return None
            case _:
                assert_never(order.kind)
        return self._extend(log, order, segment, payload_offset, now)

    def damaged(self, name: str, segment: int, now: float, reason: str) -> Log:
        """Know of this log only that it is damaged; `segment` is the first that may hold some of it."""
        log = self._logs.get(name)
        if log is None:
            log = self._insert(Log(name, segment, now))
        log.spoil(reason)
        return log

    def _extend(self, log: Log, order: FrameOrder, segment: int, payload_offset: int, now: float) -> str | None:
        if log.length + len(order.payload) != order.length:
            log.spoil(f"records are missing after octet {log.length}")
            return log.damage
        log.running.update(order.payload)
        if log.running.digest() != order.tag:
            log.spoil(f"its content is not what was written, somewhere before octet {order.length}")
            return log.damage
        log.places.append(segment << _OFFSET_BITS | payload_offset)
        log.sizes.append(len(order.payload))
        log.length = order.length
        log.floor = order.floor
        log.doubt = None
        if order.kind is not FrameKind.BASE and not log.final:
            log.touched = now
        log.final = order.final
        return None

    def _replace(self, order: FrameOrder, segment: int, touched: float) -> Log:
        self._forget(order.name)
        log = self._insert(Log(order.name, segment, touched))
        self._occupy(log, order.frame_bytes)
        return log

    def _occupy(self, log: Log, frame_bytes: int) -> None:
        log.frame_bytes += frame_bytes
        self.live_bytes += frame_bytes
        if is_record(log.name):
            self.record_bytes += frame_bytes

    def _insert(self, log: Log) -> Log:
        self._logs[log.name] = log
        self._beginning_in[log.first_segment] += 1
        if is_record(log.name):
            bisect.insort(self._records, log.name)
        return log

    def _forget(self, name: str) -> None:
        log = self._logs.pop(name, None)
        if log is None:
            return
        self.live_bytes -= log.frame_bytes
        if is_record(name):
            self.record_bytes -= log.frame_bytes
            del self._records[bisect.bisect_left(self._records, name)]
        self._beginning_in[log.first_segment] -= 1
        if not self._beginning_in[log.first_segment]:
            del self._beginning_in[log.first_segment]


def place(coded: int) -> tuple[int, int]:
    """(segment, offset) of an entry of `Log.places`."""
    return coded >> _OFFSET_BITS, coded & (1 << _OFFSET_BITS) - 1
