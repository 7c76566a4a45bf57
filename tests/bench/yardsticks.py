"""What a round is measured against in the same run: the disk, the interpreter, and an exchange that asks for nothing.

Figures of a shared machine differ from hour to hour by a factor; what they are to these three does not as much.
"""

import os
import time
from pathlib import Path
from typing import Final

import trio

from sdcpd.edge.transport import Request, Transport
from sdcpd.protocol.encoding import MEDIA_TYPE
from tests.bench.figures import median, percentile

RECORD_BYTES: Final = 256
"""As long as a commit record with its frame in the journal, for the disk measured alone."""
ECHO_PATH: Final = "echo"
QUESTION_BYTES: Final = 225
ANSWER_BYTES: Final = 146
"""As a proposal of 8 tokens and its verdict."""
LOOPS: Final = 20
STEPS: Final = 2000


def lone_fdatasync(folder: Path, count: int) -> dict[str, float]:
    """A write of a record's length and its sync, by a process that does nothing else: what the disk alone takes."""
    took: list[float] = []
    descriptor = os.open(folder / "lone", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for number in range(count):
            begin = time.perf_counter()
            os.pwrite(descriptor, bytes(RECORD_BYTES), number * RECORD_BYTES)
            os.fdatasync(descriptor)
            took.append(1000 * (time.perf_counter() - begin))
    finally:
        os.close(descriptor)
    return {"median_ms": median(took), "p99_ms": percentile(took, 99)}


def python_loop() -> dict[str, float]:
    """A fixed piece of work for the interpreter alone."""
    took: list[float] = []
    for _ in range(LOOPS):
        begin = time.perf_counter()
        seen: dict[int, bytes] = {}
        for step in range(STEPS):
            seen[step % 64] = b"%d" % len(seen)
        took.append(1000 * (time.perf_counter() - begin))
    return {"median_ms": median(took), "p99_ms": percentile(took, 99)}


class Echo:
    """Asks with as many octets as a proposal has, and is answered at once with as many as a verdict has."""

    def __init__(self, transport: Transport, base: str) -> None:
        self._transport: Final = transport
        self._base: Final = base
        self.took_ms: Final[list[float]] = []

    async def ask(self, times: int) -> None:
        """So often, each when the last is answered."""
        headers = {"content-type": MEDIA_TYPE}
        for _ in range(times):
            request = Request(method="POST", path=ECHO_PATH, headers=headers, body=bytes(QUESTION_BYTES))
            begin = time.perf_counter()
            response = await self._transport.exchange(self._base, request)
            self.took_ms.append(1000 * (time.perf_counter() - begin))
            assert (response.status, len(response.body)) == (200, ANSWER_BYTES), response.status


async def echoes(transport: Transport, base: str, callers: int, times: int) -> tuple[list[float], float]:
    """As many callers at once. All their times in milliseconds, and what it took together, in seconds."""
    asked = [Echo(transport, base) for _ in range(callers)]
    begin = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for echo in asked:
            nursery.start_soon(echo.ask, times)
    return [took for echo in asked for took in echo.took_ms], time.perf_counter() - begin
