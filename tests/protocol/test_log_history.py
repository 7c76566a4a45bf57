"""What a log says to whoever takes its session up (draft 6.8; decisions 85, 88, 89, 91)."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from sdcpd.protocol import digests
from sdcpd.protocol.commit_log import CommitRecord, Control, EndRecord, FenceRecord, Record, write_record
from sdcpd.protocol.log_history import History, LogEnding, read_history
from sdcpd.protocol.problems import IllFormed
from sdcpd.protocol.terms import Action
from tests.support.messages import contract, first_digest

PROMPT = (1, 1, 1)
PLAIN = contract(stop=(2,), max_new=12)


def commits(*rounds: tuple[int, ...], epoch: int = 1, after: tuple[tuple[int, ...], ...] = ()) -> list[Record]:
    """Commit records of these rounds, which follow those of `after`."""
    blocks = [*after, *rounds]
    start = first_digest(PLAIN)
    chain = accumulate(blocks, digests.extend, initial=start)
    lengths = accumulate((len(block) for block in blocks), initial=0)
    states = list(zip(chain, lengths, strict=True))[1:]
    every = [
        CommitRecord(epoch=epoch, round=number, emitted=block, committed=committed, digest=digest)
        for number, (block, (digest, committed)) in enumerate(zip(blocks, states, strict=True), 1)
    ]
    return list(every[len(after) :])


def history(*records: Record) -> History:
    return read_history(b"".join(map(write_record, records)), PLAIN, PROMPT)


def test_an_empty_log() -> None:
    seen = history()
    assert (seen.epoch, seen.fence, seen.round, seen.tokens, seen.ending) == (0, 0, 0, (), None)
    assert seen.digest == first_digest(PLAIN)


def test_tokens_and_chain_of_several_epochs() -> None:
    """A fence changes who may write, never what was written."""
    seen = history(
        *commits((10, 11), (12,)),
        FenceRecord(epoch=3, by="r#n"),
        *commits((13,), epoch=3, after=((10, 11), (12,))),
    )
    assert seen.tokens == (10, 11, 12, 13)
    assert (seen.epoch, seen.fence, seen.fenced_by, seen.round, seen.records) == (3, 3, "r#n", 3, 4)
    assert seen.digest == digests.extend(first_digest(PLAIN), (10, 11, 12, 13))


def test_the_highest_epoch_is_any_records() -> None:
    """Decision 89: "highest epoch in the log + 1"."""
    (later,) = commits((10,), epoch=5)
    seen = history(later)
    assert (seen.epoch, seen.fence, seen.fenced_by) == (5, 0, None)


@given(at=st.integers(0, 4), stale=st.integers(1, 4), epoch=st.integers(1, 3))
@settings(max_examples=100)
def test_stale_commits_behind_a_fence_do_not_count(at: int, stale: int, epoch: int) -> None:
    """Decision 88: on a store that only orders appends, whatever a fenced verifier still writes is skipped."""
    before = [(10 + n,) for n in range(at)]
    zombie = [(30 + n, 31 + n) for n in range(stale)]
    after = [(20,), (21, 22)]
    honest = [*commits(*before), FenceRecord(epoch=4, by="r#n")]
    late = commits(*zombie, epoch=epoch, after=tuple(before))
    resumed = commits(*after, epoch=4, after=tuple(before))
    mixed = [*honest, late[0], resumed[0], *late[1:], resumed[1]]
    seen = history(*mixed)
    clean = history(*honest, *resumed)
    assert (seen.tokens, seen.digest, seen.round) == (clean.tokens, clean.digest, clean.round)
    assert seen.records == len(mixed)


@pytest.mark.parametrize("what", ["digest", "round", "committed", "gap", "token"])
def test_a_broken_chain_is_a_fault(what: str) -> None:
    first, second = commits((10,), (11,))
    assert isinstance(second, CommitRecord)
    broken = {
        "digest": replace(second, digest=bytes(32)),
        "round": replace(second, round=3),
        "committed": replace(second, committed=3),
        "gap": second,
        "token": replace(second, emitted=(1 << 32,)),
    }[what]
    records = [broken] if what == "gap" else [first, broken]
    with pytest.raises(IllFormed):
        history(*records)


def test_a_damaged_log_is_a_fault() -> None:
    with pytest.raises(IllFormed):
        read_history(b"\xa1\x61", PLAIN, PROMPT)


def control(action: Action) -> Control:
    return Control(c=0, g=0, j=0, action=action, low=0, load=0)


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        ((10, 2), (Action.FINISH, None)),
        (tuple(range(10, 22)), (Action.FINISH, None)),
        ((10,), None),
    ],
    ids=["stop token", "max_new", "neither"],
)
def test_what_closes_a_log(last: tuple[int, ...], ending: tuple[Action, None] | None) -> None:
    assert said(history(*commits(last)).ending) == ending


def said(ending: LogEnding | None) -> tuple[Action, str | None] | None:
    return None if ending is None else (ending.finish, ending.reason)


@pytest.mark.parametrize("action", list(Action))
def test_actions_that_close_a_log(action: Action) -> None:
    (record,) = commits((10,))
    assert isinstance(record, CommitRecord)
    seen = history(replace(record, ctl=control(action)))
    assert (seen.ending is not None) is (action in (Action.FINISH, Action.FAIL))


@pytest.mark.parametrize("end", [Action.FINISH, Action.FAIL])
def test_an_end_record_closes_a_log(end: Action) -> None:
    ending = history(*commits((10,)), EndRecord(epoch=1, end=end, reason="why")).ending
    assert said(ending) == (end, "why")
    assert ending is not None
    assert ending.stats.rounds == 1


def test_a_stale_end_does_not_close_it() -> None:
    seen = history(*commits((10,)), FenceRecord(epoch=2), EndRecord(epoch=1, end=Action.FAIL))
    assert seen.ending is None
    assert seen.fenced_by is None
    assert seen.last is not None
    assert seen.last.ctl is UNSET


def test_without_its_prompt_a_log_is_believed_from_its_first_commit_on() -> None:
    """Whoever cannot have the prompt any more still sees what was committed, and whether it is over."""
    rounds = commits((10, 11), (12,), (2,))
    octets = b"".join(map(write_record, rounds))
    assert read_history(octets, PLAIN, None) == history(*rounds)
    assert read_history(b"", PLAIN, None).digest == b""
    wrong = replace(rounds[1], digest=b"?" * 32)
    with pytest.raises(IllFormed, match="digest chain"):
        read_history(b"".join(map(write_record, [rounds[0], wrong])), PLAIN, None)
