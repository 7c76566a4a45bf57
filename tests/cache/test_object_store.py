"""Objects: written once, short-lived, never more than fits (decisions, cache part 5.3, 5.4)."""

from sdcpd.cache.object_store import ObjectContent, ObjectDiffers, ObjectFull, ObjectStore, ObjectStored, object_tag
from sdcpd.cache.settings import KIB, CacheSettings

NAME = "v1/s/-/o/AAECAwQFBgcICQoLDA0ODw/1/0/tokens"
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
    store.remove("a")
    store.remove("a")
    assert store.snapshot().object_bytes == 0
    store.create("b", b"x" * 500, 0.0)
    store.expire(9.0)
    assert store.snapshot().objects == 1
    store.expire(10.0)
    assert (store.snapshot().objects, store.snapshot().object_bytes) == (0, 0)
