"""Where a session begins at its verifier: at nothing, or where another verifier left it (draft 6.9; 29, 30, 91, 92).

A `resume` is a claim. It is checked against the log, which the new verifier reads itself, and against the tokens it was
given: the last fence must be that of the epoch it is opened with, the last commit must be the one named, and prompt and
tokens must lead to its digest. Whatever differs is 409, and the router fences anew. Once taken, the verifier holds the
writer's copy of the whole log, so the verdicts of rounds that others committed can still be answered (62).
"""

from msgspec import UNSET, Struct

from sdcpd.protocol import digests
from sdcpd.protocol.escalation import Counters
from sdcpd.protocol.log_history import History, read_history
from sdcpd.protocol.messages import Contract, SessionOpen
from sdcpd.protocol.prefix import Prefix
from sdcpd.protocol.problems import Conflict, IllFormed, StaleEpoch


class Takeover(Struct, frozen=True):
    """A resume that was found true. `history` is the log as it stands, `counters` what the ladder starts from."""

    history: History
    counters: Counters


def check_epoch(message: SessionOpen) -> None:
    """Epoch 1 begins a session, every higher one resumes it (decision 29). Raises IllFormed."""
    if message.epoch == 0:
        raise IllFormed("epoch: 0 is none; a session is first opened with epoch 1")
    if message.epoch == 1 and message.resume is not UNSET:
        raise IllFormed("resume: epoch 1 begins a session; to resume one, fence its log at a higher epoch first")
    if message.epoch > 1 and message.resume is UNSET:
        raise IllFormed(f"resume: missing; a session is opened with epoch {message.epoch} only to resume it")


def take_over(message: SessionOpen, prompt: tuple[int, ...], tokens: tuple[int, ...], log: bytes) -> Takeover:
    """Check the resume of `message` against the log's octets and the content of `committed_tokens` (decision 91).

    Raises StaleEpoch when the log is fenced higher, Conflict for whatever else does not agree.
    """
    resume = message.resume
    assert resume is not UNSET
    try:
        history = read_history(log, message.contract, prompt)
    except IllFormed as error:
        raise Conflict(f"commit_log: {error.detail}") from error
    if history.epoch > message.epoch:
        raise StaleEpoch(f"epoch {message.epoch} is below {history.epoch}, which the log names")
    if history.fence != message.epoch:
        raise Conflict(f"commit_log: the last fence is of epoch {history.fence}, not {message.epoch}")
    last = history.last
    if last is not None and last.epoch == message.epoch:
        raise Conflict("commit_log: the session was already served at this epoch")  # decision 30
    if (resume.round, resume.committed, resume.digest) != (history.round, len(history.tokens), history.digest):
        raise Conflict(f"resume: not the last commit of the log, which is round {history.round}")
    if history.ending is not None:
        raise Conflict("commit_log: the session has ended and cannot be resumed")
    start = digests.prompt_digest(digests.contract_digest(message.contract), prompt)
    if len(tokens) != resume.committed or digests.extend(start, tokens) != resume.digest:
        raise Conflict("committed_tokens: they do not lead to resume.digest")
    return Takeover(history=history, counters=_counters(history, message.contract))


def starting_prefix(
    message: SessionOpen, prompt: tuple[int, ...], log_tag: str, taken: Takeover | None = None
) -> Prefix:
    """The committed prefix that a session starts from at its verifier. `log_tag` is the tag of a log just created."""
    prefix = Prefix(
        epoch=message.epoch,
        prompt=prompt,
        digest=digests.prompt_digest(digests.contract_digest(message.contract), prompt),
        counters=taken.counters if taken is not None else Counters(limit=message.contract.m_max),
        log_tag=log_tag if taken is None else taken.history.tag,
    )
    if taken is not None:
        prefix.take_over(taken.history.commits, acknowledged=taken.history.records)
    return prefix


def _counters(history: History, contract: Contract) -> Counters:
    """Decision 92: c, g and j from the last commit that tells them; m_cap is the next assignment's (42)."""
    last = history.last
    if last is None or last.ctl is UNSET:
        return Counters(limit=contract.m_max)
    return Counters(c=last.ctl.c, g=last.ctl.g, j=last.ctl.j, limit=contract.m_max)
