"""A draft model's reduced vocabulary: a head over some of the tokens only (as EAGLE-3 and FR-Spec do).

Most of a small model's pass is its head, and most of what is written uses a tenth of the tokens. Such a checkpoint has
the tensor `d2t`, int64 [rows of the head]: row i stands for the token i + d2t[i] of the full vocabulary. The embedding
stays whole, so every token can be read. A token that has no row is one that this drafter never proposes.
"""

from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sdcpd.engine.model_config import ModelRefused
from sdcpd.engine.model_digest import weight_files

MAP: Final = "d2t"
BACK: Final = "t2d"
"""The inverse, as a mask over the full vocabulary. Such checkpoints carry it; it says nothing new."""


def read_draft_vocabulary(folder: Path, vocabulary: int) -> Tensor | None:
    """The token of each row of the head, int64 [rows], rising; None for a model with a head over all tokens.

    Raises ModelRefused for a map that leaves the vocabulary or names a token twice.
    """
    for file in weight_files(folder):
        try:
            with safe_open(folder / file, framework="pt") as tensors:
                found = tensors.get_tensor(MAP) if MAP in tensors.keys() else None  # noqa: SIM118  # not a dict
        except (SafetensorError, OSError) as error:
            raise ModelRefused(f"{folder / file} cannot be read: {error}. Fetch the model again.") from error
        if found is not None:
            return _checked(folder / file, found, vocabulary)
    return None


def _checked(file: Path, offsets: Tensor, vocabulary: int) -> Tensor:
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not len(offsets):
        raise ModelRefused(
            f"{file}: {MAP} is {offsets.dtype} {list(offsets.shape)}; it must be int64 with one entry a row."
        )
    tokens = offsets + torch.arange(len(offsets))
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ModelRefused(
            f"{file}: {MAP} leads to tokens {int(tokens.min())} to {int(tokens.max())}, but the vocabulary has "
            f"{vocabulary}. Row i stands for the token i + {MAP}[i]."
        )
    if len(tokens) > 1 and not bool((tokens.diff() > 0).all()):
        raise ModelRefused(f"{file}: {MAP} does not lead to rising tokens. Row i stands for the token i + {MAP}[i].")
    return tokens
