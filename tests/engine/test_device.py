"""Device, precision and free memory (bug 29: no silent fall-back to the CPU)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdcpd.engine import device as module
from sdcpd.engine.device import choose, free_bytes
from sdcpd.engine.model_config import ModelRefused
from sdcpd.engine.settings import EngineSettings


def test_cuda_is_had_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelRefused, match="CUDA_VISIBLE_DEVICES"):
        choose(EngineSettings(model="m", device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose(EngineSettings(model="m", device="cuda")) == (torch.device("cuda"), "bf16")
    assert choose(EngineSettings(model="m"))[0] == torch.device("cuda")
    assert choose(EngineSettings(model="m", device="cpu"))[0] == torch.device("cpu")


@pytest.mark.parametrize(("capability", "dtype"), [("AVX512", "bf16"), ("AVX2", "fp32"), ("DEFAULT", "fp32")])
def test_auto_precision_follows_the_cpu(monkeypatch: pytest.MonkeyPatch, capability: str, dtype: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert choose(EngineSettings(model="m", device="cpu")) == (torch.device("cpu"), dtype)
    assert choose(EngineSettings(model="m", device="cpu", dtype="bf16"))[1] == "bf16", "an explicit one wins"


def test_free_memory_is_less_than_all_of_it() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024  # MemTotal is the first line
    assert 0 < free_bytes(torch.device("cpu")) < total


def test_a_cgroup_limit_lowers_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cgroup_bytes", lambda: 1000)
    assert free_bytes(torch.device("cpu")) == 1000


def test_what_a_router_needs_comes_without_torch() -> None:
    names = "settings, spans, scheduler, model_config, model_digest"
    code = f"import sys\nfrom sdcpd.engine import {names}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
