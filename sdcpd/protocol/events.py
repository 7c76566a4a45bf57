"""What one session at its verifier has to tell its router, in order (draft 6.5.2; decisions 49, 83, 111)."""

from msgspec import UNSET

from sdcpd.protocol.messages import Event
from sdcpd.protocol.session_values import Point
from sdcpd.protocol.terms import Action


class Events:
    """Events of one session and epoch that were not taken for delivery yet; a handful at most between two takes."""

    def __init__(self, session: bytes, epoch: int) -> None:
        self._session = session
        self._epoch = epoch
        self._untaken: list[Event] = []

    def say(self, kind: Action, at: Point, *, seq: int | None, reason: str | None) -> None:
        """Something happened at this committed position, under the assignment `seq` (decision 111)."""
        self._untaken.append(
            Event(
                session=self._session,
                epoch=self._epoch,
                kind=kind,
                committed=at.committed,
                digest=at.digest,
                round=at.round,
                seq=seq if seq is not None else UNSET,
                reason=reason if reason is not None else UNSET,
            )
        )

    def take(self) -> list[Event]:
        """All events since the last call."""
        untaken, self._untaken = self._untaken, []
        return untaken
