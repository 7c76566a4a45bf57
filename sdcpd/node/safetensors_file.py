"""Writing one safetensors file in bf16, tensor by tensor, with nothing but numpy (no torch here).

The form: 8 octets of length, a JSON header padded with blanks to a multiple of 8, then the tensors. As the reference
writer does, tensors of one dtype lie in the order of their names. A tensor is written when it comes, at its place, so
that a model never has to be in memory as a whole.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy

_BF16_BYTES: Final = 2
_ALIGNMENT: Final = 8


def write_bf16(
    file: Path, shapes: Mapping[str, tuple[int, ...]], tensors: "Iterable[tuple[str, numpy.ndarray[Any, Any]]]"
) -> None:
    """`tensors` yields each name of `shapes` once, with float32 values of that shape; they are rounded to bf16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(shapes):
        starts[name] = end
        size = _BF16_BYTES
        for extent in shapes[name]:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [end, end + size]}
        end += size
    octets = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    octets += b" " * (-len(octets) % _ALIGNMENT)
    with open(file, "wb") as stream:
        stream.write(len(octets).to_bytes(8, "little") + octets)
        base = stream.tell()
        for name, values in tensors:
            assert values.shape == shapes[name], (name, values.shape, shapes[name])
            stream.seek(base + starts.pop(name))
            stream.write(bf16_octets(values))
        assert not starts, f"never given: {', '.join(starts)}"
    file.chmod(0o644)


def bf16_octets(values: "numpy.ndarray[Any, Any]") -> bytes:
    """float32 values as bf16, rounded to the nearest, ties to even; what is not a number stays so."""
    import numpy

    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = numpy.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return rounded.astype("<u2").tobytes()
