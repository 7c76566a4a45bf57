"""A quick no where it is certain, and never a wrong one (bug 29)."""

from pathlib import Path

import pytest

from sdcpd.engine.device_nodes import why_no_cuda


@pytest.mark.parametrize(
    ("visible", "certain"),
    [("", True), ("-1", True), (" ,0", True), ("-1,0", True), ("0", False), ("0,-1", False), ("GPU-1f", False)],
)
def test_a_list_that_names_none(visible: str, certain: bool, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    reason = why_no_cuda({"CUDA_VISIBLE_DEVICES": visible}, tmp_path)
    assert (reason is not None) == certain
    assert reason is None or "CUDA_VISIBLE_DEVICES" in reason


@pytest.mark.parametrize("node", ["nvidiactl", "nvidia0", "kfd", "dxg", "nvmap", "nvhost-gpu"])
def test_any_way_to_a_device_leaves_it_to_torch(node: str, tmp_path: Path) -> None:
    (tmp_path / "null").touch()
    reason = why_no_cuda({}, tmp_path)
    assert reason is not None
    assert "PrivateDevices" in reason
    (tmp_path / node).touch()
    assert why_no_cuda({}, tmp_path) is None
