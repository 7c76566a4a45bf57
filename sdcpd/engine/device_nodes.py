"""Whether a CUDA device can be there at all, answered in a moment: without torch, whose import alone takes seconds.

It says no only when it is certain. Otherwise torch has the last word (device.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
NODES: Final = ("nvidia*", "kfd", "dxg", "nvmap", "nvhost*")
"""Through which a process reaches what torch calls a CUDA device: NVIDIA's driver, AMD's, WSL's, Tegra's."""


def why_no_cuda(environment: Mapping[str, str], dev: Path) -> str | None:
    """Why there is certainly none, with the remedy; None when there may be one. `dev`: where devices are, /dev."""
    visible = environment.get(VISIBLE)
    if visible is not None and visible.partition(",")[0].strip() in (
        "",
        "-1",
    ):  # the list ends at the first that is none
        return f"{VISIBLE}={visible!r} hides all of them. Unset it"
    if not any(True for pattern in NODES for _ in dev.glob(pattern)):
        return (
            f"{dev} holds none ({', '.join(NODES)}). Check that the driver is loaded and that nothing hides its "
            "devices (PrivateDevices, DeviceAllow, the container's settings)"
        )
    return None
