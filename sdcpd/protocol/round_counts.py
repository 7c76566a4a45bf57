"""What speculation did for one session, in counts that add up (conventions of the field: counters, no rates)."""

from msgspec import UNSET

from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.messages import SpeculationStats


class RoundCounts:
    """Counts over the committed rounds of one session; `m_max` bounds the histogram."""

    def __init__(self, m_max: int) -> None:
        self.cached_tokens = 0
        """Tokens of the prompt whose keys and values were there already; the verifier's to say."""
        self._rounds = 0
        self._draft_tokens = 0
        self._accepted_histogram = [0] * (m_max + 1)

    def committed(self, record: CommitRecord, proposed: int | None) -> None:
        """One more committed round of M = `proposed` tokens; None for a self-decoded one."""
        self._rounds += 1
        if proposed is None:
            return
        assert record.ctl is not UNSET
        assert record.ctl.accepted is not UNSET
        self._draft_tokens += proposed
        self._accepted_histogram[record.ctl.accepted] += 1

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            rounds=self._rounds,
            drafts=sum(self._accepted_histogram),
            draft_tokens=self._draft_tokens,
            accepted_tokens=sum(a * count for a, count in enumerate(self._accepted_histogram)),
            accepted_histogram=tuple(self._accepted_histogram),
            cached_tokens=self.cached_tokens,
        )
