"""Identifiers in paths (draft 5.1; decision 31). Those of sessions: tests/draft/test_5_1_http_usage.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol.terms import instance_from_path_id, instance_path_id, session_from_path_id, session_path_id


@given(st.binary(min_size=16, max_size=16))
def test_session_ids_round_trip(session: bytes) -> None:
    assert session_from_path_id(session_path_id(session)) == session


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_instance_ids_round_trip(instance: str) -> None:
    assert instance_from_path_id(instance_path_id(instance)) == instance


@pytest.mark.parametrize("text", ["_w", "A", "gICA"])  # octet ff, one character too few, octets 80 80 80
def test_what_is_no_instance_id(text: str) -> None:
    with pytest.raises(ValueError, match="is not base64url of UTF-8"):
        instance_from_path_id(text)


@given(st.text(max_size=30))
def test_any_text_is_an_id_or_a_value_error(text: str) -> None:
    try:
        session = session_from_path_id(text)
    except ValueError:
        return
    assert session_path_id(session) == text
