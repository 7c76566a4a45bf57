"""Names of logs and objects have one spelling, and references carry them (decisions, cache part 5.2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.cache.refs import (
    CacheReference,
    LogName,
    ObjectKind,
    ObjectName,
    RecordName,
    directory_path,
    directory_scope,
    is_record,
    log_reference,
    object_reference,
    parse_path,
    parse_reference,
    record_reference,
    require_scope,
)
from sdcpd.protocol.problems import Forbidden, IllFormed

SESSION = bytes(range(16))
SCOPE = bytes(range(16, 32))
BASE = "https://c.example/cache/"
SESSION_TEXT = "AAECAwQFBgcICQoLDA0ODw"
SCOPE_TEXT = "EBESExQVFhcYGRobHB0eHw"


def test_the_forms_of_the_decisions() -> None:
    assert log_reference(BASE, None, SESSION) == f"{BASE}v1/s/-/l/{SESSION_TEXT}"
    assert log_reference(BASE, SCOPE, SESSION) == f"{BASE}v1/s/{SCOPE_TEXT}/l/{SESSION_TEXT}"
    assert record_reference(BASE, SCOPE, SESSION) == f"{BASE}v1/s/{SCOPE_TEXT}/d/{SESSION_TEXT}"
    tokens = object_reference(BASE, SCOPE, SESSION, 2, 17, ObjectKind.TOKENS)
    assert tokens == f"{BASE}v1/s/{SCOPE_TEXT}/o/{SESSION_TEXT}/2/17/tokens"


octets = st.binary(min_size=16, max_size=16)
names = st.one_of(
    st.builds(LogName, scope=st.none() | octets, session=octets),
    st.builds(RecordName, scope=st.none() | octets, session=octets),
    st.builds(
        ObjectName,
        scope=st.none() | octets,
        session=octets,
        epoch=st.integers(0, 2**64 - 1),
        round=st.integers(0, 2**64 - 1),
        kind=st.sampled_from(ObjectKind),
    ),
)


@given(names)
def test_a_name_survives_its_text(name: LogName | RecordName | ObjectName) -> None:
    assert parse_path(name.path) == name
    assert is_record(name.path) == isinstance(name, RecordName)
    assert directory_scope(directory_path(name.scope)) == name.scope
    reference = CacheReference(base=BASE, name=name)
    assert parse_reference(str(reference)) == reference


def test_the_base_of_a_reference_is_brought_to_its_canonical_form() -> None:
    reference = parse_reference(f"HTTPS://C.example:443/cache/v1/s/-/l/{SESSION_TEXT}")
    assert str(reference) == f"{BASE}v1/s/-/l/{SESSION_TEXT}"


def test_a_base_may_itself_look_like_a_name() -> None:
    base = f"https://c/v1/s/-/l/{SESSION_TEXT}/"
    assert parse_reference(log_reference(base, None, SESSION)).base == base


@pytest.mark.parametrize(
    "path",
    [
        "",
        "v1/s/-",
        "v1/s/-/l/",
        f"v1/s/-/l/{SESSION_TEXT}/",
        f"/v1/s/-/l/{SESSION_TEXT}",
        f"v2/s/-/l/{SESSION_TEXT}",
        f"v1/s//l/{SESSION_TEXT}",
        f"v1/s/-/x/{SESSION_TEXT}",
        f"v1/s/-/l/{SESSION_TEXT}=",
        f"v1/s/-/l/{SESSION_TEXT[:-1]}",
        f"v1/s/-/l/{SESSION_TEXT[:-1]}x",  # the same 16 octets, another spelling
        "v1/s/-/l/AAECAwQFBgcICQoLDA0OD%77",
        "v1/s/-/l/../../../../etc/passwd",
        f"v1/s/-/o/{SESSION_TEXT}/1/2/rows",
        f"v1/s/-/o/{SESSION_TEXT}/01/2/q",
        f"v1/s/-/o/{SESSION_TEXT}/1/-2/q",
        f"v1/s/-/o/{SESSION_TEXT}/+1/2/q",
        f"v1/s/-/o/{SESSION_TEXT}/1/{2**64}/q",
        f"v1/s/-/o/{SESSION_TEXT}/1/{'9' * 5000}/q",
        f"v1/s/-/o/{SESSION_TEXT}/1/\u0661/q",
    ],
)
def test_any_other_spelling_names_nothing(path: str) -> None:
    with pytest.raises(IllFormed):
        parse_path(path)
    with pytest.raises(IllFormed):
        parse_reference(BASE + path)


@pytest.mark.parametrize(
    "text",
    [
        f"v1/s/-/l/{SESSION_TEXT}",
        f"file:///v1/s/-/l/{SESSION_TEXT}",
        f"https://u@c/v1/s/-/l/{SESSION_TEXT}",
        f"https://c/../v1/s/-/l/{SESSION_TEXT}",
        f"{BASE}v1/s/-/l/{SESSION_TEXT}?x",
        f"{BASE}v1/s/-/l/{SESSION_TEXT}#x",
        "https://c.example/cache/",
    ],
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(IllFormed):
        parse_reference(text)


@pytest.mark.parametrize("path", ["", "v1/s/-", "v1/s/x/d", "v1/s//d", "v1/s/-/d/", f"v1/s/-/d/{SESSION_TEXT}"])
def test_what_is_no_directory(path: str) -> None:
    with pytest.raises(IllFormed):
        directory_scope(path)


def test_a_reference_stays_within_the_scope_of_its_session() -> None:
    """Decision 21: "refuse references whose path names another"."""
    scoped = parse_reference(log_reference(BASE, SCOPE, SESSION))
    require_scope(scoped, SCOPE)
    for scope in (None, SESSION):
        with pytest.raises(Forbidden):
            require_scope(scoped, scope)
