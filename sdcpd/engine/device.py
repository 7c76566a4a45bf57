"""Where a model runs, in which precision, and how much memory is free there. The only module that asks the machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from sdcpd.engine.model_config import ModelRefused
from sdcpd.engine.settings import EngineSettings

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


def choose(settings: EngineSettings) -> tuple[torch.device, str]:
    """Device and dtype in effect. Raises ModelRefused when a CUDA device is demanded and there is none.

    "auto" is a function of what the machine is, not of a measurement: the dtype is part of the target digest, and two
    equal machines must agree. On CPU bf16 is chosen with AVX-512 only. Without it torch's bf16 product costs so much
    more a row that a pass over 8 rows is slower than in fp32, and speculation would not pay. That holds with int8
    weights too: their products are of integers there (linear.py), and all else is faster in fp32.
    """
    cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not cuda:
        raise ModelRefused(
            'device = "cuda", but torch finds no CUDA device. Check nvidia-smi, the driver, CUDA_VISIBLE_DEVICES and '
            'that this torch is a CUDA build; or set device = "cpu".'
        )
    device = torch.device("cuda" if cuda and settings.device != "cpu" else "cpu")
    if settings.dtype != "auto":
        return device, settings.dtype
    return device, "bf16" if device.type == "cuda" or has_avx512() else "fp32"


def has_avx512() -> bool:
    """Whether torch uses it here."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 numbers on `device`. A CUDA device fetches them from pinned memory when it gets there: nobody waits."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on `device` now. For the CPU: what the kernel calls available, less under a cgroup limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = _available_bytes()
    limited = _cgroup_bytes()
    return available if limited is None else min(available, limited)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ModelRefused("/proc/meminfo has no MemAvailable; set kv_cache_bytes")


def _cgroup_bytes() -> int | None:
    """What is left under the tightest memory limit of our cgroups (version 2), None without one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        place = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    except (OSError, StopIteration):
        return None
    root = Path("/sys/fs/cgroup")
    left: list[int] = []
    group = root / place
    while True:
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
        except OSError:
            pass
        else:
            if limit != "max":
                left.append(max(0, int(limit) - used))
        if group == root or root not in group.parents:
            return min(left, default=None)
        group = group.parent
