"""Who holds which objects until when (decisions, cache part 5.3: Lease). Plain bookkeeping; times are the caller's.

A lease names some objects that were there when it was taken, and an end. Until then it *holds* them: they are not
removed by anybody but its owner, and do not expire. At its end, and from then on, it holds nothing, whether or not
anybody has looked. A renewal moves the end later, never earlier, so that one which arrives late takes nothing away; a
lease that has ended cannot be renewed, since its objects may be gone. Releasing twice is releasing once.

Leases know names only. That a name is of a living object is kept true by their user (object_store.py), which takes
leases on living objects alone and tells when one is gone.
"""

from collections import Counter

from msgspec import Struct

from sdcpd.cache.settings import CacheSettings


class Lease(Struct, frozen=True):
    """`id` is unguessable and never used again; `owner` is the base URI of the peer that took it; `names` are paths."""

    id: str
    owner: str
    names: tuple[str, ...]
    until: float


class LeaseLapsed(Struct, frozen=True):
    """No such lease, or not any more."""


class LeaseForeign(Struct, frozen=True):
    """The lease is another peer's."""


class LeasesFull(Struct, frozen=True):
    """A limit is reached; nothing is held by this."""

    detail: str


class Leases:
    """All leases of a store. Never blocks."""

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._leases: dict[str, Lease] = {}
        self._of_name: dict[str, dict[str, None]] = {}
        """Ids of the leases on a name, in the order in which they were taken."""
        self._of_owner: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    def take(self, lease: Lease, now: float) -> Lease | LeasesFull:
        """Hold `lease.names`, which are of living objects, until `lease.until`."""
        assert lease.id not in self._leases, "ids are drawn at random"
        assert lease.names, "a lease on nothing holds nothing"
        settings = self._settings
        if len(self._leases) >= settings.max_leases or self._of_owner[lease.owner] >= settings.max_leases_of_owner:
            self.expire(now)
        if self._of_owner[lease.owner] >= settings.max_leases_of_owner:
            return LeasesFull(f"one peer may hold {settings.max_leases_of_owner} leases; release some")
        if len(self._leases) >= settings.max_leases:
            return LeasesFull(f"the store keeps {settings.max_leases} leases at most")
        self._leases[lease.id] = lease
        self._of_owner[lease.owner] += 1
        for name in lease.names:
            self._of_name.setdefault(name, {})[lease.id] = None
        return lease

    def renew(self, lease_id: str, owner: str, until: float, now: float) -> Lease | LeaseLapsed | LeaseForeign:
        """Hold on until `until`, if that is later. Returns the lease as it is then."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return LeaseLapsed()
        if lease.owner != owner:
            return LeaseForeign()
        if lease.until <= now:
            self._end(lease)
            return LeaseLapsed()
        renewed = Lease(id=lease.id, owner=owner, names=lease.names, until=max(lease.until, until))
        self._leases[lease_id] = renewed
        return renewed

    def release(self, lease_id: str, owner: str) -> tuple[str, ...] | LeaseForeign:
        """End a lease. Returns what it held; nothing when there is no such lease: it was released already."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return ()
        if lease.owner != owner:
            return LeaseForeign()
        self._end(lease)
        return lease.names

    def hold(self, name: str, now: float) -> bool:
        """Is this object held by anybody?"""
        return any(self._leases[lease_id].until > now for lease_id in self._of_name.get(name, ()))

    def known(self, name: str) -> bool:
        """Is there a lease on this object that nobody has ended yet, its time over or not? Asks no clock."""
        return name in self._of_name

    def count(self, name: str) -> int:
        """How many leases that nobody has ended are on this object."""
        return len(self._of_name.get(name, ()))

    def hold_against(self, owner: str, name: str, now: float) -> bool:
        """Is this object held by anybody else?"""
        held = (self._leases[lease_id] for lease_id in self._of_name.get(name, ()))
        return any(lease.owner != owner and lease.until > now for lease in held)

    def forget(self, name: str) -> None:
        """The object is gone. Another that takes its name is not held by the same leases."""
        for lease_id in self._of_name.pop(name, {}):
            lease = self._leases[lease_id]
            left = tuple(other for other in lease.names if other != name)
            self._leases[lease_id] = Lease(id=lease.id, owner=lease.owner, names=left, until=lease.until)

    def next_end(self) -> float | None:
        """When the first lease ends."""
        return min((lease.until for lease in self._leases.values()), default=None)

    def expire(self, now: float) -> tuple[str, ...]:
        """Give back what has ended; the names that those leases were on."""
        ended = [lease for lease in self._leases.values() if lease.until <= now]
        for lease in ended:
            self._end(lease)
        return tuple(name for lease in ended for name in lease.names)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.id]
        self._of_owner[lease.owner] -= 1
        if not self._of_owner[lease.owner]:
            del self._of_owner[lease.owner]
        for name in lease.names:
            holders = self._of_name[name]
            del holders[lease.id]
            if not holders:
                del self._of_name[name]
