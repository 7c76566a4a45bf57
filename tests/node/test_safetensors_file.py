"""The file is what the reference library writes, octet for octet."""

from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file, save_file

from sdcpd.node.safetensors_file import bf16_octets, write_bf16


def test_octets_are_those_of_the_reference(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in (("b", (3, 5)), ("a.x", (7,)), ("c", (2, 2)))
    }
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "their", metadata={"format": "pt"}
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_bf16(tmp_path / "our", shapes, ((name, tensor.numpy()) for name, tensor in tensors.items()))
    assert (tmp_path / "our").read_bytes() == (tmp_path / "their").read_bytes()
    assert torch.equal(load_file(tmp_path / "our")["b"], tensors["b"].bfloat16())


def test_rounding_is_torchs() -> None:
    bits = numpy.arange(0, 1 << 32, 9973, dtype=numpy.uint64).astype(numpy.uint32)
    values = torch.from_numpy(bits.view(numpy.float32).copy())
    ours = torch.frombuffer(bytearray(bf16_octets(values.numpy())), dtype=torch.bfloat16)
    finite = ~values.isnan()
    assert torch.equal(ours[finite], values.bfloat16()[finite])
    assert bool(ours[~finite].isnan().all())
