"""What speculation did for one session, in counts that add up (conventions of the field: counters, no rates).

All of it stands in the commit log, M of each round as `sdcpd_proposed` of its `ctl`. So the figures are the session's
and not its last verifier's: whoever takes it over counts on from the log, and a reader of a closed log has them too.
"""

from collections.abc import Iterable

from msgspec import UNSET

from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.messages import SpeculationStats


class RoundCounts:
    """Counts over the committed rounds of one session; `m_max` bounds the histogram.

    `commits` are those of a log that is taken over, whoever wrote it: what does not tell M counts as M = a, and an a
    beyond m_max, which no verifier may commit, as m_max. `cached_tokens`, the verifier's to say, are those of the
    prompt whose keys and values were there already.
    """

    def __init__(self, m_max: int, commits: Iterable[CommitRecord] = ()) -> None:
        self.cached_tokens = 0
        self._rounds = 0
        self._draft_tokens = 0
        self._accepted_histogram = [0] * (m_max + 1)
        for record in commits:
            self.committed(record)

    def committed(self, record: CommitRecord) -> None:
        """One more committed round; without `accepted` a self-decoded one."""
        self._rounds += 1
        if record.ctl is UNSET or record.ctl.accepted is UNSET:
            return
        accepted = min(record.ctl.accepted, len(self._accepted_histogram) - 1)
        self._draft_tokens += accepted if record.ctl.proposed is UNSET else record.ctl.proposed
        self._accepted_histogram[accepted] += 1

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            rounds=self._rounds,
            drafts=sum(self._accepted_histogram),
            draft_tokens=self._draft_tokens,
            accepted_tokens=sum(a * count for a, count in enumerate(self._accepted_histogram)),
            accepted_histogram=tuple(self._accepted_histogram),
            cached_tokens=self.cached_tokens,
        )
