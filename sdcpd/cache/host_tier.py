"""Host buffers for blocks, and the copies between them and the page pool (the second tier of the cache).

A fixed number of buffers, made once: pinned where there is a CUDA device, so that copies run at the bus's speed and
beside the kernels; plain memory on a CPU, given by the kernel when it is first used. Which buffer holds what is the
index's business (block_index.py).

All copies block and belong to worker threads; several may run at once. On CUDA they go through a stream of their own
that first waits for all work that passes have issued: a page that was written is read whole, and a page that a pass
wrote in vain is filled after that pass. On CPU they are plain copies in the thread that makes them: torch's own would
start a second pool of threads on the same cores.
"""

from typing import Any, Final

import numpy
import torch
from torch import Tensor

from sdcpd.cache.block_file import payload_bytes
from sdcpd.cache.blocks import KvLayout
from sdcpd.cache.gpu_tier import PagePool

Octets = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


class HostTierRefused(Exception):
    """The buffers cannot be had. The text says how an operator can mend it."""


class HostTier:
    """KvMemory (block_orders.py) over a page pool and `octets` of host memory, as many buffers as fit."""

    def __init__(self, pool: PagePool, layout: KvLayout, octets: int, memlock_limit_bytes: int | None = None) -> None:
        """`memlock_limit_bytes`: how much memory the process may pin, None without a limit. Raises HostTierRefused."""
        self._pool = pool
        self._shape: Final = layout.shape
        count = octets // payload_bytes(layout)
        device = pool.slots.device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        if self._cuda and count:
            check_memlock(count * payload_bytes(layout), memlock_limit_bytes)
        try:
            self._held = torch.empty((count, *layout.shape), dtype=pool.slots.dtype, pin_memory=self._cuda)
        except RuntimeError as error:
            raise HostTierRefused(
                f"{count * payload_bytes(layout)} bytes of host memory for the cache cannot be had: {error}. Lower "
                "cache.cpu_bytes_to_use."
            ) from error

    @property
    def buffers(self) -> int:
        return len(self._held)

    def page_to_buffer(self, page: int, buffer: int) -> None:
        self._copy(self._held[buffer], self._page(page))

    def buffer_to_page(self, buffer: int, page: int) -> None:
        self._copy(self._page(page), self._held[buffer])

    def read_page(self, page: int) -> bytes:
        """The numbers of a page in the order of the layout's shape."""
        content = torch.empty(self._shape, dtype=self._held.dtype, pin_memory=self._cuda)
        self._copy(content, self._page(page))
        return _octets(content).tobytes()

    def write_page(self, page: int, payload: memoryview) -> None:
        self._copy(self._page(page), self._tensor(payload))

    def read_buffer(self, buffer: int) -> bytes:
        return _octets(self._held[buffer]).tobytes()

    def write_buffer(self, buffer: int, payload: memoryview) -> None:
        self._copy(self._held[buffer], self._tensor(payload))

    def _page(self, page: int) -> Tensor:
        size = self._pool.page_tokens
        return self._pool.slots[:, :, page * size : (page + 1) * size]

    def _tensor(self, payload: memoryview) -> Tensor:
        found = numpy.frombuffer(payload, dtype=numpy.uint8).reshape((*self._shape[:-1], -1)).copy()
        return torch.from_numpy(found).view(self._held.dtype)

    def _copy(self, into: Tensor, source: Tensor) -> None:
        if self._stream is None:
            numpy.copyto(_octets(into), _octets(source))
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
            into.copy_(source, non_blocking=True)
        self._stream.synchronize()


def check_memlock(wanted_bytes: int, limit_bytes: int | None) -> None:
    """Whether so much memory may be pinned. Raises HostTierRefused."""
    if limit_bytes is not None and limit_bytes < wanted_bytes:
        raise HostTierRefused(
            f"cache.cpu_bytes_to_use wants {wanted_bytes} bytes of pinned memory, but this process may lock "
            f"{limit_bytes} (RLIMIT_MEMLOCK). Raise LimitMEMLOCK in the unit (or `ulimit -l`), or lower "
            "cache.cpu_bytes_to_use."
        )


def _octets(tensor: Tensor) -> Octets:
    """The tensor's own memory as octets; the last dimension is contiguous."""
    found: Octets = tensor.view(torch.uint8).numpy()
    return found
