"""The batched acceptance rules in the form in which tests/support/chance.py asks for one."""

from collections.abc import Sequence

import torch

from sdcpd.engine.acceptance import judge_rows
from sdcpd.engine.spans import Drawn, Weighed
from sdcpd.protocol.acceptance import Accepted, accept_equal
from tests.support.chance import Round, logits_after

AT_ONCE = 512


def on_tensors(rounds: Sequence[Round]) -> list[Accepted]:
    """Rule 2, many sessions a pass."""
    answers: list[Accepted] = []
    for start in range(0, len(rounds), AT_ONCE):
        part = rounds[start : start + AT_ONCE]
        spans = [(Weighed(one.profile, one.rows, one.draws), (0, *one.proposed)) for one in part]
        for rows in judge_rows(_logits(part), spans):
            assert all(row.finite for row in rows)
            answers.append(Accepted(accepted=len(rows) - 1, additional=rows[-1].token))
    return answers


def replayed_on_tensors(rounds: Sequence[Round]) -> list[Accepted]:
    """Rule 65281, many sessions a pass."""
    answers: list[Accepted] = []
    for start in range(0, len(rounds), AT_ONCE):
        part = rounds[start : start + AT_ONCE]
        spans = [(Drawn(one.profile, one.draws.tokens), (0, *one.proposed)) for one in part]
        for one, rows in zip(part, judge_rows(_logits(part), spans), strict=True):
            answers.append(accept_equal(one.proposed, [row.token for row in rows]))
    return answers


def _logits(rounds: Sequence[Round]) -> torch.Tensor:
    return torch.tensor([logits_after(prefix) for one in rounds for prefix in one.prefixes])
