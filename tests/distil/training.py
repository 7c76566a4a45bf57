"""The training loop: windows of the texts, the target's best tokens as what is to be said, AdamW, a checkpoint.

The loss is the cross-entropy against what the target's best tokens leave when they are scaled to 1; those that the
head has no row for are left out, and so are places of which nothing is left. Windows are cut from the texts as they
stand after one another, so some begin in the middle of one: a drafter meets that too, when a long text outgrows it.
All is computed in fp32: torch's products of bf16 matrices of these shapes took 30 times as long on one thread.
"""

import math
import os
import time
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from tests.bench.figures import progress
from tests.distil.student import Student
from tests.distil.texts import Texts

WARM_UP_STEPS: Final = 20
WEIGHT_DECAY: Final = 0.01
LONGEST_GRADIENT: Final = 1.0


def loss_of(logits: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss, and the share of places whose best token is the target's.

    `logits` [n, head]; `places` int64 [n, KEPT], rows of the head, -1 for none; `weights` [n, KEPT].
    """
    known = places >= 0
    wanted = torch.where(known, weights, 0.0)
    total = wanted.sum(-1, keepdim=True)
    counted = total.squeeze(-1) > 0
    chances = logits.float().log_softmax(-1).gather(-1, places.clamp(min=0))
    losses = -(wanted / total.clamp(min=1e-9) * chances).sum(-1)
    right = (logits.argmax(-1) == places[:, 0]).float()
    return (losses * counted).sum() / counted.sum().clamp(min=1), right.mean()


def train(
    student: Student, texts: Texts, folder: Path, *, steps: int, windows: int, length: int, rate: float, every: int
) -> float:
    """Train up to step `steps`, from the checkpoint in `folder` if there is one. The last mean agreement."""
    rows = torch.full((student.embedding.shape[0],), -1)
    rows[student.head_tokens] = torch.arange(len(student.head_tokens))
    usable = (len(texts.tokens) - 1) // length * length
    if not usable:
        raise ValueError(f"{len(texts.tokens)} places are fewer than one window of {length}; make more texts")
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.95))
    step = _resume(folder, student, optimizer)
    agreed = 0.0
    seen_loss = seen_right = 0.0
    began, before = time.monotonic(), step
    while step < steps:
        draws = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(texts.tokens) - length + 1, (windows,), generator=draws)
        chosen = (starts[:, None] + torch.arange(length)).flatten()
        for group in optimizer.param_groups:
            group["lr"] = rate * _share_of_rate(step, steps)
        logits = student(texts.tokens[chosen].view(windows, length)).flatten(0, 1)
        loss, right = loss_of(logits, rows[texts.best[chosen]], texts.weights[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(student.parameters(), LONGEST_GRADIENT)
        optimizer.step()
        step += 1
        seen_loss += loss.item()
        seen_right += right.item()
        if step % every == 0 or step == steps:
            count = every if step % every == 0 else step % every
            agreed = seen_right / count
            pace = (step - before) * windows * length / (time.monotonic() - began)
            progress(
                f"step {step} of {steps}: loss {seen_loss / count:.3f}, agreement {agreed:.3f}, {pace:.0f} places/s"
            )
            seen_loss = seen_right = 0.0
            _checkpoint(folder, student, optimizer, step)
    return agreed


def _share_of_rate(step: int, steps: int) -> float:
    """Up in a line, down as a cosine to a tenth."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))


def _checkpoint(folder: Path, student: Student, optimizer: torch.optim.Optimizer, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "checkpoint.part"
    torch.save({"student": student.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    os.replace(part, folder / "checkpoint.pt")


def _resume(folder: Path, student: Student, optimizer: torch.optim.Optimizer) -> int:
    file = folder / "checkpoint.pt"
    if not file.exists():
        return 0
    kept = torch.load(file, weights_only=True)
    student.load_state_dict(kept["student"])
    optimizer.load_state_dict(kept["optimizer"])
    return int(kept["step"])
