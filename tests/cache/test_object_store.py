"""Objects: written once, short-lived, never more than fits (decisions, cache part 5.3, 5.4)."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sdcpd.cache.leases import Lease, LeaseForeign, LeaseLapsed, LeasesFull
from sdcpd.cache.object_store import (
    ObjectContent,
    ObjectDiffers,
    ObjectFull,
    ObjectHeld,
    ObjectRemoved,
    ObjectsLeased,
    ObjectStore,
    ObjectStored,
    object_tag,
)
from sdcpd.cache.settings import KIB, CacheSettings

NAME = "v1/s/-/o/AAECAwQFBgcICQoLDA0ODw/1/0/tokens"
OWNER, OTHER = "https://d.example/drafter/", "https://v.example/verifier/"
SMALL = CacheSettings(
    max_objects=2, max_object_bytes=1 * KIB, object_memory_bytes=1 * KIB, default_object_ttl_s=10, max_object_ttl_s=60
)


def test_an_object_is_written_once() -> None:
    """5.3: "412 exists (same content: treat as done)"."""
    store = ObjectStore(CacheSettings())
    assert store.create(NAME, b"abc", 0.0) == ObjectStored(tag=object_tag(b"abc"), created=True)
    assert store.create(NAME, b"abc", 0.0) == ObjectStored(tag=object_tag(b"abc"), created=False)
    assert store.create(NAME, b"abd", 0.0) == ObjectDiffers()
    assert store.read(NAME, 0.0) == ObjectContent(octets=b"abc", tag=object_tag(b"abc"))


def test_it_lives_for_its_time() -> None:
    store = ObjectStore(SMALL)
    store.create(NAME, b"abc", 0.0)
    assert store.read(NAME, 9.9) is not None
    assert store.read(NAME, 10.0) is None
    assert store.create(NAME, b"other", 10.0, ttl_s=5) == ObjectStored(tag=object_tag(b"other"), created=True)
    assert store.read(NAME, 14.9) is not None
    assert store.read(NAME, 15.0) is None


def test_writing_it_again_prolongs_its_life_within_the_limit() -> None:
    store = ObjectStore(SMALL)
    store.create(NAME, b"abc", 0.0, ttl_s=1_000_000)
    assert store.read(NAME, 59.9) is not None
    assert store.read(NAME, 60.0) is None
    store.create(NAME, b"abc", 100.0, ttl_s=20)
    store.create(NAME, b"abc", 105.0, ttl_s=1)
    assert store.read(NAME, 119.9) is not None
    store.create(NAME, b"abc", 119.0, ttl_s=20)
    assert store.read(NAME, 138.9) is not None


def test_a_full_store_refuses_until_something_has_expired() -> None:
    store = ObjectStore(SMALL)
    store.create("a", b"x" * 600, 0.0)
    assert isinstance(store.create("b", b"x" * 600, 1.0), ObjectFull)
    assert isinstance(store.create("b", b"x" * 2000, 1.0), ObjectFull)
    store.create("b", b"x", 1.0)
    assert isinstance(store.create("c", b"", 2.0), ObjectFull)
    assert isinstance(store.create("c", b"x" * 600, 10.0), ObjectStored)
    assert store.snapshot().object_bytes == 601


def test_removing_and_expiring_give_the_memory_back() -> None:
    store = ObjectStore(SMALL)
    store.create("a", b"x" * 500, 0.0)
    store.remove("a", OWNER, 0.0)
    store.remove("a", OWNER, 0.0)
    assert store.snapshot().object_bytes == 0
    store.create("b", b"x" * 500, 0.0)
    store.expire(9.0)
    assert store.snapshot().objects == 1
    store.expire(10.0)
    assert (store.snapshot().objects, store.snapshot().object_bytes) == (0, 0)


def leased(store: ObjectStore, lease_id: str, owner: str, names: list[str], now: float, ttl_s: float) -> ObjectsLeased:
    outcome = store.lease(lease_id, owner, names, now, ttl_s)
    assert isinstance(outcome, ObjectsLeased), outcome
    return outcome


def test_a_lease_says_what_it_found() -> None:
    store = ObjectStore(SMALL)
    store.create("a", b"x", 0.0)
    assert leased(store, "1", OWNER, ["b", "a", "a", "c"], 1.0, 5.0) == ObjectsLeased(
        lease=Lease(id="1", owner=OWNER, names=("a",), until=6.0), missed=("b", "c")
    )
    assert leased(store, "2", OWNER, ["b"], 1.0, 5.0) == ObjectsLeased(lease=None, missed=("b",))
    assert store.snapshot().leases == 1


def test_a_lease_that_outlives_the_object_s_time_prolongs_its_life() -> None:
    """Brief life, long lease: draft rows under a lease until the verdict (cache part 5.4)."""
    store = ObjectStore(SMALL)
    store.create("a", b"x", 0.0, ttl_s=1)
    leased(store, "1", OWNER, ["a"], 0.5, 20.0)
    store.expire(20.4)
    assert store.read("a", 20.4) is not None
    assert store.read("a", 20.5) is None
    store.create("b", b"x", 30.0, ttl_s=40)
    leased(store, "2", OWNER, ["b"], 30.0, 1.0)
    assert store.read("b", 69.9) is not None, "a shorter lease takes nothing away"


def test_what_a_lease_alone_kept_alive_is_gone_with_its_release() -> None:
    store = ObjectStore(SMALL)
    store.create("a", b"x", 0.0, ttl_s=1)
    leased(store, "1", OWNER, ["a"], 0.0, 20.0)
    leased(store, "2", OTHER, ["a"], 0.0, 10.0)
    assert store.release("1", OTHER, 5.0) == LeaseForeign()
    assert store.release("1", OWNER, 5.0) is None
    assert store.read("a", 5.0) is not None
    assert store.release("2", OTHER, 5.0) is None
    assert store.release("2", OTHER, 5.0) is None
    assert store.snapshot().object_bytes == 0


def test_what_others_hold_is_not_removed() -> None:
    """5.3, Delete: "423 while someone else's lease holds"."""
    store = ObjectStore(SMALL)
    store.create("a", b"x", 0.0)
    leased(store, "1", OTHER, ["a"], 0.0, 5.0)
    leased(store, "2", OWNER, ["a"], 0.0, 5.0)
    assert store.remove("a", OWNER, 4.9) == ObjectHeld()
    assert store.remove("a", OWNER, 5.0) == ObjectRemoved()
    assert store.read("a", 5.0) is None
    store.create("a", b"y", 5.0)
    leased(store, "3", OWNER, ["a"], 5.0, 5.0)
    assert store.remove("a", OWNER, 6.0) == ObjectRemoved(), "one's own lease does not stand in the way"
    store.create("a", b"z", 6.0, ttl_s=1)
    assert store.read("a", 7.0) is None, "a lease on an object is not one on its name"
    assert isinstance(store.renew("3", OWNER, 8.0, 5.0), Lease)
    assert store.release("3", OWNER, 8.0) is None


def test_a_renewal_is_never_earlier_never_another_s_and_never_too_late() -> None:
    store = ObjectStore(SMALL)
    store.create("a", b"x", 0.0)
    leased(store, "1", OWNER, ["a"], 0.0, 1000.0)
    assert store.renew("1", OWNER, 10.0, 5.0) == Lease(id="1", owner=OWNER, names=("a",), until=60.0), "the cap"
    assert store.renew("1", OTHER, 10.0, 5.0) == LeaseForeign()
    assert store.renew("1", OWNER, 60.0, 5.0) == LeaseLapsed()
    assert store.renew("2", OWNER, 60.0, 5.0) == LeaseLapsed()


def test_leases_have_limits() -> None:
    store = ObjectStore(CacheSettings(max_leases=3, max_leases_of_owner=2))
    store.create("a", b"x", 0.0)
    leased(store, "1", OWNER, ["a"], 0.0, 5.0)
    leased(store, "2", OWNER, ["a"], 0.0, 9.0)
    assert isinstance(store.lease("3", OWNER, ["a"], 1.0, 5.0), LeasesFull)
    leased(store, "4", OTHER, ["a"], 0.0, 5.0)
    assert isinstance(store.lease("5", "https://r.example/router/", ["a"], 1.0, 5.0), LeasesFull)
    leased(store, "6", OWNER, ["a"], 5.0, 5.0)
    assert store.snapshot().leases == 2, "what has ended makes room"


NAMES = st.sampled_from(["a", "b", "c"])
OWNERS = st.sampled_from([OWNER, OTHER])


class LeaseMachine(RuleBasedStateMachine):
    """Against a model of a few lines: nothing leased is removed or expires, nothing is held after its end."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ObjectStore(CacheSettings(max_lease_ttl_s=12))
        self.now = 0.0
        self.drawn = 0
        self.ends: dict[str, float] = {}  # of each living object's own time
        self.leases: dict[str, tuple[str, set[str], float]] = {}

    def held(self, name: str, owner: str | None = None) -> bool:
        return any(
            name in names and until > self.now and holder != owner for holder, names, until in self.leases.values()
        )

    def gone(self, name: str) -> None:
        del self.ends[name]
        for _, names, _ in self.leases.values():
            names.discard(name)

    def settle(self) -> None:
        self.leases = {key: lease for key, lease in self.leases.items() if lease[2] > self.now}
        for name in [name for name, end in self.ends.items() if end <= self.now and not self.held(name)]:
            self.gone(name)

    @rule(name=NAMES, ttl_s=st.integers(1, 20))
    def create(self, name: str, ttl_s: int) -> None:
        created = self.store.create(name, name.encode(), self.now, ttl_s=ttl_s)
        assert created == ObjectStored(tag=object_tag(name.encode()), created=name not in self.ends)
        self.ends[name] = max(self.ends.get(name, 0.0), self.now + ttl_s)

    @rule(owner=OWNERS, names=st.lists(NAMES, min_size=1, max_size=4), ttl_s=st.integers(1, 20))
    def lease(self, owner: str, names: list[str], ttl_s: int) -> None:
        self.drawn += 1
        got = leased(self.store, str(self.drawn), owner, names, self.now, ttl_s)
        found = {name for name in names if name in self.ends}
        assert set(got.missed) == set(names) - found
        assert (got.lease is not None) == bool(found)
        if found:
            self.leases[str(self.drawn)] = (owner, found, self.now + min(ttl_s, 12))

    @rule(owner=OWNERS, number=st.integers(1, 8), ttl_s=st.integers(1, 20))
    def renew(self, owner: str, number: int, ttl_s: int) -> None:
        got = self.store.renew(str(number), owner, self.now, ttl_s)
        lease = self.leases.get(str(number))
        if lease is None:
            assert isinstance(got, LeaseLapsed | LeaseForeign)
        elif lease[0] != owner:
            assert got == LeaseForeign()
        else:
            assert isinstance(got, Lease)
            assert got.until == max(lease[2], self.now + min(ttl_s, 12))
            self.leases[str(number)] = (owner, lease[1], got.until)

    @rule(owner=OWNERS, number=st.integers(1, 8))
    def release(self, owner: str, number: int) -> None:
        lease = self.leases.get(str(number))
        got = self.store.release(str(number), owner, self.now)
        if lease is not None and lease[0] == owner:
            assert got is None
            del self.leases[str(number)]
            self.settle()

    @rule(owner=OWNERS, name=NAMES)
    def remove(self, owner: str, name: str) -> None:
        held = name in self.ends and self.held(name, owner)
        assert self.store.remove(name, owner, self.now) == (ObjectHeld() if held else ObjectRemoved())
        if not held and name in self.ends:
            self.gone(name)

    @rule(by_s=st.integers(0, 10), look=st.booleans())
    def time_passes(self, by_s: int, look: bool) -> None:
        self.now += by_s
        self.settle()
        if look:
            self.store.expire(self.now)
            assert self.store.snapshot().leases == len(self.leases)
            assert self.store.snapshot().objects == len(self.ends)

    @invariant()
    def what_lives_is_read(self) -> None:
        for name in ("a", "b", "c"):
            assert (self.store.read(name, self.now) is not None) == (name in self.ends), name


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
